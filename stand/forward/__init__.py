"""The packed forward: many rows and their drafts in one pass over an unmodified transformers model."""
