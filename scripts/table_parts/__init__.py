"""What model_tables.py consists of."""
