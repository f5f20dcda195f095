"""Whether attention is told the window that a model's masks have: some classes put it into the mask alone.

Tree attention takes no masks of transformers': it makes its own, with the window that a layer's attention is called
with. The probe runs a forward in which every mask is one number, how many keys it lets a far token see, and compares
that with what each layer says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from stand.forward.devices import input_device
from stand.forward.model import max_positions
from stand.forward.modules import modules_of
from stand.forward.tree_attention import PREFIX, tree_attention

PROBE = PREFIX + "window_probe"
MOST_KEYS = 1 << 20  # a longer window is none
OTHER = -1  # said of a mask that is no window
QUERIES = 256  # of a mask at a time
BEHIND, AHEAD = 0, 1  # what masks show: behind a token, or ahead of it too


class _Probe:
    """What the layers of the running forward were told, and what their masks say."""

    def __init__(self, num_keys: int) -> None:
        self.num_keys = num_keys
        self.found: list[tuple[str, int, int]] = []  # class of a layer's attention, keys by its argument, by its mask

    def number_of(self, mask_function: Callable) -> int:
        """How many keys the last of `num_keys` tokens sees."""
        keys = torch.arange(self.num_keys, device="cpu")
        first = torch.zeros((), dtype=torch.int64, device="cpu")
        with _LastEntryStands():
            seen = mask_function(first, first, keys[-1], keys).expand(self.num_keys)
        number = int(seen.sum())
        return number if bool(seen[self.num_keys - number :].all()) else OTHER

    def note(self, module: torch.nn.Module, told: int | None, masked: int | None) -> None:
        """The window that a layer's attention is told, and what its mask says; None for none."""
        told = min(told or self.num_keys, self.num_keys)
        self.found.append((type(module).__name__, told, self.num_keys if masked is None else masked))


class _AheadProbe(_Probe):
    """Whether masks of `layers` show what comes in a later forward: of `start` tokens any behind those, of the others
    any."""

    def __init__(self, num_keys: int, start: int, layers: set[torch.nn.Module]) -> None:
        super().__init__(num_keys)
        self._start, self._layers = start, layers
        self.is_ahead = False

    def number_of(self, mask_function: Callable) -> int:
        """AHEAD or BEHIND."""
        keys, first = torch.arange(self.num_keys, device="cpu"), torch.zeros((), dtype=torch.int64, device="cpu")
        for places in keys.split(QUERIES):
            queries = places[:, None]
            with _LastEntryStands():  # towers make masks for other numbers of tokens
                seen = mask_function(first, first, queries, keys).expand(len(places), self.num_keys)
            if bool((seen & (keys > queries.clamp(min=self._start - 1))).any()):
                return AHEAD
        return BEHIND

    def note(self, module: torch.nn.Module, told: int | None, masked: int | None) -> None:
        self.is_ahead |= masked == AHEAD and module in self._layers


class _LastEntryStands(TorchFunctionMode):
    """Within it a table that is read beyond its end gives its last entry. A mask may have one with an entry per token
    of the forward (Gemma 4: which image it belongs to), and of a text all tokens have the same."""

    def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            table, places = args
            args = table, tuple(_within(place, size) for place, size in zip(places, table.shape, strict=False))
        return function(*args, **(kwargs or {}))


def _within(place: object, size: int) -> object:
    is_index = isinstance(place, torch.Tensor) and place.dtype is torch.int64
    return place.clamp(max=size - 1) if is_index else place


_running = threading.local()  # .probe: of this thread's forward; other threads may check other models


def _mask(*, mask_function: Callable, **kwargs: object) -> torch.Tensor:
    return torch.full((1, 1, 1, 1), _running.probe.number_of(mask_function), device="cpu")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    _running.probe.note(module, sliding_window, None if attention_mask is None else int(attention_mask.flatten()[0]))
    return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)


@torch.inference_mode()
def window_disagreement(model: PreTrainedModel) -> str | None:
    """Which layer's attention is told another window than its mask has, or None."""
    probe = _Probe(min(max_positions(model) or MOST_KEYS, MOST_KEYS))
    _run(model, probe, input_ids=torch.zeros((1, 2), dtype=torch.int64, device=input_device(model)))
    for name, told, masked in probe.found:
        if told != masked:
            return f"{name} is told of {told} keys, and its mask shows {'others' if masked == OTHER else masked}"
    return None


@torch.inference_mode()
def looks_ahead(model: PreTrainedModel, start: int, **inputs: object) -> bool:
    """Whether a token of a prompt sees one that comes in a later forward, where its first `start` tokens are run by
    one forward and the others one by one. inputs: of the model's forward, among them input_ids [1, L]."""
    probe = _AheadProbe(inputs["input_ids"].shape[1], start, set(modules_of(model.get_decoder())))
    _run(model, probe, **inputs)
    return probe.is_ahead


def _run(model: PreTrainedModel, probe: _Probe, **inputs: object) -> None:
    """A forward that the probe is told of."""
    _running.probe = probe
    try:
        with tree_attention(model, PROBE):
            model(**inputs, use_cache=False)
    finally:
        del _running.probe
