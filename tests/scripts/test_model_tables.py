"""Tables on one model: replays are what the engine does, and what is finished is not run anew."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import model_tables
import numpy as np
import pytest
import torch
from measuring.setup import REASONER
from table_parts import replay_tables, time_tables
from table_parts.estimates import CalibrationArm, calibration_table, run_calibration_arm
from table_parts.law_recording import LawRecording, record
from table_parts.law_replay import replay
from table_parts.loop_tables import loop_arms, run_loop_arm
from table_parts.path_laws import PathLawsDrafter
from table_parts.time_tables import PLAIN, Sampler, counted_forwards, time_arms, time_problem, time_table
from table_parts.token_drafter import TokenDrafter
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import stand
from stand.drafters.costs.step_cost import StepCost
from stand.trees import BlendedLookup, LookupTree

PROMPT = [3, 4, 5, 3, 4, 6, 7, 3, 4]
SETTINGS = {"max_new_tokens": 40, "temperature": 0.7, "top_k": 0, "seed": 5}


@pytest.fixture(scope="module")
def recording():
    return record(tiny_model("qwen2"), None, [PROMPT], 4, **SETTINGS)


@pytest.fixture(scope="module")
def model_and_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    return AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32), tokenizer


class Counter(PathLawsDrafter):
    """Notes how many nodes every step has."""

    def draft(self, request):
        batch = super().draft(request)
        self.sizes = [*getattr(self, "sizes", []), batch.num_nodes]
        return batch


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
def test_a_replay_drafts_what_the_engine_drafts(recording, kind):
    """With `match`, and laws of kept paths: the same tokens, steps and nodes as with the model in the loop."""

    def make():
        return Counter(BlendedLookup(), budget=12, kind=kind)

    for rows in (1, 4):
        live, replayed = make(), make()
        engine = stand.wrap(tiny_model("qwen2"), drafter=live, verifier="match")
        output = engine.generate(input_ids=PROMPT, num_return_sequences=rows, **SETTINGS)
        part = replace(recording, trajectories=recording.trajectories[:rows])
        result = replay(part, lambda drafter=replayed: drafter, rows=rows, seed=SETTINGS["seed"])
        assert result.tokens == [[len(token_ids) for token_ids in output.token_ids]]
        assert [one.tokens.tolist() for one in part.trajectories] == output.token_ids
        together = min(result.steps[0])  # then a row ends, and the engine puts another one in its place
        assert replayed.sizes[:together] == live.sizes[:together] and max(live.sizes) > 8
        if rows == 1:
            assert sum(result.steps[0]) == output.stats.num_steps < output.stats.num_tokens
            assert result.nodes == output.stats.num_draft_tokens
            ended_by_a_node = output.stats.num_accepted_draft_tokens - result.estimates.kept.sum()
            assert ended_by_a_node in (0, 1)  # the replay takes the last token as drawn


def test_greedy_texts_are_replayed_with_the_drafts_of_greedy_calls():
    """Where laws are one-hots the engine draws no children: a replay of sampled ones is that of the likeliest."""
    texts = record(tiny_model("qwen2"), None, [PROMPT], 1, **{**SETTINGS, "temperature": 0.0})
    arms = [arm for arm in replay_tables.replay_arms() if "kinds" in arm.tables]
    greedy = [model_tables.run_replay(texts, arm, "0:1.0") for arm in arms]
    assert len(arms) == 3 and greedy[0] == greedy[1] == greedy[2]
    drawn = [model_tables.run_replay(texts, arm, "1:1.0")["calibration"] for arm in arms]
    assert drawn[0] != drawn[1] != drawn[2]  # the control


def test_other_laws_would_be_seen(recording):
    """The control: laws one place off are other evidence."""
    shifted = replace(recording, trajectories=[
        replace(one, top_ids=np.roll(one.top_ids, 1, axis=0), top_probs=np.roll(one.top_probs, 1, axis=0))
        for one in recording.trajectories
    ])  # fmt: skip

    def make():
        return PathLawsDrafter(BlendedLookup(), budget=12)

    right, wrong = (replay(one, make, rows=1) for one in (recording, shifted))
    assert sum(right.steps[0]) < sum(wrong.steps[0])


def test_recordings_are_saved_and_loaded(recording, tmp_path):
    recording.save(tmp_path / "new" / "one.npz")
    loaded = LawRecording.load(tmp_path / "new" / "one.npz")
    assert [prompt.tolist() for prompt in loaded.prompts] == [PROMPT]
    for one, other in zip(recording.trajectories, loaded.trajectories, strict=True):
        assert one.problem == other.problem and np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.top_ids, other.top_ids) and np.array_equal(one.top_probs, other.top_probs)
    probs = loaded.trajectories[0].top_probs
    assert np.all(np.diff(probs, axis=1) <= 0) and np.all(probs.sum(axis=1) <= 1 + 1e-5)


def test_every_drafter_of_the_tables_replays(recording):
    for arm in replay_tables.replay_arms():
        found = replay(recording, arm.make, rows=arm.rows)
        assert found.tokens == [[len(one.tokens) for one in recording.trajectories]]
        assert sum(found.steps[0]) <= sum(found.tokens[0])


def test_tokens_alone_are_learned():
    learned = []

    class Recorder(BlendedLookup):
        def learn(self, context, token_ids, rows=None, *, scope=0):
            assert rows is None
            learned.append((len(context), token_ids.tolist()))
            super().learn(context, token_ids, scope=scope)

        def learn_batch(self, *arguments, **named):
            raise AssertionError("the laws must not be learned")

    engine = stand.wrap(tiny_model("qwen2"), drafter=TokenDrafter(Recorder(), budget=8))
    output = engine.generate(input_ids=PROMPT, max_new_tokens=40, seed=1)
    assert learned[0] == (1, PROMPT[1:])  # the prompt
    runs = learned[1:]
    tokens = [token for _, run in runs for token in run]
    assert len(runs) > 3 and tokens == output.token_ids[0][: len(tokens)]
    lengths = np.cumsum([len(PROMPT), *(len(run) for _, run in runs[:-1])])
    assert [length for length, _ in runs] == np.minimum(lengths, 32).tolist()


def test_a_fixed_shape_learns_kept_paths_alone(recording):
    learned = []

    class Recorder(LookupTree):
        def learn_batch(self, batch, befores, top_ids, top_probs, **named):
            batch.check()
            learned.extend(top_probs[:, 0].tolist())
            super().learn_batch(batch, befores, top_ids, top_probs, **named)

    inner = stand.FixedShapeDrafter(Recorder())
    found = replay(recording, lambda: replay_tables.OnPathDrafter(inner, replay_tables.kept_lesson), rows=2)
    assert len(learned) == sum(found.tokens[0]) and min(learned) > 0  # one law per committed token


def run(monkeypatch, folder, *words):
    monkeypatch.setattr(sys, "argv", ["model_tables.py", "--folder", str(folder), "--threads", "1", *words])
    return model_tables.main()


def test_estimates_with_the_model_in_the_loop():
    """The nodes that are counted are the engine's."""
    model, how = tiny_model("qwen2"), {**SETTINGS, "seed": 3}
    arm = CalibrationArm("deterministic", "match", 8)
    drafted, expected, kept = run_calibration_arm(model, None, [PROMPT], arm, samples=2, **how)["calibration"]
    lookup = stand.BlendedDrafter(BlendedLookup(), budget=8, kind="deterministic")
    engine = stand.wrap(model, drafter=lookup, verifier="match")
    stats = [engine.generate(input_ids=[PROMPT], **{**how, "seed": seed}).stats for seed in (3, 4)]
    assert sum(drafted) == sum(each.num_draft_tokens for each in stats) > 100
    assert 0 < sum(each.num_accepted_draft_tokens for each in stats) <= sum(kept) < sum(drafted)
    assert 0.3 < sum(kept) / sum(expected) < 3.0 and all(one <= all_ for one, all_ in zip(kept, drafted, strict=True))
    table = calibration_table([(["0.7", arm.name], [[200.0] * 10, [100.0] * 10, [50.0] * 10])], ["setting", "drafts"])
    assert table.count("0.50/0.25") == 10 and table.splitlines()[-1].split()[-11] == "0.50"


@pytest.mark.long
def test_the_command_goes_on_where_it_ended(monkeypatch, tmp_path, capsys):
    wanted = {"deterministic, 32 nodes, 4 rows", "tokens, 8 nodes, 1 rows", "laws, 10 a row, 8 nodes, 1 rows"}
    arms = [arm for arm in replay_tables.replay_arms() if arm.name in wanted]
    monkeypatch.setattr(model_tables, "replay_arms", lambda costs: arms)
    timed_arms = [arm for arm in time_arms() if arm.name in {PLAIN, "generate", "token recycling"}]
    monkeypatch.setattr(time_tables, "time_arms", lambda: timed_arms)
    words = "--num-problems 2 --tokens 20 --settings 1.0:1.0 --loop-settings 1.0:1.0 --loop-problems 2 --loop-samples 2"
    run(monkeypatch, tmp_path, *words.split())
    first = capsys.readouterr().out
    for line in ("deterministic 32 4", "chains         block", "kept paths' laws", "laws, 10 a row", "token recycling"):
        assert " ".join(line.split()) in " ".join(first.split())
    lines = (tmp_path / f"{REASONER.name}.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 3 + 4 + 3 + 4 + 2 and all(json.loads(line)["result"] for line in lines[1:])
    for name in ("record", "replay", "run_loop_arm", "time_problem"):
        monkeypatch.setattr(model_tables, name, None)  # nothing is run anew
    run(monkeypatch, tmp_path, *words.split())
    assert capsys.readouterr().out == first
    another = str(Path(model_tables.__file__).parent / "drafters" / "eagle")
    assert run(monkeypatch, tmp_path, *words.split(), "--head", another) == 2
    assert "must hold results of this model, --head and --costs" in capsys.readouterr().err
    monkeypatch.setattr(model_tables, "time_problem", lambda *args, **how: pytest.fail("timed anew"))
    with pytest.raises(pytest.fail.Exception, match="timed anew"):
        run(monkeypatch, tmp_path, *words.split(), "--parts", "time", "--threads", "2")


def test_what_a_table_cannot_work_with_is_one_error(monkeypatch, tmp_path, capsys):
    (tmp_path / "costs.json").write_text("{}")
    streams = str(Path(model_tables.__file__).parent / "drafters" / "streams")
    assert run(monkeypatch, tmp_path, "--parts", "rules", "--head", streams, "--tokens", "16") == 2
    assert "model_tables: --head must name what was trained for --model" in capsys.readouterr().err
    for words, said in (
        (f"--parts replay --costs {tmp_path / 'costs.json'}", "--costs must be a file of step costs"),
        (f"--parts loop --costs {tmp_path / 'costs.json'}", "--costs has no effect without `replay`"),
        (f"--parts loop --head {streams}", "--head has no effect without `rules`"),
        ("--parts rules --head another", "--head must be a file or a folder, got another"),
        ("--parts rules --tokens 10", "--tokens must be above 10 for `rules` and `loop`"),
        ("--parts time --loop-settings 0:1.0", "--loop-settings must have temperatures above 0, got 0:1.0"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, tmp_path, *words.split())
        assert said in capsys.readouterr().err


def test_a_heads_digest_is_of_its_files(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    before = model_tables.digest_of_head(tmp_path)
    assert before == model_tables.digest_of_head(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"2")
    assert before != model_tables.digest_of_head(tmp_path)


def test_chains_of_a_head_are_asked_about_too(model_and_tokenizer):
    head = Path(model_tables.__file__).parent / "drafters" / "eagle"
    (arm,) = (one for one in loop_arms("rules", head=head, temperature=0.8) if one.head)
    how = {**SETTINGS, "temperature": 0.8, "max_new_tokens": 24}
    found = run_loop_arm(*model_and_tokenizer, [PROMPT], arm, samples=2, **how)
    steps, tokens = found["steps"][0], {rule: kept[0] for rule, kept in found["tokens"].items()}
    assert set(tokens) == {"token", "block", "match"}
    assert steps < tokens["match"] <= tokens["token"] and 0.95 < tokens["block"] / tokens["token"] < 1.2


def test_time_is_that_of_the_steps(recording):
    cost = StepCost(1, 10, (1, 4, 8), (1.0, 1.0, 3.0))
    assert [replay_tables.seconds_of(cost, size) for size in (1, 2, 4, 6, 8, 10)] == [1, 1, 1, 2, 3, 4]
    (arm, *_) = [arm for arm in replay_tables.replay_arms(stand.CostTable((cost,))) if "time" in arm.tables]
    found = replay_tables.result_of(replay(recording, arm.make, rows=1))
    steps = [count for call in found["sizes"][0] for _, count in call]
    assert sum(steps) == sum(found["steps"][0])
    expected = len(recording.trajectories[0].tokens) / sum(
        count * replay_tables.seconds_of(cost, size) for size, count in found["sizes"][0][0]
    )
    table = replay_tables.replay_tables({("1:1", arm.name): found}, ["1:1"], stand.CostTable((cost,)))
    (line,) = [line for line in table.splitlines() if line.startswith("1:1")][-1:]
    assert f" {expected:.2f} " in line and "±" not in line


@pytest.fixture(scope="module")
def timed():
    how = {"samples": 3, "problem": 0, "max_new_tokens": 24, "temperature": 0.7, "top_p": 0.95, "top_k": 0, "seed": 7}
    return time_problem(tiny_model("qwen2"), None, PROMPT, **how)


def test_every_arm_is_timed_on_the_same_samples(timed):
    assert list(timed) == [arm.name for arm in time_arms()] and len(timed) == 10
    for arm in time_arms():
        found = timed[arm.name]
        assert all(len(values) == 3 and min(values) > 0 for values in found.values())
        if arm.make is not None and arm.rule == "match":
            assert found["tokens"] == timed[PLAIN]["tokens"]
    assert timed[PLAIN]["steps"] == timed[PLAIN]["tokens"]
    assert timed["generate"]["steps"] == timed["generate"]["tokens"]  # one forward a token, and no other is counted
    for name in timed.keys() - {PLAIN, "generate"}:
        assert sum(timed[name]["steps"]) < sum(timed[name]["tokens"])


def test_samples_of_match_are_those_without_drafts():
    model, how = tiny_model("qwen2"), {"max_new_tokens": 24, "temperature": 0.7, "top_k": 0}
    arms = [arm for arm in time_arms() if arm.make is not None and arm.rule == "match"]
    drawn = [[Sampler(arm, model, None, PROMPT).draw(seed, **how)[0] for seed in (5, 6)] for arm in arms]
    assert len(drawn) == 6 and all(tokens == drawn[0] for tokens in drawn)
    assert drawn[0][0] != drawn[0][1]  # the control: another seed is another sample


def test_a_sampler_learns_from_sample_to_sample():
    """The same seed again: the lookup knows the text, and an arm without a lookup does not."""
    model, how = tiny_model("qwen2"), {"max_new_tokens": 24, "temperature": 0.7, "top_k": 0}
    learning, forgetting = "ours, 8 nodes, match", "generate, prompt lookup 8"
    arms = [arm for arm in time_arms() if arm.name in {learning, forgetting}]
    by_name = {arm.name: Sampler(arm, model, None, PROMPT) for arm in arms}
    first, again = ({name: one.draw(5, **how)[1] for name, one in by_name.items()} for _ in range(2))
    assert again[learning] < first[learning]
    assert again[forgetting] == first[forgetting]


def test_forwards_are_counted_within_the_block_alone():
    model = tiny_model("qwen2")
    with counted_forwards(model) as count:
        for _ in range(3):
            model(torch.tensor([PROMPT]))
    model(torch.tensor([PROMPT]))
    assert count == [3]


def test_times_are_told_as_medians_over_problems():
    def found(tokens, wall, cpu):
        return {"tokens": [tokens, tokens], "steps": [2, 3], "wall": [wall, wall], "cpu": [cpu, cpu]}

    problems = [
        {PLAIN: found(5, 5.0, 1.0), "fast": found(10, wall, cpu)} for wall, cpu in ((5.0, 1.0), (2.0, 1.0), (2.5, 4.0))
    ]
    lines = time_table({"1:1": problems}).splitlines()
    assert lines[-2].split()[-5:] == ["2.00", "1.0", "5.0", "1.00", "1.00"]
    assert lines[-1].split()[-5:] == ["4.00", "4.0", "10.0", "4.00", "2.00"]
