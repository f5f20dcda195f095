"""Linear layers and attention on a CPU for the few tokens of a speculative step, compiled."""
