"""Recorded streams through the doors of serving engines: what is counted is what happened."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import replay_serving
from replay_parts.doors import CorpusDoor, Outcome, Stream, VllmDoor, path_length
from replay_serving import Replay, replay, result_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from workloads.recordings import Recording


def recordings(seed: int, count: int) -> list[Recording]:
    generator = np.random.default_rng(seed)
    walk = generator.integers(0, 30, 150).astype(np.int32)
    found = []
    for sample in range(count):
        tokens = np.where(generator.random(150) < 0.05, generator.integers(0, 30, 150), walk).astype(np.int32)
        found.append(Recording(0, sample, walk[:9], tokens[: 100 + 7 * sample]))
    return found


class Knowing:
    """A door that is right about so many tokens, and checks what it is shown."""

    def __init__(self, num_right: int):
        self.num_right, self.seen, self.dropped = num_right, {}, []

    def step(self, live):
        for one in live:
            assert one.end - one.num_new == self.seen.get(one.name, one.num_prompt)
            self.seen[one.name] = one.end
        right = [min(self.num_right, len(one.tokens) - one.end) for one in live]
        return Outcome([self.num_right] * len(live), right, 2.0 * len(live))

    def drop(self, place, live):
        self.dropped.append(live[place].name)


@pytest.mark.parametrize("num_right", [0, 3])
def test_every_step_of_every_row_is_counted(num_right):
    streams, door = recordings(0, 7), Knowing(num_right)
    done = replay([door], streams, num_rows=3)
    after_first = [len(one.tokens) - 1 for one in streams]
    steps = done.num_row_steps
    assert done.num_tokens == sum(after_first) and done.num_drafted == num_right * steps
    assert steps == sum(-(-length // (num_right + 1)) for length in after_first)
    assert sorted(door.dropped) == list(range(7))
    assert done.microseconds.sum() == 2.0 * steps and 0 < done.is_full.sum() < len(done.is_full)
    assert set(done.microseconds[done.is_full]) == {6.0}
    figures = result_of(done, file="f", door="d", size=1, rows=3, servers=1, is_shared=False)
    assert (figures.us_per_row_step, figures.us_per_row_median, figures.slowest_step_us) == (2.0, 2.0, 6.0)


def test_of_equal_runs_each_steps_shortest_time_counts():
    def run(*times):
        return Replay(4, 9, 0, np.array(times), np.array([True, False]))

    assert run(3.0, 5.0).shortest(run(4.0, 2.0)).microseconds.tolist() == [3.0, 2.0]
    with pytest.raises(ValueError, match="same calls"):
        run(3.0, 5.0).shortest(replace(run(4.0, 2.0), num_row_steps=5))


def test_vllms_door_counts_what_the_proposer_counts():
    streams = recordings(1, 9)
    door = VllmDoor(6, num_rows=4, longest=300, options={})
    done = replay([door], streams, num_rows=4)
    counts = door.proposer.row_steps
    assert done.num_tokens / done.num_row_steps > 1.5
    assert counts.num_row_steps == done.num_row_steps - len(streams)  # a stream's last step is seen by nobody
    assert counts.num_drafted <= done.num_drafted


def test_sglangs_door_follows_the_tree():
    door = CorpusDoor(replay_serving.OURS, 8, depth=20)
    done = replay([door], recordings(2, 9), num_rows=4)
    assert done.num_tokens / done.num_row_steps > 1.5 and done.num_drafted == 7 * done.num_row_steps


def test_recordings_are_dealt_to_servers_which_step_in_turn():
    streams, turns = recordings(0, 7), []

    class Turn(Knowing):
        def step(self, live):
            turns.append(self)
            return super().step(live)

    doors = [Turn(1), Turn(1), Turn(1)]
    done = replay(doors, streams, num_rows=1)
    assert [len(door.seen) for door in doors] == [3, 2, 2] and turns[:6] == doors * 2
    assert done.num_tokens == sum(len(one.tokens) - 1 for one in streams) and len(done.microseconds) == len(turns)
    assert done.num_row_steps == len(turns) and done.is_full.all()


def test_servers_that_share_make_more_tokens_per_step(tmp_path):
    streams, made = recordings(4, 8), []
    for options in ({}, {"share": str(tmp_path)}):
        doors = [VllmDoor(6, num_rows=1, longest=300, options=options) for _ in range(4)]
        made.append(replay(doors, streams, num_rows=1))
    apart, shared = (done.num_tokens / done.num_row_steps for done in made)
    assert shared > 1.1 * apart


def test_a_path_is_followed_to_its_end():
    one = Stream(0, np.array([5, 6, 7, 8], np.int32), 0, 1)
    parents = np.array([-1, 0, 0, 2, 1])
    assert path_length(np.array([5, 9, 6, 7, 8]), parents, one) == 2
    assert path_length(np.array([5, 9, 7, 7, 8]), parents, one) == 0
    with pytest.raises(ValueError, match="root"):
        path_length(np.array([6, 9, 6, 7, 8]), parents, one)


def test_the_command_writes_a_table_and_json(tmp_path, capsys):
    words = [f"w{number}" for number in range(30)]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [
        {"problem_id": "p", "problem": "w1 w2", "text": " ".join(words[token] for token in one.tokens)}
        for one in recordings(3, 3)
    ]
    file = tmp_path / "walks.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    named = [str(file), "--tokenizer", str(tmp_path / "tokenizer.json"), "--rows", "2", "--repeats", "2"]
    assert replay_serving.main([*named, "--door", "vllm", "sglang", "--size", "4", "--options", '{"floor": 0.2}']) == 0
    *_, document = capsys.readouterr().out.strip().splitlines()
    results = [SimpleNamespace(**one) for one in json.loads(document)["results"]]
    assert [one.door for one in results] == ["vllm", "sglang"]
    assert all(one.tokens_per_row_step > 1 and one.us_per_row_median > 0 for one in results)
    assert results[0].drafted_per_row_step < 4 == results[1].drafted_per_row_step + 1
    assert replay_serving.main([*named, "--options", '{"flor": 1}']) == 2
    assert replay_serving.main([*named, "--servers", "2", "--share", "--repeats", "1"]) == 0
    (shared,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["results"]
    assert shared["servers"] == 2 and shared["is_shared"]


@pytest.mark.parametrize(
    ("door", "option"),
    [
        ("suffix", ["--depth", "3"]),
        ("vllm", ["--corpus", "a:B"]),
        ("sglang", ["--options", "{}"]),
    ],
)
def test_options_of_other_doors_are_refused(door, option, capsys):
    given = [__file__, "--tokenizer", __file__, "--door", door, *option]
    if option[1] == "{}":  # its default
        assert replay_serving.parse(given).options == {}
        given[-1] = '{"floor": 0.2}'
    with pytest.raises(SystemExit):
        replay_serving.parse(given)
    assert f"{option[0]} has no effect without one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--share"], "--share has no effect with one server"),
        (
            ["--share", "--servers", "2", "--door", "vllm", "sglang"],
            "--share is for --door vllm alone, got",
        ),
        (["--share", "--servers", "2", "--repeats", "2"], "--repeats must make the same calls"),
    ],
)
def test_sharing_where_it_has_no_place_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        replay_serving.parse([__file__, "--tokenizer", __file__, *options])
    assert message in capsys.readouterr().err
