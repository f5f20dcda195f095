"""Who guesses: what a drafter is asked, what it is told afterwards, and the base class of all drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.costs.step_cost import StepTimer
from stand.drafters.heads.packed_run import RunRecorder
from stand.forward.features import FeatureLayers
from stand.forward.rider import Rider
from stand.trees import BlendedLookup, DraftBatch, LookupTree, TokenMasks

_COUNTING = Lock()


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One step's question: what may come next in each of B rows?"""

    histories: Sequence[np.ndarray]  # per row: int32 committed tokens, the pending one last
    seed: int  # of this call's own random streams; never that of an earlier call which the drafter learned from
    target_seed: int  # of the noise that `match` and `coupled` draw the target's tokens with
    rows: np.ndarray  # [B] int64: numbers of the rows in the call
    steps: np.ndarray  # [B] int64: steps each row has made
    problems: np.ndarray  # [B] int64: samples of one prompt share a number, which no other prompt has
    max_depths: np.ndarray  # [B] int64: drafts deeper than this are of no use
    is_greedy: bool  # the target's laws are one-hots
    is_seeded: bool = True  # the call was given its seed: nothing that differs from run to run may shape the draft
    is_learning: bool = True  # else nothing that this step shows may shape the drafts of another call
    prompt_words: np.ndarray | int = 0  # [B] int64: `stand.seeds.prompt_word` of the rows' prompts
    most_rows: int = 0  # that the call may have at once, as `prepare` was told; 0: not known
    # (planned drafts without noise) -> what the rows' grammars allow at their nodes; None where they allow everything
    masks_at: Callable[[DraftBatch], TokenMasks] | None = None

    @property
    def noise_keys(self) -> np.ndarray:
        """[B] int64 in [0, 2**32): with `seed` they name the rows' random numbers."""
        return self.rows ^ self.prompt_words


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What a step showed: which drafted tokens were kept, and what the target held likely at every node.

    Every scored node is a true observation of its context, rejected ones too.
    """

    request: DraftRequest
    batch: DraftBatch
    accepted: Sequence[np.ndarray]  # B arrays int32: row-local nodes of the kept path in order, root excluded
    next_tokens: np.ndarray  # [B] int64: the token after the kept path
    top_ids: np.ndarray  # [M, K] int32: the target's best tokens after each node, K = num_candidates
    top_probs: np.ndarray  # [M, K] float32
    features: torch.Tensor | None = None  # [M, W]: of every node, where the drafter requires them; see `Drafter.follow`


class CallCounter:
    """Counts the calls that begin to teach it."""

    _num_taught: int = 0

    def count_call(self, *, learns: bool) -> int:
        """A number for a call that starts now: of one that teaches no other call's, else one of such calls alone."""
        with _COUNTING:
            number = 2 * self._num_taught
            if learns:
                self._num_taught += 1
        return number if learns else number + 1


class Drafter(CallCounter, ABC):
    """Proposes drafts and may learn from what the target said. Only `draft` must be written.

    Drafts must keep the promise of `DraftBatch.adapted`; docs/verifiers.md says what each rule asks of a draft. A
    drafter that learns makes the drafts of a call depend on other calls: see `start_call`.
    """

    num_candidates: int = 0  # top entries per scored node that `learn` wants; 0: `learn` is never called
    remembers: bool = True  # whether a call's drafts may depend on what earlier calls have shown; see `start_call`
    rows_apart: bool = False  # whether a row's mates shape its draft by what is learned of them alone, if at all
    requires_features: bool = False  # whether `follow_prompt` and `follow` want the target's hidden states
    feature_layers: FeatureLayers = ()  # which: the inputs of these decoder layers, or the last hidden states
    rider: Rider | None = None  # what runs on the model's own steps

    @property
    def asked_features(self) -> FeatureLayers | None:
        """`feature_layers`, None where features are not required."""
        return self.feature_layers if self.requires_features else None

    def attach(self, model: PreTrainedModel, fingerprint: bytes) -> None:
        """`stand.wrap` shows the model and names its vocabulary, before anything else.

        Raises ValueError where they do not fit.
        """

    def record_runs(self, recorder: RunRecorder | None) -> None:
        """The engine says, behind `attach`, what records runs of the drafter's own modules as its steps are recorded;
        None: they run operation by operation."""

    def start_call(self, *, learns: bool) -> int:
        """A number in [0, 2**64) that the engine mixes into the seed of a call that starts now.

        learns: whether the call will teach. Two calls must get different numbers wherever one of them may draft from
        what the other one teaches: with the same noise the law of the one that drafts so would be wrong. This one
        counts the calls that teach, and where `num_candidates` is 0 all calls, since nobody knows what `draft` keeps in
        mind. So a seed repeats its tokens with the same object only where `remembers` is False: set it for a drafter
        whose drafts follow from the call alone. Counting is safe unless the drafter is saved and loaded, or several
        drafters share a memory: then the number must come from the memory.
        """
        if not self.remembers:
            return 0
        return self.count_call(learns=learns or not self.num_candidates)

    def typical_draft(self) -> DraftBatch | None:
        """A draft typical of this drafter, by which `wrap` sees early that a rule takes its drafts; None: unknown.

        Asked after `attach`. Its support is as wide as drafts may have one.
        """
        return None

    @abstractmethod
    def draft(self, request: DraftRequest) -> DraftBatch:
        """One draft per row; its root is the row's pending token."""

    def most_nodes(self, num_rows: int) -> int | None:
        """The most nodes, roots excluded, that drafts of so many rows will have together; None: not known.

        Where memory is limited, room for them is kept free, and a draft beyond it ends the call. Unknown: 256 a row.
        """
        return None

    def most_slots(self, num_rows: int) -> int | None:
        """The most slots of the cache, roots excluded, that a step takes behind the committed keys: `most_nodes`, and
        what `rider` writes."""
        nodes = self.most_nodes(num_rows)
        if nodes is None or self.rider is None:
            return nodes
        sizes = np.ones(num_rows, dtype=np.int64)
        sizes[:1] += nodes
        return nodes + int(self.rider.num_slots(sizes).sum())

    def prepare(self, num_rows: int, measure: StepTimer) -> None:
        """A call of `num_rows` rows is about to be made; `measure` times its steps, if that is to be done first."""

    def record_time(self, request: DraftRequest, num_tokens: int, seconds: float) -> None:
        """The forward and the verdict of the step with this request's drafts, `num_tokens` in all, took so long."""

    def learn_prompt(self, token_ids: np.ndarray, *, problem: int) -> None:
        """A prompt, int32 [L], before its rows start."""

    def learn(self, lesson: Lesson) -> None:
        """What a step showed; asked once per step where `num_candidates` is above 0."""

    def follow_prompt(self, token_ids: np.ndarray, features: torch.Tensor) -> None:
        """A prompt, int32 [L], before its rows start, and the features [L - 1, W] of all its tokens but the last, which
        is the pending one; asked where `requires_features`.

        A feature is the target's last hidden state, after its final norm, or the inputs of the decoder layers that
        `feature_layers` names, side by side in that order; in the model's dtype and on its device.
        """

    def follow(self, lesson: Lesson) -> None:
        """What a step showed, features of all its nodes among it; asked where `requires_features`, before the next
        draft and before `learn`, also by calls that must not learn.

        Rows `offsets[b]` and `offsets[b] + accepted[b]` of the features are those of row b's newly committed tokens.
        What is kept of them must serve the drafts of this row alone: nothing is learned here.
        """


class LookupDrafter(Drafter):
    """A drafter whose memory is a lookup; `lookup` is None until `attach` where none was given."""

    lookup: BlendedLookup | LookupTree | None

    @property
    def num_candidates(self) -> int:
        return 0 if self.lookup is None else self.lookup.num_candidates

    def start_call(self, *, learns: bool) -> int:
        return 0 if self.lookup is None else self.lookup.start_call(learns=learns)


def check_kind(kind: str, offered: tuple[str, ...], drafter: str) -> None:
    """Raise ValueError where `drafter` does not offer this kind of draft."""
    if kind not in offered:
        raise ValueError(f"{drafter} drafts one of {', '.join(offered)}, got {kind!r}; choose another kind")


def teach_two_ways(lookup: object) -> np.ndarray:
    """Teach an empty lookup a context that goes on in two ways; the context, int32, to draft from."""
    context = np.full(5, 3, dtype=np.int32)
    for token in (1, 2):
        lookup.learn(context[:1], np.append(context[1:], np.int32(token)))
    return context


def settle_vocabulary(lookup: object, fingerprint: bytes) -> None:
    """Raise ValueError where a lookup was trained with another vocabulary; an empty one without any gets this one."""
    lookup.name_vocabulary(fingerprint)
    if lookup.fingerprint and lookup.fingerprint != fingerprint:
        raise ValueError(
            f"a lookup must have been learned with this tokenizer (vocabulary {fingerprint.hex()[:12]}; without one "
            f"its size counts), got one for vocabulary {lookup.fingerprint.hex()[:12]}; pass the tokenizer that it was "
            "learned with to stand.wrap, or load the lookup that belongs to this model"
        )
