"""vLLM: the target's laws at all positions that a step has verified, for `LookupProposer` with the option `laws`.

vLLM hands no logits to a proposer. They come from `GPUModelRunner._sample`, which is wrapped: it has the same arguments
in 0.22 to 0.33, and others are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING

import numpy as np

from stand.plugins.serving.arriving_laws import ArrivingLaws
from stand.trees import DraftBatch
from stand.trees.layouts.text_rows import TextRows

if TYPE_CHECKING:
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

ARGUMENTS = ["self", "logits", "spec_decode_metadata"]  # of `_sample`


@cache  # engines of one process share the class
def show_scores(proposers: type) -> None:
    """From now on model runners call `see_scores` of such proposers before they sample.

    Raises RuntimeError where vLLM's method has other arguments.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner._sample = showing_scores(GPUModelRunner._sample, proposers)


def showing_scores(sample: Callable[..., SamplerOutput], proposers: type) -> Callable[..., SamplerOutput]:
    """The method `_sample` of a model runner, which shows its scores first. Raises RuntimeError for other arguments."""
    names = [*inspect.signature(sample).parameters]
    if names != ARGUMENTS:
        raise RuntimeError(
            f"laws need a model runner of vLLM whose _sample takes {', '.join(ARGUMENTS)}, as in 0.22 to 0.33; got "
            f"{', '.join(names)}; leave laws out to learn tokens"
        )

    @wraps(sample)
    def _sample(self, logits, spec_decode_metadata):
        if isinstance(getattr(self, "drafter", None), proposers):  # an engine without drafts has none
            self.drafter.see_scores(logits, spec_decode_metadata, self.input_batch.sampling_metadata)
        return sample(self, logits, spec_decode_metadata)

    return _sample


class VerifiedLaws:
    """Laws at the positions of a step: of every row of vLLM's batch its last token, and the draft behind it."""

    def __init__(
        self, logits: torch.Tensor, drafts: SpecDecodeMetadata | None, sampling: SamplingMetadata, num_entries: int
    ):
        """logits [N, V], as vLLM is about to sample from them: with the masks of grammars, without penalties."""
        import torch

        self._sizes = np.ones(len(logits), dtype=np.int64)  # by row
        temperatures, others = sampling.temperature, []
        if drafts is not None:
            self._sizes = np.array(drafts.num_draft_tokens) + 1
            others = [drafts.draft_token_ids]
            if temperatures is not None:
                ends = drafts.cu_num_sampled_tokens
                counts = torch.diff(ends, prepend=ends.new_zeros(1))
                temperatures = torch.repeat_interleave(temperatures, counts, output_size=len(logits))
        if temperatures is not None:
            temperatures = temperatures[:, None]
        self._arriving = ArrivingLaws(logits, temperatures, num_entries, *others)

    def lesson(
        self, tokens: np.ndarray, rows: np.ndarray, before: np.ndarray
    ) -> tuple[DraftBatch, TextRows, np.ndarray, np.ndarray]:
        """The chains of these rows, the texts before them, and the laws at their nodes: ids and probabilities [M, K].

        tokens int32 [R, L] of all rows; before int64 [B]: tokens of the rows in question before the step, at least one.
        """
        top_ids, top_probs, *drafted = self._arriving.arrays()
        sizes = self._sizes[rows]
        offsets = np.concatenate([[0], sizes.cumsum()]).astype(np.int32)
        depths = np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], sizes)
        lines = np.repeat((self._sizes.cumsum() - self._sizes)[rows], sizes) + depths
        token_ids = np.repeat(tokens[rows, before - 1], sizes)
        if drafted:  # without the rows' last tokens, of which there is one more with each row
            is_drafted = depths > 0
            token_ids[is_drafted] = drafted[0][(lines - np.repeat(rows, sizes) - 1)[is_drafted]]
        chains = DraftBatch.scored(token_ids, depths - 1, offsets, depths, np.zeros_like(depths))
        return chains, TextRows(tokens, before - 1, rows), top_ids[lines], top_probs[lines]
