"""A context of llama.cpp over the weights of a `llama_cpp.Llama`: sequences that share cells, and decoding."""

from __future__ import annotations

import ctypes
import gc
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from threading import RLock
from typing import Protocol
from weakref import WeakSet, finalize

import llama_cpp
import numpy as np
from llama_cpp import Llama
from llama_cpp._utils import suppress_stdout_stderr

from stand.forward.cache.tree_cache import CacheMemoryError

NO_ROOM = 1  # llama_decode: too few free cells
MOST_TOKENS = 512  # of one decoding: a step, or a chunk of a prompt. It is done in one piece: between two of them cells
# that are out of a window would go, which a token that is not kept had left behind
MOST_OUTPUTS = 256  # tokens of one decoding whose logits are asked for
WHOLE = -1  # a position: from the first, or to the last


class Holder(Protocol):
    """Who holds sequences of a context."""

    num_slots: int  # that they fill

    def give_back_idle(self) -> None:
        """Those that nothing is in."""


class Context:
    """Its cells hold keys of `num_slots` tokens. A cell may belong to several sequences, and is free when it belongs to
    none. A token sees the cells of its sequence that come before it.

    It lives beside the context that `llm` has for itself, with that one's settings but for its size.
    """

    def __init__(self, llm: Llama, num_slots: int):
        params = type(llm.context_params).from_buffer_copy(llm.context_params)
        params.n_ctx, params.n_batch, params.n_ubatch = num_slots, MOST_TOKENS, MOST_TOKENS
        params.n_seq_max = llama_cpp.llama_max_parallel_sequences()
        params.kv_unified = params.swa_full = True
        params.embeddings = False
        params.n_outputs_max = MOST_OUTPUTS
        with suppress_stdout_stderr(disable=llm.verbose):
            pointer = llama_cpp.llama_init_from_model(llm.model, params)
        if not pointer:
            raise CacheMemoryError(
                f"llama.cpp must have room for {num_slots} tokens' keys, got no context; lower num_slots"
            )
        self.llm = llm
        self.num_slots: int = llama_cpp.llama_n_ctx(pointer)
        self.caches: WeakSet[Holder] = WeakSet()
        self._pointer = pointer
        self._memory = llama_cpp.llama_get_memory(pointer)
        self._num_tokens = llm.n_vocab()
        self._free = list(reversed(range(params.n_seq_max)))  # sequences
        self._abandoned: deque[int] = deque()
        self._lock = RLock()  # around what llama.cpp does: it is called without Python's own lock
        finalize(self, _close, pointer, llm)
        _set_adapter(llm, pointer)

    def take(self) -> int:
        """A sequence without cells."""
        self._tidy()
        if not self._free:
            gc.collect()  # rows of a call that an error has ended
            self._tidy()
            for cache in list(self.caches):
                cache.give_back_idle()
        if not self._free:
            raise CacheMemoryError(
                "rows, prompts and branches of drafts must be at most 256 at once, got more; end other calls of this "
                "model first"
            )
        return self._free.pop()

    def give_back(self, sequence: int) -> None:
        self.remove(sequence)
        self._free.append(sequence)

    def abandon(self, sequences: Iterable[int]) -> None:
        """Give them back before the next decoding: the collector may ask for it in the midst of one."""
        self._abandoned.extend(sequences)

    def remove(self, sequence: int, start: int = WHOLE) -> None:
        """Its cells from position `start` on."""
        with self._lock:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, WHOLE)

    def copy(self, source: int, target: int, start: int = WHOLE, end: int = WHOLE) -> None:
        """The cells of `source` in [start, end) also belong to `target`."""
        with self._lock:
            llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def decode(
        self, token_ids: np.ndarray, positions: np.ndarray, owners: Sequence[Sequence[int]], *, num_outputs: int
    ) -> np.ndarray:
        """[num_outputs, V] float32 logits of the last tokens, valid until the next call.

        token_ids, positions: [M]. owners: of each token, its sequences; the first one says what it sees."""
        count = len(token_ids)
        if count > MOST_TOKENS or num_outputs > MOST_OUTPUTS:
            raise ValueError(
                f"a step must hold at most {MOST_OUTPUTS} tokens, got {count}; lower the drafter's budget, or max_rows"
            )
        counts = np.fromiter(map(len, owners), dtype=np.int32, count=count)
        numbers = np.fromiter(chain.from_iterable(owners), dtype=np.int32, count=int(counts.sum()))
        starts = numbers.ctypes.data + 4 * (np.cumsum(counts, dtype=np.uint64) - counts.astype(np.uint64))
        wanted = np.zeros(count, dtype=np.int8)
        wanted[count - num_outputs :] = 1
        given = {
            "token": token_ids.astype(np.int32),
            "pos": positions.astype(np.int32),
            "n_seq_id": counts,
            "seq_id": starts.astype(np.uint64),
            "logits": wanted,
        }
        kinds = dict(llama_cpp.llama_batch._fields_)
        pointers = {name: ctypes.cast(array.ctypes.data, kinds[name]) for name, array in given.items()}
        batch = llama_cpp.llama_batch(n_tokens=count, **pointers)
        self._check_open()
        self._tidy()
        with self._lock:
            failure = llama_cpp.llama_decode(self._pointer, batch)
        if failure == NO_ROOM:
            raise CacheMemoryError(
                f"the keys of all calls must fit into {self.num_slots} slots, got more; raise num_slots, or end other "
                "calls of this model first"
            )
        if failure:
            raise RuntimeError(f"llama_decode must return 0, got {failure}; llama.cpp's log says why (verbose=True)")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._pointer), shape=(num_outputs, self._num_tokens))

    def _tidy(self) -> None:
        while self._abandoned:
            self.give_back(self._abandoned.pop())

    def _check_open(self) -> None:
        if self.llm._model.model is None:
            raise RuntimeError("the model must be open while its engine is used, got a closed Llama; make it anew")


def _close(pointer: object, llm: Llama) -> None:
    """llm: held until here, for its weights are used."""
    if llm._model.model is not None:  # else the memory stays: freeing reads the model
        llama_cpp.llama_free(pointer)


def _set_adapter(llm: Llama, pointer: object) -> None:
    """An adapter belongs to a context."""
    adapter = getattr(llm, "_lora_adapter", None)
    if adapter is None:
        return
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    if llama_cpp.llama_set_adapters_lora(pointer, adapters, 1, (ctypes.c_float * 1)(llm.lora_scale)):
        raise RuntimeError(f"llama.cpp must take the adapter of the Llama, got an error; check {llm.lora_path}")
