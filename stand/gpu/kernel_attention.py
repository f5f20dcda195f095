"""The tree attention kernel as a transformers attention function: what a captured step runs in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from stand.forward.attention_shape import AttentionShape
from stand.forward.latent_keys import latent_keys_of
from stand.forward.packed_plan import plain_forward_error, running_plan
from stand.gpu.kernels.attention import tree_attention

KERNEL_ATTENTION_NAME = "stand_tree_kernel"


@dataclass(frozen=True, slots=True)
class Work:
    """One work list of a step (see `WorkList`), and room for P partial results of a head, none where no row can be
    split."""

    items: torch.Tensor  # [I, 8] int32
    partial_starts: torch.Tensor  # [M + 1] int32
    tile_tokens: int
    num_partials: int  # P


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The step's arrays (see `StepPacket`), the work of each kind of layers, and scratch that all of them share."""

    step: Mapping[str, torch.Tensor]
    works: Mapping[AttentionShape, Work]
    partials: torch.Tensor  # float32, as many as any kind needs
    log_sums: torch.Tensor  # float32
    is_prompt: bool = False

    def fits(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether query [1, H, M, D] has as many tokens as the step, and the key is a pool."""
        return query.shape[2] == len(self.step["positions"]) and len(key) > 1

    def work(self, shape: AttentionShape) -> Work:
        """Raises ValueError for a kind of layers that is not known."""
        if shape not in self.works:
            raise ValueError(
                f"attention must have one of the shapes that the model had when it was wrapped, "
                f"{', '.join(map(str, self.works))}, got {shape}; wrap the model again"
            )
        return self.works[shape]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    stand_plan: KernelPlan | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of packed tokens over their own rows' slots.

    query [1, H, M, D] rotated; key [P, Hkv, S, D] and value [P, Hkv, S, E]: a layer's whole pool of pages; result
    [1, M, H, E].
    `attention_mask` is None by construction, as in `stand.forward.tree_attention`.
    """
    if stand_plan is None:
        stand_plan = running_plan(query, key)
    if stand_plan is None:
        raise plain_forward_error(f"the {KERNEL_ATTENTION_NAME} attention")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    latent = latent_keys_of(module)
    shape = AttentionShape.seen(query, key, value, sliding_window, is_latent=latent is not None)
    work = stand_plan.work(shape)
    step, places = stand_plan.step, work.num_partials * shape.num_heads
    query = query if latent is None else latent.absorbed(query)
    mixed = tree_attention(
        query[0].transpose(0, 1),
        key,
        value,
        step["pages"],
        step["ancestors"],
        step["positions"],
        work.items,
        work.partial_starts,
        stand_plan.partials[: places * shape.sizes.mixed].view(-1, shape.num_heads, shape.sizes.mixed),
        stand_plan.log_sums[:places].view(-1, shape.num_heads),
        scale,
        work.tile_tokens,
        shape.window,
        softcap or 0.0,
        s_aux,
        latent is not None,
    )[None]
    return (mixed if latent is None else latent.expanded(mixed)), None


AttentionInterface.register(KERNEL_ATTENTION_NAME, attend)
