"""What a head remembers of the rows that it follows: their features and its own keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.drafter import Lesson
from stand.drafters.eagle.feature_head import FeatureHead
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.features import prefill_features
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.model import PROMPT_CHUNK, fused
from stand.forward.packed_plan import StepPlan
from stand.forward.tree_attention import tree_attention

MOST_PROMPTS = 256  # whose features wait for their first draft; of a prompt beyond, the target computes them anew


class FollowedRows:
    """The rows of the last request: place i of the cache serves row i.

    A row is known by its tokens alone, never by its number: whatever calls the rows belong to, rows that come, go and
    change their order, what is held is a function of a row's own text. Where the features of a row are not known, for
    instance because another call was decoded in between, the target computes them anew.

    A *pair* is a feature and the token after it. The cache holds the keys of a row's pairs, of true features alone; the
    nodes of a draft are written behind them and forgotten.
    """

    def __init__(self, target: PreTrainedModel, head: FeatureHead) -> None:
        self._target, self._head = target, head
        self._cache: TreeCache | None = None  # from the first rows on
        self._prompts: dict[bytes, torch.Tensor] = {}  # by the tokens that have features: these
        self._keys: list[bytes] = []  # per place: the tokens that have features
        self._fresh: list[torch.Tensor] = []  # per place: features whose pairs are not in the cache yet
        self._lengths = np.array([], dtype=np.int64)  # per place: pairs in the cache
        self._paths: list[list[int]] = []  # per place: of each node written in this step, bits of those it sees

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
        if keys != self._keys:
            self._seat(histories, keys)

    def catch_up(self, histories: Sequence[np.ndarray]) -> tuple[np.ndarray, torch.Tensor]:
        """Run the head over all pairs of `histories` that it has not seen.

        (rows that have a pair at all, the head's estimates [rows, D] of the features of their pending tokens).
        """
        self.hold(histories)
        chunks = [
            history[length + 1 : length + 1 + len(fresh)]
            for history, length, fresh in zip(histories, self._lengths.tolist(), self._fresh, strict=True)
        ]
        counts = np.array([len(chunk) for chunk in chunks])
        self._paths = [[] for _ in chunks]
        rows = np.flatnonzero(counts)
        if len(rows) == 0:
            return rows, torch.cat(self._fresh)
        ancestors = np.zeros((counts.sum(), counts.max()), dtype=bool)
        offsets = np.concatenate([[0], counts.cumsum()])
        for first, count in zip(offsets, counts, strict=False):
            ancestors[first : first + count, :count] = np.tri(count, dtype=bool)
        depths = np.concatenate([np.arange(count) for count in counts])
        plan = StepPlan(
            np.concatenate(chunks), offsets, depths, ancestors, self._lengths, device=self._target.device
        )  # fmt: skip
        estimates = self._run(plan, torch.cat(self._fresh))
        self._lengths = self._lengths + counts
        self._fresh = [fresh[:0] for fresh in self._fresh]
        return rows, estimates[torch.from_numpy(offsets[1:][rows] - 1).to(estimates.device)]

    def extend(
        self, rows: Sequence[int], tokens: Sequence[int], parents: Sequence[int | None], features: torch.Tensor
    ) -> torch.Tensor:
        """Run the head on drafted nodes: estimates [n, D] of the features after them.

        rows ascend; parents: of each node its parent's number among the nodes that this step has written for its row,
        None below the root; features [n, D]: the estimates for the parents.
        """
        counts = np.bincount(rows, minlength=len(self._keys))
        starts = np.array([len(paths) for paths in self._paths])
        for row, parent in zip(rows, parents, strict=True):
            paths = self._paths[row]
            paths.append((paths[parent] if parent is not None else 0) | 1 << len(paths))
        seen = [bits for paths, start in zip(self._paths, starts, strict=True) for bits in paths[start:]]
        width = int((starts + counts).max())
        ancestors = np.array([[bits >> node & 1 for node in range(width)] for bits in seen], dtype=bool)
        plan = StepPlan(
            np.array(tokens, dtype=np.int32), np.concatenate([[0], counts.cumsum()]), ancestors.sum(axis=1) - 1,
            ancestors, self._lengths, starts=starts, device=self._target.device,
        )  # fmt: skip
        return self._run(plan, features)

    @torch.inference_mode()
    def _combined(self, given: torch.Tensor) -> torch.Tensor:
        """What the head goes on from, of the hidden states that the target has given."""
        return self._head.combined(given)

    def _run(self, plan: StepPlan, features: torch.Tensor) -> torch.Tensor:
        """The head on the plan's pairs: [M, D]."""
        keys, self._keys = self._keys, []  # where an error ends this, no row is held
        self._cache.begin(plan)
        with few_token_layers(self._head), fused(self._target, self._cache):
            estimates = self._head(
                features[None], plan.input_ids, plan.position_ids,
                attention_mask=None, cache=self._cache, use_cache=True, stand_plan=plan,
            )[0]  # fmt: skip
        self._keys = keys
        return estimates

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
            self._cache = TreeCache(num_rows=len(keys), room=room, fusion=self._head.fusion())
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
        for start in range(0, length - 1, PROMPT_CHUNK):
            end = min(start + PROMPT_CHUNK, length - 1)
            plan = StepPlan.for_prompt(history[start + 1 : end + 1], start, row=place, device=self._target.device)
            self._run(plan, features[start:end])
        self._fresh[place], self._lengths[place] = features[length - 1 :], length - 1
