"""Speculative Streaming (arXiv 2402.11131), lossless: streams beside a frozen target guess several tokens at once."""
