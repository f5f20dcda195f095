"""Faster test-time scaling for reasoning models, with the same output distribution."""
