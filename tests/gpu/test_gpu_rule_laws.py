"""The law of what a captured step's rules keep and draw, enumerated: all drafts of tiny worlds, laws in float32.

Traversal's kernel runs in Triton's interpreter, all drafts as rows of one launch.
"""

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from exact import (
    EX2,
    EX3,
    Report,
    compare,
    enumerate_drafts,
    mixed_sampled_first,
    pack,
    shaped,
    target_rows,
    with_replacement,
    without_replacement,
)
from exact_draws import LARGEST, draw_laws, support_first
from page_tables import one_page_each
from plain_kernels import draw_nodes as plain_draw
from plain_kernels import race as plain_race
from traversal_arrays import traversal_arrays
from verdicts import blank_verdict
from waitless_draws import draw_residuals_at

from stand.gpu.device_rule import MatchRule, follow_drawn
from stand.gpu.kernels.verification.race import race
from stand.gpu.kernels.verification.traverse import traverse
from stand.gpu.packets.step_packet import StepPacket
from stand.gpu.packets.step_size import StepSize
from stand.gpu.packets.work_list import Splitting, Tiling
from stand.trees import DraftBatch, DraftTree
from stand.verifiers import VerifierNoise
from stand.verifiers.draw import tokens_at

BOUND = 2e-6  # total variation of laws in float32
WORLDS = {"EX2": EX2, "EX3": EX3}


# Traversal: thresholds, the walk, the residual draw.


def tensors_of(batch: DraftBatch, uniforms: np.ndarray) -> list[torch.Tensor]:
    return traversal_arrays(dataclasses.replace(batch, law=batch.law.astype(np.float32)), uniforms)


def walks(parents: tuple[int, ...]) -> dict[tuple[bool, ...], int]:
    """{which nodes pass: local node where the kernel stops}, on a draft whose tests can all end either way."""
    size = len(parents)
    support = np.tile(np.arange(12, dtype=np.int32), (size, 1))
    tokens = np.arange(size, dtype=np.int32)
    law = np.full((size, 12), 0.5 / 11, dtype=np.float32)
    law[np.arange(size), tokens] = 0.5
    law[0] = 0.0
    patterns = list(product([False, True], repeat=size - 1))
    batch = DraftBatch.concatenate([DraftTree(tokens, np.array(parents, np.int32), support, law)] * len(patterns))
    uniforms = np.array([[0.0, *(0.0 if passes else LARGEST for passes in pattern)] for pattern in patterns])
    probs = torch.full((batch.num_nodes, 13), 0.7 / 12)
    probs[:, 12] = 0.3  # outside all supports: always owed
    stops, _, _, thresholds = traverse(probs, *tensors_of(batch, uniforms.reshape(-1)))
    thresholds = thresholds.numpy().reshape(len(patterns), size)
    assert np.all((thresholds[:, 1:] > 0) & (thresholds[:, 1:] < 1))
    return dict(zip(patterns, (stops.numpy() - batch.offsets[:-1]).tolist(), strict=True))


def traversal_report(world, policy, *, law_of=lambda batch: batch.law) -> Report:
    """The law of the kernel's thresholds, its walk and the draw after it; `law_of` may record other laws."""
    drafts = enumerate_drafts(world, policy)
    listed = [draft for _, draft in drafts]
    batch = pack(world, listed)
    batch = dataclasses.replace(batch, law=law_of(batch))
    probs = target_rows(world, listed, torch.float32).rows(np.arange(batch.num_nodes))
    arrays = tensors_of(batch, np.zeros(batch.num_nodes))
    _, mass, scale, thresholds = traverse(probs, *arrays)
    support = arrays[3]
    orders = support_first(batch.support_ids, probs.shape[1])
    next_laws = draw_laws(lambda points: draw_residuals_at(probs.clone(), support, mass, scale, points), orders)
    stops_of = {parents: walks(parents) for parents in {tuple(batch[row].parents) for row in range(len(batch))}}
    outcomes = []
    for row, (weight, draft) in enumerate(drafts):
        first, end = batch.offsets[row], batch.offsets[row + 1]
        passing = thresholds[first + 1 : end].numpy()
        for pattern, stop in stops_of[tuple(batch[row].parents)].items():
            share = float(weight) * float(np.prod(np.where(pattern, passing, 1 - passing)))
            if share > 0:
                outcomes.append((share, draft.context(stop), tuple(next_laws[first + stop].tolist())))
    return compare(world.as_float(), outcomes)


POLICIES = {
    "chain2": shaped(with_replacement, 1, 1),
    "without replacement (2,1)": shaped(without_replacement, 2, 1),
    "mixed (2,1)": shaped(mixed_sampled_first, 2, 1),
    "with replacement (2)": shaped(with_replacement, 2),
}
KEPT = {"chain2": (197 / 144, 21 / 25), "without replacement (2,1)": (953 / 576, 57 / 50)}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("world", WORLDS)
def test_traversal_keeps_the_targets_law(world, name):
    report = traversal_report(WORLDS[world], POLICIES[name])
    assert report.distance < BOUND
    if name in KEPT:
        assert report.expected == pytest.approx(KEPT[name][world == "EX3"], abs=1e-6)


def exchanged(batch: DraftBatch) -> np.ndarray:
    """The laws of the first two children, each in the other's place."""
    second = np.flatnonzero(batch.ranks == 1)
    law = batch.law.copy()
    law[second], law[second - 1] = batch.law[second - 1], batch.law[second]
    return law


def flattened(batch: DraftBatch) -> np.ndarray:
    """Laws a thousandth off."""
    law = np.where(batch.law > 0, batch.law + 1e-3, 0.0)
    return law / np.maximum(law.sum(axis=1, keepdims=True), 1e-9)


@pytest.mark.parametrize("law_of", [exchanged, flattened])
def test_a_wrong_law_is_seen(law_of):
    report = traversal_report(EX2, shaped(without_replacement, 2), law_of=law_of)
    assert report.distance > 20 * BOUND


# Match and coupled: what is drawn at every node, and the path of agreements.


def decided(world, listed, probs: torch.Tensor, draw: np.ndarray) -> list[tuple[int, int]]:
    """(local node where it stops, next token) per draft, when `match` draws with uniforms `draw` [M].

    Thousands of nodes: they draw by the kernel's plain twin, equal in test_gpu_draw.py; the rows follow in the kernel.
    """
    batch, rule = pack(world, listed), MatchRule()
    lengths, rows = np.full(len(batch), 9, dtype=np.int64), np.arange(len(batch), dtype=np.int64)
    size = StepSize(batch.num_nodes, len(batch), (Tiling(8, Splitting(1)),), (4 * len(batch),))
    table = one_page_each(len(batch))
    packet = StepPacket(size, torch.device("cpu"), table=table, more=rule.fields(size))
    noise = VerifierNoise(seed=1, rows=rows, steps=rows, positions=rows)
    packet.fill(batch, lengths, rows, table)
    rule.fill(packet.host, batch, noise)
    packet.upload()
    verdict = blank_verdict(len(batch), 64)
    follow_drawn(plain_draw(probs, torch.from_numpy(draw)), probs, packet.device, verdict)
    return list(zip((verdict.stops.numpy() - batch.offsets[:-1]).tolist(), verdict.next_tokens.tolist(), strict=True))


def match_report(world, policy, *, shift: float = 0.0) -> Report:
    """Every node's token drawn in every way, weighed by how much of [0, 1) draws it."""
    drafts = enumerate_drafts(world, policy)
    probs = target_rows(world, [draft for _, draft in drafts], torch.float32).rows(
        np.arange(sum(len(draft) for _, draft in drafts))
    )
    size, first, cases = world.vocabulary_size, 0, []
    orders = np.tile(np.arange(size), (len(probs), 1))
    laws = draw_laws(lambda points: tokens_at(probs, (points - shift).clip(min=0))[0], orders)
    middles = laws.cumsum(axis=1) - laws / 2
    for weight, draft in drafts:
        nodes = np.arange(first, first + len(draft))
        for tokens in product(range(size), repeat=len(draft)):
            share = float(weight) * float(np.prod(laws[nodes, tokens]))
            if share > 0:
                cases.append((share, draft, nodes, middles[nodes, tokens]))
        first += len(draft)
    packed = np.concatenate([nodes for _, _, nodes, _ in cases])
    draw = np.concatenate([points for *_, points in cases]) - shift
    verdicts = decided(world, [draft for _, draft, _, _ in cases], probs[packed], draw.clip(min=0))
    one_hots = np.eye(size).tolist()
    outcomes = [
        (share, draft.context(stop), one_hots[token])
        for (share, draft, _, _), (stop, token) in zip(cases, verdicts, strict=True)
    ]
    return compare(world.as_float(), outcomes)


MATCHED = {
    "chain2": shaped(with_replacement, 1, 1),
    "without replacement (2)": shaped(without_replacement, 2),
    "equal siblings": shaped(with_replacement, 2),
}


@pytest.mark.parametrize("name", MATCHED)
@pytest.mark.parametrize("world", WORLDS)
def test_match_keeps_the_targets_law(world, name):
    """`coupled` follows what it drew by the same code; how it draws is the next test's."""
    report = match_report(WORLDS[world], MATCHED[name])
    assert report.distance < BOUND
    if name == "chain2":
        assert report.expected == pytest.approx((2611 / 5184, 1809 / 5000)[world == "EX3"], abs=1e-6)


def test_uniforms_that_are_a_little_off_are_seen():
    assert match_report(EX2, MATCHED["chain2"], shift=1e-4).distance > 20 * BOUND


def test_the_race_draws_from_its_law():
    """Its noise cannot be chosen, only counted: chi-square over 40,000 keys, 3 degrees of freedom, upper 1e-6 below 31.

    The plain race is the kernel's twin: equal on some keys here, and in test_gpu_race.py.
    """
    law = torch.tensor([[0.45, 0.3, 0.0, 0.2, 0.05]])
    count = 40_000
    rows = np.arange(count)
    noise = VerifierNoise(seed=3, rows=rows, steps=rows, positions=rows)
    batch = DraftBatch(
        token_ids=np.zeros(count, np.int32), parents=np.full(count, -1, np.int32), offsets=np.arange(count + 1),
        depths=np.zeros(count, np.int32), ranks=np.zeros(count, np.int32),
        support_ids=np.full((count, 1), -1, np.int32), law=np.zeros((count, 1), np.float32),
    )  # fmt: skip
    keys = torch.from_numpy(noise.keys_at_nodes(batch))
    winners = plain_race(law.repeat(count, 1), keys)
    counts, expected = np.bincount(winners.numpy(), minlength=5), count * law[0].numpy()
    assert counts[2] == 0
    kept = [0, 1, 3, 4]
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 31
    assert race(law.repeat(30, 1), keys[:30]).tolist() == winners[:30].tolist()
    flat = np.full(5, count / 4)  # control: another law
    assert ((counts - flat)[kept] ** 2 / flat[kept]).sum() > 1000
