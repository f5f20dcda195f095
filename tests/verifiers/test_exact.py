"""The checker of losslessness: known values, and wrong rules that it must catch."""

from fractions import Fraction
from functools import cache

import exact_rules
import pytest
from exact import (
    WORLDS,
    check,
    compare,
    deterministic,
    enumerate_drafts,
    mixed_sampled_first,
    mixed_sampled_last,
    normalized,
    shaped,
    with_replacement,
    without_replacement,
)

KINDS = {
    "chain1": shaped(with_replacement, 1),
    "chain2": shaped(with_replacement, 1, 1),
    "chain3": shaped(with_replacement, 1, 1, 1),
    "deterministic chain2": shaped(deterministic, 1, 1),
    "deterministic (2,2)": shaped(deterministic, 2, 2),
    "without replacement (2,1)": shaped(without_replacement, 2, 1),
    "without replacement (2,2)": shaped(without_replacement, 2, 2),
    "with replacement (2,1)": shaped(with_replacement, 2, 1),
    "mixed (2,2), sampled first": shaped(mixed_sampled_first, 2, 2),
    "mixed (2,2), sampled last": shaped(mixed_sampled_last, 2, 2),
}


@cache
def drafts(world: str, kind: str) -> list:
    return enumerate_drafts(WORLDS[world], KINDS[kind])


GOLDEN = [  # kind, rule, expected drafted tokens kept on EX1, EX2, EX3
    ("chain2", "token", "10/9 5/4 39/50"),
    ("chain2", "rrs", "10/9 5/4 39/50"),
    ("chain2", "block", "11/9 197/144 21/25"),
    ("chain2", "traversal", "11/9 197/144 21/25"),
    ("chain2", "match", "52/81 2611/5184 1809/5000"),
    ("chain3", "token", "38/27 - -"),
    ("chain3", "block", "5/3 - -"),
    ("chain3", "traversal", "5/3 - -"),
    ("deterministic chain2", "token", "- 35/72 39/100"),
    ("deterministic chain2", "block", "- 35/72 39/100"),
    ("deterministic chain2", "traversal", "- 35/72 39/100"),
    ("deterministic chain2", "match", "- 35/72 39/100"),
    ("deterministic (2,2)", "match", "- 181/144 63/50"),
    ("deterministic (2,2)", "rrs", "- 181/144 63/50"),
    ("deterministic (2,2)", "traversal", "- 181/144 63/50"),
    ("without replacement (2,1)", "match", "- 81559/85536 13779/20000"),
    ("without replacement (2,1)", "rrs", "- 865/576 27/25"),
    ("without replacement (2,1)", "traversal", "- 953/576 57/50"),
    ("without replacement (2,2)", "match", "- 51335/42768 441/500"),
    ("without replacement (2,2)", "rrs", "- 1897/1080 59/50"),
    ("without replacement (2,2)", "traversal", "- 2551/1440 59/50"),
    ("with replacement (2,1)", "rrs", "- 25/18 93/100"),
    ("with replacement (2,1)", "traversal", "- 217/144 99/100"),
    ("mixed (2,2), sampled first", "match", "- 511/432 9/10"),
    ("mixed (2,2), sampled first", "rrs", "- 2 63/50"),
    ("mixed (2,2), sampled first", "traversal", "- 2 63/50"),
    ("mixed (2,2), sampled last", "rrs", "- 3031/1728 11/10"),
    ("mixed (2,2), sampled last", "traversal", "- 1025/576 11/10"),
]


@pytest.mark.parametrize(("kind", "rule", "expected"), GOLDEN, ids=lambda value: str(value))
def test_golden_values(kind, rule, expected):
    for world, value in zip(WORLDS, expected.split(), strict=True):
        if value == "-":
            continue
        report = check(WORLDS[world], drafts(world, kind), getattr(exact_rules, rule))
        assert report.distance == 0
        assert report.expected == Fraction(value)


@pytest.mark.parametrize(
    ("kind", "world", "value"),
    [("chain2", "EX1", "12/9"), ("chain2", "EX2", "199/144"), ("chain2", "EX3", "21/25"), ("chain3", "EX1", "50/27")],
)
def test_greedy_block_needs_its_modification(kind, world, value):
    listed = drafts(world, kind)
    modified = compare(
        WORLDS[world],
        [
            (weight * probability, context, law)
            for weight, draft in listed
            for probability, context, law in exact_rules.greedy_block_continued(WORLDS[world], draft)
        ],
    )
    assert modified.distance == 0
    unmodified = check(WORLDS[world], listed, exact_rules.greedy_block_unmodified)
    assert unmodified.expected == Fraction(value)
    assert unmodified.distance > 0


DISTANCES = [  # wrong rule, kind, total variation on EX1, EX2, EX3
    ("block_testing_prefix", "chain2", "1/6 19/128 3/25"),
    ("block_breaking", "chain2", "1/3 19/52 1/5"),
    ("block_token_residual", "chain2", "0 1/192 3/100"),
    ("block_uncapped_last", "chain2", "1/9 1/72 0"),
    ("greedy_block_unmodified", "chain2", "1/9 1/72 1/35"),
    ("per_path_keep_longest", "without replacement (2,1)", "- 4357/114048 251/2000"),
    ("per_path_retry_next", "without replacement (2,1)", "- 5/48 3/20"),
    ("best_path_only", "without replacement (2,1)", "- 703463/5816448 1979/14000"),
]


@pytest.mark.parametrize(("rule", "kind", "expected"), DISTANCES, ids=lambda value: str(value))
def test_wrong_rules_are_caught(rule, kind, expected):
    """Each by its known distance; EX2 alone sees all eight."""
    for world, value in zip(WORLDS, expected.split(), strict=True):
        if value != "-":
            report = check(WORLDS[world], drafts(world, kind), getattr(exact_rules, rule))
            assert report.distance == Fraction(value)
            assert world != "EX2" or report.distance > 0


def test_every_draft_probability_is_counted():
    for world in WORLDS:
        for kind in KINDS:
            assert sum(probability for probability, _ in drafts(world, kind)) == 1


# What an unadapted builder does to ratio rules; `match` does not mind.


def without_small_nodes(world, draft):
    """Drop drawn leaves whose drafter probability is small."""
    keep = [
        node
        for node in range(1, len(draft))
        if draft.children_of(node) or world.q(draft.context(draft.node(node).parent))[draft.node(node).token] > 0.3
    ]
    return relabelled(draft, keep)


def re_sorted(world, draft):
    """Siblings by falling drafter probability, whatever order they were drawn in."""
    order = sorted(
        range(1, len(draft)),
        key=lambda node: (
            draft.depth(node),
            -world.q(draft.context(draft.node(node).parent))[draft.node(node).token],
        ),
    )
    return relabelled(draft, order)


def relabelled(draft, order):
    names = {0: 0}
    result = exact_rules.Draft()
    for node in order:
        old = draft.node(node)
        names[node] = len(result)
        result = result.grown(names[old.parent], old.token, old.law)
    return result


def with_laws(law_of):
    """The same nodes under other recorded laws."""

    def change(world, draft):
        result = exact_rules.Draft()
        for node in draft.nodes:
            others = {other.token for other in result.nodes if other.parent == node.parent} - {node.token}
            result = result.grown(node.parent, node.token, law_of(world.q(draft.context(node.parent)), others))
        return result

    return change


def plain_law(q, others):
    return q


def law_without_siblings(q, others):
    return normalized([0 if token in others else mass for token, mass in enumerate(q)])


UNADAPTED = {
    "small nodes dropped": ("without replacement (2,1)", without_small_nodes),
    "siblings re-sorted": ("without replacement (2,1)", re_sorted),
    "plain law for draws without replacement": ("without replacement (2,1)", with_laws(plain_law)),
    "law without siblings for independent draws": ("with replacement (2,1)", with_laws(law_without_siblings)),
    "drafter's law for deterministic children": ("deterministic (2,2)", with_laws(law_without_siblings)),
}


@pytest.mark.parametrize("case", UNADAPTED)
def test_unadapted_drafts_break_ratio_rules_only(case):
    kind, change = UNADAPTED[case]
    changed = [(weight, change(WORLDS["EX2"], draft)) for weight, draft in drafts("EX2", kind)]
    assert check(WORLDS["EX2"], changed, exact_rules.match).distance == 0
    assert check(WORLDS["EX2"], changed, exact_rules.rrs).distance > Fraction(1, 50)
    assert check(WORLDS["EX2"], changed, exact_rules.traversal).distance > Fraction(1, 50)
