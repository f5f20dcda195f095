"""Compiled Triton kernels, run without a GPU: a slow machine for the PTX that they are compiled to.

`driver.compiled_kernels` puts it in the place of Triton's driver, so production launchers choose their specialisations,
compile them for sm_80 or sm_90 and launch them as on a GPU. Threads of a block run side by side in NumPy arrays.
Beside the results the machine judges what a GPU would leave to chance: reads beyond a tensor, misaligned accesses, and
memory that two threads touch without a barrier between them.

What it cannot show: what the assembler (ptxas) makes of the PTX, the GPU's own rounding of approximate instructions
and of tensor cores, and speed.
"""
