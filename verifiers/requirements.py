"""What a draft must meet for a rule to be lossless, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stand.trees import NO_PARENT, DraftBatch
from stand.trees.draft import LAW_TOLERANCE
from stand.verifiers.schedule import Schedule, packed_parents, token_columns

Laws = Literal["ignored", "recorded", "with_replacement", "one_batch"]


@dataclass(frozen=True, slots=True)
class Requirements:
    """Conditions on a draft and on who calls the rule.

    chain: no node has two children.
    adapted: the builder's promise of `DraftTree.adapted`.
    laws: "ignored", the rule never reads them (supports must hold the children's tokens all the same); "recorded",
      each child's is the law that it was drawn from; "with_replacement", moreover siblings were drawn independently
      from one law; "one_batch", moreover a node's children were drawn at once: without replacement from one law, or one
      of them drawn and the rest given.
    fixed_widths: how many children a node gets was settled before any of them was drawn, as by a builder that follows
      a shape (`DraftTree.slots`). One that grows the likeliest place next lets what it has drawn decide how many
      siblings follow.
    most_candidates: how wide a draft with siblings drawn without replacement may be, in tokens of a support; None: any.
    carries_debts: later targets change with what was accepted (`TargetRows.debts`), and the drafter must be one fixed
      function of the context, which a lookup that learns is not.
    """

    chain: bool = False
    adapted: bool = True
    laws: Laws = "recorded"
    fixed_widths: bool = False
    most_candidates: int | None = None
    carries_debts: bool = False


def check_requirements(name: str, requires: Requirements, batch: DraftBatch) -> None:
    """Raise ValueError, naming a rule that fits, where `batch` does not meet what rule `name` requires."""
    if requires.adapted and not batch.adapted:
        raise ValueError(
            f"verifier {name!r} must get an adapted draft, got adapted=False; "
            "use verifier 'match' or 'coupled', which keep the law whatever the draft"
        )
    if requires.chain and np.any(batch.ranks > 0):
        raise ValueError(
            f"verifier {name!r} must get chains, got two siblings in row {_row_of(batch, batch.ranks > 0)}; "
            "use verifier 'traversal' (on a chain it is 'block') or 'match'"
        )
    if requires.laws == "with_replacement":
        wrong = _departures(batch, without_replacement=False)
        if np.any(wrong):
            raise ValueError(
                f"verifier {name!r} must get siblings drawn independently from one law, got others in row "
                f"{_row_of(batch, wrong)}; use verifier 'traversal', which takes any recorded laws"
            )
    if requires.laws == "one_batch":
        wrong = wrong_batches(batch)
        if np.any(wrong):
            raise ValueError(
                f"verifier {name!r} must get a node's children in one draw (without replacement from one law, or one "
                f"drawn and the rest deterministic), got others in row {_row_of(batch, wrong)}; "
                "use verifier 'traversal', which takes any recorded laws"
            )
    if requires.fixed_widths and batch.slots is None:
        wrong = _drawn_siblings(batch)
        if np.any(wrong):
            raise ValueError(
                f"verifier {name!r} must get as many siblings as were settled before they were drawn, got a draft "
                f"that follows no shape in row {_row_of(batch, wrong)}; use verifier 'traversal' or a fixed shape"
            )
    most, width = requires.most_candidates, batch.law.shape[1]
    if most is not None and width > most and np.any(drawn_without_replacement(batch)):
        raise ValueError(
            f"verifier {name!r} must get at most {most} candidates per context, got {width}; "
            "use verifier 'traversal', or give the drafter a smaller num_candidates"
        )


def _drawn_siblings(batch: DraftBatch) -> np.ndarray:
    """[M] bool: children of nodes with two or more, unless at most one of these was drawn and the rest given."""
    exhausted = drawn_without_replacement(batch)  # of two candidates the second one's law is a one-hot
    return _children_of((_num_sampled(batch) > 1) | exhausted, batch)


def _num_sampled(batch: DraftBatch) -> np.ndarray:
    """[M] int64: children of each node whose law leaves more than one token."""
    parents = packed_parents(batch)
    sampled = np.count_nonzero(batch.law, axis=1) > 1
    return np.bincount(parents[sampled], minlength=batch.num_nodes)


def _children_of(nodes: np.ndarray, batch: DraftBatch) -> np.ndarray:
    """[M] bool: children of the nodes that are set in `nodes` [M] bool."""
    parents = packed_parents(batch)
    return nodes[parents] & (parents != NO_PARENT)


def wrong_batches(batch: DraftBatch) -> np.ndarray:
    """[M] bool: children whose node is neither one draw without replacement nor "at most one child drawn"."""
    departs = _departures(batch, without_replacement=True)
    node_departs = np.zeros(batch.num_nodes, dtype=bool)
    node_departs[packed_parents(batch)[departs]] = True
    return _children_of(node_departs & (_num_sampled(batch) > 1), batch)


def drawn_without_replacement(batch: DraftBatch) -> np.ndarray:
    """[M] bool: nodes with two or more children, all drawn without replacement from the first one's law."""
    parents = packed_parents(batch)
    num_children = np.bincount(parents[parents != NO_PARENT], minlength=batch.num_nodes)
    departs = np.zeros(batch.num_nodes, dtype=bool)
    departs[parents[_departures(batch, without_replacement=True)]] = True
    return (num_children > 1) & ~departs


def _departures(batch: DraftBatch, *, without_replacement: bool) -> np.ndarray:
    """[M] bool: children whose law is not the first sibling's (without its earlier siblings' tokens, if so asked)."""
    parents = packed_parents(batch)
    columns, _ = token_columns(batch, parents)
    schedule = Schedule.by_rank(batch)
    left = np.zeros(batch.law.shape)  # per parent: what the next child must have been drawn from, not normalised
    departs = np.zeros(batch.num_nodes, dtype=bool)
    for rank, step in enumerate(schedule.steps[0]):
        children = schedule.order[step]
        if rank == 0:
            left[parents[children]] = batch.law[children]
        expected = left[parents[children]]
        totals = expected.sum(axis=1, keepdims=True)
        expected = expected / np.where(totals > 0, totals, 1.0)
        departs[children] = np.abs(batch.law[children] - expected).max(axis=1) > LAW_TOLERANCE
        if without_replacement:
            left[parents[children], columns[children]] = 0.0
    return departs


def _row_of(batch: DraftBatch, nodes: np.ndarray) -> int:
    """The row of the first node that is set in `nodes` [M] bool."""
    return int(np.searchsorted(batch.offsets, np.argmax(nodes), side="right")) - 1
