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
    from stand.drafter import BlendedDrafter, Drafter, LookupDrafter
    from stand.engine import Engine, wrap
    from stand.model_drafter import ModelDrafter
    from stand.output import GenerationOutput
    from stand.planning import GammaPlan, estimate_alpha, estimate_cost, plan_gamma
    from stand.prompt_lookup import PromptLookupDrafter
    from stand.sampling import SamplingParams
    from stand.stats import Stats
    from stand.step_cost import CostTable
    from stand.support import UnsupportedModelError
    from stand.token_recycling import TokenRecyclingDrafter

__version__ = "0.1.0"

_HOMES = {
    "BlendedDrafter": "stand.drafter",
    "CostTable": "stand.step_cost",
    "Drafter": "stand.drafter",
    "Engine": "stand.engine",
    "GammaPlan": "stand.planning",
    "GenerationOutput": "stand.output",
    "LookupDrafter": "stand.drafter",
    "ModelDrafter": "stand.model_drafter",
    "PromptLookupDrafter": "stand.prompt_lookup",
    "SamplingParams": "stand.sampling",
    "Stats": "stand.stats",
    "TokenRecyclingDrafter": "stand.token_recycling",
    "UnsupportedModelError": "stand.support",
    "estimate_alpha": "stand.planning",
    "estimate_cost": "stand.planning",
    "plan_gamma": "stand.planning",
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
