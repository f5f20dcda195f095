"""Norms, gates and rotary positions, compiled for CPUs: see row_kernels.pxi."""

from stand.step_compiled import gate_rows, norm_rows, turn_rows

__all__ = ["gate_rows", "norm_rows", "turn_rows"]
