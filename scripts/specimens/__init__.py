"""Specimens: kernels of stand/gpu/kernels, specialised as for common models, to be compiled without a GPU."""
