"""Images, videos and sound of a prompt, as the model's processor gives them: inputs of its first forward.

Which inputs these are is read from the model's class, and where its tokens lie then is asked of it, as transformers'
`generate` does. Nothing here is made for one family of models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from stand.forward.cache.cache_argument import CACHE_ARGUMENTS
from stand.forward.devices import input_device

TYPES = ("token_type_ids", "mm_token_type_ids")  # [1, L]: of every token what it stands for, 0 for text
NO_INPUTS = frozenset({*CACHE_ARGUMENTS, *TYPES, "mm_encoder_outputs", "return_dict", "output_router_logits"})


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

        Raises ValueError where the last token is no text, and for what is no array of numbers.
        """
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(input_device(model))[None]
        arrays = {name: _tensor_of(name, value) for name, value in shown.items()}
        types = {name: arrays[name].to(ids.device) for name in TYPES if name in arrays}
        inputs = {name: _moved(tensor, model) for name, tensor in arrays.items() if name not in TYPES}
        asked = {"attention_mask": torch.ones_like(ids), **inputs, **types}
        positions = model._prepare_position_ids_for_generation(ids, asked)
        rotary = positions[-3:] if positions.dim() == 3 else positions  # of four the first are places in the text
        offsets = rotary.reshape(-1, len(token_ids)) - torch.arange(len(token_ids), device=ids.device)
        start = _text_start(model, token_ids, types)
        if start == len(token_ids) or len(offsets[:, -1].unique()) > 1:
            raise ValueError(
                "a prompt must end with a token of text, got one of what it shows; apply the chat template with "
                "add_generation_prompt=True"
            )
        if len(offsets[:, start:].unique()) > 1:  # then all is taken for what is shown
            start = len(token_ids) - 1
        named = {name: tensor[:, :start] if name in TYPES else tensor for name, tensor in arrays.items()}
        return cls(inputs, types, positions, int(offsets[0, -1]), start, _digest(named))

    @property
    def kind(self) -> tuple[str, ...]:
        """What one check stands for: the names of the inputs."""
        return *sorted(self.inputs), *sorted(self.types)


def media_arguments(model: PreTrainedModel) -> frozenset[str]:
    """What the model's forward takes and a text model's does not; nothing of a text model."""
    return _arguments_of(type(model).forward)


@cache
def _arguments_of(forward: Callable) -> frozenset[str]:
    names = frozenset(inspect.signature(inspect.unwrap(forward)).parameters)
    return names - frozenset(inspect.signature(inspect.unwrap(LlamaForCausalLM.forward)).parameters) - NO_INPUTS


def placeholder_ids(model: PreTrainedModel) -> list[int]:
    """Tokens that stand for what is shown, by the configuration."""
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    ids = [getattr(model.config, name, None) for name in names]
    return [token for token in ids if isinstance(token, int)]


def _text_start(model: PreTrainedModel, token_ids: np.ndarray, types: Mapping[str, torch.Tensor]) -> int:
    is_shown = np.isin(token_ids, placeholder_ids(model))
    for kinds in types.values():
        is_shown |= kinds[0].cpu().numpy() != 0
    places = is_shown.nonzero()[0]
    return int(places[-1]) + 1 if len(places) else len(token_ids) - 1


def _tensor_of(name: str, value: object) -> torch.Tensor:
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be an array of numbers, got {type(value).__name__} ({error}); call the processor with "
            'return_tensors="pt"'
        ) from error


def _moved(tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    return tensor.to(input_device(model), model.dtype if tensor.is_floating_point() else None)


def _digest(shown: Mapping[str, torch.Tensor]) -> bytes:
    """16 bytes (blake2b)."""
    digest = blake2b(digest_size=16)
    for name in sorted(shown):
        tensor = shown[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.digest()
