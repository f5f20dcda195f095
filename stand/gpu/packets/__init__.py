"""What the host tells the device about one step, in arrays that travel as one copy."""
