"""Coupled drafts (ranked by the verifier's own noise, refused by ratio rules) and independent ones."""

import dataclasses

import numpy as np
import pytest
import torch
from reference import ReferenceLookup

from stand.trees import DraftBatch, DraftTree, LookupTree, TreeShape
from stand.verifiers import TargetRows, VerifierNoise, get_verifier, verifier_names

VOCABULARY_SIZE = 30
HOST = torch.device("cpu")
GOLDEN_WAITS = [1.5298532397481948, 1.134896713030628, 0.48367160741651166, 1.4976280992035766]


def bigram_laws(seed: int, concentration: float = 0.2) -> np.ndarray:
    """[V, V] float64: the law of the next token by the last one."""
    return np.random.default_rng(seed).dirichlet(np.full(VOCABULARY_SIZE, concentration), VOCABULARY_SIZE)


def lookup_of(laws: np.ndarray, *, num_candidates: int = 10, orders=(1,)) -> LookupTree:
    """Knows the best tokens after every token."""
    best = np.argsort(-laws, axis=1, kind="stable")[:, :num_candidates].astype(np.int32)
    laws_of_best = np.take_along_axis(laws, best, axis=1).astype(np.float32)
    lookup = LookupTree(orders=orders, num_candidates=num_candidates)
    for token in range(VOCABULARY_SIZE):
        lookup.learn([token], [int(best[token, 0])], top_ids=best[[token]], top_probs=laws_of_best[[token]])
    return lookup


def test_equals_slow_twin():
    laws, shape = bigram_laws(1), TreeShape.from_branching([3, 2, 2])
    lookup, twin = lookup_of(laws), ReferenceLookup(orders=(1,))
    for token in range(VOCABULARY_SIZE):
        best = np.argsort(-laws[token], kind="stable")[:10]
        twin.observe([token], [(int(other), np.float32(laws[token, other])) for other in best])
    histories = [np.arange(length, dtype=np.int32) % VOCABULARY_SIZE for length in (1, 2, 7, 29)]
    rows, steps = np.array([0, 5, 2, 2**31]), np.array([0, 3, 1, 9])
    batch = lookup.draft(histories, shape, seed=2**64 - 7, rows=rows, steps=steps, kind="coupled")
    batch.check()
    for row, history in enumerate(histories):
        expected = twin.draft(
            history.tolist(), shape.parents, seed=2**64 - 7, row=int(rows[row]), step=int(steps[row]), kind="coupled"
        )
        assert batch[row].token_ids.tolist() == [node["token"] for node in expected]
        assert batch[row].parents.tolist() == [node["parent"] for node in expected]


def test_independent_children_equal_the_slow_twin_and_suit_their_rules():
    """More children than candidates too; siblings repeat, which the rules for independent draws alone allow."""
    laws, shape = bigram_laws(1), TreeShape.from_branching([6, 2])
    lookup, twin = lookup_of(laws, num_candidates=4), ReferenceLookup(orders=(1,), num_candidates=4)
    for token in range(VOCABULARY_SIZE):
        best = np.argsort(-laws[token], kind="stable")[:4]
        twin.observe([token], [(int(other), np.float32(laws[token, other])) for other in best])
    histories = [np.array([token], np.int32) for token in range(VOCABULARY_SIZE)]
    rows = np.arange(VOCABULARY_SIZE)
    batch = lookup.draft(histories, shape, seed=4, rows=rows, steps=rows + 1, kind="independent")
    assert batch.adapted and batch.num_nodes == VOCABULARY_SIZE * len(shape.parents)
    for row in rows.tolist():
        expected = twin.draft([row], shape.parents, seed=4, row=row, step=row + 1, kind="independent")
        assert batch[row].token_ids.tolist() == [node["token"] for node in expected]
        law = {int(token): float(p) for token, p in zip(batch[row].support_ids[0], batch[row].law[1], strict=True)}
        assert law == pytest.approx(expected[1]["law"], rel=1e-6)
    for rule in ("specinfer", "spectr", "traversal", "rrs", "match"):
        get_verifier(rule).check_draft(batch)
    with pytest.raises(ValueError, match="children in one draw"):
        get_verifier("ot_traversal").check_draft(batch)


def test_children_are_the_first_of_the_verifiers_own_race():
    """Node by node, against `VerifierNoise.exponentials`: the smallest E / q first."""
    laws, rows = bigram_laws(2), np.array([3, 0, 11])
    histories = [np.arange(length, dtype=np.int32) % VOCABULARY_SIZE for length in (4, 90, 17)]
    shape = TreeShape.from_branching([3, 2, 1])
    batch = lookup_of(laws).draft(histories, shape, seed=5, rows=rows, steps=np.array([1, 8, 2]), kind="coupled")
    noise = VerifierNoise(5, rows=rows, steps=np.array([1, 8, 2]), positions=np.array(list(map(len, histories))))
    seen = 0
    for row in range(3):
        draft = batch[row]
        for node in range(draft.num_nodes):
            children = np.flatnonzero(draft.parents == node)
            if len(children) == 0:
                continue
            depth = int(batch.depths[batch.offsets[row] + node])
            waits = noise.exponentials(np.array([row]), depth, vocabulary_size=VOCABULARY_SIZE, device=HOST)[0].numpy()
            support = draft.support_ids[node]
            arrivals = waits[support] / laws[draft.token_ids[node], support]
            order = support[np.argsort(arrivals)][: len(children)]
            assert draft.token_ids[children].tolist() == order.tolist()
            seen += 1
    assert seen == 3 * (1 + 3 + 6)


def test_the_shared_noise_never_changes():
    """Golden bits: what a seed gave once it gives for good, on both sides."""
    noise = VerifierNoise(12345, rows=np.array([2]), steps=np.array([0]), positions=np.array([40]))
    waits = noise.exponentials(np.array([0]), 1, vocabulary_size=4, device=HOST)[0].numpy()
    assert waits.tolist() == pytest.approx(GOLDEN_WAITS, rel=1e-15)
    lookup = LookupTree(orders=(1,))
    lookup.learn([7], [0], top_ids=[[0, 1, 2, 3]], top_probs=np.full((1, 4), 0.25, np.float32))
    history = np.full(41, 7, np.int32)
    shape = TreeShape.from_branching([4])
    batch = lookup.draft([history], shape, seed=12345, rows=[2], steps=[9], kind="coupled")
    assert batch.token_ids[1:].tolist() == np.argsort(GOLDEN_WAITS).tolist()


def test_positions_stand_in_for_cut_histories():
    laws, shape = bigram_laws(3), TreeShape.from_branching([2, 2])
    lookup, history = lookup_of(laws), np.arange(60, dtype=np.int32) % VOCABULARY_SIZE
    keys = {"seed": 1, "rows": [4], "steps": [2], "kind": "coupled"}
    whole = lookup.draft([history], shape, **keys)
    cut = lookup.draft([history[-3:]], shape, positions=[60], **keys)
    elsewhere = lookup.draft([history[-3:]], shape, **keys)
    assert cut.token_ids.tolist() == whole.token_ids.tolist() != elsewhere.token_ids.tolist()
    later = lookup.draft([history], shape, **(keys | {"steps": [77]}))
    assert later.token_ids.tolist() == whole.token_ids.tolist()  # the step is no part of the key
    for bad in ([-1], [2**31]):
        with pytest.raises(ValueError, match=r"positions must be in \[0, 2\*\*31\)"):
            lookup.draft([history], shape, positions=bad, **keys)
    with pytest.raises(ValueError, match="one number per history"):
        lookup.draft([history], shape, positions=[1, 2], **keys)


def test_ratio_rules_refuse_them():
    batch = lookup_of(bigram_laws(4)).draft(
        [np.array([3], np.int32)], TreeShape.from_branching([1, 1]), seed=0, rows=[0], steps=[0], kind="coupled"
    )
    assert not batch.adapted
    fits = {rule for rule in verifier_names() if not get_verifier(rule, allow_lossy=True).requires.adapted}
    assert fits == {"match", "coupled", "typical"}
    for rule in verifier_names():
        verifier = get_verifier(rule, allow_lossy=True)
        if rule in fits:
            verifier.check_draft(batch)
        else:
            with pytest.raises(ValueError, match="adapted=False; use verifier 'match' or 'coupled'"):
                verifier.check_draft(batch)


# Output and acceptance over a whole run.


def decode(kind: str | None, *, rule: str, rows: int, length: int, target: np.ndarray, drafter: np.ndarray):
    """(tokens of every row, steps of all rows) of a bigram model drafted in a fixed shape; kind None: no drafts."""
    verifier, lookup, shape = get_verifier(rule), lookup_of(drafter), TreeShape.from_branching([2, 2, 1])
    histories = [np.array([row % VOCABULARY_SIZE], np.int32) for row in range(rows)]
    numbers, num_steps = np.arange(rows), 0
    while min(map(len, histories)) <= length:
        steps = np.full(rows, num_steps)
        if kind is None:
            batch = DraftBatch.concatenate([DraftTree.pending(int(history[-1])) for history in histories])
        else:
            batch = lookup.draft(histories, shape, seed=6, rows=numbers, steps=steps, kind=kind)
        noise = VerifierNoise(6, rows=numbers, steps=steps, positions=np.array(list(map(len, histories))))
        verdicts = verifier.verify(batch, TargetRows(torch.from_numpy(target[batch.token_ids])), noise)
        gained = verdicts.gained(batch)
        histories = [np.append(old, new).astype(np.int32) for old, new in zip(histories, gained, strict=True)]
        num_steps += 1
    mean = np.mean([len(history) - 1 for history in histories]) / num_steps
    return [history[1 : length + 1].tolist() for history in histories], mean


def test_output_is_that_of_plain_sampling_and_more_is_kept():
    target = bigram_laws(7)
    drafter = 0.7 * target + 0.3 * bigram_laws(8)
    settings = {"rows": 12, "length": 80, "target": target, "drafter": drafter}
    plain, _ = decode(None, rule="coupled", **settings)
    kept = {}
    for kind in ("sampled", "mixed", "deterministic", "coupled"):
        tokens, kept[kind] = decode(kind, rule="coupled", **settings)
        assert tokens == plain
    assert kept["coupled"] > 1.15 * kept["sampled"]
    assert kept["coupled"] > kept["mixed"] and kept["coupled"] > kept["deterministic"]


def test_match_may_take_coupled_drafts():
    target = bigram_laws(9)
    settings = {"rule": "match", "rows": 6, "length": 40, "target": target, "drafter": target}
    assert decode("coupled", **settings)[0] == decode(None, **settings)[0]


def joint_counts(kind: str, *, rows: int, target: np.ndarray, drafter: np.ndarray) -> np.ndarray:
    """[3, 3, 3]: how often each three tokens came, under `traversal` and chains of two that claim to be adapted."""
    lookup, shape, numbers = LookupTree(orders=(1,)), TreeShape.chain(2), np.arange(rows)
    for token in range(3):
        order = np.argsort(-drafter[token])
        lookup.learn([token], [0], top_ids=order[None], top_probs=drafter[token][order][None])
    histories = [np.zeros(1, np.int32)] * rows
    for step in range(3):
        steps = np.full(rows, step)
        batch = lookup.draft(histories, shape, seed=3, rows=numbers, steps=steps, kind=kind)
        batch = dataclasses.replace(batch, adapted=True)
        noise = VerifierNoise(3, rows=numbers, steps=steps, positions=np.array(list(map(len, histories))))
        verdicts = get_verifier("traversal").verify(batch, TargetRows(torch.from_numpy(target[batch.token_ids])), noise)
        gained = verdicts.gained(batch)
        histories = [np.append(old, new).astype(np.int32) for old, new in zip(histories, gained, strict=True)]
    counts = np.zeros((3, 3, 3))
    for history in histories:
        counts[tuple(history[1:4])] += 1
    return counts


def test_a_ratio_rule_on_coupled_drafts_would_be_lossy():
    """Why they are not adapted: what a step drafted and refused, the next step drafts again with the same noise.

    Chi-square over the first three tokens, 18,000 rows, fixed seed; 26 degrees of freedom, upper 1e-6 below 82.
    """
    generator, rows = np.random.default_rng(2), 18_000
    target, drafter = generator.dirichlet(np.ones(3), 3), generator.dirichlet(np.ones(3), 3)
    law = np.einsum("i,ij,jk->ijk", target[0], target, target) * rows
    statistic = {}
    for kind in ("sampled", "coupled"):
        counts = joint_counts(kind, rows=rows, target=target, drafter=drafter)
        statistic[kind] = ((counts - law) ** 2 / law).sum()
    assert statistic["sampled"] < 82 < statistic["coupled"]
