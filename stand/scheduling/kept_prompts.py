"""Keys of prompts that stay from call to call, for the branches of a search and the turns of a chat."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from stand.forward.key_shape import key_shape
from stand.forward.model import PROMPT_CHUNK
from stand.forward.model_state import ModelState
from stand.forward.tree_cache import TreeCache
from stand.scheduling.prefilled import Prefilled, common_chunks


class KeptPrompts:
    """Copies of the keys of whole chunks of prompts, the latest ones, in `max_bytes` at most.

    They belong to the weights that made them: `begin` forgets them where the model is seen to have changed, which takes
    a few milliseconds. Not seen are values that are written past torch's counters of changes (`tensor.data`).
    """

    def __init__(self, model: PreTrainedModel, max_bytes: float):
        self.max_bytes = max_bytes
        self.prompts: list[Prefilled] = []  # the latest one last
        self._model = model
        self._state: ModelState | None = None
        self._versions: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(prompt.nbytes for prompt in self.prompts)

    def begin(self) -> None:
        """A call begins."""
        state, versions = ModelState(self._model), list(_versions(self._model))
        if self._state is None or versions != self._versions or state.change_since(self._state) is not None:
            self.prompts.clear()
        self._state, self._versions = state, versions

    def offer(self, prompt: Prefilled) -> None:
        """Of a prompt that its call needs no longer. One that begins another one here is not kept beside it: only its
        recurrent states are."""
        chunks = prompt.begins_at(max(prompt.done, 0) // PROMPT_CHUNK)
        if not chunks:
            return
        token_ids = prompt.token_ids[: chunks * PROMPT_CHUNK].copy()
        kept = Prefilled(TreeCache(1, 0), token_ids, len(token_ids), features=prompt.features[:chunks])
        for other in self.prompts:
            if common_chunks(other, kept) == chunks and len(other.features) >= len(kept.features):
                other.states = prompt.states | other.states
                self._renew(other)
                return
        shape = key_shape(self._model)
        if kept.done * shape.token_bytes + shape.row_bytes > self.max_bytes:
            return
        try:
            kept.begin_with(prompt, chunks)
        except (RuntimeError, MemoryError):  # no memory, or a device that has failed, which its own call tells
            return
        kept.states |= prompt.states
        if kept.is_recurrent:
            kept.keys.recurrent = kept.states[chunks]  # one copy is enough: nothing is computed here
        for other in [one for one in self.prompts if common_chunks(kept, one) * PROMPT_CHUNK >= one.done]:
            kept.states = other.states | kept.states
            self.prompts.remove(other)
        self.prompts.append(kept)
        self._trim()

    def _trim(self) -> None:
        """The oldest goes first, and of it the states of its shortest beginning."""
        while self.nbytes > self.max_bytes:
            oldest = self.prompts[0]
            if len(oldest.states) > 1:
                del oldest.states[min(oldest.states)]
            else:
                self.prompts.pop(0)

    def _renew(self, prompt: Prefilled) -> None:
        self.prompts.remove(prompt)
        self.prompts.append(prompt)
        self._trim()


def _versions(model: PreTrainedModel) -> Iterator[int]:
    """How often torch has seen each tensor written in place; tensors made for inference alone are not counted."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield 0 if tensor.is_inference() else tensor._version
