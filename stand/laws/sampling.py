"""From logits to the law that plain sampling would draw from, node by node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stand.laws.filters import filter_laws
from stand.laws.grammars.masks import GrammarMasks
from stand.laws.processors import ProcessorChain
from stand.row import Row
from stand.simd.threads import parallel_region
from stand.trees import DraftBatch
from stand.verifiers.doubles import where_doubles_are

FILTERS = {  # in transformers' order; each class keeps its setting in an attribute of that name
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
LEAST, MOST = 1e-30, 1e30  # temperatures above 0
HOT = 1e4  # from about a hundred times that on, tokens of unlike scores have equal probabilities in float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The end of every law: temperature, top_k, top_p, min_p, in this order; temperature 0 is greedy."""

    temperature: float = 1.0  # >= 0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]; 0: off

    def __post_init__(self) -> None:
        _require(_finite(self.temperature) and self.temperature >= 0, "temperature must be >= 0", self.temperature,
                 "use 0 for greedy decoding")  # fmt: skip
        _require(self.temperature == 0 or LEAST <= self.temperature <= MOST,
                 f"temperature must be 0 or in [{LEAST:g}, {MOST:g}]", self.temperature,
                 "beyond them float32 overflows; use 0 for greedy decoding")  # fmt: skip
        _require(_is_whole(self.top_k) and 0 <= self.top_k < 2**31, "top_k must be an integer in [0, 2**31)",
                 self.top_k, "use 0 to switch it off")  # fmt: skip
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p,
                 "use 1 to switch it off, temperature=0 for greedy decoding")  # fmt: skip
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p,
                 "use 0 to switch it off")  # fmt: skip

    @classmethod
    def at_the_end_of(cls, processors: Sequence[LogitsProcessor]) -> tuple[SamplingParams, int]:
        """The settings of the filters that a list of processors ends with, and how many processors they are.

        Only transformers' own four classes count, in their order, as they are made without further arguments.
        """
        settings: dict[str, float] = {}
        names = list(FILTERS)
        for processor in reversed(processors):
            name = next((name for name in names if type(processor) is FILTERS[name]), None)
            is_changed = getattr(processor, "min_tokens_to_keep", 1) != 1 or (
                getattr(processor, "filter_value", -math.inf) != -math.inf
            )
            if name is None or is_changed:
                break
            settings[name] = getattr(processor, name)
            names = names[: names.index(name)]
        return cls(**settings), len(settings)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class Laws(NamedTuple):
    """What is sampled from at each of M nodes, and the tokens that a lookup learns there."""

    probabilities: torch.Tensor  # [M, V] float32
    top_ids: torch.Tensor  # [M, count] int32, the most probable first
    top_probs: torch.Tensor  # [M, count] float32; under greedy decoding of the softmax at temperature 1


class TargetLaw:
    """Turns a step's logits into each node's law: processors in their order, then temperature and filters."""

    def __init__(self, params: SamplingParams, *, processors: ProcessorChain | None = None, num_filters: int = 0):
        """num_filters: how many of a request's processors stand for `params`, at their end."""
        self.params = params
        self._processors = processors
        self._num_filters = num_filters
        self._warpers = _make_warpers(params)

    @classmethod
    def of(cls, processors: Sequence[LogitsProcessor], *, is_sampled: bool, end_ids: Iterable[int] = ()) -> TargetLaw:
        """What transformers draws with these processors, made for request 0; `admit` takes those of further ones.

        end_ids: tokens that end the request's rows."""
        params, count = SamplingParams.at_the_end_of(processors) if is_sampled else (SamplingParams(temperature=0.0), 0)
        others = processors[: len(processors) - count]
        chain = ProcessorChain(others, end_ids=end_ids) if others else None
        return cls(params, processors=chain, num_filters=count)

    def admit(self, request: int, processors: Sequence[LogitsProcessor], *, end_ids: Iterable[int] = ()) -> None:
        """A further request's, made with the same settings. Raises ValueError where they are of other kinds."""
        others = processors[: len(processors) - self._num_filters]
        chain = ProcessorChain([]) if self._processors is None else self._processors
        chain.admit(request, others, end_ids=end_ids)

    def forget(self, row: Row, *, is_last: bool) -> None:
        """The row has ended; is_last: and so have all others of its request."""
        if self._processors is not None:
            self._processors.forget(row, is_last=is_last)

    def process(self, logits: torch.Tensor, batch: DraftBatch, rows: Sequence[Row]) -> torch.Tensor:
        """[M, V] logits of any float dtype -> [M, V] float32 scores, before temperature and filters."""
        scores = logits.float()
        if self._processors is None:
            return scores
        return self._processors(scores, batch, rows, temperature=self.params.temperature or 1.0)

    def sound(self, batch: DraftBatch, place: int, path: np.ndarray) -> tuple[int, Exception | None]:
        """How many tokens a row drew before the first node of its kept path at which processors left no law, and what
        is wrong there; as of the last step that was `process`ed."""
        first = int(batch.offsets[place])
        return self._processors.sound([first, *(first + path).tolist()])

    @property
    def grammar(self) -> GrammarMasks | None:
        """What says at planned nodes which tokens may follow, where one of the processors is a grammar library's."""
        return None if self._processors is None else self._processors.grammar

    @property
    def has_processors(self) -> bool:
        """Whether a law is more than temperature and filters: then it may depend on a node's prefix."""
        return self._processors is not None

    @property
    def has_filters(self) -> bool:
        """Whether top_k, top_p or min_p may take tokens out; without them a law is softmax(scores / temperature)."""
        return not self.params.is_greedy and (
            self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0
        )

    @property
    def needs_scores(self) -> bool:
        """Whether filters must see scores and not their softmax: where it is hot, float32 probabilities are equal
        though scores are not."""
        return self.has_filters and self.params.temperature > HOT

    def warp(self, scores: torch.Tensor) -> torch.Tensor:
        """[M, V] float32: the temperature and the filters, row by row; nothing at temperature 0."""
        for warper in self._warpers:
            scores = warper(None, scores)
        return scores

    def filtered(self, scores: torch.Tensor, laws: torch.Tensor) -> torch.Tensor:
        """As `warp`, where `laws` [M, V] float32 of these scores are known: they say what top_p and min_p took out, to
        the token and without a sort. top_k alone may leave tokens whose probability is 0 in float32. What is returned
        may be `scores` themselves, written over."""
        if not self.has_filters:
            return self.warp(scores)
        scores, is_kept = scores.div_(self.params.temperature), (laws > 0).to(scores.device)
        if self.params.top_p == 1.0 and self.params.min_p == 0.0:
            best = torch.topk(scores, min(self.params.top_k, scores.shape[1]), dim=-1).values
            is_kept |= scores >= best[:, -1:]
        most = is_kept.float().sub_(0.5).mul_(math.inf)  # inf or -inf: faster on a CPU than `masked_fill_`
        return torch.minimum(scores, most)

    def laws(self, scores: torch.Tensor, num_top: int = 0) -> Laws:
        """The laws of `process`ed scores [M, V], and the best `num_top` (at most V) tokens of each.

        A law is the softmax after temperature and filters, or at temperature 0 all mass on the best token (lowest id
        on ties). The best tokens are then those of the softmax at temperature 1: the runners-up are what other
        contexts will want.

        Raises ValueError where a row has no finite best score: there the softmax is NaN throughout, so one column
        tells.

        Laws lie where the scores do, or on the host where those lie on a device without 64-bit floats.
        """
        scores, num_top = where_doubles_are(scores), min(num_top, scores.shape[1])
        if scores.device.type == "cpu" and scores.dtype == torch.float32:
            laws = self._compiled_laws(scores, num_top)
        else:
            softmax = torch.softmax(self.warp(scores), dim=-1)
            best = torch.topk(softmax, num_top, dim=-1)
            laws = Laws(softmax, best.indices.to(torch.int32), best.values)
        if bool(torch.isnan(laws.probabilities[:, 0]).any()):
            _refuse_scores(self.warp(scores))
        if not self.params.is_greedy:
            return laws
        best = scores.argmax(dim=-1, keepdim=True)
        return laws._replace(probabilities=torch.zeros_like(scores).scatter_(1, best, 1.0))

    def _compiled_laws(self, scores: torch.Tensor, num_top: int) -> Laws:
        """The same without a sort of the vocabulary; at temperature 0 the softmax."""
        params = self.params
        settings = {} if params.is_greedy else {
            "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p
        }  # fmt: skip
        threads = {"num_threads": torch.get_num_threads(), "in_threads": parallel_region()}
        arrays = filter_laws(scores.contiguous().numpy(), **settings, count=num_top, **threads)
        return Laws(*map(torch.from_numpy, arrays))


def _make_warpers(params: SamplingParams) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if params.is_greedy:
        return warpers
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


def _refuse_scores(scores: torch.Tensor) -> None:
    best = scores.amax(dim=-1)
    broken = best[~torch.isfinite(best)]
    kind = "NaN" if bool(torch.isnan(broken).any()) else "+inf" if bool((broken > 0).any()) else "only -inf"
    raise ValueError(
        f"every position needs a finite best logit, got {kind}; "
        "check the model's weights and dtype (float16 overflows), and processors that forbid every token"
    )


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, rule: str, got: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{rule}, got {got!r}; {remedy}")
