"""What compiled code of several packages shares: vectors, the exponential, bfloat16, torch's threads."""
