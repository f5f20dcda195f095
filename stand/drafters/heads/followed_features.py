"""What a head with keys of its own remembers of the rows that it follows: the features of their tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from stand.drafters.drafter import Lesson
from stand.drafters.heads.packed_run import Body, PackedRun, RunRecorder
from stand.forward.attention_shape import AttentionShape
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.features import FeatureLayers, prefill_features
from stand.forward.tree_attention import tree_attention
from stand.fusion.fusion import Fusion

RECORDED_ROOM = 1024  # slots beyond a row's text in a cache whose runs are recorded: longer rooms are recorded anew
MOST_PROMPTS = 256  # whose features wait for their first draft; of a prompt beyond, the target computes them anew


class FollowingHead(Protocol):
    """What a head tells of itself."""

    config: PretrainedConfig  # of its layers
    feature_layers: FeatureLayers

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [..., D], of what the target gives of `feature_layers`."""

    def fusion(self) -> Fusion | None:
        """What was proven for its layers on a CPU."""

    @property
    def is_recordable(self) -> bool:
        """Whether a run never waits for the device."""

    def modules_of_a_run(self) -> Sequence[nn.Module]:
        """All that a run goes through."""


class FollowedFeatures(ABC):
    """The rows of the last request: place i of the cache serves row i.

    A row is known by its tokens alone, never by its number: whatever calls the rows belong to, rows that come, go and
    change their order, what is held is a function of a row's own text. Where the features of a row are not known, for
    instance because another call was decoded in between, the target computes them anew.

    The cache holds the keys that a head makes of true features; what it writes for a draft lies behind them and is
    forgotten.
    """

    def __init__(self, target: PreTrainedModel, head: FollowingHead) -> None:
        self._target, self._head = target, head
        self._recorder: RunRecorder | None = None
        self._cache: TreeCache | None = None  # from the first rows on
        self._is_cast = False  # whether the cache's keys were made inside torch.autocast
        self._prompts: dict[bytes, torch.Tensor] = {}  # by the tokens that have features: these
        self._keys: list[bytes] = []  # per place: the tokens that have features
        self._fresh: list[torch.Tensor] = []  # per place: features whose keys are not in the cache yet
        self._lengths = np.array([], dtype=np.int64)  # per place: features whose keys are in the cache

    def record_runs(self, recorder: RunRecorder | None) -> None:
        """See `Drafter.record_runs`; no row is held then."""
        self._recorder = recorder if self._head.is_recordable else None
        self._cache, self._keys = None, []

    def follow_prompt(self, token_ids: np.ndarray, features: torch.Tensor) -> None:
        """See `Drafter.follow_prompt`."""
        self._prompts[token_ids[:-1].tobytes()] = self._combined(features)
        if len(self._prompts) > MOST_PROMPTS:
            del self._prompts[next(iter(self._prompts))]  # the oldest

    def forget_prompts(self) -> None:
        """Nothing is drafted now for those whose features wait."""
        self._prompts.clear()

    def follow(self, lesson: Lesson) -> None:
        """Note the features of the tokens that a step has committed; rows that are not held are left out."""
        offsets, nodes, counts = lesson.batch.offsets, [], []
        for row, history in enumerate(lesson.request.histories):
            is_held = row < len(self._keys) and self._keys[row] == history[:-1].tobytes()
            path = offsets[row] + np.append(0, lesson.accepted[row]) if is_held else offsets[:0]
            if is_held:
                self._keys[row] = np.append(history, lesson.batch.token_ids[path[1:]]).tobytes()
            nodes.append(path)
            counts.append(len(path))
        places = torch.from_numpy(np.concatenate(nodes).astype(np.int64)).to(lesson.features.device)
        for row, fresh in enumerate(self._combined(lesson.features[places]).split(counts)):
            if counts[row]:
                self._fresh[row] = torch.cat([self._fresh[row], fresh])

    def hold(self, histories: Sequence[np.ndarray]) -> None:
        """These are the rows from now on, whether the head runs for them or not."""
        keys = [history[:-1].tobytes() for history in histories]
        is_cast = torch.is_autocast_enabled(self._target.device.type)
        if is_cast != self._is_cast:  # keys of another type
            self._is_cast, self._keys = is_cast, []
        if keys != self._keys:
            self._seat(histories, keys)

    @torch.inference_mode()
    def _combined(self, given: torch.Tensor) -> torch.Tensor:
        """What the head goes on from, of the hidden states that the target has given."""
        return self._head.combined(given)

    def _seat(self, histories: Sequence[np.ndarray], keys: list[bytes]) -> None:
        """Place i becomes histories[i]: held rows move, new ones begin with the features of their tokens."""
        held = {key: place for place, key in enumerate(self._keys)}
        self._keys = []  # until all are seated
        sources = [held.get(key) for key in keys]
        known = [source for source in sources if source is not None]
        room = max(map(len, histories))
        if known:
            self._cache.fan_out([known[0] if source is None else source for source in sources])
        else:
            self._cache = self._new_cache(len(keys), room)
        empty = torch.empty(0, self._head.config.hidden_size, dtype=self._target.dtype, device=self._target.device)
        self._fresh = [empty if source is None else self._fresh[source] for source in sources]
        self._lengths = np.array([0 if source is None else self._lengths[source] for source in sources])
        first: dict[bytes, int] = {}
        for place, (history, source) in enumerate(zip(histories, sources, strict=True)):
            if source is None:
                self._begin(place, history, first.setdefault(keys[place], place), self._prompts.get(keys[place]))
        self._keys = keys
        for key in keys:
            self._prompts.pop(key, None)

    def _new_cache(self, num_rows: int, room: int) -> TreeCache:
        if self._recorder is None:
            return TreeCache(num_rows=num_rows, room=room, fusion=self._head.fusion())
        self._recorder.look_at(self._head.modules_of_a_run())
        return self._recorder.rooms(num_rows, room + RECORDED_ROOM)

    def _results(
        self,
        body: Body,
        parts: Sequence[PackedRun],
        features: Sequence[torch.Tensor],
        *,
        count: int,
        ends: np.ndarray | None = None,
        stays: Sequence[str] = (),
    ) -> dict[str, torch.Tensor]:
        """Of a body, as `RunRecorder.run` says, recorded or operation by operation."""
        recorder = self._recorder
        if recorder is not None:
            found = recorder.run(body, parts, features, cache=self._cache, ends=ends, count=count, stays=stays)
            if found is not None:
                return found
        plans = [part.plan(self._target.device) if part.num_tokens else None for part in parts]
        shapes: list[AttentionShape] = []
        if recorder is not None and not recorder.knows_shapes():
            for plan in plans:
                if plan is not None:
                    plan.attentions = shapes
        found = body(
            plans, torch.cat(list(features)), None if ends is None else torch.from_numpy(ends).to(plans[-1].device)
        )
        if shapes:
            recorder.note_shapes(shapes)
        return {name: value if name in stays else value.cpu() for name, value in found.items()}

    def _begin(self, place: int, history: np.ndarray, first: int, features: torch.Tensor | None) -> None:
        """All pairs but the last one of a row that is not held; those of an equal row at `first` are copied.

        features: of its tokens, where they are known.
        """
        length = len(history) - 1
        if length == 0:
            return
        if first != place:
            self._cache.move(first, place, int(self._lengths[first]))
            self._fresh[place], self._lengths[place] = self._fresh[first], self._lengths[first]
            return
        if features is None:
            with tree_attention(self._target):
                asked = {"row": 0, "layers": self._head.feature_layers}
                given = prefill_features(self._target, TreeCache(num_rows=1, room=length), history[:-1], **asked)
            features = self._combined(given)
        self._fill(place, history, features)

    @abstractmethod
    def _fill(self, place: int, history: np.ndarray, features: torch.Tensor) -> None:
        """A row begins at `place`: its tokens int32 [L], and the features [L - 1, D] of all but the pending one."""
