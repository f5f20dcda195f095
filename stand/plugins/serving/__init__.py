"""What the ways into serving engines, vLLM and SGLang, have in common."""
