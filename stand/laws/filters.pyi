import numpy as np

VECTORS: tuple[str, ...]

def filter_laws(
    scores: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    count: int = 0,
    vectors: str | None = None,
    num_threads: int = 1,
    in_threads: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
