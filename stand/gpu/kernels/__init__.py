"""Triton kernels, one per file, each with the launcher that checks its arguments."""
