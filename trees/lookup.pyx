"""The lookup tree."""
