"""The default drafter: the blended lookup, grown under a node budget."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.costs.assumed import AssumedCosts, has_captured_steps
from stand.drafters.costs.known import KnownCosts, saved_costs
from stand.drafters.costs.step_cost import CostTable, StepCost, StepTimer, best_size
from stand.drafters.drafter import (
    DraftRequest,
    Lesson,
    LookupDrafter,
    check_kind,
    settle_vocabulary,
    teach_two_ways,
)
from stand.drafters.heads.packed_run import RunRecorder
from stand.drafters.law_source import LawSource
from stand.drafters.settings import check_count
from stand.forward.devices import input_device, is_nvidia, off_one_device, tensor_group
from stand.forward.model import is_mixture, text_config
from stand.measured_files import measured_folder
from stand.seeds import call_seed
from stand.sharing.exchange import Exchange, checked_folder, exchange_of
from stand.sharing.news import StepNews
from stand.trees import BlendedLookup, DraftBatch
from stand.trees.kinds import KINDS
from stand.trees.lookups import MAX_SCOPE

MOST_RISES = 1000  # arrays of rises that are kept; a cost that follows the steps' times changes, and has new ones
RisesKey = tuple[StepCost, int, int, tuple[int, ...]]  # cost, rows, budget, sizes of steps
EAGER = "sdpa"  # how the ways of eager steps on a GPU begin
MOST_NODES = 1 << 16  # a budget beyond this is a mistake: no step holds so many tokens


def default_budget(model: PreTrainedModel) -> int:
    """Draft nodes per step where costs are not asked: few on a CPU, as many as cost little more than one on a GPU.

    32: best of 16 to 64 on two cores with the bundled model (LOG.md); also for GPUs of Apple, AMD and Intel, where it
    was not measured. 112: within 2 % of the best for 1 to 16 rows of 2,048 tokens of a dense model by the times of an
    H100; `AssumedCosts` draft less behind longer texts, and more for more rows (docs/gpu.md). 8: for a mixture of
    experts on CUDA, where every token reads weights of its own; not measured.
    """
    if not is_nvidia(input_device(model)):
        return 32
    return 8 if is_mixture(model) else 112


class BlendedDrafter(LookupDrafter):
    """All context lengths blended, drafts grown best-first under one node budget for all live rows.

    lookup: what was learned before; None: an empty `BlendedLookup` of the model's vocabulary.
    budget: the most nodes of all rows of a step together; a row that ends hands its share on. None: as many as pay by
    what steps cost.
    costs: what steps cost on this machine (`CostTable((engine.measure_cost(), ...))`): growth then ends as soon as a
    node adds a larger share to the step's time than to its expected tokens. Where steps jump from a size to the next,
    a draft is planned first, and where it does not pay as a whole, as many nodes are drafted as give the most tokens
    per second.

    With neither, the first call of so many rows times a few steps, of fewer rows too, since rows end: less than two
    seconds for each of 1, 4, 16 ... rows, or sixteen of its steps. The results are kept in files and followed while
    steps run (`stand.drafters.costs.known`). On CUDA it is the table that gpu_bench.py saved, if there is one. Without
    it captured steps on one GPU cost what is computed from the model's sizes (`AssumedCosts`), but those of a mixture
    of experts, where every token may read more weights, are timed. Elsewhere the budget is `default_budget`.
    floor: no node that is less likely to be accepted (estimated), in [0, 1].
    kind: "sampled" children; "mixed": one sampled child, then the likeliest others; or "deterministic".
    source: a head whose laws are blended in, by odds that are learned while decoding (`EagleLaws`, or your own).
    share: a folder in which all processes that name it tell each other what they learn, see `Exchange`. One folder per
    model. With ratio rules a seed then repeats its tokens no longer: a process has random numbers of its own, and what
    others tell shapes the drafts.
    """

    NUM_SCOPES = MAX_SCOPE  # the scopes after these are of what others tell, and of what came from a file

    def __init__(
        self,
        lookup: BlendedLookup | None = None,
        *,
        budget: int | None = None,
        costs: CostTable | None = None,
        floor: float = 0.0,
        kind: str = "sampled",
        source: LawSource | None = None,
        share: str | os.PathLike | None = None,
    ):
        _check_settings(lookup, budget, costs, floor)
        if source is not None and not isinstance(source, LawSource):
            raise ValueError(
                f"source must be a LawSource such as EagleLaws, got {type(source).__name__}; a head alone goes into "
                "stand.EagleLaws(head)"
            )
        check_kind(kind, KINDS, "growth under a budget")
        self.lookup = lookup
        self.budget = budget
        self.costs: CostTable | AssumedCosts | None = costs
        self.floor = floor
        self.kind = kind
        self.source = source
        self.share = None if share is None else checked_folder(share)
        self.exchange: Exchange | None = None  # by `attach`, where `share` is given
        self.requires_features = source is not None and source.requires_features
        self.rider = None if source is None else source.rider
        self._known: KnownCosts | None = None  # by which the call drafts
        self._timed: KnownCosts | None = None  # where nothing was given: eager steps, or a mixture's
        self._chosen: tuple[int | None, CostTable | AssumedCosts | None] = (None, None)  # budget and costs, by `attach`
        self._padded: tuple[int, ...] = ()  # tokens to which the call's steps are padded
        self._known_rises: dict[RisesKey, tuple[np.ndarray, np.ndarray | None]] = {}

    def attach(self, model: PreTrainedModel, fingerprint: bytes) -> None:
        if self.lookup is None:
            self.lookup = BlendedLookup(fingerprint=fingerprint)
        settle_vocabulary(self.lookup, fingerprint)
        if tensor_group(model) is not None and (self.share is not None or self.source is not None):
            raise ValueError(
                "source and share must be left out under tensor parallelism, where all processes draft and learn the "
                f"same, got source={self.source!r}, share={self.share!r}; save the lookup and load it elsewhere"
            )
        if self.share is not None:
            size = text_config(model).vocab_size
            self.exchange = exchange_of(self.share, self.lookup, vocabulary_size=size)
        if self.source is not None:
            self.source.attach(model)
            self.feature_layers = self.source.feature_layers
        if (self.budget, self.costs) == self._chosen:
            self._choose_costs(model)
        else:  # somebody has set them
            self._known = self._timed = None

    def record_runs(self, recorder: RunRecorder | None) -> None:
        if self.source is not None:
            self.source.record_runs(recorder)

    def _choose_costs(self, model: PreTrainedModel) -> None:
        """Where neither a budget nor costs are given; see the class."""
        folder = measured_folder() if tensor_group(model) is None else None  # ranks would time steps apart
        is_untold = is_mixture(model) or not has_captured_steps(model)
        costs = None if folder is None else saved_costs(model, folder)
        timed = None if folder is None else KnownCosts(model, folder)
        if timed is not None and self._timed is not None and timed.path(1) == self._timed.path(1):
            timed = self._timed  # calls that were prepared go on with their tables
        if costs is None and not is_untold and not off_one_device(model):
            costs = AssumedCosts.of(model)
        known = timed if costs is None and is_untold else None
        budget = default_budget(model) if costs is None and known is None else None
        self._known, self.costs, self.budget, self._chosen = known, costs, budget, (budget, costs)
        self._timed = timed

    def start_call(self, *, learns: bool) -> int:
        """From the lookup; from the process's own number where it shares; and from the source, whose memory outlives
        `lookup.clear()` and this drafter."""
        start = super().start_call(learns=learns)
        if self.exchange is not None:
            start = self.exchange.start_call(start, learns=learns)
        return start if self.source is None else call_seed(start, self.source.start_call(learns=learns))

    def most_nodes(self, num_rows: int) -> int:
        if self._known is not None:
            return max(self._known.most_tokens(num_rows) - num_rows, 0)
        if self.costs is None:
            return self.budget
        timed = max(self.costs.most_tokens - num_rows, 0)
        return timed if self.budget is None else min(timed, self.budget)

    def prepare(self, num_rows: int, measure: StepTimer) -> None:
        self._padded = tuple(getattr(measure, "sizes", ()))  # a drafter of one's own may hand on a function
        if self.costs is not None and self.costs is self._chosen[1]:  # of captured steps
            self._known = self._timed if getattr(measure, "way", "").startswith(EAGER) else None
        if self._known is not None:
            self._known.prepare(num_rows, measure)

    def record_time(self, request: DraftRequest, num_tokens: int, seconds: float) -> None:
        if self._known is not None:
            self._known.record(len(request.histories), num_tokens, seconds)
        if self.source is not None:
            self.source.record_time(request, num_tokens, seconds)

    def typical_draft(self) -> DraftBatch:
        lookup = BlendedLookup()
        tokens = teach_two_ways(lookup)
        row = np.zeros(1, dtype=np.int64)
        return lookup.draft([tokens], 4, seed=0, rows=row, steps=row, kind=self.kind)

    def draft(self, request: DraftRequest) -> DraftBatch:
        budget, rises, seconds = self._limits(request)
        grow = partial(
            self.lookup.draft,
            request.histories,
            seed=request.seed,
            rows=request.noise_keys,
            steps=request.steps,
            floor=self.floor,
            rises=rises,
            max_depths=request.max_depths,
            scopes=request.problems % self.NUM_SCOPES,
        )
        outside = None
        if self.source is not None and budget > 0:
            outside = self.source.laws(request, lambda laws: grow(budget, kind="deterministic", outside=laws))
        elif self.source is not None:
            self.source.skip()
        grow = partial(grow, outside=outside)
        if request.masks_at is not None and budget > 0:
            grow = partial(grow, masks=request.masks_at(grow(budget, kind="deterministic")))
        size = budget
        if seconds is not None:  # known before anything is drawn, so that what is drawn decides nothing
            size = best_size(grow(budget, kind="deterministic"), seconds)
        return grow(size, kind=self._kind_of(request))

    def follow_prompt(self, token_ids: np.ndarray, features: torch.Tensor) -> None:
        if self.source is not None:
            self.source.follow_prompt(token_ids, features)

    def follow(self, lesson: Lesson) -> None:
        if self.source is not None:
            self.source.follow(lesson)

    def learn_prompt(self, token_ids: np.ndarray, *, problem: int) -> None:
        self.lookup.learn(token_ids[:1], token_ids[1:], scope=problem % self.NUM_SCOPES)
        if self.source is not None:
            self.source.learn_prompt(token_ids)

    def learn(self, lesson: Lesson) -> None:
        request, scopes = lesson.request, lesson.request.problems % self.NUM_SCOPES
        befores = [history[:-1] for history in request.histories]
        self.lookup.learn_batch(lesson.batch, befores, lesson.top_ids, lesson.top_probs, scopes=scopes)
        self.record(lesson)
        if self.exchange is not None:
            self.exchange.send(StepNews(lesson.batch, befores, lesson.top_ids, lesson.top_probs))
            self.exchange.receive()
        if self.source is not None:
            self.source.learn(lesson)

    def record(self, lesson: Lesson) -> None:
        """What became of the draft corrects the odds of the next ones, whatever else is learned."""
        kind = self._kind_of(lesson.request)
        self.lookup.record_outcome(lesson.batch, lesson.accepted, lesson.next_tokens.astype(np.int32), kind=kind)

    def _kind_of(self, request: DraftRequest) -> str:
        return "deterministic" if request.is_greedy else self.kind

    def _limits(self, request: DraftRequest) -> tuple[int, np.ndarray | None, np.ndarray | None]:
        """The most nodes, never beyond what was timed; what each adds to the cost of a step, as a share of it; and
        seconds by nodes, where steps jump."""
        num_rows = len(request.histories)
        if self._known is not None:
            if request.is_seeded:
                cost = self._known.seeded_cost(num_rows, request.most_rows)
            else:
                cost = self._known.followed_cost(num_rows)
        elif self.costs is not None:
            cost = self.costs.at(sum(map(len, request.histories)) / num_rows, num_rows=num_rows)
        else:
            return self.budget, None, None
        budget = max(min(MOST_NODES if self.budget is None else self.budget, cost.most_tokens - num_rows), 0)
        key = cost, num_rows, budget, self._padded
        if key not in self._known_rises:
            if len(self._known_rises) > MOST_RISES:
                self._known_rises.clear()
            jumps = None if self._padded else cost.jumps(num_rows, budget)
            self._known_rises[key] = cost.rises(num_rows, budget, self._padded), jumps
        return budget, *self._known_rises[key]


def _check_settings(lookup: object, budget: object, costs: object, floor: object) -> None:
    if lookup is not None and not isinstance(lookup, BlendedLookup):
        remedy = "load a file with stand.BlendedLookup.load(path), or give a LookupTree to stand.FixedShapeDrafter"
        raise ValueError(f"lookup must be a BlendedLookup, got {type(lookup).__name__}; {remedy}")
    if budget is not None:
        check_count("budget", budget, 0, MOST_NODES, usual="32 to 128 nodes are usual")
    if costs is not None and not isinstance(costs, CostTable):
        raise ValueError(f"costs must be a CostTable, got {type(costs).__name__}; write CostTable((cost, ...))")
    is_number = isinstance(floor, (int, float, np.floating)) and not isinstance(floor, bool)
    if not is_number or not 0 <= floor <= 1:
        raise ValueError(f"floor must be a probability in [0, 1], got {floor!r}; 0 leaves nothing out")
