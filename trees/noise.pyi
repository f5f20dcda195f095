from collections.abc import Sequence

import numpy as np

DRAFT: int
ACCEPT: int
RESAMPLE: int
TARGET: int
GOLDEN_GAMMA: int
FIRST_FACTOR: int
SECOND_FACTOR: int

Numbers = int | Sequence[int] | np.ndarray

def uniforms(seed: int, stream: int, rows: Numbers, steps: Numbers, nodes: Numbers, *, slot: int = 0) -> np.ndarray: ...
def node_uniforms(
    seed: int,
    stream: int,
    row_numbers: np.ndarray,
    step_numbers: np.ndarray,
    row_offsets: np.ndarray,
    node_depths: np.ndarray | None = None,
    *,
    out: np.ndarray | None = None,
) -> np.ndarray: ...
def fill_tests(
    seed: int,
    row_numbers: np.ndarray,
    step_numbers: np.ndarray,
    row_offsets: np.ndarray,
    accept: np.ndarray,
    resample: np.ndarray,
) -> None: ...
def step_keys(seed: int, stream: int, rows: Numbers, steps: Numbers) -> np.ndarray: ...
