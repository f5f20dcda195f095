"""Laws that followed the same token in the target's most similar hidden states."""
