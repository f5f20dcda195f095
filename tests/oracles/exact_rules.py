"""The rules in explicit form, on `exact.Draft`s, in whatever numbers the world holds (Fractions: exact).

Each yields outcomes (probability, stopping node, law of the next token). The last part holds rules that are wrong on
purpose: a checker that passes one of them is blind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

from exact import Draft, Law, Outcome, World, normalized


def target_law(world: World, draft: Draft, node: int) -> Law:
    return world.p(draft.context(node))


def excess(weights: Law, law: Law) -> tuple:
    """(weights - law)+, token by token."""
    return tuple(max(0, weight - mass) for weight, mass in zip(weights, law, strict=True))


def scaled(factor, law: Law) -> tuple:
    return tuple(factor * mass for mass in law)


def capped_ratio(numerator, denominator):
    return min(1, numerator / denominator)


def match(world: World, draft: Draft) -> Iterator[Outcome]:
    def visit(node: int, reach) -> Iterator[Outcome]:
        law = list(target_law(world, draft, node))
        for child in draft.children_of(node):
            token = draft.node(child).token
            yield from visit(child, reach * law[token])
            law[token] = 0
        left = sum(law)
        if left > 0:
            yield reach * left, node, scaled(1 / left, law)

    yield from visit(0, 1)


def rrs(world: World, draft: Draft) -> Iterator[Outcome]:
    def visit(node: int, reach) -> Iterator[Outcome]:
        law = target_law(world, draft, node)
        for child in draft.children_of(node):
            drawn = draft.node(child)
            accept = capped_ratio(law[drawn.token], drawn.law[drawn.token])
            yield from visit(child, reach * accept)
            reach = reach * (1 - accept)
            law = normalized(excess(law, drawn.law)) or law
        yield reach, node, law

    yield from visit(0, 1)


def token(world: World, draft: Draft) -> Iterator[Outcome]:
    reach = 1
    for node, drawn in enumerate(draft.nodes):
        law = target_law(world, draft, node)
        accept = capped_ratio(law[drawn.token], drawn.law[drawn.token])
        if accept < 1:
            yield reach * (1 - accept), node, normalized(excess(law, drawn.law))
        reach = reach * accept
    yield reach, len(draft.nodes), target_law(world, draft, len(draft.nodes))


def traversal(world: World, draft: Draft) -> Iterator[Outcome]:
    outcomes = []

    def visit(node: int, owed, reach):
        """Test all below `node`, then it; returns the probability that all of it failed."""
        mass = scaled(owed, target_law(world, draft, node))
        for child in draft.children_of(node):
            drawn = draft.node(child)
            inherited = capped_ratio(mass[drawn.token], drawn.law[drawn.token])
            reach = visit(child, inherited, reach)
            rest = excess(mass, drawn.law)
            failure = sum(rest) + 1 - sum(mass)
            mass = scaled(1 / failure, rest) if failure > 0 else mass
        threshold = sum(mass) if node else 1
        if threshold > 0:
            outcomes.append((reach * threshold, node, normalized(mass)))
        return reach * (1 - threshold)

    visit(0, 1, 1)
    return iter(outcomes)


def block(world: World, draft: Draft) -> Iterator[Outcome]:
    return last_success(world, draft, *block_parts(world, draft))


def block_parts(world: World, draft: Draft) -> tuple[list, list]:
    """(h_i, laws of the next token) for i = 0 .. gamma; equations 4 and 5."""
    prefix = capped_prefix(world, draft)
    thresholds, laws = [1], []
    last = len(draft.nodes)
    for node in range(last):
        rest = excess(scaled(prefix[node], target_law(world, draft, node)), draft.nodes[node].law)
        laws.append(normalized(rest) or target_law(world, draft, node))
        failure = sum(rest) + 1 - prefix[node]
        if node:
            thresholds.append(sum(rest) / failure if failure > 0 else 1)
    laws.append(target_law(world, draft, last))
    return ([*thresholds, prefix[last]] if last else thresholds), laws


def capped_prefix(world: World, draft: Draft) -> list:
    """p_0 = 1, p_i = min(1, p_{i-1} p / q)."""
    prefix = [1]
    for node, drawn in enumerate(draft.nodes):
        step = target_law(world, draft, node)[drawn.token] / drawn.law[drawn.token]
        prefix.append(min(1, prefix[-1] * step))
    return prefix


def open_prefix(world: World, draft: Draft) -> list:
    """The uncapped product of ratios."""
    prefix = [1]
    for node, drawn in enumerate(draft.nodes):
        prefix.append(prefix[-1] * target_law(world, draft, node)[drawn.token] / drawn.law[drawn.token])
    return prefix


def last_success(world: World, draft: Draft, thresholds: list, laws: list) -> Iterator[Outcome]:
    reach = 1
    for node in range(len(draft.nodes), -1, -1):
        yield reach * thresholds[node], node, laws[node]
        reach = reach * (1 - thresholds[node])


# Wrong on purpose.


def block_testing_prefix(world: World, draft: Draft) -> Iterator[Outcome]:
    """h_i = p_i at every position."""
    _, laws = block_parts(world, draft)
    return last_success(world, draft, capped_prefix(world, draft), laws)


def block_breaking(world: World, draft: Draft) -> Iterator[Outcome]:
    """Stops at the first failure instead of taking the last success."""
    thresholds, laws = block_parts(world, draft)
    reach = 1
    for node in range(len(draft.nodes)):
        yield reach * (1 - thresholds[node + 1]), node, laws[node]
        reach = reach * thresholds[node + 1]
    yield reach, len(draft.nodes), laws[-1]


def block_token_residual(world: World, draft: Draft) -> Iterator[Outcome]:
    """The residual of token verification, (p - q)+."""
    thresholds, laws = block_parts(world, draft)
    for node, drawn in enumerate(draft.nodes):
        law = target_law(world, draft, node)
        laws[node] = normalized(excess(law, drawn.law)) or law
    return last_success(world, draft, thresholds, laws)


def block_uncapped_last(world: World, draft: Draft) -> Iterator[Outcome]:
    """The last test uses the uncapped product (as in public code of arXiv 2601.05724)."""
    thresholds, laws = block_parts(world, draft)
    return last_success(world, draft, [*thresholds[:-1], min(1, open_prefix(world, draft)[-1])], laws)


def greedy_block_parts(world: World, draft: Draft) -> tuple[list, list]:
    prefix = open_prefix(world, draft)
    thresholds, laws = [1], []
    last = len(draft.nodes)
    for node in range(last):
        owed, proposal = scaled(prefix[node], target_law(world, draft, node)), draft.nodes[node].law
        rest, missing = sum(excess(owed, proposal)), sum(excess(proposal, owed))
        laws.append(normalized(excess(owed, proposal)) or target_law(world, draft, node))
        if node:
            thresholds.append(min(1, rest / missing) if missing > 0 else 1)
    laws.append(target_law(world, draft, last))
    return ([*thresholds, min(1, prefix[last])] if last else thresholds), laws


def greedy_block_unmodified(world: World, draft: Draft) -> Iterator[Outcome]:
    """Greedy block verification that leaves the target as it is afterwards."""
    return last_success(world, draft, *greedy_block_parts(world, draft))


def paths(draft: Draft) -> list[list[int]]:
    """Root-to-leaf paths, root included, first children first."""

    def below(node: int) -> list[list[int]]:
        children = draft.children_of(node)
        return [[node, *rest] for child in children for rest in below(child)] if children else [[node]]

    return below(0)


def as_chain(world: World, draft: Draft, path: list[int], law_of: Callable[[int], Law]) -> Draft:
    chain = Draft()
    for position, node in enumerate(path[1:]):
        chain = chain.grown(position, draft.node(node).token, law_of(node))
    return chain


def paths_as_chains(world: World, draft: Draft) -> Iterator[tuple[list[int], list[Outcome]]]:
    """Every root-to-leaf path with what block verification makes of it alone, as if it were a chain."""
    for path in paths(draft):
        chain = as_chain(world, draft, path, lambda node: draft.node(node).law)
        yield path, [outcome for outcome in block(world, chain) if outcome[0] > 0]


def per_path_keep_longest(world: World, draft: Draft) -> Iterator[Outcome]:
    """Block verification of every path by itself; the longest result counts (ties: the first path)."""
    verified = list(paths_as_chains(world, draft))
    for combination in product(*(outcomes for _, outcomes in verified)):
        probability = prod(outcome[0] for outcome in combination)
        best = max(range(len(verified)), key=lambda index: (combination[index][1], -index))
        yield probability, verified[best][0][combination[best][1]], combination[best][2]


def per_path_retry_next(world: World, draft: Draft) -> Iterator[Outcome]:
    """Block verification of the first path; where nothing is kept, of the next one."""
    verified = list(paths_as_chains(world, draft))
    reach = 1
    for index, (path, outcomes) in enumerate(verified):
        last = index + 1 == len(verified)
        for probability, node, law in outcomes:
            if node > 0 or last:
                yield reach * probability, path[node], law
        reach = reach * sum(probability for probability, node, _ in outcomes if node == 0)


def best_path_only(world: World, draft: Draft) -> Iterator[Outcome]:
    """Block verification of the path that the target likes best."""

    def target_probability(path: list[int]):
        return prod(target_law(world, draft, draft.node(node).parent)[draft.node(node).token] for node in path[1:])

    path, outcomes = max(paths_as_chains(world, draft), key=lambda verified: target_probability(verified[0]))
    for probability, node, law in outcomes:
        yield probability, path[node], law


def greedy_block_continued(world: World, draft: Draft) -> Iterator[tuple]:
    """Greedy block verification with its modification: (probability, tokens up to position gamma, law of the next)."""
    chain_tokens = tuple(node.token for node in draft.nodes)
    prefix = open_prefix(world, draft)
    for probability, tau, law in last_success(world, draft, *greedy_block_parts(world, draft)):
        if probability > 0:
            yield from _follow(world, probability, chain_tokens[:tau], law, prefix[tau], len(chain_tokens))


def _follow(world: World, probability, context: tuple, law: Law, ratio, depth: int) -> Iterator[tuple]:
    """Draw from `law`, then from (R p - q)+ up to position `depth`, then from p."""
    if len(context) == depth:
        yield probability, context, law
        return
    for token, share in enumerate(law):
        if share > 0:
            step, proposal = world.p(context)[token], world.q(context)[token]
            longer = (*context, token)
            following, onward = world.p(longer), None
            if ratio is not None and proposal > 0:
                onward = ratio * step / proposal
                if len(longer) < depth:
                    following = normalized(excess(scaled(onward, world.p(longer)), world.q(longer)))
            yield from _follow(world, probability * share, longer, following, onward, depth)


WRONG_ON_CHAINS = (
    block_testing_prefix,
    block_breaking,
    block_token_residual,
    block_uncapped_last,
    greedy_block_unmodified,
)
WRONG_ON_TREES = (per_path_keep_longest, per_path_retry_next, best_path_only)
