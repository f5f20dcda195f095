"""Kernels from logits to the verdict: laws, their filters, draws and rules."""
