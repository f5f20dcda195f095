"""Runs of trained heads beside captured steps, recorded as these are."""
