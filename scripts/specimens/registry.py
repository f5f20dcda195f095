"""Specimens by the module of `stand/gpu/kernels` that their kernels are in."""

from __future__ import annotations

from collections.abc import Callable

from specimens import attention, experts, laws, modules, recurrent, rules
from specimens.specimen import Specimen

SPECIMENS: dict[str, Callable[[], list[Specimen]]] = {
    "attention": attention.of_attention,
    "compact": attention.of_compact,
    "convolve": recurrent.of_convolve,
    "delta_updates": recurrent.of_delta_updates,
    "draw": rules.of_draw,
    "experts": experts.of_experts,
    "filter": laws.of_filter,
    "follow": rules.of_follow,
    "gated_norm": modules.of_gated_norm,
    "linear_attention": recurrent.of_linear_attention,
    "merge": attention.of_merge,
    "norm": modules.of_norm,
    "pairs": experts.of_pairs,
    "path_decays": recurrent.of_path_decays,
    "product": modules.of_product,
    "race": rules.of_race,
    "rope": modules.of_rope,
    "rotate": modules.of_rotate,
    "route": experts.of_route,
    "softmax": laws.of_softmax,
    "swiglu": modules.of_swiglu,
    "top_tokens": laws.of_top_tokens,
    "traverse": rules.of_traverse,
}
