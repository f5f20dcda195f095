"""Keys of prompts that stay from call to call, for the branches of a search and the turns of a chat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import RLock

import torch
from transformers import PreTrainedModel

from stand.forward.cache.key_shape import key_shape
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.devices import input_device, is_offloaded
from stand.forward.few_tokens.product import ORDINARY
from stand.forward.model import moving_ropes
from stand.forward.model_state import ModelState, foreign_hook
from stand.scheduling.prefilled import Prefilled, common_pieces

NO_AGE = 0  # of a call that keeps nothing


class KeptPrompts:
    """Copies of the keys of whole pieces of prompts, the latest ones, in `max_bytes` at most.

    They belong to the weights that made them: `begin` forgets them where the model is seen to have changed, which takes
    a few milliseconds (SmolLM2: 20). Calls may lie in each other, also of several threads, with a change between: one
    that began before the latest change neither takes nor leaves any. Not seen are few values that are written past
    torch's counters of changes (`tensor.data`, fused optimisers). What a hook of somebody else's does may change
    unseen, and so may weights that are offloaded: beside either nothing is kept.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: float, *, new_keys: Callable[[], TreeCache]):
        """new_keys: an empty cache of one row."""
        self.max_bytes = max_bytes
        self.prompts: list[Prefilled] = []  # the latest one last; never changed in place
        self._model = model
        self._new_keys = new_keys
        self._state: ModelState | None = None
        self._seen: tuple[object, ...] = ()  # of the tensors' values, and of how torch computes
        self._age = NO_AGE  # changes of the model so far
        self._lock = RLock()  # not a Lock: a call that is collected as garbage leaves its prompts at any moment

    @property
    def num_free(self) -> float:
        """Bytes that may be kept beside those that are."""
        return max(self.max_bytes - self.nbytes, 0)

    @property
    def nbytes(self) -> int:
        return sum(prompt.nbytes for prompt in self.prompts)

    def begin(self) -> int:
        """A call begins. The age of what it will compute, for `of` and `offer`."""
        state, seen = ModelState(self._model), _seen(self._model)
        with self._lock:
            is_unseen = foreign_hook(self._model) is not None or is_offloaded(self._model)
            if is_unseen or self._state is None or seen != self._seen or state.change_since(self._state) is not None:
                self.prompts = []
                self._age += 1
            self._state, self._seen = state, seen
            return NO_AGE if is_unseen else self._age

    def of(self, age: int) -> list[Prefilled]:
        """Those that a call of this age may take."""
        with self._lock:
            return self.prompts if age == self._age else []

    def offer(self, prompt: Prefilled, age: int) -> None:
        """Of a prompt that its call needs no longer. One that begins another one here is not kept beside it: only its
        recurrent states are."""
        pieces = prompt.begins_at(prompt.pieces_of(prompt.done))
        if not pieces:
            return
        with self._lock:
            if age == self._age:
                self._keep(prompt, pieces)
                self._trim()

    def _keep(self, prompt: Prefilled, pieces: int) -> None:
        token_ids = prompt.token_ids[: prompt.tokens_of(pieces)].copy()
        beside = {"media": prompt.media, "features": prompt.features[:pieces]}
        kept = Prefilled(self._new_keys(), token_ids, len(token_ids), **beside)
        for other in self.prompts:
            if common_pieces(other, kept) == pieces and len(other.features) >= len(kept.features):
                others = [one for one in self.prompts if one is not other]
                self.prompts = [*others, replace(other, states=prompt.states | other.states)]
                return
        shape = key_shape(self._model)
        if kept.done * shape.token_bytes + shape.row_bytes > self.max_bytes:
            return
        try:
            kept.begin_with(prompt, pieces)
        except (RuntimeError, MemoryError):  # no memory, or a device that has failed, which its own call tells
            return
        kept.states |= prompt.states
        if kept.is_recurrent:
            kept.keys.recurrent = kept.states[pieces]  # one copy is enough: nothing is computed here
        others = []
        for other in self.prompts:
            if other.tokens_of(common_pieces(kept, other)) < other.done:
                others.append(other)
            else:
                kept.states = other.states | kept.states
        self.prompts = [*others, kept]

    def _trim(self) -> None:
        """The oldest goes first, and of it the states of its shortest beginning."""
        while self.nbytes > self.max_bytes:
            oldest, *others = self.prompts
            longer = {pieces: oldest.states[pieces] for pieces in sorted(oldest.states)[1:]}
            self.prompts = [replace(oldest, states=longer), *others] if longer else others


def _seen(model: PreTrainedModel) -> tuple[object, ...]:
    """What tells other keys: how often torch has seen each tensor written in place (those made for inference alone are
    not counted), a few of its numbers, and how torch computes here."""
    tensors = [*model.parameters(), *_constant_buffers(model)]
    versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    kind = input_device(model).type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    known = torch.backends
    products = known.cuda.matmul, known.cudnn.conv, known.mkldnn.matmul, known.mkldnn.conv
    precisions = [product.fp32_precision for product in products]
    of_others = getattr(model, "seen_weights", bytes)()  # of a model that another library runs
    return versions, _few_numbers(tensors), of_others, autocast, precisions, torch.get_num_threads()


def _constant_buffers(model: PreTrainedModel) -> list[torch.Tensor]:
    """Those that no forward writes: LongRoPE's frequencies are chosen anew by each one."""
    if not moving_ropes(model):
        return [*model.buffers()]
    named = ((name.rpartition(".")[2], buffer) for name, buffer in model.named_buffers())
    return [buffer for name, buffer in named if not name.endswith("inv_freq") or "original" in name]


@torch.inference_mode()
def _few_numbers(tensors: list[torch.Tensor]) -> bytes:
    """Four to seven along each dimension, of plain tensors. An optimiser changes nearly all numbers, and a fused one
    counts no change."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in (getattr(tensor, "_local_tensor", tensor) for tensor in tensors):  # of ranks, this one's part
        if type(tensor) in ORDINARY and tensor.numel() and not tensor.is_meta and tensor.layout == torch.strided:
            few = tensor[tuple(slice(None, None, max(size // 4, 1)) for size in tensor.shape)]
            parts.setdefault(few.device, []).append(few.contiguous().view(-1).view(torch.uint8))
    return b"".join(torch.cat(of_device).cpu().numpy().tobytes() for of_device in parts.values())
