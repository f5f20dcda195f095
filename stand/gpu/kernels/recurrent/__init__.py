"""Kernels of layers that keep a state instead of keys."""
