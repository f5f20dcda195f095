"""A stage for SGLang's NGRAM worker without SGLang: batches, a small model in place of the target, greedy verification.

`PlainWorker` has the methods of the released worker that ours builds upon. Where SGLang's source is at hand (the folder
in STAND_SGLANG_SOURCE), `released_worker` is its class, with stand-ins for everything that it imports.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ancestor_rules import links_of, parents_of

VOCABULARY, DEPTH = 12, 40
SOURCE = Path(os.environ.get("STAND_SGLANG_SOURCE", "/nonexistent"))
WORKER = SOURCE / "sglang/srt/speculative/ngram_worker.py"
LOGITS = np.random.default_rng(8).normal(size=(VOCABULARY, VOCABULARY, VOCABULARY)).astype(np.float32) * 3


def logits_after(text: list[int]) -> np.ndarray:
    """[V]: the small model knows two tokens."""
    return LOGITS[text[-2], text[-1]]


def plain_text(prompt: list[int], num_new: int) -> list[int]:
    """What greedy decoding gives without drafts."""
    text = list(prompt)
    for _ in range(num_new):
        text.append(int(logits_after(text).argmax()))
    return text[len(prompt) :]


class Mode:
    def __init__(self, name: str):
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"


@dataclass
class Request:
    rid: str
    prompt: list[int]
    text: list[int] = field(default_factory=list)  # all that was decided, the prompt first
    output_ids: array = field(default_factory=lambda: array("q"))  # what SGLang has processed of it

    def __post_init__(self):
        self.origin_input_ids_unpadded = array("q", self.prompt)
        self.text = list(self.prompt)


class Batch:
    """What the worker reads of a ScheduleBatch."""

    has_grammar, return_logprob, out_cache_loc = False, False, None

    def __init__(self, requests: list[Request], mode: str, temperature: float = 1.0):
        self.reqs, self.forward_mode = requests, Mode(mode)
        self.seq_lens = torch.tensor([len(one.text) - 1 for one in requests])
        self.seq_lens_cpu = self.seq_lens
        self.sampling_info = SimpleNamespace(
            temperatures=torch.full((len(requests), 1), temperature), has_watermark_candidates=False
        )
        self.req_pool_indices = torch.arange(len(requests))
        self.req_to_token_pool = SimpleNamespace(req_to_token=None)
        self.spec_info = None

    def grammar_needs_sync(self) -> bool:
        return False


def verify(tokens: np.ndarray, masks: np.ndarray, batch: Batch) -> tuple[torch.Tensor, list[list[int]]]:
    """(logits [B * d, V], the nodes that greedy verification keeps of each row, the root first)."""
    logits, kept = [], []
    for request, drafted, mask in zip(batch.reqs, tokens, masks, strict=True):
        assert drafted[0] == request.text[-1], "the root is the last token that was decided"
        rows = [logits_after([*request.text[:-1], *drafted[line.astype(bool)].tolist()]) for line in mask]
        logits += rows
        first, following = links_of(parents_of(mask).tolist())
        path, node = [0], first[0]
        while node >= 0:
            if drafted[node] == rows[path[-1]].argmax():
                path.append(node)
                node = first[node]
            else:
                node = following[node]
        kept.append(path)
    return torch.from_numpy(np.array(logits)), kept


class PlainWorker:
    """NGRAMWorker as far as ours builds upon it, without overlap."""

    def __init__(self, corpus):
        self.ngram_corpus, self.draft_token_num = corpus, corpus.draft_token_num

    def clear_cache_pool(self):
        self.ngram_corpus.reset()

    def _prepare_draft_tokens(self, batch):
        texts = [[*one.origin_input_ids_unpadded, *one.output_ids] for one in batch.reqs]
        names = [one.rid for one in batch.reqs]
        return self.ngram_corpus.batch_get(names, [text[-DEPTH:] for text in texts], list(map(len, texts)))

    def forward_batch_generation(self, batch, on_publish=None, pp_proxy_tensors=None):
        d, num_rows = self.draft_token_num, len(batch.reqs)
        if not batch.forward_mode.is_decode():
            logits = torch.from_numpy(np.array([logits_after(one.text) for one in batch.reqs]))
            tokens = torch.zeros((num_rows, d), dtype=torch.int32)
            tokens[:, 0] = logits.argmax(dim=-1)
            lengths = torch.ones(num_rows, dtype=torch.int32)
        else:
            drafted, masks = self._prepare_draft_tokens(batch)
            logits, kept = verify(drafted.reshape(num_rows, d), masks.reshape(num_rows, d, d), batch)
            best = logits.argmax(dim=-1).reshape(num_rows, d)
            tokens = torch.zeros((num_rows, d), dtype=torch.int32)
            for row, path in enumerate(kept):
                tokens[row, : len(path)] = best[row, path].to(torch.int32)
            lengths = torch.tensor([len(path) for path in kept], dtype=torch.int32)
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits),
            accept_lens=lengths,
            next_draft_input=SimpleNamespace(accept_tokens=tokens.flatten(), accept_lens=lengths),
        )


class Stage:
    """Runs a worker as the scheduler does. With overlap results are processed one step late."""

    def __init__(self, worker, *, is_overlapped: bool = False):
        self.worker, self.is_overlapped = worker, is_overlapped
        self.num_row_steps = self.num_tokens = 0
        self._last: tuple[list[Request], SimpleNamespace] | None = None

    def prefill(self, requests: list[Request]) -> None:
        self._run(requests, "extend")

    def step(self, requests: list[Request], temperature: float = 1.0) -> None:
        before = sum(len(one.text) for one in requests)
        self._run(requests, "decode", temperature)
        self.num_row_steps += len(requests)
        self.num_tokens += sum(len(one.text) for one in requests) - before

    def _run(self, requests: list[Request], mode: str, temperature: float = 1.0) -> None:
        batch, d = Batch(requests, mode, temperature), self.worker.draft_token_num
        if mode == "decode":
            batch.spec_info = self._relayed(requests)
        result = self.worker.forward_batch_generation(batch, on_publish=None)
        tokens = result.next_draft_input.accept_tokens.reshape(-1, d).tolist()
        for row, request in enumerate(requests):
            new = tokens[row][: int(result.accept_lens[row])]
            request.text += new
            request.waiting = new
            if not self.is_overlapped:
                request.output_ids = array("q", request.text[len(request.prompt) :])

    def _relayed(self, requests: list[Request]) -> SimpleNamespace:
        """The last step's tokens of these rows; what came before them is processed now."""
        d = self.worker.draft_token_num
        for one in requests:
            end = len(one.text) - (len(one.waiting) if self.is_overlapped else 0)
            one.output_ids = array("q", one.text[len(one.prompt) : end])
        tokens = torch.tensor([one.waiting + [0] * (d - len(one.waiting)) for one in requests], dtype=torch.int32)
        lengths = torch.tensor([len(one.waiting) for one in requests], dtype=torch.int32)
        return SimpleNamespace(accept_tokens=tokens.flatten(), accept_lens=lengths)


def released_worker(corpus, *, is_overlapped: bool):
    """An object of the released class around this corpus, and its class' module. Its imports are stand-ins."""
    stand_ins = _stand_ins(corpus)
    hidden = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec = importlib.util.spec_from_file_location("released_ngram_worker", WORKER)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, before in hidden.items():
            sys.modules.pop(name)
            if before is not None:
                sys.modules[name] = before

    def make(kind: type):
        worker = kind.__new__(kind)
        worker.ngram_corpus, worker.draft_token_num = corpus, corpus.draft_token_num
        worker.max_trie_depth, worker.enable_overlap, worker.device = DEPTH, is_overlapped, "cpu"
        worker.max_batch_size, worker._prev_decode_rids, worker.grammar_tree_host = 16, set(), None
        worker.speculative_num_draft_tokens, worker.token_to_kv_pool_allocator = corpus.draft_token_num, None
        worker.model_runner = SimpleNamespace(watermark_state=None)
        worker._target_worker = SimpleNamespace(forward_batch_generation=_target_forward)
        worker._init_preallocated_tensors()
        return worker

    return make, module.NGRAMWorker


def _target_forward(batch, pp_proxy_tensors=None, is_verify=False):
    if not is_verify:
        logits = torch.from_numpy(np.array([logits_after(one.text) for one in batch.reqs]))
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits),
            next_token_ids=logits.argmax(dim=-1).to(torch.int32),
            can_run_cuda_graph=False,
        )
    info = batch.spec_info
    tokens = info.draft_token.reshape(len(batch.reqs), -1).numpy()
    logits, batch.kept = verify(tokens, info.custom_mask.reshape(*tokens.shape, -1).numpy(), batch)
    return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits), can_run_cuda_graph=False)


def _sample(verify_input, batch, logits_output, grammar_mask=None, *, watermark_state=None):
    d = verify_input.draft_token_num
    predicted = logits_output.next_token_logits.argmax(dim=-1).to(torch.int32)
    index = torch.full((len(batch.reqs), d), -1, dtype=torch.int64)
    for row, path in enumerate(batch.kept):
        index[row, : len(path)] = torch.tensor(path) + row * d
    return predicted, torch.tensor([len(path) for path in batch.kept], dtype=torch.int32), index


def _stand_ins(corpus) -> dict[str, types.ModuleType]:
    """By name: modules with the names that the released worker imports from them."""
    nothing = lambda *arguments, **named: None  # noqa: E731
    record = lambda **named: SimpleNamespace(**named)  # noqa: E731
    base = type("BaseSpecWorker", (), {"target_worker": property(lambda self: self._target_worker)})
    names = {
        "sglang.kernels.ops.speculative.cache_locs": {"assign_extend_cache_locs_func": nothing},
        "sglang.kernels.ops.speculative.reconstruct_tree": {"reconstruct_indices_from_tree_mask_func": nothing},
        "sglang.srt.layers.logprob_processor": {"compute_spec_logprobs": nothing},
        "sglang.srt.managers.schedule_batch": {"ScheduleBatch": object},
        "sglang.srt.managers.scheduler": {"GenerationBatchResult": record},
        "sglang.srt.managers.tp_worker": {"TpModelWorker": object},
        "sglang.srt.model_executor.forward_batch_info": {
            "ForwardMode": SimpleNamespace(TARGET_VERIFY=Mode("verify"), DECODE=Mode("decode"))
        },
        "sglang.srt.observability.req_time_stats": {"set_time_batch": nothing},
        "sglang.srt.runtime_context": {"get_device": nothing, "get_schedule": nothing, "get_spec": nothing},
        "sglang.srt.server_args": {"ServerArgs": object},
        "sglang.srt.speculative.base_spec_worker": {"BaseSpecWorker": base, "EagleDraftWorkerBase": object},
        "sglang.srt.speculative.cpp_ngram.ngram_corpus": {"NgramCorpus": lambda **named: corpus},
        "sglang.srt.speculative.eagle_utils": {"eagle_sample": _sample},
        "sglang.srt.speculative.ngram_info": {"NgramVerifyInput": record},
        "sglang.srt.speculative.spec_utils": dict.fromkeys(
            ("GrammarTree", "build_grammar_vocab_mask", "commit_mamba_states_after_verify",
             "move_accept_tokens_to_target_kvcache", "prepare_mamba_track_for_verify", "record_stream_for_v2_verify"),
            nothing,
        ),
        "sglang.srt.utils": {"is_cpu": lambda: True},
        "sglang.srt.utils.async_probe": {"maybe_detect_inf": nothing, "maybe_detect_nan": nothing},
    }  # fmt: skip
    made = {}
    for name, content in names.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            made.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        module = made.setdefault(name, types.ModuleType(name))
        vars(module).update(content)
    return made
