"""The parts of the GPU benchmark."""
