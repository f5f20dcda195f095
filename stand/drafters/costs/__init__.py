"""What a step costs by the tokens it holds: measured, kept, followed, or computed."""
