"""EAGLE-1 (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840): heads that go on from the target's hidden states."""
