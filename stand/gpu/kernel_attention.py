"""The tree attention kernel as a transformers attention function: what a captured step runs in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from stand.gpu.kernels.attention import tree_attention

KERNEL_ATTENTION_NAME = "stand_tree_kernel"


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The step's arrays (see `StepPacket`) and room for the partial results of split keys."""

    step: Mapping[str, torch.Tensor]
    tile_tokens: int
    partials: torch.Tensor  # [P, H, D] float32; none where no row can be split
    log_sums: torch.Tensor  # [P, H] float32


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

    query [1, H, M, D] rotated; key, value [P, Hkv, S, D]: a layer's whole pool of pages; result [1, M, H, D].
    `attention_mask` is None by construction, as in `stand.forward.tree_attention`.
    """
    if stand_plan is None:
        raise RuntimeError(
            f"the {KERNEL_ATTENTION_NAME} attention needs the plan of a step, got a plain forward; "
            "call the model through stand.Engine, or set another attention implementation"
        )
    step = stand_plan.step
    mixed = tree_attention(
        query[0].transpose(0, 1),
        key,
        value,
        step["pages"],
        step["ancestors"],
        step["positions"],
        step["items"],
        step["partial_starts"],
        stand_plan.partials,
        stand_plan.log_sums,
        query.shape[3] ** -0.5 if scaling is None else scaling,
        stand_plan.tile_tokens,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
    )
    return mixed[None], None


AttentionInterface.register(KERNEL_ATTENTION_NAME, attend)
