"""The formulas of fused modules: which rule a norm follows, where its gate comes, which activation a gate has, and
how many tokens experts take."""

ROUND_FIRST = 0  # weight * round(normal): Llama, Qwen, Mistral, Phi
SCALE_FIRST = 1  # round(weight * normal): OLMo 2
ONE_PLUS = 2  # round((1 + weight) * normal): Gemma
RULES = (ROUND_FIRST, SCALE_FIRST, ONE_PLUS)
NO_NORM = -1  # heads turn as they are

# Which components of a head turn together, and which columns of cos and sin are theirs.
HALVES = 0  # i and i + rotary / 2, by columns i and i + rotary / 2: Llama, Qwen
PAIRS = 1  # 2i and 2i + 1, by column i: GLM-4, ERNIE 4.5
PAIRED_COLUMNS = 2  # 2i and 2i + 1, by columns 2i and 2i + 1: Cohere
PAIRINGS = (HALVES, PAIRS, PAIRED_COLUMNS)

NORM_FIRST = 0  # weight * round(normal), then the gate: Qwen3.5
GATE_FIRST = 1  # the norm of what went through the gate: Mamba-2
GATE_ORDERS = (NORM_FIRST, GATE_FIRST)

SILU = 0
GELU_TANH = 1
GELU_ERF = 2
ACTIVATIONS = (SILU, GELU_TANH, GELU_ERF)

# What experts have beside these.
CLAMPED = 3  # (up + 1) * gate * sigmoid(alpha * gate), gate and up cut off at a limit: gpt-oss
RELU_SQUARED = 4  # no gate: Nemotron-H
EXPERT_ACTIVATIONS = (*ACTIVATIONS, CLAMPED, RELU_SQUARED)
MOST_EXPERT_TOKENS = 512  # that their kernels take: as many as the largest captured step has
