"""docs/guide.md: its Python blocks, run as printed but for fewer new tokens."""

from pathlib import Path

import pytest
from printed_page import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"


@pytest.mark.long
def test_the_guide_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STAND_COSTS", "off")
    namespace = run_page(
        PAGE, tmp_path, monkeypatch, lambda code: code.replace("max_new_tokens=400", "max_new_tokens=90")
    )
    told = capsys.readouterr().out
    assert "without drafts: 1.00 tokens per step" in told and (tmp_path / "first.lookup").exists()
    with_drafts = float(told.partition("with drafts: ")[2].partition(" ")[0])
    assert with_drafts > 1.5
    assert len(namespace["votes"]) == len(namespace["problems"]) == 2
    assert all(vote.total() <= 16 for vote in namespace["votes"])
