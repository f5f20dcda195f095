"""One verification rule per file, and what several of them compute."""
