"""What check_law.py consists of."""
