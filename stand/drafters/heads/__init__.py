"""What trained heads have in common, whatever they guess."""
