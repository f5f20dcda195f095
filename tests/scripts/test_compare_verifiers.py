"""The comparison's parts: exact expectations on synthetic chains, estimates, tables, and one small run of an arm."""

import json

import compare_verifiers
import numpy as np
import pytest
from verifier_parts import synthetic_chains, verifier_tables
from verifier_parts.drafts_and_rules import SHAPE_RULES, Arm

TARGET, PROPOSAL = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.3, 0.2])


def test_all_chains_are_listed_with_their_probabilities():
    batch, chances = synthetic_chains.all_chains(PROPOSAL, 3)
    batch.check()
    assert len(batch) == 27 and chances.sum() == pytest.approx(1.0)
    assert batch[5].token_ids.tolist() == [0, 0, 1, 2] and chances[5] == pytest.approx(0.5 * 0.3 * 0.2)


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_token_verification_keeps_the_geometric_sum(gamma):
    """Leviathan et al., equation 1, with alpha = 1 - distance."""
    alpha = 1 - np.abs(TARGET - PROPOSAL).sum() / 2
    expected = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert synthetic_chains.expected_tokens("token", TARGET, PROPOSAL, gamma) == pytest.approx(expected)


def test_block_verification_gains_what_its_paper_reports():
    """Nothing at gamma 1, more with every token, 7 per cent and more at gamma 8 (arXiv 2403.10444, table 1)."""
    gains = {}
    for gamma in (1, 2, 4, 8):
        token, block = (synthetic_chains.expected_tokens(rule, TARGET, PROPOSAL, gamma) for rule in ("token", "block"))
        gains[gamma] = block / token - 1
    assert gains[1] == pytest.approx(0.0, abs=1e-12)
    assert 0.0 < gains[2] < gains[4] < gains[8]
    assert 0.07 < gains[8] < 0.1


def test_pairs_of_laws_have_the_distance_asked_for():
    generator = np.random.default_rng(0)
    for concentration in synthetic_chains.CONCENTRATIONS.values():
        for distance in synthetic_chains.DISTANCES:
            target, proposal = synthetic_chains.pair_of_laws(generator, distance, concentration)
            assert np.abs(target - proposal).sum() / 2 == pytest.approx(distance)
            assert proposal.sum() == pytest.approx(1.0) and np.all(proposal >= -1e-15)


@pytest.mark.parametrize("options", [("--tokens", "12"), ("--branching", "0,x")])
def test_sizes_that_mean_nothing_are_refused(options, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["compare_verifiers.py", *options, "--output", str(tmp_path / "made")])
    with pytest.raises(SystemExit, match="2"):
        compare_verifiers.main()
    assert options[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_file_of_other_settings_is_not_overwritten(monkeypatch, capsys, tmp_path):
    path = tmp_path / "made.json"
    earlier = {"prompts": 24, "rows": 2, "tokens": 128, "branching": [3, 2, 1, 1], "own_rows": 8, "seed": 0}
    path.write_text(json.dumps({"settings": earlier, "synthetic": [{"gain": 1}], "arms": [{"arm": "one"}]}))
    text = path.read_text()
    assert compare_verifiers.known_results({**earlier, "branching": (3, 2, 1, 1)}, path) == {"one": {"arm": "one"}}
    assert compare_verifiers.earlier_synthetic(path) == [{"gain": 1}]
    monkeypatch.setattr("sys.argv", ["compare_verifiers.py", "--rows", "3", "--output", str(tmp_path / "made")])
    assert compare_verifiers.main() == 2 and path.read_text() == text
    assert "rows 2 -> 3; keep them, name another --output, or begin anew with --fresh" in capsys.readouterr().err


def arm_of(steps, tokens, **others):
    return {"drafts": "sampled", "driver": "match", "temperature": 1.0, "steps": steps, "tokens": tokens, **others}


@pytest.mark.parametrize("content", ["{}", "[]", "3", "no JSON"])
def test_another_file_is_refused_by_name(content, tmp_path):
    (tmp_path / "cv.json").write_text(content)
    with pytest.raises(ValueError, match="--output must name a file of this command, got .*cv.json"):
        compare_verifiers.known_results({}, tmp_path / "cv.json")


def test_estimates_and_paired_gains():
    generator = np.random.default_rng(1)
    steps = generator.integers(50, 100, 40).astype(float)
    tokens = steps * generator.normal(2.5, 0.3, 40)
    arm = verifier_tables.add_estimates(arm_of(steps.tolist(), {"a": tokens.tolist(), "b": (1.02 * tokens).tolist()}))
    mean, error = arm["tokens_per_step"]["a"]
    assert mean == pytest.approx(tokens.sum() / steps.sum())
    assert error == pytest.approx(0.3 / 40**0.5, rel=0.3)
    percent, spread = verifier_tables.gain(arm, "b", arm, "a")
    assert percent == pytest.approx(2.0) and spread == pytest.approx(0.0, abs=1e-9)
    both = verifier_tables.pooled([arm, {**arm, "seed": 1}])
    assert len(both) == 1 and len(both[0]["steps"]) == 80
    with pytest.raises(ValueError, match="same prompts, got 80 and 40"):
        verifier_tables.gain(both[0], "a", arm, "a")


def test_one_prompt_has_no_standard_error():
    arm = verifier_tables.add_estimates(arm_of([10.0], {"a": [25.0], "b": [30.0]}))
    assert arm["tokens_per_step"] == {"a": [2.5, None], "b": [3.0, None]}
    assert verifier_tables.with_error(*verifier_tables.gain(arm, "b", arm, "a"), "+") == "+20.00"


def test_arms_are_run_once_and_kept(tmp_path, monkeypatch):
    size = {"prompts": 1, "rows": 1, "tokens": 24, "branching": (2, 1), "own_rows": 2, "seed": 5}
    monkeypatch.setattr(compare_verifiers, "ROOM", 4)
    chosen = [
        Arm("chains", "good", 1.0, 4, ("token", "block")),
        Arm("shape", "coupled", 1.0, 0, ("coupled", "match")),
        Arm("shape", "sampled", 1.0, 0, SHAPE_RULES["sampled"]),
    ]
    output = tmp_path / "found.json"
    results = compare_verifiers.run_all(chosen, size, output)
    assert [result["drafts"] for result in results] == ["good", "sampled", "coupled"]
    assert compare_verifiers.different_outputs(results) == 0
    for result in results:
        assert sum(result["steps"]) > 2
        assert all(sum(tokens) >= sum(result["steps"]) for tokens in result["tokens"].values())
    kept = results[1]["tokens"]
    assert sum(kept["traversal"]) >= sum(kept["match"]) - 1e-9
    monkeypatch.setattr(compare_verifiers, "run_arm", None)  # would fail if it were called again
    again = compare_verifiers.run_all(chosen, size, output)
    kept_arms = json.loads(output.read_text(encoding="utf-8"))["arms"]
    assert json.dumps(again) == json.dumps([kept_arms[place] for place in (0, 2, 1)])  # chains, then shapes in order


def test_a_missing_folder_is_found_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare_verifiers.py", "--output", str(tmp_path / "missing" / "found")])
    with pytest.raises(SystemExit, match="2"):
        compare_verifiers.main()
    assert "--output must name a file in an existing folder" in capsys.readouterr().err


def test_the_document_becomes_tables_and_a_plot(tmp_path):
    chains = {"part": "chains", "gamma": 8, "alpha": 0.8, "hopeless": 0.3, "nodes_per_step": 8.0}
    trees = {"gamma": 0, "nodes_per_step": 7.5}
    counts = ([10.0, 12.0], {"traversal": [25.0, 30.0], "match": [24.0, 29.0]})
    results = [arm_of([10.0, 12.0], {"token": [50.0, 60.0], "block": [53.0, 63.0]}, **chains) | {"drafts": "good"}]
    results += [arm_of(*counts, part=part, **trees) for part in ("shape", "blended")]
    results += [arm_of([10.0, 12.0], {"traversal": [25.0, 30.0]}, part="own", **trees) | {"driver": "traversal"}]
    synthetic = [{"target": "flat", "distance": 0.1, "gamma": 8, "token": 6.0, "block": 6.5, "gain": 8.3,
                  "gain_error": 0.5}]  # fmt: skip
    document = {"arms": [verifier_tables.add_estimates(arm) for arm in results], "synthetic": synthetic}
    text = verifier_tables.tables(document)
    for part in ("+5.45", "-3.64", "+8.30 ± 0.50", "lookup tree, fixed shape", "own steps"):
        assert part in text
    verifier_tables.plot(tmp_path / "plot.png", document)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
