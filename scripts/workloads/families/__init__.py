"""Kinds of generated problems: how each is drawn, stated, answered and worked out."""
