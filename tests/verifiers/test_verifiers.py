"""The shipped rules, enumerated: the law rebuilt from `thresholds` is the target's."""

import dataclasses
import random
import warnings
from contextlib import nullcontext
from fractions import Fraction

import exact_rules
import numpy as np
import pytest
import torch
from draft_worlds import (
    ADAPTED_RULES,
    BATCH_RULES,
    CASES,
    CHAIN_RULES,
    INDEPENDENT_RULES,
    drafts,
    random_law,
    random_world,
)
from exact import (
    WORLDS,
    World,
    check,
    deterministic,
    drawn_first,
    drawn_last,
    enumerate_drafts,
    full_laws,
    law,
    mixed_sampled_first,
    mixed_sampled_last,
    pack,
    production_report,
    shaped,
    target_rows,
    with_replacement,
    without_replacement,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stand.trees import DraftBatch, DraftTree
from stand.verifiers import (
    TargetRows,
    ThresholdVerifier,
    VerifierNoise,
    get_verifier,
    operands,
    verifier_names,
)  # fmt: skip
from stand.verifiers.requirements import wrong_batches
from stand.verifiers.schedule import Schedule
from stand.verifiers.set_law import set_law, set_sizes


@pytest.mark.parametrize(("world", "kind", "rule"), CASES)
def test_lossless(world, kind, rule):
    verifier = get_verifier(rule)
    listed = drafts(world, kind)
    verifier.check_draft(pack(WORLDS[world], [draft for _, draft in listed]))
    double = production_report(WORLDS[world], listed, verifier)
    single = production_report(WORLDS[world], listed, verifier, np.float32)
    shipped = production_report(WORLDS[world], listed, verifier, inputs=np.float32)
    assert double.distance < 1e-12
    assert single.distance < 1e-6 and shipped.distance < 1e-6
    assert single.expected == pytest.approx(double.expected, abs=1e-5)
    if hasattr(exact_rules, rule):
        reference = check(WORLDS[world], listed, getattr(exact_rules, rule))
        assert reference.distance == 0
        assert double.expected == pytest.approx(float(reference.expected), abs=1e-12)


GOLDEN = [
    ("without replacement (2,1)", "ranked_traversal", "2909/1584 249/200"),
    ("without replacement (2,1)", "ot_traversal", "12641/6864 17837/14300"),
    ("without replacement (2,2)", "ot_traversal", "2 63/50"),
    ("with replacement (2,1)", "specinfer", "25/18 93/100"),
    ("chain2", "ot_traversal", "197/144 21/25"),
    ("chain2", "spectr", "5/4 39/50"),
    ("mixed (2,2), sampled first", "ot_traversal", "2 63/50"),
]


@pytest.mark.parametrize(("kind", "rule", "expected"), GOLDEN)
def test_golden_values(kind, rule, expected):
    for world, value in zip(("EX2", "EX3"), expected.split(), strict=True):
        report = production_report(WORLDS[world], drafts(world, kind), get_verifier(rule))
        assert report.expected == pytest.approx(float(Fraction(value)), abs=1e-9)


@pytest.mark.parametrize("rule", ["typical", "kl_threshold"])
def test_lossy_rules_are_lossy(rule):
    report = production_report(
        WORLDS["EX2"], drafts("EX2", "without replacement (2,1)"), get_verifier(rule, allow_lossy=True)
    )
    assert report.distance > 0.1


@pytest.mark.parametrize("rule", ["typical", "kl_threshold"])
def test_lossy_rules_go_on_with_the_target(rule):
    listed = [draft for _, draft in drafts("EX3", "without replacement (2,1)")]
    batch, target = pack(WORLDS["EX3"], listed), target_rows(WORLDS["EX3"], listed)
    _, mass, scale = get_verifier(rule, allow_lossy=True).thresholds(batch, target)
    np.testing.assert_allclose(
        full_laws(batch, target, mass=mass, scale=scale), target.rows(np.arange(batch.num_nodes))
    )


# The order in which a support lists its tokens says nothing.

TIES = {  # p / q takes one or two values at the root, and below it as much mass is owed as is offered
    "equal laws": World({}, {}, (law(1, 1, 1, 1), law(1, 1, 1, 1))),
    "the drafter is right": World({}, {}, (law(4, 3, 2, 1), law(4, 3, 2, 1))),
    "two values": World({(): law(2, 4, 1, 1)}, {(): law(2, 1, 1, 4)}, (law(1, 1, 2, 2), law(2, 2, 1, 1))),
    "half is owed twice": World({}, {}, (law(2, 2, 1, 1), law(1, 1, 2, 2))),
}


@pytest.mark.parametrize("order", [drawn_first, drawn_last])
@pytest.mark.parametrize("widths", [(2, 1), (3,)])
@pytest.mark.parametrize("world", TIES)
def test_the_order_of_a_support_does_not_matter(world, widths, order):
    """A drafter may list its candidates as they arrived; where that broke ties, the draw decided twice."""
    listed = enumerate_drafts(TIES[world], shaped(without_replacement, *widths))
    for rule in BATCH_RULES:
        report = production_report(TIES[world], listed, get_verifier(rule), order=order)
        ascending_report = production_report(TIES[world], listed, get_verifier(rule))
        assert report.distance < 1e-12, rule
        assert report.expected == pytest.approx(ascending_report.expected, abs=1e-12), rule


# Any adapted builder, any laws.

TREE_RULES = [get_verifier(name) for name in ADAPTED_RULES]


def random_policy(seed: int, max_nodes: int = 4, max_depth: int = 3):
    """What to grow next is an arbitrary function of what is revealed; siblings may repeat a token."""

    def policy(world, draft):
        revealed = [(node.parent, node.token) for node in draft.nodes]
        generator = random.Random(f"{seed} {revealed}")
        if len(draft) > max_nodes or generator.random() < 0.1:
            return None
        parents = [node for node in range(len(draft)) if draft.depth(node) < max_depth]
        return generator.choice(parents), random_law(generator, world.vocabulary_size)

    return policy


@pytest.mark.parametrize("block", range(10))
def test_adapted_builders(block):
    """30 of 300 random builders; every tenth also in Fractions."""
    for seed in range(30 * block, 30 * block + 30):
        world = random_world(seed)
        listed = enumerate_drafts(world, random_policy(seed))
        for verifier in TREE_RULES:
            assert production_report(world, listed, verifier).distance < 1e-12, (seed, verifier)
        if seed % 10 == 0:
            for rule in (exact_rules.match, exact_rules.rrs, exact_rules.traversal):
                assert check(world, listed, rule).distance == 0, (seed, rule)


WEIGHTS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 5, 1000]), min_size=4, max_size=4).filter(any)


@st.composite
def hypothesis_worlds(draw):
    laws = draw(st.lists(st.tuples(WEIGHTS, WEIGHTS), min_size=6, max_size=6))
    names = [(), (0,), (1,), (2,), (3,)]
    target = {name: law(*pair[0]) for name, pair in zip(names, laws, strict=False)}
    proposal = {name: law(*pair[1]) for name, pair in zip(names, laws, strict=False)}
    return World(target, proposal, (law(*laws[-1][0]), law(*laws[-1][1])))


CHILD_LAWS = st.sampled_from(
    [
        (without_replacement, BATCH_RULES),
        (with_replacement, INDEPENDENT_RULES),
        (mixed_sampled_first, BATCH_RULES),
        (mixed_sampled_last, BATCH_RULES),
        (deterministic, BATCH_RULES),
    ]
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(hypothesis_worlds(), CHILD_LAWS, st.sampled_from([(2, 1), (1, 2), (5,), (3,), (2,)]))
def test_any_laws(world, child_law, widths):
    """Exact zeros, one-hots, equal laws, more children than the support holds."""
    kind, rules = child_law
    listed = enumerate_drafts(
        world, shaped(kind, *(min(width, 3) if kind is with_replacement else width for width in widths))
    )
    for rule in rules:
        report = production_report(world, listed, get_verifier(rule))
        assert report.distance < 1e-12, rule
        assert production_report(world, listed, get_verifier(rule), np.float32).distance < 1e-6, rule


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(hypothesis_worlds(), st.integers(1, 3))
def test_any_laws_on_chains(world, length):
    listed = enumerate_drafts(world, shaped(with_replacement, *[1] * length))
    kept = {rule: production_report(world, listed, get_verifier(rule)) for rule in CHAIN_RULES}
    assert all(report.distance < 1e-12 for report in kept.values()), kept
    for rule in ("traversal", "ranked_traversal", "ot_traversal"):
        assert kept[rule].expected == pytest.approx(kept["block"].expected, abs=1e-12)
    for rule in ("rrs", "specinfer", "spectr"):
        assert kept[rule].expected == pytest.approx(kept["token"].expected, abs=1e-7)
    assert kept["block"].expected >= kept["token"].expected - 1e-12


def test_more_children_than_support_accepts_the_support():
    """All of q's support drawn: what is kept is p's mass on it, for every rule over one batch."""
    for world in WORLDS.values():
        listed = enumerate_drafts(world, shaped(without_replacement, 4))
        support = sum(share for share, mass in zip(world.p(()), world.q(()), strict=True) if mass > 0)
        for rule in BATCH_RULES:
            report = production_report(world, listed, get_verifier(rule))
            assert report.expected == pytest.approx(float(support), abs=1e-12)


def test_transport_is_a_maximum_flow():
    """Expected children kept at one node: the minimum cut over token sets."""
    for seed in range(40):
        world = random_world(seed, size=4, depth=1)
        listed = enumerate_drafts(world, shaped(without_replacement, 2))
        cut = min(
            sum(share for token, share in enumerate(world.p(())) if chosen >> token & 1)
            + sum(weight for weight, draft in listed if any(not chosen >> node.token & 1 for node in draft.nodes))
            for chosen in range(16)
        )
        report = production_report(world, listed, get_verifier("ot_traversal"))
        assert report.expected == pytest.approx(float(cut), abs=1e-12), seed


# One formula, two array libraries.

DEVICE_RULES = [
    name
    for name in verifier_names()
    if issubclass(type(get_verifier(name, allow_lossy=True)), ThresholdVerifier)
    and name not in ("ranked_traversal", "ot_traversal")
]


def chains_or_all(rule: str) -> str:
    requires = get_verifier(rule, allow_lossy=True).requires
    return "chain3" if requires.chain else "with replacement (2,1)"


def test_the_law_of_a_set_is_the_sum_over_its_orders():
    """Sets of one size share the probability 1 while there is something to draw, and have none afterwards."""
    weights = np.array([[0.5, 0.5, 0.0, 0.0], [0.1, 0.0, 0.6, 0.3], [0.25, 0.25, 0.25, 0.25]])
    table, sizes = set_law(weights, 4), set_sizes(4)
    for row, q in enumerate(weights):
        for size in range(5):
            total = table[row, sizes == size].sum()
            assert total == pytest.approx(float(size <= np.count_nonzero(q)))
    expected = 0.1 * 0.6 / (1 - 0.1) + 0.6 * 0.1 / (1 - 0.6)  # tokens 0 and 2 of the second law
    assert table[1, 0b101] == pytest.approx(expected)


def test_rules_over_sets_take_fourteen_candidates_at_most():
    assert set_sizes(14).shape == (2**14,) and set_sizes(14)[-1] == 14
    with pytest.raises(ValueError, match="at most 14 candidates per context, got 15"):
        set_sizes(15)


@pytest.mark.parametrize("width", [14, 15])
def test_a_draft_of_siblings_may_have_fourteen_candidates(width):
    """Two children of the root, the second one drawn from what the first one left."""
    support = np.full((3, width), -1, dtype=np.int32)
    support[0] = np.arange(width)
    law = np.zeros((3, width), dtype=np.float32)
    law[1], law[2, 1:] = 1 / width, 1 / (width - 1)
    nodes = {"token_ids": np.array([0, 0, 1], np.int32), "parents": np.array([-1, 0, 0], np.int32)}
    tree = DraftTree(**nodes, support_ids=support, law=law, slots=np.arange(3, dtype=np.int32))
    with nullcontext() if width == 14 else pytest.raises(ValueError, match="at most 14 candidates per context, got 15"):
        get_verifier("ranked_traversal").check_draft(DraftBatch.concatenate([tree]))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("rule", DEVICE_RULES)
def test_tensors_and_arrays_agree(rule, dtype, monkeypatch):
    verifier = get_verifier(rule, allow_lossy=True)
    listed = [draft for _, draft in drafts("EX2", chains_or_all(rule))]
    batch, target = pack(WORLDS["EX2"], listed), target_rows(WORLDS["EX2"], listed)
    arrays = verifier.thresholds(batch, target, dtype)
    monkeypatch.setattr(operands, "HOST", torch.device("meta"))  # so that the CPU counts as an accelerator
    monkeypatch.setattr(TargetRows, "on_host", lambda self: None)
    tensors = verifier.thresholds(batch, target, dtype)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert isinstance(array, np.ndarray) and isinstance(tensor, torch.Tensor)
        assert array.dtype == dtype and tensor.numpy().dtype == dtype
        np.testing.assert_allclose(tensor.numpy(), array, atol=1e-12 if dtype is np.float64 else 1e-6)


@pytest.mark.parametrize("rule", DEVICE_RULES)
def test_thresholds_never_wait_for_the_device(rule):
    """A meta tensor has no values: reading one on the host would raise."""
    listed = [draft for _, draft in drafts("EX2", chains_or_all(rule))]
    batch = pack(WORLDS["EX2"], listed)
    target = TargetRows(torch.empty((batch.num_nodes, 3), device="meta"))
    parts = get_verifier(rule, allow_lossy=True).thresholds(batch, target)
    shapes = [(batch.num_nodes,), batch.law.shape, (batch.num_nodes,)]
    assert [tuple(part.shape) for part in parts] == shapes


@pytest.mark.parametrize("rule", [*DEVICE_RULES, "ranked_traversal", "ot_traversal"])
def test_thresholds_change_nothing(rule):
    verifier = get_verifier(rule, allow_lossy=True)
    listed = [draft for _, draft in drafts("EX2", chains_or_all(rule) if rule in DEVICE_RULES else "chain2")]
    batch, target = pack(WORLDS["EX2"], listed), target_rows(WORLDS["EX2"], listed)
    before = [batch.law.copy(), batch.support_ids.copy(), target.rows(np.arange(batch.num_nodes))]
    first, second = verifier.thresholds(batch, target), verifier.thresholds(batch, target)
    assert all(np.array_equal(one, two) for one, two in zip(first, second, strict=True))
    after = [batch.law, batch.support_ids, target.rows(np.arange(batch.num_nodes))]
    assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("rule", [*(name for name in CHAIN_RULES if name != "match"), "greedy_block"])
def test_a_token_that_its_law_cannot_give_is_refused(rule):
    """A broken contract: the child's token has no mass in its law, or is not in the support at all."""
    for token, support in ((1, [0, 1, 2]), (1, [0, 2, -1])):
        draft = DraftTree(
            token_ids=np.array([0, token], dtype=np.int32),
            parents=np.array([-1, 0], dtype=np.int32),
            support_ids=np.array([support, [-1, -1, -1]], dtype=np.int32),
            law=np.array([[0, 0, 0], [1, 0, 0]], dtype=np.float32),
        )
        target = TargetRows(torch.tensor([[0.2, 0.7, 0.1], [1.0, 0.0, 0.0]]))
        thresholds, _, _ = get_verifier(rule).thresholds(DraftBatch.concatenate([draft]), target)
        assert thresholds[1] == 0


@pytest.mark.parametrize("rule", ["rrs", "traversal", "ranked_traversal", "ot_traversal"])
def test_a_second_child_that_its_law_cannot_give_is_refused(rule):
    """The same among siblings: token 2 has no mass in the law that both were drawn from."""
    batch = fork([[0.5, 0.5, 0], [0, 1, 0]], tokens=(0, 2))
    target = TargetRows(torch.tensor([[0.2, 0.1, 0.7]] * 3))
    thresholds, mass, _ = get_verifier(rule).thresholds(batch, target)
    assert thresholds[2] == 0 and np.all(np.isfinite(mass))


@pytest.mark.parametrize("rule", ["rrs", "traversal", "ranked_traversal", "ot_traversal"])
def test_two_children_that_their_law_cannot_give_are_refused(rule):
    """No set of three can have been drawn from a law over two tokens."""
    draft = DraftTree(
        token_ids=np.array([0, 0, 2, 3], dtype=np.int32),
        parents=np.array([-1, 0, 0, 0], dtype=np.int32),
        support_ids=np.array([[0, 1, 2, 3]] + [[-1] * 4] * 3, dtype=np.int32),
        law=np.array([[0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]], dtype=np.float32),
    )
    batch, target = DraftBatch.concatenate([draft]), TargetRows(torch.tensor([[0.2, 0.1, 0.3, 0.4]] * 4))
    thresholds, mass, _ = get_verifier(rule).thresholds(batch, target)
    assert thresholds[2:].tolist() == [0, 0] and np.all(np.isfinite(mass))


@pytest.mark.parametrize("rule", [*CHAIN_RULES, "greedy_block"])
def test_a_leaf_may_have_candidates(rule):
    """A support without children, as where a builder looked for some: the next token there is the target's."""
    for size in (1, 2):
        support = np.array([[0, 1, -1], [2, 0, 1]], dtype=np.int32)[2 - size :]
        draft = DraftTree(
            token_ids=np.array([0, 1], dtype=np.int32)[:size],
            parents=np.array([-1, 0], dtype=np.int32)[:size],
            support_ids=support,
            law=np.array([[0, 0, 0], [0.5, 0.5, 0]], dtype=np.float32)[:size],
        )
        rows = torch.tensor([[0.2, 0.7, 0.1], [0.6, 0.1, 0.3]], dtype=torch.float64)[2 - size :]
        batch, target = DraftBatch.concatenate([draft]), TargetRows(rows)
        thresholds, mass, scale = get_verifier(rule).thresholds(batch, target)
        laws = full_laws(batch, target, mass=np.asarray(mass), scale=np.asarray(scale))
        assert laws[-1] == pytest.approx(rows[-1].tolist())
        assert thresholds[0] == 1 and (rule == "match" or thresholds[-1] == 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_negative_is_left_outside_a_support_that_holds_everything(dtype):
    """Rounded laws may sum to more than 1."""
    target = TargetRows(torch.tensor([[0.3, 0.6, 0.1000003]] * 3))
    schedule = Schedule.by_depth_and_rank(BATCH)
    gathered = operands.Operands.gather(BATCH, target, dtype=dtype, schedule=schedule)
    assert gathered.tail[0] == 0.0 and gathered.target[0].sum() > 1


# Requirements, names, errors.


def fork(laws, tokens=(0, 1)) -> DraftBatch:
    """A root with children under the given laws over tokens 0, 1, 2."""
    size = len(laws) + 1
    return DraftBatch.concatenate(
        [
            DraftTree(
                token_ids=np.array([0, *tokens], dtype=np.int32),
                parents=np.array([-1] + [0] * len(laws), dtype=np.int32),
                support_ids=np.array([[0, 1, 2]] + [[-1, -1, -1]] * (size - 1), dtype=np.int32),
                law=np.array([[0, 0, 0], *laws], dtype=np.float32),
                slots=np.arange(size, dtype=np.int32),
            )
        ]
    )


INDEPENDENT = fork([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
BATCH = fork([[0.5, 0.3, 0.2], [0, 0.6, 0.4]])
MIXED = fork([[0.5, 0.5, 0], [0, 0, 1]], tokens=(0, 2))
ADAPTIVE = fork([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4]])


@pytest.mark.parametrize("rule", sorted(set(verifier_names()) - {"greedy_block"}))
def test_empty_drafts_warn_of_nothing(rule):
    """Their arrays are read-only, of which torch warns, else once per process."""
    zeros = np.zeros(1, dtype=np.int64)
    batch, noise = DraftBatch.pending([3]), VerifierNoise(seed=0, rows=zeros, steps=zeros, positions=zeros)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            get_verifier(rule, allow_lossy=True).verify(batch, TargetRows(torch.full((1, 4), 0.25)), noise)
    finally:
        torch.set_warn_always(before)


def test_chains_are_required():
    for rule in ("token", "block", "greedy_block"):
        with pytest.raises(ValueError, match="must get chains, got two siblings in row 0; use verifier 'traversal'"):
            get_verifier(rule).check_draft(BATCH)


def test_kinds_of_laws_are_told_apart():
    for rule in ("specinfer", "spectr"):
        get_verifier(rule).check_draft(INDEPENDENT)
        for batch in (BATCH, MIXED, ADAPTIVE):
            with pytest.raises(ValueError, match="drawn independently from one law.*'traversal'"):
                get_verifier(rule).check_draft(batch)
    for rule in ("ranked_traversal", "ot_traversal"):
        get_verifier(rule).check_draft(BATCH)
        get_verifier(rule).check_draft(MIXED)
        for batch in (INDEPENDENT, ADAPTIVE):
            with pytest.raises(ValueError, match="children in one draw.*'traversal'"):
                get_verifier(rule).check_draft(batch)
    assert wrong_batches(ADAPTIVE).tolist() == [False, True, True]
    for batch in (INDEPENDENT, BATCH, MIXED, ADAPTIVE):
        get_verifier("traversal").check_draft(batch)


def test_unadapted_drafts_are_refused():
    batch = DraftBatch.concatenate(
        [DraftTree(BATCH.token_ids, BATCH.parents, BATCH.support_ids, BATCH.law, adapted=False)]
    )
    for rule in verifier_names():
        verifier = get_verifier(rule, allow_lossy=True)
        if verifier.requires.adapted:
            with pytest.raises(ValueError, match="adapted=False; use verifier 'match' or 'coupled'"):
                verifier.check_draft(batch)
        else:
            verifier.check_draft(batch)


def widened_by_luck(child_law):
    """A second child only where the first one's token is 0: adapted, but the width depends on what was drawn."""

    def policy(world, draft):
        for index in range(len(draft)):
            siblings = [draft.node(child).token for child in draft.children_of(index)]
            if draft.depth(index) < 2 and len(siblings) < (1 if siblings and siblings[0] else 2):
                proposal = child_law(world.q(draft.context(index)), siblings, 2)
                if proposal is not None:
                    return index, proposal
        return None

    return policy


@pytest.mark.parametrize(
    ("rule", "child_law", "distance"),
    [
        ("ranked_traversal", without_replacement, 0.1),
        ("ot_traversal", without_replacement, 0.07),
        ("spectr", with_replacement, 0.009),
    ],
)
def test_rules_over_sets_refuse_widths_that_follow_the_draws(rule, child_law, distance):
    """Such drafts are adapted, yet these rules are lossy on them; growth by what was drawn makes such drafts."""
    listed = enumerate_drafts(WORLDS["EX2"], widened_by_luck(child_law))
    assert production_report(WORLDS["EX2"], listed, get_verifier("traversal")).distance < 1e-12
    assert production_report(WORLDS["EX2"], listed, get_verifier(rule)).distance > distance
    batch = pack(WORLDS["EX2"], [draft for _, draft in listed])
    grown = dataclasses.replace(batch, slots=None)
    get_verifier("traversal").check_draft(grown)
    get_verifier(rule).check_draft(batch)
    with pytest.raises(ValueError, match="settled before they were drawn.*'traversal' or a fixed shape"):
        get_verifier(rule).check_draft(grown)


def test_one_drawn_child_needs_no_shape():
    """One drawn and the rest given, all given, or a chain: no set of draws, whatever the width followed."""
    for batch in (MIXED, fork([[1, 0, 0], [0, 1, 0]]), DraftBatch.concatenate([DraftTree.chain([1, 2, 0])])):
        grown = dataclasses.replace(batch, slots=None)
        for rule in ("ranked_traversal", "ot_traversal"):
            get_verifier(rule).check_draft(grown)
    exhausted = fork([[0.5, 0.5, 0], [0, 1, 0]])  # two candidates, both drawn
    grown = dataclasses.replace(exhausted, slots=None)
    with pytest.raises(ValueError, match="settled before they were drawn"):
        get_verifier("ot_traversal").check_draft(grown)


def test_errors_name_the_row():
    batch = DraftBatch.concatenate([DraftTree.chain([1, 2, 0]), INDEPENDENT[0], BATCH[0]])
    with pytest.raises(ValueError, match="in row 1"):
        get_verifier("block").check_draft(batch)
    with pytest.raises(ValueError, match="in row 2"):
        get_verifier("specinfer").check_draft(batch)


def test_names():
    with pytest.raises(ValueError, match="verifier must be one of traversal, match, .*; got 'blok'; try 'block'"):
        get_verifier("blok")
    with pytest.raises(ValueError, match="got None; try 'traversal'"):
        get_verifier(None)
    with pytest.raises(ValueError, match="got .'match'.; try 'match'"):
        get_verifier(["match"])
    for rule in verifier_names():
        verifier = get_verifier(rule, allow_lossy=True)
        assert verifier.name == rule
        assert repr(verifier).endswith("Verifier()")
        if not verifier.lossless:
            with pytest.raises(ValueError, match="changes the output distribution; if that is wanted, pass the object"):
                get_verifier(rule)
    assert {rule for rule in verifier_names() if not get_verifier(rule, allow_lossy=True).lossless} == {
        "typical",
        "kl_threshold",
    }


def test_rows_must_belong_to_the_batch():
    thresholds = get_verifier("traversal").thresholds
    with pytest.raises(ValueError, match=r"one row per packed node \(3\), got 2"):
        thresholds(BATCH, TargetRows(torch.full((2, 3), 1 / 3)))
    with pytest.raises(ValueError, match="below the target's vocabulary size 2, got 2"):
        thresholds(BATCH, TargetRows(torch.full((3, 2), 0.5)))
    with pytest.raises(ValueError, match="dtype must be float64 or float32, got float16"):
        thresholds(BATCH, TargetRows(torch.full((3, 3), 1 / 3)), np.float16)
    for wrong in (torch.full((3, 3), 1 / 3).bfloat16(), torch.ones(3)):
        with pytest.raises(ValueError, match="float32 or float64"):
            TargetRows(wrong)


@pytest.mark.parametrize("rule", ["traversal", "match", "rrs", "block"])
@pytest.mark.parametrize(
    "change",
    [
        {"parents": np.array([-1, 0, 500_000_000], np.int32)},
        {"offsets": np.array([0, 200_000_000], np.int32)},
        {"law": np.ones((0, 1), np.float32)},
        {"support_ids": np.zeros((3, 2), np.int32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_unsound_batches_are_refused_before_memory_is_read(rule, change):
    batch = dataclasses.replace(DraftBatch.concatenate([DraftTree.chain([1, 2, 3])]), **change)
    noise = VerifierNoise(seed=1, rows=np.array([0]), steps=np.array([0]), positions=np.array([0]))
    with pytest.raises(ValueError, match="see batch.check()"):
        get_verifier(rule).verify(batch, TargetRows(torch.full((3, 10), 0.1)), noise)
