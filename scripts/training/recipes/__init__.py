"""How heads of one kind are made, trained and judged; one kind per file."""
