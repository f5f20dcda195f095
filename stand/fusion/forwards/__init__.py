"""Fused forwards, one kind of module per file."""
