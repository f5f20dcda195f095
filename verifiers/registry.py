"""Rules by name."""

from __future__ import annotations

import difflib

from stand.trees import DraftBatch
from stand.verifiers.rules.block import BlockVerifier
from stand.verifiers.rules.coupled import CoupledVerifier
from stand.verifiers.rules.greedy_block import GreedyBlockVerifier
from stand.verifiers.rules.kl_threshold import KLThresholdVerifier
from stand.verifiers.rules.match import MatchVerifier
from stand.verifiers.rules.ot_traversal import TransportTraversalVerifier
from stand.verifiers.rules.ranked_traversal import RankedTraversalVerifier
from stand.verifiers.rules.rrs import RecursiveRejectionVerifier
from stand.verifiers.rules.specinfer import SpecInferVerifier
from stand.verifiers.rules.spectr import SpecTrVerifier
from stand.verifiers.rules.token import TokenVerifier
from stand.verifiers.rules.traversal import TraversalVerifier
from stand.verifiers.rules.typical import TypicalVerifier
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
    if not isinstance(name, str) or name not in RULES:
        near = difflib.get_close_matches(str(name), RULES, n=1) or [next(iter(RULES))]
        raise ValueError(f"verifier must be one of {', '.join(RULES)}; got {name!r}; try {near[0]!r}")
    rule = RULES[name]
    if not rule.lossless and not allow_lossy:
        raise ValueError(
            f"a name must stand for a lossless rule, got one that is not: verifier {name!r} changes the output "
            "distribution; if that is wanted, pass the object "
            f"stand.verifiers.get_verifier({name!r}, allow_lossy=True), else use 'traversal'"
        )
    return rule()


def fitting_names(batch: DraftBatch) -> list[str]:
    """Lossless rules that take drafts like this one, in the order of `verifier_names`.

    Rules that carry debts are left out: whether the drafter is one fixed function of the context is not to be seen.
    """
    names = []
    for name, rule in RULES.items():
        if rule.lossless and not rule.requires.carries_debts:
            try:
                rule().check_draft(batch)
            except ValueError:
                continue
            names.append(name)
    return names


def fitted(verifier: Verifier, batch: DraftBatch) -> Verifier:
    """`verifier`, once it is clear that it takes drafts like this one.

    Raises ValueError where it does not, with the lossless rules that do.
    """
    try:
        verifier.check_draft(batch)
    except ValueError as error:
        raise ValueError(f"{error}; rules that fit: {', '.join(fitting_names(batch))}") from error
    return verifier
