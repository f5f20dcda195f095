import numpy as np

KIND_NUMBERS: dict[str, int]
KINDS: tuple[str, ...]
SHAPED_KINDS: tuple[str, ...]

def draw_children(
    kind: str, probabilities: np.ndarray, uniforms: np.ndarray, num_children: int
) -> tuple[np.ndarray, np.ndarray]: ...
