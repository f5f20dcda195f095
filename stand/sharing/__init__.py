"""Processes that tell each other what they learn, through files in a folder."""
