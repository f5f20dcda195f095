"""The promise of an adapted draft, tested on the shipped drafters: all joint drafts of a step's rows, and their law.

A draft is a function of its noise, and its noise of the seed. Seeds are tried until the drafts that were seen have all
the probability that their recorded laws give them: the product of what each law gives its own token, summed over the
different drafts, must come to 1. Less means that some drafts never come (two nodes share a random number); more, that
drafts differ in something that no recorded law decided (growth that looked ahead, a child that was dropped).

Then each draft is verified by its exact thresholds, and the law of the sequences that come out of all rows together is
compared with the target's. All of that takes recorded laws at their word; `chi_square` asks how often drafts really
come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch
from exact import Draft, World, full_laws, stop_probabilities

from stand.trees import DraftBatch, DraftTree
from stand.verifiers import TargetRows, ThresholdVerifier, get_verifier

RULES = ["traversal", "rrs", "match"]  # for adapted drafts
SET_RULES = ["ranked_traversal", "ot_traversal"]  # want widths that were settled before the draws
ROUNDING = 1e-6  # recorded laws are float32
PATIENCE = 4  # the search ends when it has found nothing new for this many times as long as until the last find


@dataclass(frozen=True)
class JointDraft:
    key: bytes
    probability: float  # by the recorded laws
    drafts: tuple[DraftTree, ...]  # one per row


def as_if_shaped(joint: Sequence[JointDraft]) -> list[JointDraft]:
    """The same drafts with the claim that they follow a shape, so that rules take them which would refuse them."""
    return [
        replace(each, drafts=tuple(replace(draft, slots=np.arange(draft.num_nodes)) for draft in each.drafts))
        for each in joint
    ]


def joint_drafts(draft_with: Callable[[int], DraftBatch], *, most_seeds: int = 160_000) -> list[JointDraft]:
    """Every different draft of `draft_with(seed)`: until all probability is found, or nothing new comes."""
    found: dict[bytes, JointDraft] = {}
    total, last_find = 0.0, 0
    for seed in range(most_seeds):
        batch = draft_with(seed)
        key = _batch_key(batch)
        if key not in found:
            drafts = tuple(batch[row] for row in range(len(batch)))
            found[key] = JointDraft(key, recorded_probability(batch), drafts)
            total, last_find = total + found[key].probability, seed
        if abs(total - 1.0) < ROUNDING and seed > PATIENCE * last_find + 50:
            break
    return list(found.values())


def chi_square(
    draft_with: Callable[[int], DraftBatch], joint: Sequence[JointDraft], *, num_seeds: int
) -> tuple[float, int]:
    """(statistic, degrees of freedom) of how often each draft comes; those expected less than 5 times are one class."""
    seen = Counter(_batch_key(draft_with(seed)) for seed in range(num_seeds))
    expected = np.array([num_seeds * each.probability for each in joint])
    counts = np.array([seen[each.key] for each in joint])
    is_rare = expected < 5
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    counts = np.append(counts[~is_rare], num_seeds - counts[~is_rare].sum())
    kept = expected > 0.5
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1


def _batch_key(batch: DraftBatch) -> bytes:
    return batch.token_ids.tobytes() + batch.parents.tobytes() + batch.offsets.tobytes()


def recorded_probability(batch: DraftBatch) -> float:
    """What the laws give the drawn tokens, all nodes together."""
    drawn = np.flatnonzero(batch.depths > 0)
    starts = np.repeat(batch.offsets[:-1], batch.sizes)
    is_token = batch.support_ids[starts[drawn] + batch.parents[drawn]] == batch.token_ids[drawn, None]
    return float(np.prod((batch.law[drawn] * is_token).sum(axis=1, dtype=np.float64)))


def distance_from_target(joint: Sequence[JointDraft], worlds: Sequence[World], verifier: ThresholdVerifier) -> float:
    """Total variation between what comes out of all rows together and the target's law; two rows, one world each."""
    horizon = 1 + max(_depth(draft) for each in joint for draft in each.drafts)
    laws, places = [], []
    for row, world in enumerate(worlds):
        drafts = {_key(each.drafts[row]): each.drafts[row] for each in joint}
        laws.append(_sequence_laws(list(drafts.values()), world, verifier, horizon))
        places.append({key: place for place, key in enumerate(drafts)})
    weights = np.zeros((len(places[0]), len(places[1])))
    for each in joint:
        weights[places[0][_key(each.drafts[0])], places[1][_key(each.drafts[1])]] += each.probability
    reached = laws[0].T @ weights @ laws[1]
    truth = [_continuation(world, (), horizon) for world in worlds]
    reached -= np.outer(*truth)
    return float(np.abs(reached, out=reached).sum() / 2)


def assert_adapted(joint: Sequence[JointDraft], worlds: Sequence[World], rules: Sequence[str]) -> None:
    """The recorded laws of all joint drafts account for them, and under each rule the target's law comes out."""
    assert abs(sum(each.probability for each in joint) - 1.0) < ROUNDING
    for rule in rules:
        assert distance_from_target(joint, worlds, get_verifier(rule)) < ROUNDING, rule


def assert_refused_where_widths_are_not_settled(
    joint: Sequence[JointDraft], worlds: Sequence[World], rule: str
) -> None:
    """The rule would be lossy for these drafts, in which the number of siblings follows from what was drawn."""
    assert distance_from_target(as_if_shaped(joint), worlds, get_verifier(rule)) > 0.05
    with pytest.raises(ValueError, match="settled before they were drawn"):
        for each in joint:
            get_verifier(rule).check_draft(DraftBatch.concatenate(each.drafts))


def _key(draft: DraftTree) -> bytes:
    return draft.token_ids.tobytes() + draft.parents.tobytes()


def _depth(draft: DraftTree) -> int:
    depths = [0]
    for parent in draft.parents[1:].tolist():
        depths.append(depths[parent] + 1)
    return max(depths)


def as_draft(draft: DraftTree) -> Draft:
    """Nodes and who is whose child; laws stay in the arrays."""
    result = Draft()
    for parent, token in zip(draft.parents[1:].tolist(), draft.token_ids[1:].tolist(), strict=True):
        result = result.grown(parent, token, ())
    return result


def _sequence_laws(drafts: Sequence[DraftTree], world: World, verifier: ThresholdVerifier, horizon: int) -> np.ndarray:
    """[n, V ** horizon]: the law of the first `horizon` tokens when one draft is verified, then the target goes on."""
    batch, listed = DraftBatch.concatenate(drafts), [as_draft(draft) for draft in drafts]
    verifier.check_draft(batch)
    continuation = cache(partial(_continuation, world, horizon=horizon))
    rows = [world.p(draft.context(node)) for draft in listed for node in range(len(draft))]
    target = TargetRows(torch.tensor(rows, dtype=torch.float64))
    thresholds, mass, scale = verifier.thresholds(batch, target)
    next_laws = full_laws(batch, target, mass=mass, scale=scale)
    order = np.argsort(verifier.test_order(batch, target))
    laws = np.zeros((len(drafts), world.vocabulary_size**horizon))
    for row, draft in enumerate(listed):
        first, end = batch.offsets[row], batch.offsets[row + 1]
        stops = stop_probabilities(verifier, draft, thresholds[first:end].tolist(), order[first:end].tolist())
        for node, probability in enumerate(stops):
            for token, share in enumerate(next_laws[first + node]):
                if probability * share > 0:
                    reached = (*draft.context(node), token)
                    laws[row, _block(reached, world, horizon)] += probability * share * continuation(reached)
    return laws


def _block(context: tuple, world: World, horizon: int) -> slice:
    """Where the sequences that begin with `context` stand among all of length `horizon`, in ascending order."""
    size = world.vocabulary_size ** (horizon - len(context))
    place = 0
    for token in context:
        place = place * world.vocabulary_size + token
    return slice(place * size, (place + 1) * size)


def _continuation(world: World, context: tuple, horizon: int) -> np.ndarray:
    """[V ** (horizon - len(context))]: the target's law of what follows."""
    law = np.ones(1)
    for length in range(len(context), horizon):
        contexts = product(range(world.vocabulary_size), repeat=length - len(context))
        steps = np.array([world.p((*context, *tail)) for tail in contexts])
        law = (law[:, None] * steps).reshape(-1)
    return law
