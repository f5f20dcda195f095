"""Rules by name."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.block import BlockVerifier
from stand.verifiers.coupled import CoupledVerifier
from stand.verifiers.greedy_block import GreedyBlockVerifier
from stand.verifiers.kl_threshold import KLThresholdVerifier
from stand.verifiers.match import MatchVerifier
from stand.verifiers.ot_traversal import TransportTraversalVerifier
from stand.verifiers.ranked_traversal import RankedTraversalVerifier
from stand.verifiers.rrs import RecursiveRejectionVerifier
from stand.verifiers.specinfer import SpecInferVerifier
from stand.verifiers.spectr import SpecTrVerifier
from stand.verifiers.token import TokenVerifier
from stand.verifiers.traversal import TraversalVerifier
from stand.verifiers.typical import TypicalVerifier
from stand.verifiers.verifier import Verifier

RULES: dict[str, type[Verifier]] = {
    rule.name: rule
    for rule in (
        TraversalVerifier,
        MatchVerifier,
        CoupledVerifier,
        RecursiveRejectionVerifier,
        RankedTraversalVerifier,
        TransportTraversalVerifier,
        SpecInferVerifier,
        SpecTrVerifier,
        BlockVerifier,
        GreedyBlockVerifier,
        TokenVerifier,
        TypicalVerifier,
        KLThresholdVerifier,
    )
}


def verifier_names() -> list[str]:
    return list(RULES)


def get_verifier(name: str, *, allow_lossy: bool = False) -> Verifier:
    """The rule called `name` with its default settings.

    Raises ValueError for an unknown name, and for a rule that changes the output's law unless `allow_lossy`.
    """
    if name not in RULES:
        raise ValueError(f"verifier must be one of {', '.join(RULES)}; got {name!r}")
    rule = RULES[name]
    if not rule.lossless and not allow_lossy:
        raise ValueError(
            f"verifier {name!r} changes the output distribution; "
            "pass allow_lossy=True if that is wanted, or use 'traversal'"
        )
    return rule()


def resolve(batch: DraftBatch) -> Verifier:
    """The best rule for drafts of this kind: `match` if unadapted or deterministic throughout, else
    `traversal`.

    To be asked once, with a draft typical of the drafter, and not at every step: the two rules draw with
    different noise, so a choice that followed each step's batch would let a row's tokens depend on its
    batch mates.
    """
    if not batch.adapted or _deterministic(batch):
        return MatchVerifier()
    return TraversalVerifier()


def _deterministic(batch: DraftBatch) -> bool:
    children = batch.depths > 0
    return bool(np.all(np.count_nonzero(batch.law[children], axis=1) == 1))
