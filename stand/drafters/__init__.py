"""Who guesses: the protocol of a drafter, and every drafter of this project."""
