"""A draft: this step's candidate tokens and the laws that they were drawn from.

Node 0 of a draft is the *pending* token: committed, not yet in the KV cache. Row i of the target's output is
therefore the law of node i's children, and an empty draft (N = 1) is ordinary decoding.

Letters: N nodes of one draft, M nodes of all drafts of a step, B rows, S candidates kept per context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stand.trees import compiled
from stand.trees.arguments import int32_array
from stand.trees.parents import NO_PARENT, ROOT, check_parents, depths_and_ranks

NO_TOKEN = -1
LAW_TOLERANCE = 1e-5  # of a sum over a law, and between laws that must be equal
OPTIONAL_ARRAYS = ("slots", "path_probabilities", "path_estimates")  # one entry per node, or None


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One row's draft.

    `law[c]` is the law that child c was drawn from, given its earlier siblings, over the token ids
    `support_ids[parents[c]]`; a deterministic child has a one-hot law. `law[ROOT]` is all zero.

    Invariants (`check`): parents[i] < i; siblings are in the order in which they were revealed; laws sum to
    1 and give their own token positive mass; siblings have distinct tokens unless every law at the node is
    drawn with replacement.

    `adapted` is the builder's promise that each node, its law and the decision to stop depended only on what
    was revealed before, and that nothing drawn was dropped or re-ordered (needed by every ratio rule). Children drawn
    with noise that the verifier will use too are not adapted.

    `slots[i]` is the slot of the shape that node i fills, where the builder followed one: how many children each node
    got was then settled before any of them was drawn, which some rules ask for.

    `path_probabilities[i]` is the builder's estimate that node i is accepted, where it makes one; `path_estimates[i]`
    is the same before it was corrected by what became of earlier drafts.
    """

    token_ids: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, NO_PARENT at the root
    support_ids: np.ndarray  # [N, S] int32, per parent, padded with NO_TOKEN
    law: np.ndarray  # [N, S] float32, per child over its parent's support
    adapted: bool = True
    slots: np.ndarray | None = None  # [N] int32
    path_probabilities: np.ndarray | None = None  # [N] float32
    path_estimates: np.ndarray | None = None  # [N] float32

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    @classmethod
    def pending(cls, token_id: int, *, support_size: int = 1) -> DraftTree:
        """The empty draft: the pending token alone."""
        return cls(
            token_ids=int32_array([token_id], "token_id"),
            parents=np.array([NO_PARENT], dtype=np.int32),
            support_ids=np.full((1, support_size), NO_TOKEN, dtype=np.int32),
            law=np.zeros((1, support_size), dtype=np.float32),
        )

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> DraftTree:
        """A deterministic chain: token_ids[0] is the pending token, the rest are guesses.

        Raises ValueError where they are no list of whole numbers of 32 bits, or none.
        """
        tokens = _tokens_of(token_ids)
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        support_ids = np.full((len(tokens), 1), NO_TOKEN, dtype=np.int32)
        support_ids[:-1, 0] = tokens[1:]
        law = np.ones((len(tokens), 1), dtype=np.float32)
        law[ROOT] = 0.0
        return cls(token_ids=tokens, parents=parents, support_ids=support_ids, law=law)

    @classmethod
    def branching(cls, token_ids: Sequence[int], branches: int) -> DraftTree:
        """A deterministic tree, level by level: node i has the children branches * i + 1 .. branches * i + branches, as
        far as there are tokens. token_ids[0] is the pending token; siblings must differ.

        Raises ValueError as `chain`, and unless `branches` is at least 1.
        """
        tokens = _tokens_of(token_ids)
        if branches < 1:
            raise ValueError(f"branches must be at least 1, got {branches}; 1 makes a chain")
        above, columns = np.divmod(np.arange(len(tokens) - 1), branches)  # of the children
        support_ids = np.full((len(tokens), branches), NO_TOKEN, dtype=np.int32)
        law = np.zeros((len(tokens), branches), dtype=np.float32)
        support_ids[above, columns] = tokens[1:]
        law[np.arange(1, len(tokens)), columns] = 1.0
        parents = np.concatenate([[NO_PARENT], above]).astype(np.int32)
        return cls(token_ids=tokens, parents=parents, support_ids=support_ids, law=law)

    def check(self) -> None:
        """Raise ValueError where an invariant is broken."""
        _check_arrays(self)
        for node in range(1, self.num_nodes):
            _check_node(self, node)


@dataclass(frozen=True)
class DraftBatch:
    """The drafts of all rows of a step, concatenated; row b owns nodes offsets[b] : offsets[b + 1].

    `parents` are row-local (NO_PARENT at each root). `depths` and `ranks` (position among its siblings) follow
    from `parents` and are stored because every consumer needs them. `slots` is None unless every draft has
    slots; `path_probabilities` and `path_estimates` are of all drafts or of none. `outside_laws` are those that a
    lookup has blended in.
    """

    token_ids: np.ndarray  # [M] int32
    parents: np.ndarray  # [M] int32, row-local
    offsets: np.ndarray  # [B + 1] int32
    depths: np.ndarray  # [M] int32
    ranks: np.ndarray  # [M] int32
    support_ids: np.ndarray  # [M, S] int32
    law: np.ndarray  # [M, S] float32
    adapted: bool = True
    slots: np.ndarray | None = None  # [M] int32
    path_probabilities: np.ndarray | None = None  # [M] float32
    path_estimates: np.ndarray | None = None  # [M] float32
    outside_laws: object | None = None  # `OutsideLaws`, for the lookup to learn from

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> DraftTree:
        if not 0 <= row < len(self):
            raise IndexError(f"row must be in [0, {len(self)}), got {row}; a batch holds one draft per row")
        nodes = slice(self.offsets[row], self.offsets[row + 1])
        return DraftTree(
            token_ids=self.token_ids[nodes],
            parents=self.parents[nodes],
            support_ids=self.support_ids[nodes],
            law=self.law[nodes],
            adapted=self.adapted,
            **{name: _part(getattr(self, name), nodes) for name in OPTIONAL_ARRAYS},
        )

    @property
    def num_nodes(self) -> int:
        """M, the packed tokens of the step."""
        return len(self.token_ids)

    @property
    def sizes(self) -> np.ndarray:
        """[B] int32: nodes of each row, the pending token included."""
        return self.offsets[1:] - self.offsets[:-1]

    @classmethod
    def scored(
        cls,
        token_ids: np.ndarray,
        parents: np.ndarray,
        offsets: np.ndarray,
        depths: np.ndarray,
        ranks: np.ndarray,
    ) -> DraftBatch:
        """Drafts to learn from alone: what their nodes were drawn from teaches nothing and is left out."""
        nothing = np.empty((len(token_ids), 0), dtype=np.float32)
        return cls(token_ids, parents, offsets, depths, ranks, nothing.astype(np.int32), nothing)

    @classmethod
    def concatenate(cls, drafts: Sequence[DraftTree]) -> DraftBatch:
        """Pack drafts, one per row; supports are padded to the widest, whole numbers become int32, laws that are
        not float64 float32.

        Raises ValueError where there is no draft, where numbers are not whole, or where only some drafts have path
        probabilities or path estimates: the batch could not say any more which ones were grown by them.
        """
        if len(drafts) == 0:
            raise ValueError("drafts must hold at least one draft, got none; give DraftTree.pending() to rows without")
        has_slots = all(draft.slots is not None for draft in drafts)
        width = max(draft.support_ids.shape[1] for draft in drafts)
        parents = int32_array(np.concatenate([draft.parents for draft in drafts]), "parents")
        # Trees whose arrays lie column by column would give such a batch, which compiled rules do not take.
        supports = np.ascontiguousarray(np.concatenate([_widen(tree.support_ids, width, NO_TOKEN) for tree in drafts]))
        law = np.ascontiguousarray(np.concatenate([_widen(tree.law, width, 0.0) for tree in drafts]))
        offsets = np.cumsum([0] + [draft.num_nodes for draft in drafts]).astype(np.int32)
        depths, ranks = _depths_and_ranks(parents, offsets)
        return cls(
            token_ids=int32_array(np.concatenate([draft.token_ids for draft in drafts]), "token_ids"),
            parents=parents,
            offsets=offsets,
            depths=depths,
            ranks=ranks,
            support_ids=int32_array(supports, "support_ids"),
            law=law if law.dtype == np.float64 else law.astype(np.float32, copy=False),
            adapted=all(draft.adapted for draft in drafts),
            slots=np.concatenate([draft.slots for draft in drafts]) if has_slots else None,
            path_probabilities=_of_all(drafts, "path_probabilities"),
            path_estimates=_of_all(drafts, "path_estimates"),
        )

    def chains(self, num_tokens: int) -> list[list[int]]:
        """Each row's best path without the root, at most `num_tokens` tokens: as engines take chains.

        It is the path with the largest sum of path probabilities, the expected number of accepted tokens; without them
        the longest. The rest of a draft is dropped, so only of deterministic drafts chains may be verified.
        Raises ValueError on an unsound batch.
        """
        return compiled.chains(self, num_tokens)

    def ancestor_masks(
        self, num_nodes: int, *, pad_id: int = 0, out: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(token_ids int32 [B, d], masks bool [B, d, d]) with d = num_nodes, for engines with as many nodes per row.
        out: int64 [B, d, d], C-contiguous, that becomes the masks; None for a new array of bool.

        masks[b, i, j] says that node j is node i or above it. Node 0 is the pending token. A row with fewer nodes is
        padded with `pad_id` by a chain below its last node, so no node has two equal children.
        Raises ValueError on an unsound batch, where a row has more nodes, and on another kind of `out`.
        """
        return compiled.ancestor_masks(self, num_nodes, pad_id, out)

    @classmethod
    def pending(cls, token_ids: Sequence[int]) -> DraftBatch:
        """Empty drafts: the pending token of every row alone. Such batches share all but the tokens, read-only."""
        return cls(np.array(int32_array(token_ids, "token_ids")), *_pending_arrays(len(token_ids)))

    def check(self) -> None:
        """Raise ValueError where an invariant is broken."""
        check_packing(self)
        for row in range(len(self)):
            self[row].check()
        depths, ranks = _depths_and_ranks(self.parents, self.offsets)
        if not np.array_equal(depths, self.depths) or not np.array_equal(ranks, self.ranks):
            raise ValueError("depths and ranks must follow from parents, got others; build the batch by concatenate()")


def _tokens_of(token_ids: Sequence[int]) -> np.ndarray:
    """[N] int32. Raises ValueError where they are no list of whole numbers of 32 bits, or none."""
    tokens = int32_array(token_ids, "token_ids")
    if tokens.ndim != 1 or len(tokens) == 0:
        raise ValueError(f"token_ids must be a non-empty list, got shape {tokens.shape}; the pending token is first")
    return tokens


def check_packing(batch: DraftBatch) -> None:
    """Raise ValueError unless every array has an entry per node and the offsets share the nodes out."""
    num_nodes, ends = batch.num_nodes, np.asarray(batch.offsets)
    if ends.ndim != 1 or len(ends) == 0 or ends[0] != 0 or ends[-1] != num_nodes or np.any(ends[1:] <= ends[:-1]):
        raise ValueError(
            f"offsets must rise from 0 to the number of nodes, {num_nodes}, got {ends.tolist()}; build the batch by "
            "concatenate()"
        )
    for name in ("token_ids", "parents", "depths", "ranks", "support_ids", "law", *OPTIONAL_ARRAYS):
        array, num_dimensions = getattr(batch, name), 2 if name in ("support_ids", "law") else 1
        if array is not None and np.ndim(array) != num_dimensions:
            raise ValueError(
                f"{name} must have {num_dimensions} dimensions, got {np.ndim(array)}; build the batch by concatenate()"
            )
        if array is not None and len(array) != num_nodes:
            raise ValueError(
                f"{name} must have one entry per node, {num_nodes}, got {len(array)}; build the batch by concatenate()"
            )


@lru_cache(maxsize=64)
def _pending_arrays(num_rows: int) -> tuple[np.ndarray, ...]:
    """All but the tokens of `num_rows` empty drafts, in the order of `DraftBatch`."""
    zeros = np.zeros(num_rows, dtype=np.int32)
    parents, offsets = np.full(num_rows, NO_PARENT, dtype=np.int32), np.arange(num_rows + 1, dtype=np.int32)
    support_ids, law = np.full((num_rows, 1), NO_TOKEN, dtype=np.int32), np.zeros((num_rows, 1), dtype=np.float32)
    arrays = parents, offsets, zeros, zeros, support_ids, law
    for array in arrays:  # all such batches share them: who wrote into one would change the others
        array.flags.writeable = False
    return arrays


def _depths_and_ranks(parents: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every draft of a batch, [M] int32 each."""
    found = [depths_and_ranks(parents[first:end]) for first, end in zip(offsets[:-1], offsets[1:], strict=True)]
    if not found:
        return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
    depths, ranks, _ = zip(*found, strict=True)
    return np.concatenate(depths), np.concatenate(ranks)


def _part(array: np.ndarray | None, nodes: slice) -> np.ndarray | None:
    return None if array is None else array[nodes]


def _of_all(drafts: Sequence[DraftTree], name: str) -> np.ndarray | None:
    arrays = [getattr(draft, name) for draft in drafts]
    missing = [row for row, array in enumerate(arrays) if array is None]
    if len(missing) == len(arrays):
        return None
    if missing:
        raise ValueError(
            f"drafts must all have {name} or none of them, got None in {missing[0]}; give that draft its own "
            "(1 for a pending token alone)"
        )
    return np.concatenate(arrays)


def _widen(array: np.ndarray, width: int, fill: float) -> np.ndarray:
    missing = width - array.shape[1]
    return array if missing == 0 else np.pad(array, ((0, 0), (0, missing)), constant_values=fill)


def _check_arrays(draft: DraftTree) -> None:
    num_nodes = draft.num_nodes
    if num_nodes == 0:
        raise ValueError("a draft must hold at least the pending token, got 0 nodes; see DraftTree.pending()")
    if draft.parents.shape != (num_nodes,) or len(draft.law) != num_nodes or draft.support_ids.shape != draft.law.shape:
        shapes = draft.parents.shape, draft.support_ids.shape, draft.law.shape
        raise ValueError(
            f"parents must be [N], support_ids and law [N, S] with N = {num_nodes}, got {shapes}; match them"
        )
    for name in OPTIONAL_ARRAYS:
        array = getattr(draft, name)
        if array is not None and array.shape != (num_nodes,):
            raise ValueError(f"{name} must be [N] with N = {num_nodes}, got shape {array.shape}; None is allowed")
    if np.any(draft.token_ids < 0):
        raise ValueError(f"token_ids must not be negative, got {draft.token_ids.min()}; leave padding out")
    check_parents(draft.parents)
    wrong = draft.law[~((draft.law >= 0) & np.isfinite(draft.law))]
    if len(wrong):
        raise ValueError(f"law must be finite and not negative, got {wrong[0]}; record the law of each draw")


def _check_node(draft: DraftTree, node: int) -> None:
    parent = draft.parents[node]
    support, law, token = draft.support_ids[parent], draft.law[node], draft.token_ids[node]
    place = f"; record it over support_ids[{parent}]"
    if abs(law.sum(dtype=np.float64) - 1.0) > LAW_TOLERANCE:
        raise ValueError(f"law of node {node} must sum to 1, got {law.sum(dtype=np.float64)}" + place)
    if np.any(law[support == NO_TOKEN] != 0):
        raise ValueError(f"law of node {node} must be 0 on padding, got {law[support == NO_TOKEN].max()}" + place)
    kept = support[support != NO_TOKEN]
    if len(np.unique(kept)) != len(kept):
        raise ValueError(f"support_ids[{parent}] must hold distinct token ids, got {support.tolist()}; add mass up")
    if not law[support == token].sum() > 0:
        raise ValueError(f"law of node {node} must give its own token {token} positive mass, got none" + place)
