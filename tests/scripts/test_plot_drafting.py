"""The picture of docs/drafting.md is drawn from the figures of the page."""

import json

import plot_drafting
import pytest

needs_data = pytest.mark.skipif(not (plot_drafting.FIGURES / "drafting.json").is_file(), reason="needs the documents")


@needs_data
def test_draws_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot_drafting.main(["--output", str(tmp_path / "drafting.png")])
    assert (tmp_path / "drafting.png").read_bytes().startswith(b"\x89PNG")


@needs_data
def test_every_coloured_line_has_its_points():
    results = json.loads((plot_drafting.FIGURES / "drafting.json").read_text(encoding="utf-8"))["results"]
    results = [one for one in results if one["setting"] == "all"]
    for family in plot_drafting.HELD_OUT:
        numbers = {name: len(plot_drafting.tokens_by_nodes(results, family, name)) for name in plot_drafting.DRAFTERS}
        assert numbers == {"lookup": 6, "arctic": 3, "stand": 3}


def test_bins_with_few_nodes_are_left_out():
    bins = [[0.15, 0.18, 500], [0.25, 0.9, 499]]
    assert plot_drafting.errors({"calibration": bins}) == [(0.15, pytest.approx(0.03))]


@pytest.mark.parametrize("name", ["no/such/folder/plot.png", "plot.xyz"])
def test_a_picture_that_cannot_be_written_is_refused_at_once(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        plot_drafting.main(["--output", name])
    assert "argument --output: " in capsys.readouterr().err


def test_figures_that_are_none_are_refused(tmp_path, capsys):
    others, few = tmp_path / "others.json", tmp_path / "few.json"
    others.write_text("[1]")
    few.write_text(json.dumps({"results": [{"family": "math", "drafter": "lookup", "setting": "all"}]}))
    for file, message in ((others, "as docs/figures/drafting.json does"), (few, "got none of")):
        assert plot_drafting.main(["--data", str(file), "--output", str(tmp_path / "drafting.png")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "drafting.png").exists()
