"""The middle of a decoding step: a forward over the drafts and the verdict on them; two ways to run it.

`EagerStep` runs on every device, operation by operation. `stand.gpu.captured_step` replays graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.forward.cache.tree_cache import DRAFT_ROOM, TreeCache
from stand.forward.devices import input_device
from stand.forward.features import FeatureLayers, taken_features
from stand.forward.model import fused, run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.rider import Rider, path_ends
from stand.forward.tree_attention import tree_attention
from stand.laws.sampling import Laws, TargetLaw
from stand.laws.scored import SCORES, Scored
from stand.row import LiveRows, Row
from stand.scheduling.page_allocator import PageAllocator
from stand.trees import ROOT, DraftBatch
from stand.trees.arguments import vector
from stand.verifiers import TargetRows, Verdicts, Verifier, VerifierNoise


@dataclass(frozen=True, slots=True, eq=False)
class StepStart:
    """What the steps of a call begin with; `enter` then takes its rows."""

    num_places: int  # the most rows that are live at once
    rows: Sequence[Row]  # those that enter first
    keys: TreeCache  # of the longest of their prompts
    law: TargetLaw
    verifier: Verifier
    num_top: int  # the most top entries per node that lessons ask for
    feature_layers: FeatureLayers | None = None  # the features that lessons ask for, if any
    rider: Rider | None = None  # which backends refuse whose steps do not carry it
    pages: PageAllocator | None = None  # whose page is whose, where the call counts pages
    held: frozenset[str] = frozenset()  # of LOGITS and SCORES of stand/laws/scored.py: what `scored` is to have

    @property
    def asked(self) -> dict[str, object]:
        """Keywords of an `EagerStep`."""
        names = ("num_top", "feature_layers", "rider", "held")
        return {name: getattr(self, name) for name in names}


class Step(Protocol):
    """Used in this order: forward, verify, ride, keep, teach; between steps leave, enter and move; close at the end of
    the call.

    The live rows hold places 0 .. B-1, in the order in which `forward` gets them.
    """

    def attention(self) -> AbstractContextManager[None]:
        """Within it the model attends as this step needs."""

    def forward(self, batch: DraftBatch, live: LiveRows, noise: VerifierNoise) -> None:
        """The model over the drafts of the live rows."""

    def verify(self) -> Verdicts:
        """What stays of each draft, and the token after it."""

    def ride(self, accepted: Sequence[np.ndarray]) -> None:
        """Tell the rider where its rows go on, before `keep`; asked where `StepStart.rider` is given."""

    def keep(self, live: LiveRows, accepted: Sequence[np.ndarray]) -> None:
        """Move the keys of the nodes accepted[i] of row i to follow its committed ones. A row that has just ended may
        be left as it is."""

    def leave(self, row: Row, place: int) -> None:
        """`row`, in `place`, has ended or goes away for a while; its keys are of no further use."""

    def enter(self, row: Row, place: int, keys: TreeCache) -> None:
        """`row` starts in `place`, which a row has left or none had; its committed keys are those of row 0 of `keys`,
        which is given back and may be used again."""

    def move(self, row: Row, source: int, target: int) -> None:
        """`row` goes from place `source` to place `target`, which a row has left."""

    def top_entries(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The target's best tokens after every node: ids [M, count] int32, probabilities [M, count] float32."""

    def scored(self) -> Scored:
        """What the last verdicts were made of, with what `StepStart.held` names; asked before the next forward."""

    def features(self) -> torch.Tensor:
        """[M, D]: those of every node, not written over by later steps; asked where `StepStart.feature_layers` names
        them."""

    def teach(self, lesson: Callable[[], None]) -> None:
        """Call `lesson`, which may ask for `top_entries` and `features`: at once, or where a device works by itself and
        no features are wanted, during the next forward."""

    def finish(self) -> None:
        """Call what `teach` has put off."""

    def close(self) -> None:
        """The call is over, perhaps by an error: nothing more is asked of this step."""


class EagerStep:
    """A packed forward on an unmodified model and a verifier of `stand.verifiers`."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        law: TargetLaw,
        verifier: Verifier,
        *,
        num_top: int,
        feature_layers: FeatureLayers | None = None,
        rider: Rider | None = None,
        held: frozenset[str] = frozenset(),
    ):
        """cache: has a row for every place. num_top: the largest count that `top_entries` will be asked for."""
        self.cache = cache
        self._model = model
        self._law = law
        self._verifier = verifier
        self._num_top = num_top
        self._feature_layers = feature_layers
        self._rider = rider
        self._holds_scores = SCORES in held
        self._batch: DraftBatch | None = None  # from here to `_features` of the last forward
        self._live: LiveRows | None = None
        self._noise: VerifierNoise | None = None
        self._logits: torch.Tensor | None = None
        self._features: torch.Tensor | None = None
        self._laws: Laws | None = None  # of the last verdicts
        self._scores: torch.Tensor | None = None  # that they were made of, where they are held

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Fused forwards are swapped once for many steps, but where a step's hooks come and go with it."""
        is_hooked = self._feature_layers is not None or self._rider is not None
        with tree_attention(self._model), nullcontext() if is_hooked else fused(self._model, self.cache):
            yield

    def forward(self, batch: DraftBatch, live: LiveRows, noise: VerifierNoise) -> None:
        place = {"rotary_offsets": live.rotary_offsets, "device": input_device(self._model)}
        plan = StepPlan.for_drafts(batch, live.lengths, **place)
        self._batch, self._live, self._noise = batch, live, noise
        with (
            taken_features(self._model, self._feature_layers) as taken,
            nullcontext() if self._rider is None else self._rider.watching(),
        ):
            self._logits = run_plan(self._model, self.cache, plan)
        self._features = taken[0] if taken else None
        if self._rider is not None:
            self._rider.scored(self.cache, batch, live.lengths)

    def verify(self) -> Verdicts:
        scores = self._law.process(self._logits, self._batch, self._live.rows)
        self._laws = self._law.laws(scores, self._num_top)
        self._scores = scores if self._holds_scores else None
        verdicts = self._verifier.verify(self._batch, TargetRows(self._laws.probabilities), self._noise)
        size = self._laws.probabilities.shape[1]
        for token in verdicts.next_tokens.tolist():
            if not 0 <= token < size:  # of a rule of the user's
                raise ValueError(
                    f"rule {self._verifier.name!r} must answer next tokens in [0, {size}), got {token}; draw them from "
                    "the target's rows"
                )
        return replace(verdicts, accepted=[vector(path, "accepted") for path in verdicts.accepted])  # a user's rule's

    def ride(self, accepted: Sequence[np.ndarray]) -> None:
        ends = path_ends(self._batch, accepted)
        guesses = partial(self._rider.guesses, self.cache, self._batch, self._live.lengths, ends)
        self._rider.kept(self._batch, self._live, accepted, guesses)

    def keep(self, live: LiveRows, accepted: Sequence[np.ndarray]) -> None:
        going = [place for place, row in enumerate(live.rows) if row.finish_reason is None]
        keep_paths(self.cache, live.lengths, accepted, going)

    def leave(self, row: Row, place: int) -> None:
        self.cache.leave(place)

    def enter(self, row: Row, place: int, keys: TreeCache) -> None:
        self.cache.most_room = max(self.cache.most_room, row.most_cached + DRAFT_ROOM)
        self.cache.enter(place, keys, row.num_cached)

    def move(self, row: Row, source: int, target: int) -> None:
        self.cache.move(source, target, row.num_cached)

    def top_entries(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """As in `Laws`."""
        return self._laws.top_ids[:, :count].cpu().numpy(), self._laws.top_probs[:, :count].cpu().numpy()

    def scored(self) -> Scored:
        return Scored(self._law, self._laws.probabilities, self._logits, self._scores)

    def features(self) -> torch.Tensor:
        return self._features

    def teach(self, lesson: Callable[[], None]) -> None:
        lesson()

    def finish(self) -> None:
        """Nothing is put off."""

    def close(self) -> None:
        """Nothing outlives the object."""


def keep_paths(cache: TreeCache, lengths: np.ndarray, accepted: Sequence[np.ndarray], going: Iterable[int]) -> None:
    """Behind the committed `lengths` [A] of its rows a cache keeps what was accepted of each row's draft, nodes behind
    the root. Keys are moved only of the rows that go on, `going`."""
    cache.keep_states([path[-1] if len(path) else ROOT for path in accepted])
    moved = [place for place in going if len(path := accepted[place]) and path[-1] != len(path)]
    if not moved:
        return
    counts = [len(accepted[place]) for place in moved]
    rows, starts = np.repeat(moved, counts), np.repeat(lengths[moved], counts)
    sources = np.concatenate([accepted[place] for place in moved])
    targets = np.concatenate([np.arange(1, count + 1) for count in counts])
    cache.compact(rows, starts + sources, starts + targets)
