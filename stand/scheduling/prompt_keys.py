"""The keys that waiting rows begin with, computed chunk by chunk between steps: each prompt once, and what a row had
when it was put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from weakref import finalize

import torch
from transformers import PreTrainedModel

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.features import FeatureLayers, no_features, taken_features
from stand.forward.long_factors import long_factors
from stand.forward.model import PROMPT_CHUNK, prefill_chunk
from stand.forward.ranks import ALONE, Ranks
from stand.forward.tree_attention import exclusive, tree_attention
from stand.media.first_forward import prefill_media
from stand.row import Row
from stand.scheduling.admission import Admission, beginning, lies_beyond
from stand.scheduling.kept_prompts import NO_AGE, KeptPrompts
from stand.scheduling.prefilled import Prefilled, common_pieces


class PromptKeys:
    """Per prompt one cache of one row, with the keys of all its tokens but the last, which is pending.

    They stay until no waiting row needs them (`keep_only`). A row that was put back has a cache of its own, with the
    keys of all its tokens but the last. Where another prompt that is still here begins alike, the keys of whole pieces
    are copied from it, and the recurrent states behind them: pieces are the same whenever they are run, and so are
    their keys, to the bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        new_keys: Callable[[int], TreeCache],
        admission: Admission,
        on_ready: Callable[[Row], None],
        feature_layers: FeatureLayers | None,
        kept: KeptPrompts | None = None,
        ranks: Ranks = ALONE,
        border: int | None = None,
    ):
        """new_keys: a cache of one row with so much room; admission: counts their memory.
        on_ready: told the first row of every prompt when its keys are complete.
        kept: what earlier calls have left, and what this one leaves; on a rank that has no memory for it, nothing.
        border: as in `Scheduler`."""
        self.num_tokens = 0  # of the prompts that were complete, the pending ones included
        self.num_replayed = 0  # tokens of rows that were put back
        self.num_copied = 0  # tokens whose keys were another prompt's
        self._latest = -1  # request whose prompt was complete: where memory runs out, one is computed again
        self._new_keys = new_keys
        self._admission = admission
        self._model = model
        self._feature_layers = feature_layers
        self._on_ready = on_ready
        self._kept = kept
        self._ranks = ranks
        self._border = border
        self._age = NO_AGE  # as `kept` says when the call begins
        self._budget = 0.0
        self._prompts: dict[Hashable, Prefilled] = {}  # by what rows begin with

    def begin(self) -> None:
        """The call begins: what was kept may be of other weights."""
        if self._kept is not None:
            self._age = self._kept.begin()

    def allow(self, num_tokens: float) -> None:
        """Until the next call of this, `ready` runs no further chunk once so many tokens were run."""
        self._budget = num_tokens

    def allow_one_chunk(self) -> None:
        """Rows are running and wait for no more than this."""
        self.allow(PROMPT_CHUNK)

    def allow_all(self) -> None:
        """Nobody is running."""
        self.allow(math.inf)

    def ready(self, row: Row) -> Prefilled | None:
        """The keys that the row begins with, or None where they are incomplete; runs chunks as far as is allowed."""
        start = beginning(row)
        if start not in self._prompts:
            self._prompts[start] = self._opened(row)
        prompt = self._prompts[start]
        while prompt.done < row.num_cached and self._budget > 0:
            before = max(prompt.done, 0)
            prompt.is_cut = True  # by an error or an interrupt, after which it is offered to later calls
            with taken_features(self._model, self._feature_layers) as features:
                done = self._prefilled(row, prompt, before)
            prompt.features += features
            prompt.done, prompt.is_cut = done, False
            prompt.note_states()
            self._budget -= prompt.done - before
            if prompt.done == row.num_cached:
                self._count(row, prompt)
        return prompt if prompt.done == row.num_cached else None

    def _prefilled(self, row: Row, prompt: Prefilled, done: int) -> int:
        """How many tokens of what `row` begins with have keys behind a further piece."""
        if row.media is not None and not done:
            with exclusive(self._model):
                return prefill_media(self._model, prompt.keys, row.history, row.media)
        factors = long_factors(self._model) if prompt.is_beyond else nullcontext()
        asked = {"takes_features": self._feature_layers is not None, "rotary_offset": row.rotary_offset}
        with tree_attention(self._model), factors:
            return prefill_chunk(self._model, prompt.keys, row.history[:-1], done, row=0, **asked)

    def features(self, prompt: Prefilled) -> torch.Tensor:
        """[L - 1, D] of a prompt of L tokens that is ready."""
        return torch.cat(prompt.features) if prompt.features else no_features(self._model, self._feature_layers)

    def keep_only(self, row: Row | None, problems: Iterable[int] = ()) -> None:
        """Drop the keys that neither `row`, the next one to enter, nor rows of these problems begin with."""
        needed = {("problem", problem) for problem in problems} | (set() if row is None else {beginning(row)})
        self._drop([start for start in self._prompts if start not in needed])

    def end(self) -> None:
        """The call is over. Until it is collected, it must not hold what others have left: gigabytes, perhaps."""
        self.keep_only(None)
        self._kept = None

    def keep_shared(self) -> None:
        """Drop the keys that share no memory with live rows."""
        self._drop([start for start in self._prompts if not self._admission.is_shared(start)])

    def _opened(self, row: Row) -> Prefilled:
        """With what another prompt has behind whole pieces that it begins with, but for the last piece, which tells
        that all are here. Recurrent states are known where they were noted: for the next one that parts from others in
        the same place, and for later calls behind the last whole piece. Where memory is short, what others wait with
        goes first: the only live row may have crossed its border, and now begins with keys of its own."""
        if not self._admission.fits([], row):
            self.keep_only(row)
        kind = {"media": row.media, "is_beyond": lies_beyond(row, self._border)}
        prompt = Prefilled(self._new_keys(row.num_cached), row.history[:-1], **kind)
        finalize(prompt.keys, self._admission.release, self._admission.open(row))
        others = [*self._prompts.values(), *(() if self._kept is None else self._kept.of(self._age))]
        most = prompt.pieces_of(row.num_cached - 1)
        shared = [(min(common_pieces(other, prompt), most), other) for other in others if self._is_of_use(other)]
        begun = [(source.begins_at(pieces), source) for pieces, source in shared]
        pieces, source = max(begun, key=lambda pair: pair[0], default=(0, None))
        if self._kept is not None and not self._ranks.are_alike(pieces):
            pieces = 0
        if pieces > 0:
            prompt.begin_with(source, pieces)
            prompt.copied = prompt.done
            prompt.features = [] if self._feature_layers is None else source.features[:pieces]
        prompt.noting = {max((common for common, _ in shared), default=0)}
        if self._kept is not None:
            prompt.noting.add(prompt.pieces_of(row.num_cached))
        return prompt

    def _is_of_use(self, source: Prefilled) -> bool:
        return bool(source.features) or self._feature_layers is None

    def _count(self, row: Row, prompt: Prefilled) -> None:
        """What `row` begins with is complete."""
        if row.num_steps:
            self.num_replayed += row.num_cached - prompt.copied
        elif row.request > self._latest:
            self._latest = row.request
            self.num_tokens += len(row.history)
            self.num_copied += prompt.copied
            self._on_ready(row)

    def _drop(self, starts: Sequence[Hashable]) -> None:
        for start in starts:
            self._admission.close(start)
            prompt = self._prompts.pop(start)
            if self._kept is not None and not prompt.is_beyond:
                self._kept.offer(prompt, self._age)
