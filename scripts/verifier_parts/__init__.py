"""What compare_verifiers.py consists of."""
