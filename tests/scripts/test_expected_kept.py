"""Expected tokens kept: what enumeration gives, draft by draft and over all drafts of a kind."""

import numpy as np
import pytest
from draft_worlds import KINDS
from exact import WORLDS, enumerate_drafts, pack, production_report, target_rows
from verifier_parts.expected_kept import expected_kept

from stand.verifiers import get_verifier

CASES = [(kind, rule) for kind, (_, rules) in KINDS.items() for rule in rules]


@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_average_over_drafts_is_the_enumerated_one(kind, rule):
    for world in (WORLDS["EX2"], WORLDS["EX3"]):
        listed = enumerate_drafts(world, KINDS[kind][0])
        chosen = [draft for _, draft in listed]
        kept = expected_kept(get_verifier(rule), pack(world, chosen), target_rows(world, chosen))
        weights = np.array([float(weight) for weight, _ in listed])
        report = production_report(world, listed, get_verifier(rule))
        assert weights @ kept == pytest.approx(report.expected, abs=1e-9)


def test_lossy_rules_and_unfit_drafts_are_refused():
    listed = [draft for _, draft in enumerate_drafts(WORLDS["EX2"], KINDS["without replacement (2,1)"][0])]
    batch, target = pack(WORLDS["EX2"], listed), target_rows(WORLDS["EX2"], listed)
    with pytest.raises(ValueError, match="from the top or in post-order, got 'typical'"):
        expected_kept(get_verifier("typical", allow_lossy=True), batch, target)
    with pytest.raises(ValueError, match="must get chains"):
        expected_kept(get_verifier("token"), batch, target)
