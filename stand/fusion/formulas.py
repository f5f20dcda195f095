"""The formulas that fused modules have: which rule a norm follows, which activation a gate has."""

ROUND_FIRST = 0  # weight * round(normal): Llama, Qwen, Mistral, Phi
SCALE_FIRST = 1  # round(weight * normal): OLMo 2
ONE_PLUS = 2  # round((1 + weight) * normal): Gemma
RULES = (ROUND_FIRST, SCALE_FIRST, ONE_PLUS)
NO_NORM = -1  # heads turn as they are

SILU = 0
GELU_TANH = 1
GELU_ERF = 2
ACTIVATIONS = (SILU, GELU_TANH, GELU_ERF)
