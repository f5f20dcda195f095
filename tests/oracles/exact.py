"""Exact enumeration: is a verification rule lossless, and how many drafted tokens does it keep?

A tiny world (`World`) gives the target's and the drafter's law for every context. A policy grows drafts in it, one
child at a time, each a draw from a stated law given what is already revealed; every draft it can grow is listed with
its probability. A rule turns a draft into outcomes (probability, stopping node, law of the next token). `check` lets
the target continue from each outcome and compares the law of all sequences one longer than the deepest draft with
the target's: total variation, a Fraction, 0 for a lossless rule.

`production_outcomes` does the same with the numbers that the shipped tensor code returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import torch

from stand.trees import DraftBatch, DraftTree
from stand.verifiers import TargetRows, ThresholdVerifier
from stand.verifiers.walk import last_from_top

Law = tuple  # V numbers (Fraction or float) that sum to 1
Context = tuple  # token ids from the root down


@dataclass(frozen=True)
class World:
    """Laws by context; contexts that are not listed follow `default`."""

    target: dict[Context, Law]
    proposal: dict[Context, Law]
    default: tuple[Law, Law]

    @property
    def vocabulary_size(self) -> int:
        return len(self.default[0])

    def p(self, context: Context) -> Law:
        return self.target.get(context, self.default[0])

    def q(self, context: Context) -> Law:
        return self.proposal.get(context, self.default[1])

    def as_float(self) -> World:
        def convert(laws: dict[Context, Law]) -> dict[Context, Law]:
            return {context: tuple(map(float, law)) for context, law in laws.items()}

        default = (tuple(map(float, self.default[0])), tuple(map(float, self.default[1])))
        return World(convert(self.target), convert(self.proposal), default)


def law(*weights: int | Fraction) -> Law:
    """Weights normalised to Fractions."""
    total = sum(Fraction(weight) for weight in weights)
    return tuple(Fraction(weight) / total for weight in weights)


def one_hot(token: int, size: int) -> Law:
    return tuple(Fraction(int(token == other)) for other in range(size))


EX1 = World({}, {}, (law(1, 2), law(2, 1)))
EX2 = World(
    {(): law(5, 4, 3), (0,): law(2, 7, 3), (1,): law(6, 1, 5), (2,): law(1, 3, 8)},
    {(): law(8, 3, 1), (0,): law(6, 4, 2), (1,): law(3, 6, 3), (2,): law(2, 2, 8)},
    (law(4, 4, 4), law(4, 4, 4)),
)
EX3 = World(
    {
        (): law(9, 6, 5, 0),
        (0,): law(0, 12, 8, 0),
        (1,): law(10, 0, 6, 4),
        (2,): law(5, 5, 5, 5),
        (3,): law(20, 0, 0, 0),
    },
    {
        (): law(4, 12, 0, 4),
        (0,): law(10, 10, 0, 0),
        (1,): law(6, 0, 14, 0),
        (2,): law(0, 0, 8, 12),
        (3,): law(5, 5, 5, 5),
    },
    (law(8, 6, 4, 2), law(10, 10, 0, 0)),
)
WORLDS = {"EX1": EX1, "EX2": EX2, "EX3": EX3}


@dataclass(frozen=True)
class Node:
    parent: int
    token: int
    law: Law


@dataclass(frozen=True)
class Draft:
    """Revealed nodes after the root; node numbers start at 1, the root is 0. `contexts`: tokens up to each of them."""

    nodes: tuple[Node, ...] = ()
    children: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)
    contexts: tuple[Context, ...] = field(default=((),), compare=False)

    def __len__(self) -> int:
        return len(self.nodes) + 1

    def grown(self, parent: int, token: int, law: Law) -> Draft:
        children = dict(self.children)
        children[parent] = (*children.get(parent, ()), len(self))
        contexts = (*self.contexts, (*self.contexts[parent], token))
        return Draft((*self.nodes, Node(parent, token, law)), children, contexts)

    def node(self, index: int) -> Node:
        return self.nodes[index - 1]

    def children_of(self, index: int) -> tuple[int, ...]:
        return self.children.get(index, ())

    def context(self, index: int) -> Context:
        return self.contexts[index]

    def depth(self, index: int) -> int:
        return len(self.contexts[index])


Policy = Callable[[World, Draft], "tuple[int, Law] | None"]  # (parent, law of its next child), or stop
Outcome = tuple  # (probability, stopping node, law of the next token)
Rule = Callable[[World, Draft], "Iterable[Outcome]"]


def enumerate_drafts(world: World, policy: Policy) -> list[tuple[Fraction, Draft]]:
    """Every draft the policy can grow, with its probability."""
    done: list[tuple[Fraction, Draft]] = []
    open_drafts = [(Fraction(1), Draft())]
    while open_drafts:
        probability, draft = open_drafts.pop()
        step = policy(world, draft)
        if step is None:
            done.append((probability, draft))
            continue
        parent, proposal = step
        for token, mass in enumerate(proposal):
            if mass > 0:
                open_drafts.append((probability * mass, draft.grown(parent, token, proposal)))
    return done


ChildLaw = Callable[[Law, "Sequence[int]", int], "Law | None"]  # (q, earlier siblings' tokens, width) -> law


def shaped(child_law: ChildLaw, *widths: int) -> Policy:
    """Breadth-first drafts: a node at depth d gets up to widths[d] children from `child_law`."""

    def policy(world: World, draft: Draft) -> tuple[int, Law] | None:
        for index in range(len(draft)):
            context = draft.context(index)
            if len(context) == len(widths):
                continue
            siblings = [draft.node(child).token for child in draft.children_of(index)]
            if len(siblings) < widths[len(context)]:
                proposal = child_law(world.q(context), siblings, widths[len(context)])
                if proposal is not None:
                    return index, proposal
        return None

    return policy


def normalized(weights: Sequence) -> Law | None:
    total = sum(weights)
    return tuple(weight / total for weight in weights) if total > 0 else None


def with_replacement(q: Law, siblings: Sequence[int], width: int) -> Law | None:
    return q


def without_replacement(q: Law, siblings: Sequence[int], width: int) -> Law | None:
    """What Gumbel-Top-K records: q without the earlier siblings, renormalised."""
    return normalized([0 if token in siblings else mass for token, mass in enumerate(q)])


def ranking(q: Law) -> list[int]:
    """Tokens of positive mass, most likely first, ties to the lowest id."""
    return sorted((token for token, mass in enumerate(q) if mass > 0), key=lambda token: -q[token])


def deterministic(q: Law, siblings: Sequence[int], width: int) -> Law | None:
    best = ranking(q)
    return one_hot(best[len(siblings)], len(q)) if len(siblings) < len(best) else None


def mixed_sampled_first(q: Law, siblings: Sequence[int], width: int) -> Law | None:
    """One draw outside the width - 1 most likely tokens, then those."""
    best = ranking(q)[: width - 1]
    rest = normalized([0 if token in best else mass for token, mass in enumerate(q)])
    queue = [one_hot(token, len(q)) for token in best]
    if rest is not None:
        queue.insert(0, rest)
    return queue[len(siblings)] if len(siblings) < len(queue) else None


def mixed_sampled_last(q: Law, siblings: Sequence[int], width: int) -> Law | None:
    best = ranking(q)[: width - 1]
    rest = normalized([0 if token in best else mass for token, mass in enumerate(q)])
    queue = [one_hot(token, len(q)) for token in best]
    if rest is not None:
        queue.append(rest)
    return queue[len(siblings)] if len(siblings) < len(queue) else None


@dataclass(frozen=True)
class Report:
    distance: Fraction | float  # total variation between what comes out and the target
    expected: Fraction | float  # drafted tokens kept, on average


def check(world: World, drafts: Iterable[tuple], rule: Rule) -> Report:
    """Enumerate `rule` on drafts [(probability, draft)]; see the module's first lines."""
    return compare(
        world,
        (
            (weight * probability, draft.context(node), next_law)
            for weight, draft in drafts
            for probability, node, next_law in rule(world, draft)
            if probability > 0
        ),
    )


def compare(world: World, outcomes: Iterable[tuple], horizon: int | None = None) -> Report:
    """Report on outcomes (probability, kept tokens, law of the next token)."""
    mass: dict[int, dict[Context, Fraction]] = defaultdict(lambda: defaultdict(int))
    expected = 0
    for probability, context, next_law in outcomes:
        expected += probability * len(context)
        level = mass[len(context) + 1]
        for token, share in enumerate(next_law):
            if share > 0:
                level[(*context, token)] += probability * share
    horizon = horizon or max(mass)
    truth: dict[Context, Fraction] = {(): 1}
    reached: dict[Context, Fraction] = {}
    for length in range(1, horizon + 1):
        truth = _continued(world, truth)
        reached = _continued(world, reached)
        for context, share in mass[length].items():
            reached[context] = reached.get(context, 0) + share
    keys = truth.keys() | reached.keys()
    distance = sum(abs(truth.get(key, 0) - reached.get(key, 0)) for key in keys) / 2
    return Report(distance=distance, expected=expected)


def _continued(world: World, masses: dict[Context, Fraction]) -> dict[Context, Fraction]:
    return {
        (*context, token): mass * share
        for context, mass in masses.items()
        for token, share in enumerate(world.p(context))
        if share > 0
    }


SupportOrder = Callable[["list[int]", "list[int]"], "list[int]"]  # (support, tokens drawn from it) -> support


def ascending(support: list[int], drawn: list[int]) -> list[int]:
    return support


def drawn_first(support: list[int], drawn: list[int]) -> list[int]:
    """As a race lists them: in order of arrival."""
    return [*drawn, *(token for token in support if token not in drawn)]


def drawn_last(support: list[int], drawn: list[int]) -> list[int]:
    return drawn_first(support, drawn)[::-1]


def pack(
    world: World, drafts: Sequence[Draft], *, support_size: int | None = None, order: SupportOrder = ascending
) -> DraftBatch:
    """Enumerated drafts as one batch; the pending token is 0."""
    size, laws = support_size or world.vocabulary_size, {}
    for law in (node.law for draft in drafts for node in draft.nodes):
        if id(law) not in laws:  # drafts share them, and Fractions are slow
            laws[id(law)] = tuple(map(float, law))
    return DraftBatch.concatenate([_draft_tree(world, draft, size, order, laws) for draft in drafts])


def _draft_tree(
    world: World, draft: Draft, support_size: int, order: SupportOrder, laws_of: dict[int, tuple[float, ...]]
) -> DraftTree:
    """laws_of: by the identity of the laws of the draft's nodes."""
    support_ids = np.full((len(draft), support_size), -1, dtype=np.int32)
    laws = np.zeros((len(draft), support_size), dtype=np.float64)
    for index in range(len(draft)):
        children = draft.children_of(index)
        own = {child: laws_of[id(draft.node(child).law)] for child in children}
        support = [token for token in range(world.vocabulary_size) if any(law[token] > 0 for law in own.values())]
        support = order(support, list(dict.fromkeys(draft.node(child).token for child in children)))
        support_ids[index, : len(support)] = support
        for child in children:
            laws[child, : len(support)] = [own[child][token] for token in support]
    return DraftTree(
        token_ids=np.array([0, *(node.token for node in draft.nodes)], dtype=np.int32),
        parents=np.array([-1, *(node.parent for node in draft.nodes)], dtype=np.int32),
        support_ids=support_ids,
        law=laws,
        slots=np.arange(len(draft), dtype=np.int32),
    )


def target_rows(world: World, drafts: Sequence[Draft], dtype: torch.dtype = torch.float64) -> TargetRows:
    contexts = [context for draft in drafts for context in draft.contexts]
    numbers = {context: number for number, context in enumerate(dict.fromkeys(contexts))}  # few, in many drafts
    laws = torch.tensor([[float(share) for share in world.p(context)] for context in numbers], dtype=dtype)
    return TargetRows(laws[[numbers[context] for context in contexts]])


def production_report(
    world: World,
    drafts: Sequence[tuple],
    verifier: ThresholdVerifier,
    dtype: type = np.float64,
    *,
    order: SupportOrder = ascending,
    inputs: type = np.float64,
) -> Report:
    """Rebuild the law of `verifier.thresholds` over all enumerated drafts, packed in one batch.

    dtype: what is computed in; inputs: what the laws of drafter and target are given in (an engine gives float32).
    """
    listed = [draft for _, draft in drafts]
    batch = pack(world, listed, order=order)
    batch = replace(batch, law=batch.law.astype(inputs))
    target = target_rows(world, listed, getattr(torch, np.dtype(inputs).name))
    thresholds, mass, scale = verifier.thresholds(batch, target, dtype)
    next_laws = full_laws(batch, target, mass=mass, scale=scale)
    order = verifier.test_order(batch, target)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    outcomes = []
    for row, (weight, draft) in enumerate(drafts):
        first, end = batch.offsets[row], batch.offsets[row + 1]
        stops = stop_probabilities(verifier, draft, thresholds[first:end].tolist(), place[first:end].tolist())
        for node, probability in enumerate(stops):
            if probability > 0:
                outcomes.append((float(weight) * probability, draft.context(node), next_laws[first + node]))
    return compare(world.as_float(), outcomes)


def full_laws(batch: DraftBatch, target: TargetRows, *, mass: np.ndarray, scale: np.ndarray) -> list[tuple[float, ...]]:
    """[M] normalised laws {mass on the support, scale x p elsewhere}."""
    weights = np.asarray(target.rows(np.arange(batch.num_nodes))).astype(np.float64) * scale[:, None]
    for node, ids in enumerate(batch.support_ids):
        weights[node, ids[ids >= 0]] = mass[node][ids >= 0]
    totals = weights.sum(axis=1, keepdims=True)
    return [tuple(row) for row in (weights / np.where(totals > 0, totals, 1)).tolist()]


def stop_probabilities(verifier: ThresholdVerifier, draft: Draft, thresholds: Sequence, place: Sequence[int]) -> list:
    """Per node: how often a row stops there. `place[node]` orders siblings as they are tested."""
    stops = [0] * len(draft)
    top_down = type(verifier).walk is last_from_top

    def visit(node: int, reach):
        """`reach`: the chance that this node is tested (bottom-up) or that its parent passed (top-down)."""
        for child in sorted(draft.children_of(node), key=place.__getitem__):
            if top_down:
                visit(child, reach * thresholds[child])
                reach = reach * (1 - thresholds[child])
            else:
                reach = visit(child, reach)
        stops[node] = reach if top_down or node == 0 else reach * thresholds[node]
        return reach - stops[node]

    visit(0, 1)
    return stops
