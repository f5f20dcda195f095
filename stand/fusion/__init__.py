"""Fused forwards of a model's modules, each proven equal on the loaded weights before it is used."""
