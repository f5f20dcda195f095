"""One forward pass over packed tokens: who sits where, and who sees whom.

All live rows' tokens are packed into `input_ids [1, M]`. A row's committed keys fill slots [0, length) of its
cache row; its M_b new tokens are written behind them, token i at slot length + i, and a token sees the committed
prefix and its own ancestors. A chain of prompt tokens and a draft are the same thing here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from stand.forward.attention_shape import AttentionShape
from stand.forward.few_tokens.attention import TokenPaths
from stand.forward.few_tokens.product import IS_FASTER
from stand.trees import DraftBatch

MOST_ROW_TOKENS = 128  # for an attention of our own: chunks of prompts take torch's
CALL_COST = 6  # query places that cost as much as one more attention call on a CPU (5 us each at 300 keys, measured)


class Plan(Protocol):
    """What an attention of this project needs of a step."""

    is_prompt: bool

    def fits(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether a layer's query and key can be the step's."""
        ...


class StepPlan:
    """Positions, cache slots and attention masks of one packed forward over A cache rows.

    `first_row` is the cache row of the first packed row; the packed rows are consecutive cache rows.
    A tree that grows in several forwards gives `starts`; its ancestors then count from the first token of the tree, and
    attention must have no window.
    """

    def __init__(
        self,
        token_ids: np.ndarray,  # [M] int32
        offsets: np.ndarray,  # [A + 1]
        depths: np.ndarray,  # [M]
        ancestors: np.ndarray,  # [M, T] bool: token (row-local) is an ancestor of, or is, the packed token
        lengths: np.ndarray,  # [A] committed tokens per row
        *,
        starts: np.ndarray | None = None,  # [A] tokens behind the committed ones that earlier forwards wrote; default 0
        rotary_offsets: np.ndarray | None = None,  # [A] what rotary positions are beyond places in the text; default 0
        first_row: int = 0,
        is_prompt: bool = False,  # one row, a chain, and all of it stays
        device: torch.device | str = "cpu",
    ):
        starts = np.zeros_like(lengths) if starts is None else starts
        rotary_offsets = np.zeros_like(lengths) if rotary_offsets is None else rotary_offsets
        counts = np.diff(offsets)
        local_rows = np.repeat(np.arange(len(counts)), counts)
        local_nodes = np.arange(len(token_ids)) - np.repeat(offsets[:-1], counts)
        self.num_tokens = len(token_ids)  # M
        self.num_rows = len(counts)  # A
        self.first_row = first_row
        self.is_prompt = is_prompt
        self._tails = starts + counts
        self.ends = lengths + self._tails  # [A] slots per row, the new tokens' included
        self.kv_length = int(self.ends.max())  # L
        self.device = torch.device(device)
        self.token_ids = token_ids
        self._given = (token_ids, offsets, depths, ancestors, lengths, starts, rotary_offsets, first_row, is_prompt)
        self._elsewhere: dict[torch.device, StepPlan] = {}
        self._lasts: dict[int, StepPlan] = {}
        self.attentions: list[AttentionShape] | None = None  # of the layers of a forward, where somebody collects them
        self.longest = int(counts.max())  # tokens
        self.has_few_tokens = IS_FASTER and self.device.type == "cpu" and self.longest <= MOST_ROW_TOKENS
        self.offsets = offsets
        self._counts = counts
        self.depths = depths
        self.ancestors = ancestors
        self.lengths = lengths
        self._rotary_offsets = rotary_offsets
        self._local_rows = local_rows
        self._local_nodes = local_nodes
        self._masks: dict[tuple[int | None, int, torch.dtype], list[torch.Tensor]] = {}
        self._paths_back: dict[int, torch.Tensor] = {}
        self.input_ids = self._to_device(token_ids.astype(np.int64))[None]  # [1, M]
        positions = (lengths + rotary_offsets)[local_rows] + depths
        self.position_ids = self._to_device(positions.astype(np.int64))[None]  # [1, M] rotary ones; masks have none
        self.cache_rows = self._to_device((local_rows + first_row).astype(np.int64))  # [M]
        slots = (lengths + starts)[local_rows] + local_nodes
        self.cache_slots = self._to_device(slots.astype(np.int64))  # [M]

    @classmethod
    def for_drafts(
        cls,
        batch: DraftBatch,
        lengths: np.ndarray,
        *,
        rotary_offsets: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> StepPlan:
        """The verification step: one draft per cache row, rows 0 .. A-1."""
        ancestors = ancestor_matrix(batch)
        given = {"rotary_offsets": rotary_offsets, "device": device}
        return cls(batch.token_ids, batch.offsets, batch.depths, ancestors, lengths, **given)

    @classmethod
    def for_prompt(
        cls,
        token_ids: np.ndarray,
        length: int,
        *,
        row: int,
        rotary_offset: int = 0,
        device: torch.device | str = "cpu",
    ) -> StepPlan:
        """A chunk of one prompt behind `length` tokens that are already in cache row `row`."""
        count = len(token_ids)
        return cls(
            token_ids,
            np.array([0, count]),
            np.arange(count),
            np.tri(count, dtype=bool),
            np.array([length]),
            rotary_offsets=np.array([rotary_offset]),
            first_row=row,
            is_prompt=True,
            device=device,
        )

    @property
    def told(self) -> StepPlan:
        """What the attention of a forward takes as `stand_plan`."""
        return self

    def on(self, device: torch.device) -> StepPlan:
        """The same plan with its tensors on `device`, where a layer of the model may lie that is not at home here."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            *given, starts, rotary_offsets, first_row, is_prompt = self._given
            behind = {"starts": starts, "rotary_offsets": rotary_offsets, "first_row": first_row}
            self._elsewhere[device] = StepPlan(*given, **behind, is_prompt=is_prompt, device=device)
            self._elsewhere[device].attentions = self.attentions
        return self._elsewhere[device]

    def last(self, count: int) -> StepPlan:
        """Of a prompt's last `count` tokens, behind all others, whose keys are written: where layers reuse keys,
        transformers runs them for those tokens alone whose logits are wanted (Gemma 4 E2B). Raises ValueError where
        a step is no prompt's."""
        if not self.is_prompt or not 0 < count < self.num_tokens:
            raise ValueError(
                f"attention must be asked for all tokens of a step, or for a prompt's last ones, got {count} of "
                f"{self.num_tokens}; this model class cannot be served"
            )
        if count not in self._lasts:
            tokens, length = self._given[0][-count:], int(self.ends[0]) - count
            place = {"row": self.first_row, "rotary_offset": int(self._rotary_offsets[0]), "device": self.device}
            self._lasts[count] = StepPlan.for_prompt(tokens, length, **place)
        return self._lasts[count]

    def fits(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether query [1, H, M, D] and key [A, Hkv, L, D] are of as many tokens, rows and slots as the plan."""
        return (query.shape[2], key.shape[0], key.shape[2]) == (self.num_tokens, self.num_rows, self.kv_length)

    @cached_property
    def paths(self) -> TokenPaths:
        """For `few_token_attention`."""
        return TokenPaths(self.offsets, self.lengths, self._tails, self.ancestors)

    @cached_property
    def width(self) -> int:
        """T: tokens per row that are attended to in one padded call, where attention pads."""
        return _padded_width(self._counts) if self.device.type == "cpu" else self.longest

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all rows have `width` tokens."""
        return bool((self._counts == self.width).all())

    @cached_property
    def overflow(self) -> list[tuple[int, int, int]]:
        """(row of the plan, first packed token, end): on a CPU, where a call costs little, the rows' tokens beyond
        `width` are attended to row by row."""
        offsets = self.offsets
        return [
            (row, int(offsets[row]) + self.width, int(offsets[row + 1]))
            for row in np.flatnonzero(self._counts > self.width)
        ]

    @cached_property
    def _padded(self) -> np.ndarray:
        """Packed tokens that have a padded place."""
        return np.flatnonzero(self._local_nodes < self.width)

    @cached_property
    def _tokens(self) -> torch.Tensor:
        return self._to_device(self._padded)

    @cached_property
    def _places(self) -> torch.Tensor:
        """Of `_tokens`, in all rows' padded places."""
        places = self._local_rows * self.width + self._local_nodes
        return self._to_device(places[self._padded].astype(np.int64))

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[H, M, D] -> [A, H, T, D]; places without a token are zero, tokens of `overflow` are left out."""
        heads, _, size = packed.shape
        if self.is_uniform:
            return packed.view(heads, self.num_rows, self.width, size).transpose(0, 1)
        padded = packed.new_zeros(self.num_rows * self.width, heads, size)
        padded[self._places] = packed.transpose(0, 1)[self._tokens]
        return padded.view(self.num_rows, self.width, heads, size).transpose(1, 2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[A, H, T, D] -> [1, M, H, D]; tokens of `overflow` are left undefined."""
        flat = padded.transpose(1, 2).reshape(self.num_rows * self.width, padded.shape[1], padded.shape[3])
        if self.is_uniform:
            return flat[None]
        packed = flat.new_empty(self.num_tokens, *flat.shape[1:])
        packed[self._tokens] = flat[self._places]
        return packed[None]

    def packed_places(self, local: Sequence[int]) -> np.ndarray:
        """[A]: of token local[a] of each row a among all packed tokens."""
        return self.offsets[:-1] + np.asarray(local)

    @cached_property
    def seen(self) -> torch.Tensor:
        """[A, 1, T, T] bool, T tokens in the longest row: token j of a row is an ancestor of token i, or is it."""
        seen = np.zeros((self.num_rows, self.longest, self.longest), dtype=bool)
        seen[self._local_rows, self._local_nodes] = self.ancestors[:, : self.longest]
        return self._to_device(seen)[:, None]

    @cached_property
    def row_places(self) -> torch.Tensor:
        """[M]: row * T + place of the packed tokens, T tokens in the longest row."""
        return self._to_device((self._local_rows * self.longest + self._local_nodes).astype(np.int64))

    def pad_rows(self, packed: torch.Tensor) -> torch.Tensor:
        """[M, ...] -> [A, T, ...], T tokens in the longest row; places without a token are zero."""
        shape = (self.num_rows, self.longest, *packed.shape[1:])
        if self.num_tokens == shape[0] * shape[1]:
            return packed.view(shape)
        padded = packed.new_zeros(shape[0] * shape[1], *shape[2:])
        padded[self.row_places] = packed
        return padded.view(shape)

    def unpad_rows(self, padded: torch.Tensor) -> torch.Tensor:
        """[A, T, ...] -> [M, ...]."""
        flat = padded.flatten(0, 1)
        return flat if self.num_tokens == len(flat) else flat[self.row_places]

    def paths_back(self, count: int) -> torch.Tensor:
        """[M, count] int64: every token and what comes before it on its path, the oldest first, as places in a list of
        the `count` - 1 newest committed tokens of every row, and then the packed tokens."""
        if count not in self._paths_back:
            packed, local = np.nonzero(self.ancestors)  # by token in the order of its path
            ends = np.cumsum(np.bincount(packed, minlength=self.num_tokens))
            lengths = np.diff(ends, prepend=0)
            places = np.empty((self.num_tokens, count), dtype=np.int64)
            for place in range(count):
                at = ends - count + place
                is_new = at >= ends - lengths
                new = self.offsets[self._local_rows] + local[np.maximum(at, 0)] + (count - 1) * self.num_rows
                places[:, place] = np.where(is_new, new, (count - 1) * self._local_rows + lengths - 1 + place)
            self._paths_back[count] = self._to_device(places)
        return self._paths_back[count]

    def mask(self, *, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [A, 1, groups * T, L] of the padded places: 0 where a token may look, -inf elsewhere.

        `groups` query heads share a key head and are folded into the query axis. `window` is the sliding window in
        tree positions (a token sees positions > its own - window), not in cache slots. Built once per step and kind.
        """
        return self._masks_of(window, groups, dtype)[0]

    def overflow_masks(self, *, window: int | None, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Per entry of `overflow` its mask [1, 1, groups * n, L]."""
        return self._masks_of(window, groups, dtype)[1:]

    def _masks_of(self, window: int | None, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
        key = (window, groups, dtype)
        if key not in self._masks:
            allowed = self.visible(window)
            parts = [self._pad_allowed(allowed), *(allowed[None, first:end] for _, first, end in self.overflow)]
            self._masks[key] = [self._additive(part, groups, dtype) for part in parts]
        return self._masks[key]

    def _additive(self, allowed: np.ndarray, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """[A, T, L] bool -> [A, 1, groups * T, L]."""
        forbidden = torch.from_numpy(~allowed).to(self.device)
        additive = torch.zeros(allowed.shape, dtype=dtype, device=self.device)
        additive.masked_fill_(forbidden, float("-inf"))
        return torch.cat([additive] * groups, dim=1)[:, None]

    def visible(self, window: int | None) -> np.ndarray:
        """[M, L] bool: which slots of its own row a packed token sees."""
        own_lengths = self.lengths[self._local_rows]  # [M]
        slots = np.arange(self.kv_length)
        allowed = slots[None, :] < own_lengths[:, None]
        if window is not None:
            allowed &= slots[None, :] > (own_lengths + self.depths - window)[:, None]
        packed, seen = np.nonzero(self._visible_tail(window))
        allowed[packed, own_lengths[packed] + seen] = True
        return allowed

    def _pad_allowed(self, allowed: np.ndarray) -> np.ndarray:
        """[M, L] -> [A, T, L]; a place without a token looks at slot 0 so that its softmax stays finite."""
        if self.is_uniform:
            return allowed.reshape(self.num_rows, self.width, self.kv_length)
        padded = np.zeros((self.num_rows, self.width, self.kv_length), dtype=bool)
        padded[:, :, 0] = True
        padded[self._local_rows[self._padded], self._local_nodes[self._padded]] = allowed[self._padded]
        return padded

    def _visible_tail(self, window: int | None) -> np.ndarray:
        """[M, T] bool: which tokens of its own row's tail a packed token sees."""
        if window is None:
            return self.ancestors
        tail_depths = np.zeros((self.num_rows, self.ancestors.shape[1]), dtype=np.int64)
        tail_depths[self._local_rows, self._local_nodes] = self.depths
        distances = self.depths[:, None] - tail_depths[self._local_rows]
        return self.ancestors & (distances < window)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _padded_width(counts: np.ndarray) -> int:
    """Tokens per row that are attended to in one padded call; longer rows' remainders get calls of their own.

    Least total of query places and of CALL_COST places per further call.
    """
    widths = np.sort(counts)
    num_rows = len(widths)
    num_longer = num_rows - np.searchsorted(widths, widths, side="right")
    beyond = widths[::-1].cumsum()[::-1] - widths * np.arange(num_rows, 0, -1)  # tokens of longer rows beyond a width
    costs = num_rows * widths + beyond + CALL_COST * num_longer
    return int(widths[np.argmin(costs)])


def ancestor_matrix(batch: DraftBatch) -> np.ndarray:
    """[M, T] bool: a node sees itself and what its parent sees. Bits of one integer per node: array operations by depth
    take several times as long for drafts of a few dozen nodes."""
    seen: list[int] = []
    for first, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        for node, parent in enumerate(batch.parents[first:end].tolist()):
            seen.append((seen[first + parent] if parent >= 0 else 0) | 1 << node)
    most = int(batch.sizes.max())
    num_bytes = -(-most // 8)
    packed = np.frombuffer(b"".join([bits.to_bytes(num_bytes, "little") for bits in seen]), dtype=np.uint8)
    return np.unpackbits(packed.reshape(-1, num_bytes), axis=1, count=most, bitorder="little").view(bool)


_RUNNING = threading.local()


@contextmanager
def running(plan: Plan) -> Iterator[None]:
    """Within it `running_plan` is `plan`: for layers that do not hand on what their model was called with."""
    before = getattr(_RUNNING, "plan", None)
    _RUNNING.plan = plan
    try:
        yield
    finally:
        _RUNNING.plan = before


def running_plan(query: torch.Tensor, key: torch.Tensor) -> Plan | None:
    """Of the forward that runs in this thread, where these are its query and key: it may be a plain forward in the
    midst of a step's one."""
    plan = getattr(_RUNNING, "plan", None)
    return plan if plan is not None and plan.fits(query, key) else None


def running_step() -> Plan | None:
    """Of the forward that runs in this thread, unless it is a prompt's."""
    plan = getattr(_RUNNING, "plan", None)
    return None if plan is None or plan.is_prompt else plan


def plain_forward_error(part: str) -> RuntimeError:
    """For a part of the model that runs without the plan that a step gives it."""
    return RuntimeError(
        f"{part} needs the plan of a step, got a plain forward within one: processors, criteria, streamers and other "
        "threads must not call the model that decodes; give them one of their own"
    )
