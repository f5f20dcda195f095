"""Fills the arrays of a packed step from its drafts in one pass, without Python per node: see packing.pxi."""

from stand.step_compiled import ListArrays, StepArrays, fill_laws, kept_paths, outgrown

__all__ = ["ListArrays", "StepArrays", "fill_laws", "kept_paths", "outgrown"]
