"""The step on a GPU: Triton kernels, a packed step captured as one graph, fused modules.

Nothing here is needed on a CPU, and importing `stand` does not import it. Every kernel also runs on CPU tensors under
Triton's interpreter (TRITON_INTERPRET=1, set before the first import), which is how it is tested without a GPU.
"""
