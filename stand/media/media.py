"""Images, videos and sound of a prompt, as the model's processor gives them: inputs of its first forward. Where tokens
lie beside them is asked of the model, as `generate` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.forward.devices import input_device
from stand.forward.model_state import unchanged
from stand.forward.self_check import MODEL_ERRORS

# What tokens stand for, 0 for text
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
WORDS = ("pixel", "image", "video", "audio", "feature", "grid")  # one of them is in the name of what is shown
SETTING = "vision_"  # names of settings of a tower begin so
_NO_TEXT = (
    "a prompt must end with a token of text, got one of what it shows; apply the chat template with "
    "add_generation_prompt=True"
)


class MediaError(ValueError):
    """What a prompt shows does not fit its tokens, or the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """What one prompt of L tokens shows."""

    inputs: Mapping[str, torch.Tensor]  # by argument of the model's forward; on the model's device, in its type
    types: Mapping[str, torch.Tensor]  # [1, L] by argument, those of TYPES that are given
    positions: torch.Tensor  # [1, L], or [P, 1, L] where places within an image count: of the prompt's tokens
    rotary_offset: int  # of what follows, beyond its place in the text
    text_start: int  # how many tokens end with the last one that stands for something shown; where none is known, L - 1
    digest: bytes  # names all of it

    @classmethod
    def of(cls, model: PreTrainedModel, token_ids: np.ndarray, shown: Mapping[str, object]) -> Media:
        """shown: what the processor gives beside token_ids, int32 [L], and their mask; names of `media_arguments`, and
        of TYPES.

        Raises MediaError where the last token is no text, and for what is no array of numbers or does not fit.
        """
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(input_device(model))[None]
        given = {name: _tensor_of(name, value) for name, value in shown.items()}
        start = _text_start(model, token_ids, [given[name] for name in TYPES if name in given])
        if start == len(token_ids):
            raise MediaError(_NO_TEXT)
        arrays = {name: tensor.to(ids.device, copy=True) for name, tensor in given.items()}  # callers may write there
        with misfits_refused(model, shown), unchanged(model):
            asked = {"attention_mask": torch.ones_like(ids), **arrays}
            positions = model._prepare_position_ids_for_generation(ids, asked)
        rotary = positions[-3:] if positions.dim() == 3 else positions  # of four the first are places in the text
        offsets = rotary.reshape(-1, len(token_ids)) - torch.arange(len(token_ids), device=ids.device)
        if len(offsets[:, -1].unique()) > 1:
            raise MediaError(_NO_TEXT)
        if len(offsets[:, start:].unique()) > 1:  # all is taken for shown
            start = len(token_ids) - 1
        named = {name: tensor[:, :start] if name in TYPES else tensor for name, tensor in given.items()}
        types = {name: arrays.pop(name) for name in TYPES if name in arrays}
        inputs = {name: _in_type(tensor, model) for name, tensor in arrays.items()}
        return cls(inputs, types, positions, int(offsets[-1, -1]), start, _digest(named))


def media_arguments(model: PreTrainedModel) -> frozenset[str]:
    """By which the model's forward takes what a prompt shows; nothing of a text model."""
    return _arguments_of(type(model).forward)


@cache
def _arguments_of(forward: Callable) -> frozenset[str]:
    names = inspect.signature(inspect.unwrap(forward)).parameters
    return frozenset(name for name in names if any(word in name for word in WORDS) and not name.startswith(SETTING))


@contextmanager
def misfits_refused(model: PreTrainedModel, shown: Iterable[str]) -> Iterator[None]:
    """Within it what the model's own code raises is a MediaError. A lack of memory says nothing of the prompt."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        raise MediaError(
            f"{', '.join(shown)} must fit the prompt's tokens and {type(model).__name__}, got {type(error).__name__}: "
            f"{error}; see whether model(**output) takes what the processor returns"
        ) from error


def _placeholder_ids(model: PreTrainedModel) -> list[int]:
    """Tokens that stand for what is shown, by the configuration."""
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    ids = [getattr(model.config, name, None) for name in names]
    return [token for token in ids if isinstance(token, int)]


def _text_start(model: PreTrainedModel, token_ids: np.ndarray, types: Iterable[torch.Tensor]) -> int:
    is_shown = np.isin(token_ids, _placeholder_ids(model))
    for kinds in types:
        is_shown |= kinds[0].cpu().numpy() != 0
    places = is_shown.nonzero()[0]
    return int(places[-1]) + 1 if len(places) else len(token_ids) - 1


def _tensor_of(name: str, value: object) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is None or not tensor.dim():
        raise MediaError(
            f'{name} must be an array of numbers, got {value!r:.80}; call the processor with return_tensors="pt"'
        )
    return tensor


def _in_type(tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """Pixels and the like in the model's type; numbers about them, such as seconds, as they are."""
    return tensor.to(model.dtype) if tensor.is_floating_point() and tensor.dim() > 1 else tensor


def _digest(shown: Mapping[str, torch.Tensor]) -> bytes:
    """16 bytes (blake2b)."""
    digest = blake2b(digest_size=16)
    for name in sorted(shown):
        tensor = shown[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.digest()
