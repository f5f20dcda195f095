"""How far a faster way to compute a module may be from the module itself."""

import torch

# Largest difference, as a share of the largest value of its row, that rounding explains: two steps of the last place
# of the 16-bit types.
MODULE_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
