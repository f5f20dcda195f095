"""Models that other libraries run: what those of llama.cpp and of MLX have in common here."""
