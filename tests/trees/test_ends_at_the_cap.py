"""Ends of texts that a lookup remembers while contexts lose their memory to others."""

import numpy as np

from stand.trees import BlendedLookup

MB = 1 << 20


def walk(rng: np.random.Generator, successors: np.ndarray, size: int) -> np.ndarray:
    """int32[size]: each token one of the successors of the one before, now and then any."""
    tokens = [0]
    while len(tokens) < size:
        is_known = rng.random() < 0.8
        tokens.append(int(rng.choice(successors[tokens[-1]])) if is_known else int(rng.integers(len(successors))))
    return np.array(tokens, dtype=np.int32)


def test_remembered_ends_stay_sound_while_contexts_are_evicted():
    """Only the ends of contexts that go are forgotten: `check` compares those kept with walks from single tokens."""
    lookup = BlendedLookup(max_bytes=MB)
    rng = np.random.default_rng(1)
    successors = rng.integers(0, 300, (300, 6))
    texts = [walk(rng, successors, 900) for _ in range(40)]
    ends = np.zeros(len(texts), dtype=int)
    while (ends < 900).any():
        for text, end in enumerate(ends):
            lookup.learn(texts[text][:end], texts[text][end : end + 3])
        ends += 3
        if ends[0] % 30 == 0:
            lookup.check()
    assert lookup.num_evicted > 10_000
