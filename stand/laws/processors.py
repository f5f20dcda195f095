"""Logits processors at every node of a step's drafts: one order, each node with its own prefix, rows apart."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as library

from stand.forward.devices import uploaded
from stand.laws.grammars.allowed_tokens import AllowedTokens
from stand.laws.grammars.masks import GrammarMasks
from stand.laws.grammars.matchers import has_matcher
from stand.laws.node import Node, groups_of, nodes_of
from stand.laws.output_penalties import OutputPenalties, PenalisedNodes
from stand.laws.seen_tokens import SeenTokens
from stand.own_copy import own_copy
from stand.row import Row
from stand.trees import DraftBatch

# They look at the scores of a node alone: one call for all nodes of a step.
WITHOUT_PREFIX = frozenset(
    {
        library.TemperatureLogitsWarper,
        library.TopHLogitsWarper,
        library.TopKLogitsWarper,
        library.TopPLogitsWarper,
        library.MinPLogitsWarper,
        library.TypicalLogitsWarper,
        library.EpsilonLogitsWarper,
        library.EtaLogitsWarper,
        library.InfNanRemoveLogitsProcessor,
        library.SuppressTokensLogitsProcessor,
        library.LogitNormalization,
    }
)
HARMLESS = frozenset(  # of those: they forbid nothing
    {library.TemperatureLogitsWarper, library.InfNanRemoveLogitsProcessor, library.LogitNormalization}
)
REVIVING = frozenset(  # they give a token a finite score that had -inf
    {
        library.InfNanRemoveLogitsProcessor,
        library.ForcedBOSTokenLogitsProcessor,
        library.ForcedEOSTokenLogitsProcessor,
    }
)
# Functions of prefix and scores without a memory of earlier calls: one call for prefixes of one length. The encoder's
# repetition penalty is not among them: up to transformers 5.16 it changes the first row of a batch alone.
BY_PREFIX = frozenset(
    {
        library.SequenceBiasLogitsProcessor,
        library.NoBadWordsLogitsProcessor,
        library.RepetitionPenaltyLogitsProcessor,
        library.NoRepeatNGramLogitsProcessor,
        library.EncoderNoRepeatNGramLogitsProcessor,
        library.MinLengthLogitsProcessor,
        library.MinNewTokensLengthLogitsProcessor,
        library.ForcedBOSTokenLogitsProcessor,
        library.ForcedEOSTokenLogitsProcessor,
        library.ExponentialDecayLengthPenalty,
        library.SuppressTokensAtBeginLogitsProcessor,
        library.WatermarkLogitsProcessor,
    }
)
# Refused by name, each with its reason; the first one itself is served, and what derives from it is not.
REFUSED = {
    library.PrefixConstrainedLogitsProcessor: "its class may ask for a row's number in the batch, and rows run apart",
    library.UnbatchedClassifierFreeGuidanceLogitsProcessor: "it runs forwards of its own beside the packed ones",
    library.ClassifierFreeGuidanceLogitsProcessor: "it needs conditional and unconditional rows side by side",
    library.DiaClassifierFreeGuidanceLogitsProcessor: "it needs conditional and unconditional rows side by side",
    library.AlternatingCodebooksLogitsProcessor: "it belongs to an audio model",
    library.DiaEOSChannelFilterLogitsProcessor: "it belongs to an audio model",
    library.DiaEOSDelayPatternLogitsProcessor: "it belongs to an audio model",
    library.WhisperNoSpeechDetection: "it belongs to an audio model",
}


NO_LAW = (
    "processors must leave a token of finite score behind every text that they allow, got {best} as the best behind "
    "{count} new tokens; allow a token there, or an end token"
)


def checked_processors(processors: object) -> list[LogitsProcessor]:
    """A processor, or any iterable of them (a `LogitsProcessorList`), as a list.

    Raises ValueError by the name of the first that cannot run node by node.
    """
    if processors is None:
        return []
    found = list(processors) if isinstance(processors, Iterable) else [processors]
    for processor in found:
        name = type(processor).__name__
        if not callable(processor) or isinstance(processor, type):
            raise ValueError(
                f"a logits processor must be callable with (input_ids, scores), got {processor!r}; pass an object "
                "whose class derives from transformers' LogitsProcessor"
            )
        arguments, takes_two = _arguments(processor)
        if not takes_two:
            raise ValueError(
                "a logits processor must take input_ids and scores alone, got "
                f"{name} with {', '.join(arguments) or 'none'}; give it the rest when you make it"
            )
        reason = next((reason for kind, reason in REFUSED.items() if isinstance(processor, kind)), None)
        if reason is not None and type(processor) is not library.PrefixConstrainedLogitsProcessor:
            raise ValueError(f"processors must work on one row at a time, got {name}: {reason}; leave it out")
    return found


def _arguments(processor: object) -> tuple[list[str], bool]:
    """Their names, none where they are not told, as of some functions of Python's own; whether they are two."""
    names: list[str] = []
    try:
        signature = inspect.signature(processor)
        names = list(signature.parameters)
        signature.bind(None, None)
    except (TypeError, ValueError):
        return names, False
    return names, len(names) <= 2


class ProcessorChain:
    """Runs the processors of each request in their order.

    Lists of different requests hold the same processors, made for prompts of different lengths. Processors of classes
    other than those above may remember their calls: see `PerRow`.
    """

    def __init__(self, first: Sequence[LogitsProcessor], *, end_ids: Iterable[int] = ()):
        """first: those of request 0; end_ids: tokens that end its rows."""
        self.by_request = {0: list(first)}
        self._ends = {0: frozenset(end_ids)}  # by request
        self._kinds = [type(processor) for processor in first]
        self._has_prefixes = any(kind not in WITHOUT_PREFIX for kind in self._kinds)
        self._runners = {
            place: _runner(processor)
            for place, processor in enumerate(first)
            if type(processor) not in WITHOUT_PREFIX | BY_PREFIX
        }
        by_depth = {place for place, runner in self._runners.items() if isinstance(runner, (PerRow, AllowedTokens))}
        reviving = {place for place, kind in enumerate(self._kinds) if kind in REVIVING}
        # Asked depth by depth: all up to the last that knows no other texts, or that brings forbidden tokens back.
        self._num_by_depth = 1 + max(by_depth | reviving) if by_depth else 0
        self._mends_scores = library.InfNanRemoveLogitsProcessor in self._kinds
        telling = {place: one for place, one in self._runners.items() if isinstance(one, (GrammarMasks, AllowedTokens))}
        self._telling = list(telling.values())
        self._told_by_depth = [one for place, one in telling.items() if place < self._num_by_depth]
        self._may_leave_none = _can_leave_none(first)
        self._seen = SeenTokens()
        self._errors: dict[int, Exception] = {}  # by node of the last call at which no token may be drawn: why

    def admit(self, request: int, processors: Sequence[LogitsProcessor], *, end_ids: Iterable[int] = ()) -> None:
        """Those of a further request. Raises ValueError where they are not of the same kinds."""
        kinds = [type(processor) for processor in processors]
        if kinds != self._kinds:
            raise ValueError(
                f"the requests of a call must need the same processors, got {_names(kinds)} beside "
                f"{_names(self._kinds)}; give end tokens to all or none, or make two calls"
            )
        self.by_request[request], self._ends[request] = list(processors), frozenset(end_ids)
        for place, runner in self._runners.items():
            runner.by_request[request] = processors[place]

    def forget(self, row: Row, *, is_last: bool) -> None:
        """The row has ended, and with the last one its request."""
        self._seen.forget(row)
        for runner in self._runners.values():
            runner.forget(row, is_last=is_last)
        if is_last:
            self.by_request.pop(row.request, None)
            self._ends.pop(row.request, None)

    def __call__(
        self, scores: torch.Tensor, batch: DraftBatch, rows: Sequence[Row], *, temperature: float = 1.0
    ) -> torch.Tensor:
        """[M, V] float32 raw scores of the packed nodes of `rows` -> processed ones.

        Where processors leave a node no law at this temperature the raw scores stay: plain decoding may never come
        there. If a row does, `sound` says so.
        """
        nodes = nodes_of(batch, rows) if self._has_prefixes or self._may_leave_none else []
        processed = self._by_depth(scores, nodes) if self._num_by_depth else scores
        later = range(self._num_by_depth, len(self._kinds))
        processed = self._run(later, processed, nodes, request=rows[0].request)
        self._errors = {}
        if self._may_leave_none:
            best = (processed.amax(dim=1) / temperature).tolist()
            broken = [node for node in nodes if not math.isfinite(best[node.place])]
            lines = [node.place for node in broken]
            processed[lines] = scores[lines].nan_to_num() if self._mends_scores else scores[lines]
            self._errors = {node.place: _no_law(best[node.place], node) for node in broken}
        for runner in self._telling:
            found = ((node.place, runner.error_at(node)) for node in nodes)
            self._errors |= {place: error for place, error in found if error is not None}
        return processed

    @property
    def grammar(self) -> GrammarMasks | None:
        """The first processor of a grammar library."""
        return next((runner for runner in self._runners.values() if isinstance(runner, GrammarMasks)), None)

    def sound(self, places: Sequence[int]) -> tuple[int, Exception | None]:
        """How many of these nodes of the last call come before the first one at which no token may be drawn, and what
        is wrong with that."""
        found = ((count, self._errors[place]) for count, place in enumerate(places) if place in self._errors)
        return next(found, (len(places), None))

    def _by_depth(self, scores: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor:
        """The processors that are asked depth by depth, and never below a token that they forbid or that ends the row:
        plain decoding asks nothing there. The model's scores stay, for no token is drawn from them."""
        scores, reached = scores.clone(), [node for node in nodes if not node.path]
        while reached:
            places = [node.place for node in reached]
            request = reached[0].row.request
            scores[places] = self._run(range(self._num_by_depth), scores[places], reached, request=request)
            parents = {node.place for node in reached if not any(one.error_at(node) for one in self._told_by_depth)}
            below = [node for node in nodes if node.path and node.parent in parents]
            reached = list(compress(below, self._are_open(scores, below)))
        return scores

    def _are_open(self, scores: torch.Tensor, drafted: Sequence[Node]) -> list[bool]:
        """By node below a root: whether its token is neither forbidden at its parent nor ends the row."""
        own = scores[[node.parent for node in drafted], [node.path[-1] for node in drafted]].tolist()
        return [
            math.isfinite(score) and node.path[-1] not in self._ends[node.row.request]
            for node, score in zip(drafted, own, strict=True)
        ]

    def _run(self, places: range, scores: torch.Tensor, nodes: Sequence[Node], *, request: int) -> torch.Tensor:
        """The processors at these places of a request's list: scores [n, V] of `nodes` -> processed ones."""
        processors = self.by_request[request]
        groups: dict[tuple[int, int], tuple[list[int], torch.Tensor]] = {}  # filled when first asked for
        for place in places:
            processor = processors[place]
            if type(processor) in WITHOUT_PREFIX:
                scores = processor(None, scores)
            elif place in self._runners:
                scores = self._runners[place](scores, nodes)
            elif _asks_which_tokens(processor):
                scores = processor(self._seen.prefixes(nodes, scores.device), scores)
            else:
                scores, groups = scores.clone(), groups or groups_of(nodes, scores.device)
                for (owner, _), (lines, prefixes) in groups.items():
                    scores[lines] = self.by_request[owner][place](prefixes, scores[lines])
        return scores


def _runner(processor: LogitsProcessor) -> PerRow | GrammarMasks | AllowedTokens | PenalisedNodes:
    """For request 0. Raises ValueError where it cannot run node by node."""
    if type(processor) is OutputPenalties:
        return PenalisedNodes({0: processor})
    if type(processor) is library.PrefixConstrainedLogitsProcessor:
        return AllowedTokens({0: processor})
    return GrammarMasks({0: processor}) if has_matcher(processor) else PerRow({0: processor})


def _no_law(best: float, node: Node) -> ValueError:
    return ValueError(NO_LAW.format(best=best, count=len(node.row.new_token_ids) + len(node.path)))


def _can_leave_none(processors: Sequence[LogitsProcessor]) -> bool:
    """Whether they may leave a node no token of finite score. A single one of transformers' filters leaves some, and a
    single grammar says itself where it does not."""
    harmless = HARMLESS | {OutputPenalties}
    forbidding = [one for one in processors if type(one) not in harmless and not _asks_which_tokens(one)]
    if len(forbidding) == 1:
        return type(forbidding[0]) not in WITHOUT_PREFIX and not has_matcher(forbidding[0])
    return len(forbidding) > 1


def _names(kinds: Sequence[type]) -> str:
    return ", ".join(kind.__name__ for kind in kinds) or "none"


def _asks_which_tokens(processor: LogitsProcessor) -> bool:
    """Whether it only asks which tokens a prefix holds: then prefixes of all lengths may share one call."""
    is_penalty = type(processor) is library.RepetitionPenaltyLogitsProcessor
    return is_penalty and processor.prompt_ignore_length is None


@dataclass(slots=True)
class _Calls:
    """What a step asked of a row's processor, behind `length` tokens."""

    length: int
    begun: LogitsProcessor  # as it was before, and stays: a captured step that fails is done again
    copies: dict[tuple[int, ...], LogitsProcessor] = field(default_factory=dict)  # by node: after its call


@dataclass(slots=True)
class PerRow:
    """A processor that may keep a state, called with one row at a time as plain decoding of that row would call it.

    Every node of a draft continues a copy of what its parent's call left behind, so branches that are not kept leave
    no trace. The processors themselves, one per request, are only copied (`own_copy`): a class with large constant
    parts should share them in its `__deepcopy__`.
    """

    by_request: dict[int, LogitsProcessor]
    _last: dict[int, _Calls] = field(default_factory=dict)  # by row index

    def __post_init__(self) -> None:
        _copy(self.by_request[0])

    def __call__(self, scores: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor:
        """[n, V] float32 of `nodes` -> the same shape; parents were asked about before their children."""
        scores = scores.clone()
        for line, node in enumerate(nodes):
            if not node.path:
                self._begin(node.row)
            calls = self._last[node.row.index]
            processor = calls.copies[node.path] = _copy(calls.copies[node.path[:-1]] if node.path else calls.begun)
            input_ids = uploaded(node.prefix()[None], scores.device)
            processed = processor(input_ids, scores[line][None])
            scores[line] = _checked_scores(processed, processor, scores.shape[1])
        return scores

    def forget(self, row: Row, *, is_last: bool) -> None:
        """As `ProcessorChain.forget`."""
        self._last.pop(row.index, None)
        if is_last:
            self.by_request.pop(row.request, None)

    def _begin(self, row: Row) -> None:
        """A step of the row, behind what the last one left at its pending token; or the same one again."""
        last = self._last.get(row.index)
        begun = self.by_request[row.request] if last is None else last.begun
        if last is not None and last.length < len(row.history):
            begun = last.copies[tuple(row.history[last.length : -1].tolist())]
        self._last[row.index] = _Calls(len(row.history), begun)


def _copy(processor: LogitsProcessor) -> LogitsProcessor:
    return own_copy(processor, "a logits processor must be copyable, for every draft node continues a copy of its own")


def _checked_scores(processed: object, processor: LogitsProcessor, vocabulary_size: int) -> torch.Tensor:
    """The one row of what a processor returned, [V]."""
    if not isinstance(processed, torch.Tensor) or processed.shape != (1, vocabulary_size):
        shape = list(processed.shape) if isinstance(processed, torch.Tensor) else type(processed).__name__
        raise ValueError(
            f"a logits processor must return scores [1, {vocabulary_size}] for one row, got {shape} from "
            f"{type(processor).__name__}; return as many scores as it was given"
        )
    return processed[0]
