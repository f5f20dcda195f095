"""Heads that guess a block of tokens in one run: DFlash, DFlash 2 and DSpark."""
