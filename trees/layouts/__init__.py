"""Drafts in the layouts of serving engines (C++, Cython)."""
