"""Drafts and texts in the layouts of serving engines (C++, Cython)."""
