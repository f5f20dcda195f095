"""The parts of abuse.py: tries of one kind each, and the child processes that they run in."""
