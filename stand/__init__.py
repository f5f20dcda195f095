"""Faster test-time scaling for reasoning models, with the same output distribution.

    import stand
    engine = stand.wrap(model, tokenizer)
    output = engine.generate(["..."], num_return_sequences=16, max_new_tokens=4096, temperature=0.6, top_p=0.95)

Names are loaded on first use, so that `stand.trees` imports in milliseconds, without torch. It is all that a plain
`pip install stand-decoding` needs; the rest comes with `stand-decoding[engine]`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING

from stand.extra import MissingExtraError, has_engine

if TYPE_CHECKING:
    from stand.drafters.blended import BlendedDrafter
    from stand.drafters.costs.step_cost import CostTable
    from stand.drafters.dflash.drafter import DFlashDrafter
    from stand.drafters.dflash.laws import DFlashLaws
    from stand.drafters.draft_model import ModelDrafter
    from stand.drafters.drafter import Drafter, DraftRequest, Lesson
    from stand.drafters.eagle.drafter import EagleDrafter
    from stand.drafters.eagle.laws import EagleLaws
    from stand.drafters.fixed_shape import FixedShapeDrafter
    from stand.drafters.law_source import LawSource
    from stand.drafters.neighbours.laws import NeighbourLaws
    from stand.drafters.prompt_lookup import PromptLookupDrafter
    from stand.drafters.streams.drafter import StreamingDrafter
    from stand.drafters.streams.laws import StreamLaws
    from stand.drafters.token_recycling import TokenRecyclingDrafter
    from stand.engine import Engine
    from stand.forward.self_check import UnsupportedModelError
    from stand.laws.grammars.after_thoughts import AfterThoughts
    from stand.laws.grammars.thinking_budget import ThinkingBudget
    from stand.laws.logprobs import TokenLogprobs
    from stand.laws.output_penalties import OutputPenalties
    from stand.output import GenerationOutput
    from stand.scheduling.open_run import OpenRun
    from stand.scheduling.request import Request, Trajectory
    from stand.scheduling.run import Run
    from stand.stats import Stats
    from stand.texts.confidence import LowConfidence
    from stand.trees import BlendedLookup, LookupTree, OutsideLaws, TokenMasks, TreeShape, merge_lookups
    from stand.verifiers import Verifier
    from stand.wrapping import wrap

# A program that is run in the source folder imports that, whatever is installed.
if any(importlib.util.find_spec(f"stand.{part}") is None for part in ("_cyutility", "trees")):
    raise ImportError(
        f"stand must be built before it is imported, got the source folder {os.path.dirname(__path__[0])}, which was "
        "not built; run in another folder, where what is installed is found, or pip install --editable this one",
        name="stand",
    )

__version__ = "0.1.0"

_HOMES = {
    "AfterThoughts": "stand.laws.grammars.after_thoughts",
    "BlendedDrafter": "stand.drafters.blended",
    "BlendedLookup": "stand.trees",
    "CostTable": "stand.drafters.costs.step_cost",
    "DFlashDrafter": "stand.drafters.dflash.drafter",
    "DFlashLaws": "stand.drafters.dflash.laws",
    "DraftRequest": "stand.drafters.drafter",
    "Drafter": "stand.drafters.drafter",
    "EagleDrafter": "stand.drafters.eagle.drafter",
    "EagleLaws": "stand.drafters.eagle.laws",
    "Engine": "stand.engine",
    "FixedShapeDrafter": "stand.drafters.fixed_shape",
    "GenerationOutput": "stand.output",
    "LawSource": "stand.drafters.law_source",
    "Lesson": "stand.drafters.drafter",
    "LookupTree": "stand.trees",
    "LowConfidence": "stand.texts.confidence",
    "ModelDrafter": "stand.drafters.draft_model",
    "NeighbourLaws": "stand.drafters.neighbours.laws",
    "OpenRun": "stand.scheduling.open_run",
    "OutputPenalties": "stand.laws.output_penalties",
    "OutsideLaws": "stand.trees",
    "PromptLookupDrafter": "stand.drafters.prompt_lookup",
    "Request": "stand.scheduling.request",
    "Run": "stand.scheduling.run",
    "Stats": "stand.stats",
    "StreamLaws": "stand.drafters.streams.laws",
    "StreamingDrafter": "stand.drafters.streams.drafter",
    "ThinkingBudget": "stand.laws.grammars.thinking_budget",
    "TokenLogprobs": "stand.laws.logprobs",
    "TokenMasks": "stand.trees",
    "TokenRecyclingDrafter": "stand.drafters.token_recycling",
    "Trajectory": "stand.scheduling.request",
    "TreeShape": "stand.trees",
    "UnsupportedModelError": "stand.forward.self_check",
    "Verifier": "stand.verifiers",
    "merge_lookups": "stand.trees",
    "wrap": "stand.wrapping",
}
_PACKAGES = ("trees", "verifiers")

__all__ = [
    "AfterThoughts",
    "BlendedDrafter",
    "BlendedLookup",
    "CostTable",
    "DraftRequest",
    "Drafter",
    "DFlashDrafter",
    "DFlashLaws",
    "EagleDrafter",
    "EagleLaws",
    "Engine",
    "FixedShapeDrafter",
    "GenerationOutput",
    "LawSource",
    "Lesson",
    "LookupTree",
    "LowConfidence",
    "ModelDrafter",
    "NeighbourLaws",
    "OpenRun",
    "OutputPenalties",
    "OutsideLaws",
    "PromptLookupDrafter",
    "Request",
    "Run",
    "Stats",
    "StreamLaws",
    "StreamingDrafter",
    "ThinkingBudget",
    "TokenLogprobs",
    "TokenMasks",
    "TokenRecyclingDrafter",
    "Trajectory",
    "TreeShape",
    "UnsupportedModelError",
    "Verifier",
    "merge_lookups",
    "wrap",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module 'stand' has no attribute {name!r}; it offers {', '.join(__all__)}")
    home = _HOMES.get(name, f"stand.{name}")
    if home != "stand.trees" and not has_engine():
        raise MissingExtraError(f"stand.{name}")
    module = importlib.import_module(home)
    return module if name in _PACKAGES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_PACKAGES])
