"""Deliberate faults in the sources, for the test of the tests."""
