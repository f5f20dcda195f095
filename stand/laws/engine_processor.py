"""Logits processors that need more than the tokens of a text, so an engine alone can run them."""

from __future__ import annotations

from transformers import LogitsProcessor


class EngineProcessor(LogitsProcessor):
    """For `logits_processors=` of this engine, `custom_generate` included; transformers by itself cannot call it."""

    def __call__(self, input_ids: object, scores: object) -> object:
        raise RuntimeError(
            f"{type(self).__name__} must be given to an engine of stand, and as its own class, none that derives from "
            "it, got a call; use engine.generate, or model.generate with custom_generate=stand_generate"
        )
