"""Latent attention (MLA: DeepSeek V2 and V3, GLM-4.7 Flash, MiniCPM 3, LongCat) without computing keys and values.

A layer keeps c, a latent of a few hundred numbers for all heads, and a turned part that all heads share. Keys and
values of a head are W_k c and W_v c. With q . (W_k c) = (W_k^T q) . c and sum_i p_i W_v c_i = W_v sum_i p_i c_i,
queries take the products once, and attention is over the latents, with one key head (DeepSeek-V2, arXiv 2405.04434,
section 2.1.2). That is cheaper wherever a row has fewer tokens than about a third of its latent's numbers; prompts are
expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from stand.forward.few_tokens.linear_layers import FewTokenForward, class_forward
from stand.forward.modules import modules_of
from stand.forward.packed_plan import running_step

NAME = "expand_kv"  # of transformers' method that computes keys and values
PARTS = ("kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # of a layer that has it
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class LatentKeys:
    """Stands for `layer.expand_kv`: in a step it hands on what the layer keeps, for `absorbed` and `expanded`.

    H heads, latents of R numbers, keys of N numbers beside T turned ones, values of V.
    """

    def __init__(self, layer: nn.Module):
        self._layer = layer

    def __call__(self, latents: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latents [A, 1, L, R], turned [A, 1, L, T]: the same in a step; else keys [A, H, L, N + T] and values
        [A, H, L, V]."""
        if running_step() is None:
            return type(self._layer).expand_kv(self._layer, latents, turned)
        return latents, turned

    def __reduce__(self) -> tuple:
        """A copy of the layer computes keys by its class's method."""
        return class_method, (self._layer,)

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Query [1, H, M, N + T] -> [1, H, M, R + T], for keys that are latents and turned parts."""
        size = self._layer.qk_nope_head_dim
        plain = torch.bmm(query[0, :, :, :size], self._weights[:, :size])
        return torch.cat((plain, query[0, :, :, size:]), dim=-1)[None]

    def expanded(self, mixed: torch.Tensor) -> torch.Tensor:
        """Sums of latents [1, M, H, R] -> sums of values [1, M, H, V], contiguous."""
        weights = self._weights[:, self._layer.qk_nope_head_dim :]
        values = torch.bmm(mixed[0].transpose(0, 1), weights.transpose(1, 2))
        return values.transpose(0, 1)[None].clone(memory_format=torch.contiguous_format)

    @property
    def _weights(self) -> torch.Tensor:
        """[H, N + V, R]: of keys, then of values."""
        weight = self._layer.kv_b_proj.weight
        return weight.view(-1, self._layer.qk_nope_head_dim + self._layer.v_head_dim, weight.shape[1])

    @torch.inference_mode()
    def are_right(self) -> bool:
        """Whether they are what the layer's own method computes, up to rounding."""
        try:
            return all(_are_close(own, expected) for own, expected in self._compared())
        except torch.OutOfMemoryError:  # says nothing of the layer
            raise
        except Exception:  # what the method of a foreign class takes may be anything
            return False

    def _compared(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(own, expected): scores, and sums of values."""
        layer, weight, generator = self._layer, self._layer.kv_b_proj.weight, torch.Generator("cpu").manual_seed(0)
        rank, size = weight.shape[1], layer.qk_nope_head_dim + layer.qk_rope_head_dim
        shapes = ((1, rank), (1, layer.qk_rope_head_dim), (len(self._weights), size))
        latents, turned, query = (
            torch.randn(1, heads, 3, width, generator=generator, device="cpu").to(weight) for heads, width in shapes
        )
        keys, values = type(layer).expand_kv(layer, latents, turned)
        scores = self.absorbed(query) @ torch.cat((latents, turned), dim=-1).transpose(2, 3)
        yield scores, query @ keys.transpose(2, 3)
        mixed = self.expanded(latents.expand(-1, len(self._weights), -1, -1).transpose(1, 2))
        yield mixed, values.transpose(1, 2)


def class_method(layer: nn.Module) -> MethodType:
    """That of its class: a copy of a layer that is made within a step has this."""
    return MethodType(type(layer).expand_kv, layer)


def latent_keys_of(layer: nn.Module) -> LatentKeys | None:
    """What a layer's step hands on latents by, or None where it hands on keys."""
    found = vars(layer).get(NAME)
    return found if isinstance(found, LatentKeys) and running_step() is not None else None


def expanding_layer(model: nn.Module) -> str | None:
    """The name of a layer that keeps latents and computes keys from them in steps, too, or None."""
    return next(
        (name for name, layer in model.named_modules() if hasattr(type(layer), NAME) and not _is_served(layer)), None
    )


@contextmanager
def unexpanded_keys(model: nn.Module) -> Iterator[None]:
    """Within it steps compute no keys from latents; then the model is as it was, also where an interrupt cuts the way
    out."""
    swapped: list[nn.Module] = []
    try:
        for layer in _served(model):
            if vars(layer).get(NAME) in (None, class_method(layer)):
                swapped.append(layer)
                vars(layer)[NAME] = LatentKeys(layer)
        yield
    finally:
        try:
            _restore(swapped)
        except BaseException:
            _restore(swapped)
            raise


def _restore(layers: list[nn.Module]) -> None:
    for layer in layers:
        vars(layer).pop(NAME, None)


# By layer: the method that was compared, and whether it is right. Nothing that holds the layer, or it would never go.
_KNOWN: WeakKeyDictionary[nn.Module, tuple[Callable, bool]] = WeakKeyDictionary()


def _served(model: nn.Module) -> Iterator[nn.Module]:
    return (layer for layer in modules_of(model) if hasattr(type(layer), NAME) and _is_served(layer))


def _is_served(layer: nn.Module) -> bool:
    if not _is_plain(layer):
        return False
    own = type(layer).expand_kv
    method, is_right = _KNOWN.get(layer, (None, False))
    if method is not own:
        _, is_right = _KNOWN[layer] = own, LatentKeys(layer).are_right()
    return is_right


def _is_plain(layer: nn.Module) -> bool:
    """Whether what it keeps is multiplied by a matrix of ordinary numbers, and by nothing else that could come to it:
    no adapter, no hook, no weights that are brought when they are needed."""
    if not all(hasattr(layer, part) for part in PARTS):
        return False
    projection = layer.kv_b_proj
    if type(projection) is not nn.Linear or projection.bias is not None or _has_hooks(projection):
        return False
    weight, size = projection.weight, layer.qk_nope_head_dim + layer.v_head_dim
    is_ordinary = type(weight) is nn.Parameter and weight.dtype in TOLERANCES and not weight.is_meta
    return is_ordinary and weight.is_contiguous() and weight.shape[0] % size == 0


def _has_hooks(linear: nn.Linear) -> bool:
    """Whether calling it runs more than its class's forward, or what stands for that here."""
    own = vars(linear).get("forward")
    is_ours = own is None or isinstance(own, FewTokenForward) or own == class_forward(linear)
    hooks = linear._forward_hooks, linear._forward_pre_hooks
    of_all = all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks
    return not is_ours or any(hooks) or any(of_all)


def _are_close(own: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = float(expected.float().abs().max())
    return float((own.float() - expected.float()).abs().max()) <= TOLERANCES[own.dtype] * largest
