"""Rows beyond what fits at once: requests, who is live, prompts' keys, and trajectories as they end."""
