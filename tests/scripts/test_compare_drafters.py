"""The comparison of lookup and head: one record per temperature, number of samples and arm, at equal nodes."""

import json
import signal

import compare_drafters
import pytest
from tiny_models import tiny_model


def test_every_arm_is_measured_at_the_nodes_asked_for(monkeypatch, capsys):
    options = ["--num-problems", "1", "--max-new-tokens", "6", "--trajectories", "1,2", "--temperatures", "0"]
    monkeypatch.setattr("sys.argv", ["compare_drafters.py", *options, "--nodes", "25"])
    assert compare_drafters.main() == 0
    records = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    arms = ["lookup", "eagle", "blended", "eagle, paper's tree"]
    assert [(one["samples"], one["drafter"]) for one in records] == [(count, arm) for count in (1, 2) for arm in arms]
    for one in records:
        assert 1 <= one["tokens_per_step"] <= 7 and 0 < one["nodes_per_step"] <= 25
        assert 0 < one["draft_share"] < 1 and one["tokens_per_second"] > 0
    assert all(one["kept_by_depth"][:1] == [one["depth_1_kept"]] for one in records if one["kept_by_depth"])


def test_some_arms_and_an_untrained_head(monkeypatch, capsys):
    options = ["--num-problems", "1", "--max-new-tokens", "4", "--trajectories", "1", "--temperatures", "0"]
    monkeypatch.setattr("sys.argv", ["compare_drafters.py", *options, "--arms", "blended", "--head", "random"])
    assert compare_drafters.main() == 0
    (record,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert record["drafter"] == "blended" and record["tokens_per_step"] >= 1


def test_streams_and_no_drafts(monkeypatch, capsys):
    arms = ["none", "streams", "streams-nodes", "streams-blended", "neighbours"]
    options = ["--num-problems", "1", "--max-new-tokens", "8", "--trajectories", "2", "--temperatures", "0.8"]
    monkeypatch.setattr("sys.argv", ["compare_drafters.py", *options, "--arms", ",".join(arms)])
    assert compare_drafters.main() == 0
    records = {one["drafter"]: one for one in json.loads(capsys.readouterr().out.strip().splitlines()[-1])}
    assert list(records) == arms
    assert records["none"]["tokens_per_step"] == 1 and records["none"]["nodes_per_step"] == 0
    for name in ("tokens_per_step", "kept_by_depth", "nodes_per_step"):  # the same drafts
        assert records["streams"][name] == records["streams-nodes"][name]
    assert all(one["processor_ms_per_token"] > 0 for one in records.values())


@pytest.mark.parametrize(("options", "always"), [([], False), (["--runs", "6"], True)])
def test_blended_streams_run_in_every_step_where_runs_are_given(options, always):
    arguments = compare_drafters.read_arguments(["--arms", "streams-blended", *options])
    make = compare_drafters.drafter_makers(arguments, None, None, None, 0.8)["streams-blended"]
    assert make(2).source.always is always


def test_what_only_a_first_call_does_is_in_no_figure(monkeypatch, capsys):
    """With `--nodes cost` the first arm paid for the timing of steps: 15.6 ms of the processor per token for 3.2."""
    draw, calls = compare_drafters.draw_with_engine, []

    def noted(engine, prompt, count, sampling, **named):
        calls.append((engine, sampling.max_new_tokens))
        return draw(engine, prompt, count, sampling, **named)

    monkeypatch.setattr(compare_drafters, "draw_with_engine", noted)
    options = ["--num-problems", "1", "--max-new-tokens", "12", "--trajectories", "1", "--temperatures", "0"]
    monkeypatch.setattr("sys.argv", ["compare_drafters.py", *options, "--arms", "none,lookup"])
    assert compare_drafters.main() == 0
    assert [tokens for _, tokens in calls] == [compare_drafters.WARM_UP_TOKENS, 12] * 2
    assert len({id(engine) for engine, _ in calls}) == 4


def test_an_interrupted_run_shows_the_arms_that_were_finished(monkeypatch, capsys):
    draw, drawn = compare_drafters.draw_with_engine, []

    def interrupted(*arguments, **named):
        if len(drawn) == 2:  # a few tokens that do not count, and those that do
            signal.raise_signal(signal.SIGINT)
        drawn.append(draw(*arguments, **named))
        return drawn[-1]

    monkeypatch.setattr(compare_drafters, "draw_with_engine", interrupted)
    options = ["--num-problems", "1", "--max-new-tokens", "4", "--trajectories", "1", "--temperatures", "0"]
    monkeypatch.setattr("sys.argv", ["compare_drafters.py", *options, "--arms", "none,lookup"])
    assert compare_drafters.main() == 128 + signal.SIGINT
    captured = capsys.readouterr()
    assert [one["drafter"] for one in json.loads(captured.out.splitlines()[-1])] == ["lookup"]
    assert "compare_drafters: ended early by SIGINT" in captured.err


@pytest.mark.parametrize("option", ["head", "streams"])
def test_what_was_trained_for_no_such_model_is_named_with_its_option(option, tmp_path):
    arguments = compare_drafters.read_arguments([f"--{option}", str(tmp_path), "--arms", "eagle,streams"])
    load = {"head": compare_drafters.head_of, "streams": compare_drafters.streams_of}[option]
    with pytest.raises(ValueError, match=f"--{option} must name what was trained for --model .*, got .*--arms"):
        load(arguments, tiny_model("llama"))


def test_unknown_arms_are_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        compare_drafters.read_arguments(["--arms", "blended,medusa"])
    assert "medusa" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--head", "--streams", "--runs"])
def test_options_of_other_arms_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        compare_drafters.read_arguments(["--arms", "lookup", option, "3"])
    assert f"{option} has no effect without one of" in capsys.readouterr().err


def test_one_temperature_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        compare_drafters.read_arguments(["--temperature", "0.5"])
    assert "--temperatures" in capsys.readouterr().err


def test_nodes_by_the_cost_of_steps_and_untrained_streams(monkeypatch, capsys):
    options = ["--num-problems", "1", "--max-new-tokens", "6", "--trajectories", "1", "--temperatures", "0"]
    drafters = ["--nodes", "cost", "--arms", "lookup,streams-blended", "--streams", "random"]
    monkeypatch.setattr("sys.argv", ["compare_drafters.py", *options, *drafters])
    assert compare_drafters.main() == 0
    records = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [one["drafter"] for one in records] == ["lookup", "streams-blended"]
    with pytest.raises(SystemExit):
        compare_drafters.read_arguments(["--nodes", "cost"])
    assert "--nodes cost is for the lookup and blended arms" in capsys.readouterr().err


@pytest.mark.parametrize(("scope", "num_engines"), [("problem", 2), ("run", 1)])
def test_drafters_are_kept_as_long_as_asked_for(monkeypatch, capsys, scope, num_engines):
    wrap, engines = compare_drafters.stand.wrap, []
    monkeypatch.setattr(compare_drafters.stand, "wrap", lambda *a, **k: engines.append(wrap(*a, **k)) or engines[-1])
    options = ["--num-problems", "2", "--max-new-tokens", "6", "--trajectories", "1", "--temperatures", "0"]
    monkeypatch.setattr("sys.argv", ["compare_drafters.py", *options, "--arms", "lookup", "--lookup-scope", scope])
    assert compare_drafters.main() == 0
    assert len(engines) == 1 + num_engines  # one is thrown away before anything is measured
