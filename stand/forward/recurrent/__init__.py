"""Layers that keep a state instead of keys, over trees of tokens."""
