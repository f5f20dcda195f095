"""What comes out of the host's draws, exactly: tokens by their weights, and the paths that they lead to."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from exact import (
    EX2,
    EX3,
    compare,
    enumerate_drafts,
    pack,
    shaped,
    target_rows,
    with_replacement,
    without_replacement,
)
from exact_draws import draw_laws, support_first

from stand.trees import compiled
from stand.verifiers import TargetRows, draw_tokens, get_verifier
from stand.verifiers.draw import BLOCK_SIZE, draw_residuals

BOUND = 1e-9
COUNT, SIZE = 40, 7


def compiled_tokens(rows: torch.Tensor, points: np.ndarray) -> np.ndarray:
    return compiled.draw_tokens(rows.numpy(), np.arange(len(rows)), points)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("draw_tokens", [draw_tokens, compiled_tokens])
def test_tokens_by_their_weights(draw_tokens, dtype):
    generator = np.random.default_rng(1)
    weights = (generator.random((COUNT, SIZE)) * (generator.random((COUNT, SIZE)) < 0.7) + 1e-30).astype(dtype)
    rows = torch.from_numpy(weights)
    laws = draw_laws(
        lambda points: torch.from_numpy(draw_tokens(rows, points.numpy())), np.tile(np.arange(SIZE), (COUNT, 1))
    )
    weights = weights.astype(np.float64)
    assert np.abs(laws - weights / weights.sum(axis=1, keepdims=True)).max() < BOUND


def compiled_residuals(probs, support, mass, scale, points):
    return compiled.draw_residuals(probs, np.arange(len(probs)), support, mass, scale, points)


def arrays(probs, support, mass, scale, points):
    parts = {"mass": torch.from_numpy(mass), "scale": torch.from_numpy(scale)}
    return draw_residuals(torch.from_numpy(probs.copy()), support_ids=support, uniforms=points, **parts)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("draw", [compiled_residuals, arrays])
def test_residuals_by_their_weights(draw, dtype):
    """Masses on a support, a scale elsewhere; padding, masses and scales of zero among them."""
    generator = np.random.default_rng(2)
    probs = generator.dirichlet(np.full(SIZE, 0.5), COUNT).astype(dtype)
    support = np.stack([generator.permutation(SIZE)[:3] for _ in range(COUNT)]).astype(np.int32)
    support[::4, 2] = -1
    mass = generator.random((COUNT, 3)) * (generator.random((COUNT, 3)) < 0.8) * (support >= 0)
    scale = generator.random(COUNT) * (np.arange(COUNT) % 5 > 0)
    weights = probs.astype(np.float64) * scale[:, None]
    for row in range(COUNT):
        weights[row, support[row][support[row] >= 0]] = mass[row][support[row] >= 0]
    kept = weights.sum(axis=1) > 0
    probs, support, mass, scale, weights = (part[kept] for part in (probs, support, mass, scale, weights))
    orders = support_first(support, SIZE)
    laws = draw_laws(lambda points: torch.from_numpy(draw(probs, support, mass, scale, points.numpy())), orders)
    assert np.abs(laws - weights / weights.sum(axis=1, keepdims=True)).max() < BOUND


@pytest.mark.parametrize("draw_tokens", [draw_tokens, compiled_tokens])
def test_one_long_row_is_drawn_from_to_its_end(draw_tokens):
    """More blocks of tokens than rows: the last block counts like the first."""
    size = 5 * BLOCK_SIZE // 2
    weights = np.random.default_rng(4).random((1, size)).astype(np.float32)
    edges = weights[0].astype(np.float64).cumsum()
    points = (edges - weights[0] / 2) / edges[-1]
    drawn = [int(draw_tokens(torch.from_numpy(weights), np.array([point]))[0]) for point in points[:: size // 50]]
    assert drawn == list(range(0, size, size // 50))


@dataclass
class GivenDraws:
    """Uniforms per packed node, for rows of one draft each: `draws[row][depth]` is what is drawn with after depth."""

    draws: list[list[float]]

    def target(self, rows, depth):
        return np.array([self.draws[row][depth] for row in rows])


def match_report(world, policy, *, shift=0.0):
    """`match` with every way in which the tokens at its depths can be drawn: one uniform per depth, as it is keyed.

    Along a path a depth is met once, so the uniforms of a path are independent. The edges of all nodes at a depth cut
    its uniform into pieces; each piece is tried at its middle.
    """
    outcomes, verifier = [], get_verifier("match")
    for weight, draft in enumerate_drafts(world, policy):
        rows = target_rows(world, [draft]).rows(np.arange(len(draft)))
        cuts = []
        for depth in range(1 + max(draft.depth(node) for node in range(len(draft)))):
            nodes = [node for node in range(len(draft)) if draft.depth(node) == depth]
            edges = np.unique(np.concatenate([[0.0, 1.0], rows[nodes].cumsum(1).numpy().ravel()]).round(15))
            cuts.append([(high - low, (high + low) / 2) for low, high in zip(edges[:-1], edges[1:], strict=True)])
        ways = list(product(*cuts))
        noise = GivenDraws([[min(point + shift, 1 - 1e-12) for _, point in way] for way in ways])
        batch = pack(world, [draft] * len(ways))
        verdicts = verifier.verify(batch, TargetRows(rows.repeat(len(ways), 1)), noise)
        for way, path, token in zip(ways, verdicts.accepted, verdicts.next_tokens, strict=True):
            share = float(weight) * float(np.prod([length for length, _ in way]))
            stop = int(path[-1]) if len(path) else 0
            outcomes.append((share, draft.context(stop), np.eye(world.vocabulary_size)[token].tolist()))
    return compare(world.as_float(), outcomes)


@pytest.mark.parametrize("world", [EX2, EX3], ids=["EX2", "EX3"])
@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (3,)])
def test_match_follows_what_it_drew(world, widths):
    """Equal siblings among the drafts: the first of them is followed."""
    for child_law in (with_replacement, without_replacement):
        if child_law is with_replacement and widths == (2, 1):
            continue  # as many drafts as all others together
        assert match_report(world, shaped(child_law, *widths)).distance < BOUND


def test_uniforms_that_are_off_are_seen():
    assert match_report(EX2, shaped(with_replacement, 1, 1), shift=0.2).distance > 0.02
