"""Where other libraries plug the engine in, one module per library's door."""
