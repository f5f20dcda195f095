"""Faster test-time scaling for reasoning models, with the same output distribution.

    import stand
    engine = stand.wrap(model, tokenizer)
    output = engine.generate(["..."], num_return_sequences=16, max_new_tokens=4096, temperature=0.6, top_p=0.95)

Names are loaded on first use, so that `stand.trees` imports in milliseconds, without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stand.drafters.blended import BlendedDrafter
    from stand.drafters.chain_length import GammaPlan, estimate_alpha, estimate_cost, plan_gamma
    from stand.drafters.draft_model import ModelDrafter
    from stand.drafters.drafter import Drafter
    from stand.drafters.fixed_shape import LookupDrafter
    from stand.drafters.prompt_lookup import PromptLookupDrafter
    from stand.drafters.step_cost import CostTable
    from stand.drafters.token_recycling import TokenRecyclingDrafter
    from stand.engine import Engine, wrap
    from stand.forward.self_check import UnsupportedModelError
    from stand.output import GenerationOutput
    from stand.sampling import SamplingParams
    from stand.stats import Stats

__version__ = "0.1.0"

_HOMES = {
    "BlendedDrafter": "stand.drafters.blended",
    "CostTable": "stand.drafters.step_cost",
    "Drafter": "stand.drafters.drafter",
    "Engine": "stand.engine",
    "GammaPlan": "stand.drafters.chain_length",
    "GenerationOutput": "stand.output",
    "LookupDrafter": "stand.drafters.fixed_shape",
    "ModelDrafter": "stand.drafters.draft_model",
    "PromptLookupDrafter": "stand.drafters.prompt_lookup",
    "SamplingParams": "stand.sampling",
    "Stats": "stand.stats",
    "TokenRecyclingDrafter": "stand.drafters.token_recycling",
    "UnsupportedModelError": "stand.forward.self_check",
    "estimate_alpha": "stand.drafters.chain_length",
    "estimate_cost": "stand.drafters.chain_length",
    "plan_gamma": "stand.drafters.chain_length",
    "wrap": "stand.engine",
}

__all__ = [
    "BlendedDrafter",
    "CostTable",
    "Drafter",
    "Engine",
    "GammaPlan",
    "GenerationOutput",
    "LookupDrafter",
    "ModelDrafter",
    "PromptLookupDrafter",
    "SamplingParams",
    "Stats",
    "TokenRecyclingDrafter",
    "UnsupportedModelError",
    "estimate_alpha",
    "estimate_cost",
    "plan_gamma",
    "wrap",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stand' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
