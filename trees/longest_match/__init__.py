"""STAND's lookup (arXiv 2506.04708): the longest known context decides; drafts fill a fixed shape."""
