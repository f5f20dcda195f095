"""The step on a GPU: Triton kernels, and a packed step that is captured as one graph.

Nothing here is needed on a CPU, and importing `stand` does not import it. Every kernel also runs on CPU tensors under
Triton's interpreter (TRITON_INTERPRET=1, set before the first import), which is how it is tested without a GPU.
"""
