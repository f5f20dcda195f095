"""`token` and `block` on random pairs of laws with a known distance: expected tokens, all drafts enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from stand.trees import DraftBatch
from stand.verifiers import TargetRows, get_verifier
from verifier_parts.expected_kept import expected_kept

VOCABULARY_SIZE = 3
DISTANCES = (0.05, 0.1, 0.2, 0.3, 0.4)
CONCENTRATIONS = {"flat": 1.0, "peaked": 0.1}  # of the Dirichlet law that the target's law is drawn from


def pair_of_laws(
    generator: np.random.Generator, distance: float, concentration: float
) -> tuple[np.ndarray, np.ndarray]:
    """(p, q) over VOCABULARY_SIZE tokens with total variation `distance`: q lies between p and another random law."""
    while True:
        target, other = generator.dirichlet(np.full(VOCABULARY_SIZE, concentration), 2)
        largest = np.abs(target - other).sum() / 2
        if largest >= distance:
            return target, target + (distance / largest) * (other - target)


def all_chains(proposal: np.ndarray, gamma: int) -> tuple[DraftBatch, np.ndarray]:
    """(every chain of gamma tokens, its probability), each token drawn from `proposal` whatever comes before it."""
    size = len(proposal)
    tokens = np.array(list(itertools.product(range(size), repeat=gamma)), dtype=np.int32)
    count = len(tokens)
    starts = np.zeros((count, gamma + 1), dtype=np.int32)
    starts[:, 1:] = tokens
    support = np.tile(np.arange(size, dtype=np.int32), (count * (gamma + 1), 1))
    support[gamma :: gamma + 1] = -1
    law = np.tile(proposal, (count * (gamma + 1), 1))
    law[:: gamma + 1] = 0.0
    batch = DraftBatch(
        token_ids=starts.reshape(-1),
        parents=np.tile(np.arange(-1, gamma, dtype=np.int32), count),
        offsets=np.arange(0, (count + 1) * (gamma + 1), gamma + 1, dtype=np.int32),
        depths=np.tile(np.arange(gamma + 1, dtype=np.int32), count),
        ranks=np.zeros(count * (gamma + 1), dtype=np.int32),
        support_ids=support,
        law=law,
    )
    return batch, proposal[tokens].prod(axis=1)


def expected_tokens(rule: str, target: np.ndarray, proposal: np.ndarray, gamma: int) -> float:
    """Tokens per step of `rule`, the next token included, where both laws are the same after every context."""
    batch, chances = all_chains(proposal, gamma)
    rows = TargetRows(torch.from_numpy(np.tile(target, (batch.num_nodes, 1))))
    return 1.0 + float(chances @ expected_kept(get_verifier(rule), batch, rows))


def synthetic_gains(num_pairs: int, gammas: Sequence[int], *, seed: int = 0) -> list[dict[str, object]]:
    """Per kind of target, distance and gamma: mean tokens per step of both rules, and per cent that `block` gains."""
    gains = []
    for kind, concentration in CONCENTRATIONS.items():
        for distance in DISTANCES:
            for gamma in gammas:
                generator = np.random.default_rng(seed)
                kept = np.array([
                    [expected_tokens(rule, *laws, gamma) for rule in ("token", "block")]
                    for laws in (pair_of_laws(generator, distance, concentration) for _ in range(num_pairs))
                ])  # fmt: skip
                percent = 100 * (kept[:, 1] / kept[:, 0] - 1)
                gains.append({
                    "target": kind, "distance": distance, "gamma": gamma, "token": kept[:, 0].mean(),
                    "block": kept[:, 1].mean(), "gain": percent.mean(),
                    "gain_error": percent.std(ddof=1) / num_pairs**0.5,
                })  # fmt: skip
    return gains
