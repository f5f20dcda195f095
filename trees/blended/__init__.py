"""The blended lookup: all context lengths vote with learned odds; drafts grow under a node budget."""
