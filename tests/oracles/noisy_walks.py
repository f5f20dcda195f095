"""Texts that mostly repeat themselves, drafts from them, and what a blended lookup learned of them."""

import numpy as np

from stand.trees.blended.file import read_blended_lookup

NUM_ODDS = 14 * (144 + 576) + 3 * 6 * 33


def stream(num_tokens, *, vocabulary=40, seed=0, stay=0.8):
    """A noisy walk: the next token mostly follows from the last two. stay: how often, for all or per token before."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, vocabulary, (vocabulary, vocabulary))
    stays = np.broadcast_to(stay, vocabulary)
    tokens = [0, 1]
    for _ in range(num_tokens - 2):
        likely = table[tokens[-2], tokens[-1]]
        tokens.append(int(likely) if rng.random() < stays[tokens[-1]] else int(rng.integers(0, vocabulary)))
    return np.array(tokens, np.int32)


def draft(lookup, histories, budget, **parameters):
    rows = np.arange(len(histories))
    steps = parameters.pop("steps", np.zeros(len(histories), np.int64))
    return lookup.draft(histories, budget, **({"seed": 1, "rows": rows, "steps": steps} | parameters))


def odds_of(lookup, path):
    lookup.save(path)
    return read_blended_lookup(path, num_odds=NUM_ODDS)[1]["odds"]
