"""SGLang: its NGRAM worker with laws. It hands the lookup a request's prompt before the first draft, and after every
verification the best entries of the target's law at each node.

An option of its own, STAND_LAWS=10: the entries per node. Written for the worker of `VERSIONS` and refused for others.
Never run inside SGLang itself: see docs/sglang.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stand.plugins.serving.arriving_laws import ArrivingLaws
from stand.plugins.serving.options import PREFIX, ServingOptions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VERSIONS = ("0.5.23",)  # whose worker was read
CHOOSES_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def with_laws(worker: type, algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type | None:
    """The class of workers to take in the place of the one that SGLang has chosen, None to keep it.

    Raises RuntimeError for another version, ValueError for several ranks.
    """
    options = ServingOptions.read()
    if not algorithm.is_ngram() or options.laws == 0:
        return None
    import sglang

    if sglang.__version__ not in VERSIONS:
        raise RuntimeError(
            f"laws need SGLang {' or '.join(VERSIONS)}, got {sglang.__version__}; leave STAND_LAWS out to learn tokens"
        )
    rule = "laws need one rank: all must draft alike, and logits may differ in the last bit"
    check_one_rank(server_args, rule, option="laws")
    return worker_with_laws(worker, options.laws)


def check_one_rank(server_args: ServerArgs, rule: str, *, option: str) -> None:
    """Raise ValueError where a model has several ranks. rule: why there must be one; option: that asks for it."""
    if server_args.tp_size > 1 or server_args.pp_size > 1:
        raise ValueError(
            f"{rule}; got {server_args.tp_size} in tensor and {server_args.pp_size} in pipeline parallelism; leave "
            f"{PREFIX}{option.upper()} out"
        )


def worker_with_laws(base: type, num_entries: int) -> type:
    """A subclass of SGLang's NGRAMWorker; its corpus is a `LookupCorpus`."""

    class LawWorker(base):
        _laws: ArrivingLaws | None = None  # of the last verification

        def _prepare_draft_tokens(self, batch: ScheduleBatch) -> tuple[np.ndarray, np.ndarray]:
            corpus = self.ngram_corpus
            corpus.hands_over_laws = True
            if self._laws is not None:
                corpus.learn_laws(*self._laws.arrays())
                self._laws = None
            for request in batch.reqs:
                if not corpus.knows(request.rid):
                    corpus.learn_prompt(request.rid, np.array(request.origin_input_ids_unpadded, dtype=np.int32))
            return super()._prepare_draft_tokens(batch)

        def forward_batch_generation(
            self, batch: ScheduleBatch, on_publish: object = None, pp_proxy_tensors: object = None
        ) -> GenerationBatchResult:
            is_verified = batch.forward_mode.is_decode()  # the others read prompts
            result = super().forward_batch_generation(batch, on_publish=on_publish, pp_proxy_tensors=pp_proxy_tensors)
            if is_verified:
                temperatures = batch.sampling_info.temperatures.repeat_interleave(self.draft_token_num, dim=0)
                self._laws = ArrivingLaws(result.logits_output.next_token_logits, temperatures, num_entries)
            return result

        def clear_cache_pool(self) -> None:
            super().clear_cache_pool()
            self._laws = None  # of drafts that the corpus has forgotten

    return LawWorker
