"""What the engine asks of `llama_cpp`, in Python: cells that belong to sequences, with llama.cpp's own checks of what a
batch may hold (its file llama-batch.cpp, 0.3.36), and a model whose logits follow from every token that is seen.

`install` puts it in the place of the library. A token that does not see each position before it exactly once is an
AssertionError, and so is a batch that the library would end the process for.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

VOCABULARY = 32
END = 3
NO_SEQUENCES = 256
POINTER = ctypes.c_void_p


class Params(ctypes.Structure):
    """Of a context, as far as anything here sets them."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_outputs_max")),
        *((name, ctypes.c_int) for name in ("rope_scaling_type", "type_k")),
        ("rope_freq_scale", ctypes.c_float),
        *((name, ctypes.c_bool) for name in ("embeddings", "kv_unified")),
    ]


class llama_batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


@dataclass
class FakeModel:
    """kinds: of `llama_model_is_recurrent` and its like, those that are true."""

    kinds: frozenset[str] = frozenset()
    longest: int = 1024
    window: int = 0  # tokens that a token sees, itself included; 0: all. Cells that are out of sight go at once
    ends: tuple[int, ...] = (END,)
    sees_others: bool = False  # a broken build: a token sees cells of all sequences


@dataclass
class Cell:
    position: int
    token: int
    owners: set[int]


@dataclass
class FakeContext:
    model: FakeModel
    params: Params
    cells: list[Cell] = field(default_factory=list)
    logits: np.ndarray = field(default_factory=lambda: np.zeros((512, VOCABULARY), dtype=np.float32))
    adapters: list[float] = field(default_factory=list)
    most_cells: int = 0
    num_decoded: int = 0
    is_open: bool = True

    def extents(self) -> dict[int, tuple[int, int]]:
        """By sequence, its first and its last position."""
        found: dict[int, tuple[int, int]] = {}
        for cell in self.cells:
            for sequence in cell.owners:
                first, last = found.get(sequence, (cell.position, cell.position))
                found[sequence] = min(first, cell.position), max(last, cell.position)
        return found


class Llama:
    """The library's class, as far as anything here looks at it."""

    def __init__(self, model: FakeModel | str | None = None, *, n_ctx: int = 1024, **params: object):
        """model: of a file by name, the usual one."""
        made = model if isinstance(model, FakeModel) else FakeModel()
        self._model = types.SimpleNamespace(model=made, vocab=made)
        self.context_params = Params(n_ctx=n_ctx, n_batch=8, n_seq_max=1, rope_scaling_type=-1, type_k=1)
        self.model_params = types.SimpleNamespace(n_gpu_layers=0)
        self.metadata = {"general.architecture": "fake", "fake.attention.key_length": "16"}
        self.n_threads, self.n_threads_batch, self.verbose = 2, 2, False
        self._lora_adapter, self.lora_scale, self.lora_path = None, 1.0, None
        for name, value in params.items():
            setattr(self.context_params, name, value)

    @property
    def model(self) -> FakeModel:
        return self._model.model

    def n_ctx(self) -> int:
        return self.context_params.n_ctx

    def n_vocab(self) -> int:
        return VOCABULARY

    def set_seed(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def generate(self, tokens: list[int], *, temp: float, **law: object) -> Iterator[int]:
        """One token after the other, by the library's own loop."""
        text = tuple(tokens)
        while True:
            noise = self._generator.gumbel(size=VOCABULARY) if temp else 0.0
            text += (int((plain_logits(text) / (temp or 1.0) + noise).argmax()),)
            yield text[-1]


CONTEXTS: list[FakeContext] = []  # those that were made since `install`


def plain_logits(text: tuple[int, ...]) -> np.ndarray:
    """[V] float32 after a text: the last two tokens say most of it, all others a little."""
    near = np.random.default_rng([7, *text[-2:]]).normal(size=VOCABULARY)
    far = np.random.default_rng([11, *text]).normal(size=VOCABULARY)
    return (4.0 * near + 0.3 * far).astype(np.float32)


def llama_init_from_model(model: FakeModel, params: Params) -> FakeContext | None:
    if params.n_ctx > 1 << 20:
        return None
    CONTEXTS.append(FakeContext(model, params))
    return CONTEXTS[-1]


def llama_free(context: FakeContext) -> None:
    assert context.is_open
    context.is_open = False


def llama_memory_seq_rm(memory: FakeContext, sequence: int, start: int, end: int) -> bool:
    assert 0 <= sequence < memory.params.n_seq_max and end == -1 and memory.is_open
    for cell in memory.cells:
        if cell.position >= start:
            cell.owners.discard(sequence)
    memory.cells = [cell for cell in memory.cells if cell.owners]
    return True


def llama_memory_seq_cp(memory: FakeContext, source: int, target: int, start: int, end: int) -> None:
    assert max(source, target) < memory.params.n_seq_max and memory.is_open
    for cell in memory.cells:
        if source in cell.owners and cell.position >= start and (end < 0 or cell.position < end):
            cell.owners.add(target)


def llama_decode(context: FakeContext, batch: llama_batch) -> int:
    count = batch.n_tokens
    assert 0 < count <= context.params.n_batch, "GGML_ASSERT(n_tokens_all <= cparams.n_batch)"
    assert context.is_open
    tokens, positions = batch.token[:count], batch.pos[:count]
    owners = [batch.seq_id[i][: batch.n_seq_id[i]] for i in range(count)]
    if not all(0 <= token < VOCABULARY for token in tokens) or _fault(context, positions, owners):
        return -1
    if context.model.window:
        _forget(context)
    if len(context.cells) + count > context.params.n_ctx:
        return 1
    new = [Cell(*given) for given in zip(positions, tokens, map(set, owners), strict=True)]
    context.cells += new
    context.most_cells = max(context.most_cells, len(context.cells))
    context.num_decoded += count
    asked = [i for i in range(count) if batch.logits[i]]
    assert len(asked) <= context.params.n_outputs_max, "GGML_ASSERT(n_outputs_max <= cparams.n_outputs_max)"
    found = [plain_logits(_seen(context, new[i], owners[i][0])) for i in asked]
    context.logits[: len(found)] = found  # over the last ones, as the library does
    return 0


def _forget(context: FakeContext) -> None:
    """llama.cpp writes over cells that their only owner will not see again, and takes the older ones from it. Here
    they all go, as soon as may be."""
    extents, gone = context.extents(), {}
    for cell in context.cells:
        (owner, *others) = cell.owners
        if not others and extents[owner][1] + 1 - cell.position >= context.model.window:
            gone[owner] = max(gone.get(owner, 0), cell.position)
    for cell in context.cells:
        cell.owners -= {owner for owner, last in gone.items() if cell.position <= last}
    context.cells = [cell for cell in context.cells if cell.owners]


def _seen(context: FakeContext, cell: Cell, sequence: int) -> tuple[int, ...]:
    """The text that a token ends, as far as it sees it."""
    first = max(cell.position + 1 - context.model.window, 0) if context.model.window else 0
    before = [other for other in context.cells if first <= other.position <= cell.position]
    is_seen = [other for other in before if sequence in other.owners or context.model.sees_others]
    seen = sorted(other.position for other in is_seen)
    is_whole = seen == list(range(first, cell.position + 1))
    assert is_whole or context.model.sees_others, f"sequence {sequence} sees positions {seen}"
    return tuple(other.token for other in sorted(is_seen, key=lambda other: other.position))


def _fault(context: FakeContext, positions: list[int], owners: list[list[int]]) -> str | None:
    """What llama.cpp refuses a batch for."""
    ways: dict[int, list[int]] = {}
    sets: dict[int, set[int]] = {}
    extents, none = context.extents(), (-1, -1)
    for position, own in zip(positions, owners, strict=True):
        for sequence in own:
            if not 0 <= sequence < context.params.n_seq_max:
                return "invalid seq_id"
            ways.setdefault(sequence, []).append(position)
            sets[sequence] = sets.get(sequence, set(own)) & set(own)
            if not sets[sequence]:
                return "incompatible sequence sets"
            if extents.get(sequence, none) != extents.get(own[0], none):
                return "coupled sequences have diverged"
    for sequence, way in ways.items():
        last = extents.get(sequence, none)[1]
        if way != sorted(way) or sorted(set(way)) != list(range(min(way), max(way) + 1)):
            return "positions are decreasing, or not continuous"
        if last >= 0 and min(way) != last + 1:
            return "inconsistent sequence positions"
    return None


def _kind(name: str):
    return lambda model: name in model.kinds


def install(monkeypatch) -> types.ModuleType:
    """In the place of the library until the test is over; the door that has been imported with it is forgotten then."""
    library = types.ModuleType("llama_cpp")
    inner = types.ModuleType("llama_cpp._utils")
    inner.suppress_stdout_stderr = lambda disable: nullcontext()
    Llama.__module__ = "llama_cpp.llama"
    functions = {
        "llama_n_ctx": lambda context: context.params.n_ctx,
        "llama_get_memory": lambda context: context,
        "llama_get_logits": lambda context: context.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        "llama_max_parallel_sequences": lambda: NO_SEQUENCES,
        "llama_model_n_ctx_train": lambda model: model.longest,
        "llama_model_n_embd": lambda model: 64,
        "llama_model_n_head": lambda model: 4,
        "llama_model_n_head_kv": lambda model: 2,
        "llama_model_n_layer": lambda model: 3,
        "llama_model_n_swa": lambda model: model.window,
        "llama_model_size": lambda model: 12345,
        "llama_model_is_recurrent": _kind("recurrent"),
        "llama_model_is_hybrid": _kind("hybrid"),
        "llama_model_is_diffusion": _kind("diffusion"),
        "llama_model_has_encoder": _kind("encoder"),
        "llama_vocab_bos": lambda vocabulary: -1,
        "llama_vocab_is_eog": lambda vocabulary, token: token in vocabulary.ends,
        "llama_supports_gpu_offload": lambda: False,
        "llama_set_adapters_lora": lambda context, adapters, count, scales: context.adapters.extend(scales[:count]),
    }
    own = (
        Llama, llama_batch, llama_init_from_model, llama_free, llama_memory_seq_rm, llama_memory_seq_cp, llama_decode,
    )  # fmt: skip
    for name, function in [*functions.items(), *((one.__name__, one) for one in own)]:
        setattr(library, name, function)
    library.__version__, library.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED = "0.3.36", -1
    library.llama_adapter_lora_p_ctypes = ctypes.c_void_p
    library._utils = inner
    CONTEXTS.clear()
    for name in [name for name in sys.modules if name.startswith("stand.plugins.llama_cpp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setitem(sys.modules, "llama_cpp._utils", inner)
    return library
