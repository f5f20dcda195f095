"""EAGLE-1 (arXiv 2401.15077): a head of one decoder layer that extrapolates the target's features."""
