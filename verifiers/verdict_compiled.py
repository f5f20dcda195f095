"""Verdicts on a CPU, compiled: see verdict_compiled.pxi."""

from stand.trees.compiled import draw_residuals, draw_tokens, gained, traversal_thresholds

__all__ = ["draw_residuals", "draw_tokens", "gained", "traversal_thresholds"]
