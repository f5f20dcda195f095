"""What the commands that replay recordings consist of."""
