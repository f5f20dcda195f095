"""The proposer for vLLM, called as vLLM calls it, without vLLM: rows that move, swap, leave and come back."""

import itertools
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm_proposer import LONGEST, MOST_ROWS, VOCABULARY_SIZE, K, proposer

from stand.plugins import vllm
from stand.plugins.serving.options import ServingOptions
from stand.plugins.serving.paying_drafts import Limits, PayingDrafts
from stand.plugins.serving.scopes import Scopes
from stand.plugins.vllm import LookupProposer
from stand.trees import BlendedLookup
from stand.trees.compiled import KnownTexts


class Batch:
    """vLLM's input batch, and what its model runner does with it at each step."""

    def __init__(self, made: LookupProposer):
        self.made = made
        self.tokens = np.zeros((MOST_ROWS, LONGEST), dtype=np.int32)
        self.lengths = np.zeros(MOST_ROWS, dtype=np.int32)

    def put(self, row: int, text) -> None:
        self.tokens[row] = 0
        self.tokens[row, : len(text)] = text
        self.lengths[row] = len(text)

    def move(self, source: int, target: int) -> None:
        self.tokens[target], self.lengths[target] = self.tokens[source], self.lengths[source]

    def swap(self, one: int, other: int) -> None:
        self.tokens[[one, other]] = self.tokens[[other, one]]
        self.lengths[[one, other]] = self.lengths[[other, one]]

    def step(self, sampled: list[list[int]]) -> list[list[int]]:
        """The tokens that were sampled are in the rows before drafts are asked for."""
        for row, new in enumerate(sampled):
            self.tokens[row, self.lengths[row] : self.lengths[row] + len(new)] = new
            self.lengths[row] += len(new)
        drafts = self.made.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        assert len(drafts) == len(sampled)
        assert all(len(draft) == 0 for draft, new in zip(drafts, sampled, strict=True) if not new)
        return drafts


def learned(monkeypatch) -> list[tuple[str, list[int], int]]:
    """What lookups are taught, as (verb, tokens, scope)."""
    lessons: list[tuple[str, list[int], int]] = []

    class Witness(BlendedLookup):
        def learn(self, context, token_ids, *, scope=0, **laws):
            lessons.append(("prompt", np.asarray(token_ids).tolist(), scope))
            super().learn(context, token_ids, scope=scope, **laws)

        def learn_rows(self, tokens, lengths, num_new, *, rows, scopes):
            for row, length, new, scope in zip(rows, lengths, num_new, scopes, strict=True):
                lessons.append(("new", tokens[row, length - new : length].tolist(), int(scope)))
            super().learn_rows(tokens, lengths, num_new, rows=rows, scopes=scopes)

    monkeypatch.setattr("stand.plugins.serving.options.BlendedLookup", Witness)
    return lessons


def new_tokens(lessons: list) -> list[list[int]]:
    return [tokens for verb, tokens, _ in lessons if verb == "new"]


PROMPTS = [list(range(10, 40)), list(range(50, 75)), list(range(80, 120))]


def test_each_token_is_learned_once_and_each_prompt_once(monkeypatch):
    lessons = learned(monkeypatch)
    batch = Batch(proposer())
    for row, prompt in enumerate([PROMPTS[0], PROMPTS[0], PROMPTS[1]]):
        batch.put(row, prompt)
    batch.step([[1], [2], [3]])
    batch.step([[4, 5], [6], [7, 8, 9]])
    assert sorted(tokens for verb, tokens, _ in lessons if verb == "prompt") == [PROMPTS[0], PROMPTS[1]]
    assert new_tokens(lessons) == [[1], [2], [3], [4, 5], [6], [7, 8, 9]]
    scopes = [scope for verb, _, scope in lessons if verb == "new"]
    assert scopes == [scopes[0], scopes[0], scopes[2]] * 2 and scopes[0] != scopes[2]


def test_moved_swapped_and_ended_rows_are_known_again(monkeypatch):
    lessons = learned(monkeypatch)
    batch = Batch(proposer())
    for row, prompt in enumerate(PROMPTS):
        batch.put(row, prompt)
    batch.step([[1], [2], [3]])
    batch.move(2, 0)  # row 0 has ended, the last one takes its place
    batch.step([[31, 32], [21]])
    batch.swap(0, 1)
    batch.step([[22], [33]])
    assert len([verb for verb, *_ in lessons if verb == "prompt"]) == 3
    assert new_tokens(lessons)[3:] == [[31, 32], [21], [22], [33]]
    scopes = {tokens[0]: scope for verb, tokens, scope in lessons if verb == "new"}
    assert scopes[3] == scopes[31] == scopes[33] != scopes[2] == scopes[21] == scopes[22]


def test_preempted_rows_come_back(monkeypatch):
    """Its row is used by others meanwhile; then it comes back elsewhere, with all that it had."""
    lessons = learned(monkeypatch)
    batch = Batch(proposer())
    batch.put(0, PROMPTS[0])
    batch.put(1, PROMPTS[1])
    batch.step([[1], [2]])
    batch.step([[3, 4], [5]])
    batch.put(0, PROMPTS[2])  # the first one is preempted
    batch.step([[6], [7]])
    batch.step([[8], [9]])
    batch.put(2, [*PROMPTS[0], 1, 3, 4])
    batch.step([[1], [2], []])  # its prompt is read again, in chunks
    batch.step([[1], [2], [99]])
    assert len([verb for verb, *_ in lessons if verb == "prompt"]) == 3
    assert new_tokens(lessons)[-1] == [99]
    scopes = {tokens[0]: scope for verb, tokens, scope in lessons if verb == "new"}
    assert scopes[99] == scopes[3]


def test_a_new_text_in_an_old_row_is_new(monkeypatch):
    lessons = learned(monkeypatch)
    batch = Batch(proposer())
    batch.put(0, PROMPTS[0])
    batch.step([[1]])
    batch.put(0, [*PROMPTS[2], *PROMPTS[1]])
    batch.step([[2]])
    assert [tokens for verb, tokens, _ in lessons if verb == "prompt"] == [PROMPTS[0], [*PROMPTS[2], *PROMPTS[1]]]


def test_prompts_in_chunks_get_no_drafts_and_are_learned_when_they_are_whole(monkeypatch):
    lessons = learned(monkeypatch)
    batch = Batch(proposer())
    batch.put(0, PROMPTS[0])
    for _ in range(3):
        assert batch.step([[]]) == [[]]
    assert lessons == []
    batch.step([[1]])
    assert [verb for verb, *_ in lessons] == ["prompt", "new"]


def test_steps_without_a_call_are_caught_up(monkeypatch):
    """vLLM does not ask for drafts where they would pass the model's length."""
    lessons = learned(monkeypatch)
    batch = Batch(proposer())
    batch.put(0, PROMPTS[0])
    batch.step([[1]])
    batch.put(0, [*PROMPTS[0], 1, 2, 3])
    batch.step([[4]])
    assert new_tokens(lessons) == [[1], [2, 3, 4]]


def test_drafts_continue_what_was_seen():
    """Chains of at most k tokens; a second row profits from the first one."""
    batch, story = Batch(proposer()), [7, 3, 9, 4, 1, 8, 2, 6, 5]
    batch.put(0, story)
    batch.put(1, story[:2])
    batch.step([[1], [9]])
    first, second = batch.step([[1], [4]])
    assert second == story[4:][:K]
    assert len(first) <= K and all(type(token) is int for token in first + second)


def test_prompts_with_placeholders_are_not_learned():
    """Ids of images may lie beyond the vocabulary: vLLM would look up their embeddings and laws."""
    made = proposer()
    batch = Batch(made)
    image = [VOCABULARY_SIZE + 5] * 20
    batch.put(0, [1, 2, 3, *image, 4, 5, 6])
    drafts = [batch.step([[7 + number % 3]]) for number in range(30)]
    assert any(draft[0] for draft in drafts)
    assert max(token for draft in drafts for token in draft[0]) < VOCABULARY_SIZE


def test_a_text_that_was_sampled_from_its_first_token_on_has_no_prompt():
    made = proposer()
    batch = Batch(made)
    drafts = [batch.step([[5, 6]]) for _ in range(7)]
    assert drafts[-1][0][:2] == [5, 6]


def test_drafts_of_another_models_file_end_before_its_ids(tmp_path):
    lookup = BlendedLookup()
    lookup.learn([], [1, 2, 3, VOCABULARY_SIZE, 4] * 20)
    lookup.save(tmp_path / "other.lookup")
    made = proposer(lookup=str(tmp_path / "other.lookup"))
    batch = Batch(made)
    batch.put(0, [4, 1])
    assert batch.step([[2]]) == [[3]]


def test_drafts_end_before_the_models_length():
    made = proposer(num_tokens=8, longest=64)
    batch, text = Batch(made), [1, 2, 3] * 30
    for length, room in ((40, 8), (57, 5), (61, 1), (62, 0)):
        batch.put(0, text[:length])
        (draft,) = batch.step([[text[length]]])
        assert len(draft) == room


def test_the_budget_is_for_all_rows_and_the_floor_for_each_token():
    text = [1, 2, 3, 4, 5] * 30
    for options, most, least in (({"budget": 5}, 5, 5), ({"floor": 1.0}, 0, 0), ({}, 2 * K, 2 * K)):
        batch = Batch(proposer(**options))
        batch.put(0, text)
        batch.put(1, text[1:])
        batch.step([[1], [1]])
        drafts = batch.step([[2], [2]])
        assert least <= sum(map(len, drafts)) <= most


def test_row_steps_count_every_step_of_every_row():
    batch = Batch(proposer())
    batch.put(0, PROMPTS[0])
    batch.put(1, PROMPTS[1])
    counts = batch.made.row_steps
    batch.step([[1], []])
    assert counts.num_row_steps == 0  # the prompt gives the first token
    batch.step([[2, 3, 4], [9]])
    batch.step([[5], [7]])
    assert (counts.num_row_steps, counts.num_tokens) == (3, 5)
    assert counts.tokens_per_row_step == pytest.approx(5 / 3)
    drafted = sum(map(len, batch.step([[6], [8]])))
    before = counts.num_drafted
    batch.swap(0, 1)
    batch.step([[1], [1]])
    assert counts.num_drafted == before + drafted
    assert "tokens per row-step" in str(counts)


def test_a_long_prompt_is_learned_little_by_little(monkeypatch):
    lessons = learned(monkeypatch)
    made = proposer(longest=5_000, text_tokens=300)
    text = np.random.default_rng(0).integers(0, 900, (1, 4_001)).astype(np.int32)
    length = 1_000
    for _ in range(5):
        length += 1
        made.propose([[int(text[0, length - 1])]], np.array([length], np.int32), text)
    prompts = [tokens for verb, tokens, _ in lessons if verb == "prompt"]
    assert list(map(len, prompts)) == [300, 300, 300, 100]
    assert sum(prompts, []) == text[0, :1_000].tolist()


@pytest.mark.parametrize("text_tokens", [100, 0])
def test_the_next_turn_of_a_chat_is_learned_little_by_little(monkeypatch, text_tokens):
    """It lies in the row of the turn before, with a document that no step gave."""
    lessons = learned(monkeypatch)
    batch = Batch(proposer(text_tokens=text_tokens))
    batch.put(0, PROMPTS[0])
    for _ in range(3):
        batch.step([[1, 2]])
    lessons.clear()
    chat, counts = batch.tokens[0, : batch.lengths[0]].tolist(), batch.made.row_steps.num_row_steps
    document = list(range(200, 350))
    batch.put(0, [*chat, *document])
    for _ in range(3):
        batch.step([[7]])
    assert new_tokens(lessons) == [[7]] * 3 and len({scope for *_, scope in lessons}) == 1
    parts = [tokens for verb, tokens, _ in lessons if verb == "prompt"]
    assert parts == ([document[:100], document[100:]] if text_tokens else [])
    assert batch.made.row_steps.num_row_steps == counts + 2  # reading the turn is no step


def test_ranks_draft_alike():
    """The same calls, the same drafts."""
    generator, one, other = np.random.default_rng(1), Batch(proposer()), Batch(proposer())
    for batch in (one, other):
        for row in range(4):
            batch.put(row, PROMPTS[row % 3])
    for _ in range(40):
        sampled = [generator.integers(0, 5, generator.integers(1, 4)).tolist() for _ in range(4)]
        assert one.step(sampled) == other.step(sampled)
    assert one.made.lookup.digest == other.made.lookup.digest


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(monkeypatch) -> list[tuple[int, int, float]]:
    """Steps that are counted: rows, draft tokens, seconds."""
    steps: list[tuple[int, int, float]] = []
    monkeypatch.setattr(PayingDrafts, "record", lambda self, *step: steps.append(step))
    return steps


def test_steps_are_timed_from_call_to_call_unless_they_read_prompts(monkeypatch):
    steps, clock = timed(monkeypatch), Clock()
    batch = Batch(proposer(drafts="paying", clock=clock))

    def step(sampled: list[list[int]], seconds: float) -> int:
        clock.now += seconds
        return sum(map(len, batch.step(sampled)))

    for row in (0, 1):
        batch.put(row, PROMPTS[row])
    step([[1], [2]], 7.0)  # prompts
    drafted = step([[3], [4]], 1.0)
    assert steps == [(2, 0, 1.0)]
    batch.swap(0, 1)
    drafted_then = step([[6], [5]], 2.0)
    assert steps[1:] == [(2, drafted, 2.0)]
    batch.put(2, PROMPTS[2])
    step([[1], [1], []], 8.0)  # a part of a prompt
    step([[1], [1], [9]], 9.0)  # its end
    assert drafted_then >= 0 and len(steps) == 2
    drafted = step([[2], [2], [8]], 3.0)
    step([[4], [4]], 4.0)  # the third row has ended
    assert [(rows, seconds) for rows, _, seconds in steps[2:]] == [(3, 3.0), (2, 4.0)]
    batch.lengths[0] += 1  # a step without a call
    step([[1], [1]], 5.0)
    assert len(steps) == 4
    batch.put(0, PROMPTS[2])  # after a pause, another request
    step([[1]], 500.0)
    assert len(steps) == 4 and step([[1]], 1.0) >= 0 and steps[4][0::2] == (1, 1.0)


def test_a_row_that_comes_back_is_no_step(monkeypatch):
    """A preempted row is known again, though its prompt was read anew."""
    steps = timed(monkeypatch)
    batch = Batch(proposer(drafts="paying"))
    batch.put(0, PROMPTS[0])
    batch.put(1, PROMPTS[1])
    batch.step([[1], [2]])
    batch.step([[3], [4]])
    batch.step([[5]])
    assert [rows for rows, *_ in steps] == [2, 1]
    batch.step([[6], [7]])
    assert [rows for rows, *_ in steps] == [2, 1]
    batch.step([[6], [7]])
    assert [rows for rows, *_ in steps] == [2, 1, 2]


@pytest.mark.parametrize(("per_token", "least", "most"), [(0.0, 0.8 * K, K), (1.0, 0.0, 0.2 * K)])
def test_drafts_are_made_where_they_pay(per_token, least, most):
    """All drafts come true for half of the rows; a token costs nothing, or as much as a step."""
    clock, text = Clock(), [1, 2, 3, 4, 5, 6, 7] * 200
    batch, drafts, counts = Batch(proposer(drafts="paying", clock=clock, longest=LONGEST)), [], []
    lengths = [30, 33]
    for row, length in enumerate(lengths):
        batch.put(row, text[:length])
    for _ in range(200):
        kept = [len(draft) for draft in drafts] or [0, 0]
        clock.now += 1.0 + per_token * sum(kept)
        sampled = [text[length : length + keep + 1] for length, keep in zip(lengths, kept, strict=True)]
        lengths = [length + len(new) for length, new in zip(lengths, sampled, strict=True)]
        if max(lengths) > LONGEST - 3 * K:  # the next requests
            lengths, drafts = [30, 33], []
            for row, length in enumerate(lengths):
                batch.put(row, text[:length])
            sampled = [[text[length]] for length in lengths]
            lengths = [length + 1 for length in lengths]
        drafts = batch.step(sampled)
        counts.append(sum(map(len, drafts)) / 2)
    assert least <= np.mean(counts[100:]) <= most


def test_outcomes_correct_what_is_expected_of_drafts(monkeypatch):
    """Rows that have moved, ended and come are told apart."""
    outcomes = []
    monkeypatch.setattr(PayingDrafts, "limits", lambda self, rows: Limits(rows * K, np.zeros(rows * K, np.float32),
                                                                          np.ones(rows * K + 1)))  # fmt: skip

    class Witness(BlendedLookup):
        def record_outcome(self, batch, accepted, next_tokens, *, kind):
            outcomes.append(([path.tolist() for path in accepted], next_tokens.tolist(), kind))
            super().record_outcome(batch, accepted, next_tokens, kind=kind)

    monkeypatch.setattr("stand.plugins.serving.options.BlendedLookup", Witness)
    batch = Batch(proposer(drafts="paying"))
    for row in range(3):
        batch.put(row, [10 * row + token for token in (1, 2, 3, 4, 5, 6)] * 5)
    assert all(len(draft) >= 2 for draft in batch.step([[1], [11], [21]]))
    assert outcomes == []
    batch.move(2, 0)  # the first row has ended
    batch.put(2, [99] * 20)  # and another one comes
    batch.step([[22, 23, 9], [5], [8]])
    assert outcomes == [([[], [], [1, 2]], [-1, 5, 9], "deterministic")]


@pytest.mark.parametrize(
    ("parallel", "follows"),
    [
        ({"world_size": 1, "distributed_executor_backend": "external_launcher"}, True),
        ({"world_size": 2, "distributed_executor_backend": "mp", "pipeline_parallel_size": 1}, True),
        ({"world_size": 2, "distributed_executor_backend": "external_launcher", "pipeline_parallel_size": 1}, False),
        ({"world_size": 2, "distributed_executor_backend": "mp", "pipeline_parallel_size": 2}, False),
    ],
)
def test_where_ranks_must_draft_alike_times_are_not_followed(monkeypatch, caplog, parallel, follows):
    steps = timed(monkeypatch)
    with caplog.at_level("WARNING", logger="vllm.stand"):
        batch = Batch(proposer(drafts="paying", parallel=parallel))
    assert ("drafts are not timed" in caplog.text) != follows
    batch.put(0, PROMPTS[0])
    for _ in range(3):
        batch.step([[1]])
    assert (len(steps) > 0) == follows


def test_all_drafts_follow_from_the_calls_alone(monkeypatch):
    steps, clock = timed(monkeypatch), Clock()
    one, other = Batch(proposer(drafts="all", clock=clock)), Batch(proposer(drafts="all"))
    for batch in (one, other):
        batch.put(0, PROMPTS[0] * 3)
    for token in range(40):
        clock.now += 10.0 ** (token % 5)
        assert one.step([[token % 4]]) == other.step([[token % 4]])
    assert steps == []


def test_a_run_begins_with_what_another_one_saved(tmp_path):
    path = str(tmp_path / "served.lookup")
    first = Batch(proposer(lookup=path, save=path))
    first.put(0, [7, 3, 9, 4, 1, 8, 2, 6, 5])
    first.step([[1]])
    first.made.saver.finish()
    second = Batch(proposer(lookup=path))
    second.put(0, [7, 3])
    assert second.step([[9]]) == [[4, 1, 8, 2]]
    with pytest.raises(OSError):
        proposer(lookup=str(tmp_path / "none.lookup"))


def test_ranks_of_data_parallelism_have_files_of_their_own(tmp_path):
    for rank in (0, 1):
        made = proposer(rank=rank, save=str(tmp_path / "{rank}.lookup"))
        made.lookup.learn([], [1, 2 + rank])
        made.saver.finish()
    assert [BlendedLookup.load(tmp_path / f"{rank}.lookup").predict([1])[0][0] for rank in (0, 1)] == [2, 3]


def test_one_rank_of_tensor_parallelism_writes_the_file(tmp_path):
    made = [proposer(place=place, save=str(tmp_path / "a.lookup")) for place in range(4)]
    assert [one.saver is not None for one in made] == [True, False, True, False]  # two stages of two ranks


def test_what_is_null_is_as_if_left_out():
    given = {"lookup": None, "save": None, "floor": None, "budget": 64}
    assert ServingOptions.read(given, {"STAND_FLOOR": "0.25"}) == ServingOptions(floor=0.25, budget=64)


def test_names_that_mean_nothing_are_told(caplog, tmp_path):
    ServingOptions.read(None, {"STAND_SAV": "x", "STAND_COSTS": "off", "STAND_FLOOR": "0.5", "HOME": "/"})
    assert [record.getMessage() for record in caplog.records] == [
        "STAND: nothing in the environment is named STAND_SAV; check the spelling"
    ]
    caplog.clear()
    BlendedLookup(fade=0.9).save(tmp_path / "a.lookup")
    for fade, is_told in ((0.8, True), (0.9, False), (0.95, False)):
        ServingOptions(lookup=str(tmp_path / "a.lookup"), fade=fade).new_lookup()
        assert bool(caplog.records) == is_told
        caplog.clear()


def test_a_path_may_name_its_rank(tmp_path):
    assert ServingOptions.read({"save": tmp_path / "{rank}.lookup"}, {}, rank=3).save == str(tmp_path / "3.lookup")


def test_options_come_from_the_environment_or_by_name():
    environment = {"STAND_FLOOR": "0.25", "STAND_BUDGET": "64", "STAND_DEBUG": "1", "HOME": "/"}
    assert ServingOptions.read(None, environment) == ServingOptions(floor=0.25, budget=64)
    assert ServingOptions.read({"floor": 0.5}, environment) == ServingOptions(floor=0.5, budget=64)
    assert ServingOptions.read({"max_bytes": 2**21}, {}).new_lookup().max_bytes == 2**21


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flor": 0.1}, "flor"),
        ({"floor": 2}, r"floor must be in \[0, 1\], got 2.0; 0 drafts"),
        ({"budget": -1}, "budget must be at least 0, got -1; leave it out"),
        ({"laws": -2}, "laws must be at least 0, got -2"),
        ({"budget": "many"}, "budget must be of type int"),
        ({"budget": 1.5}, "budget must be of type int"),
        ({"fade": float("nan"), "lookup": "a.lookup"}, r"fade must be in \(0, 1\], got nan; leave it out"),
        ({"fade": 0}, r"fade must be in \(0, 1\], got 0.0"),
        ({"drafts": "some"}, "drafts must be one of all, paying, got 'some'"),
        ({"save": True}, "save must be of type str"),
        ({"share": 5}, "share must be of type str, got 5"),
        ({"lookup": ["a.lookup"]}, "lookup must be of type str"),
        ("floor", "mapping"),
    ],
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ServingOptions.read(given, {})


def test_options_that_are_made_directly_are_checked_too():
    with pytest.raises(ValueError, match=r"fade must be in \(0, 1\], got nan"):
        ServingOptions(lookup="a.lookup", fade=float("nan"))


@pytest.mark.parametrize(("name", "count"), [("__main__", 1), ("__mp_main__", 0)])
def test_the_program_of_the_page_makes_one_engine(name, count, monkeypatch):
    """vLLM's processes on a CPU import the program, under another name."""
    program = re.search(r"```python\n(.*?)```", Path("docs/vllm.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    made = []

    class LLM:
        def __init__(self, model, *, speculative_config, **settings):
            made.append(speculative_config["model"])

        def chat(self, chats, sampling):
            return []

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=dict))
    monkeypatch.setattr(sys, "argv", ["program.py", "drafts"])
    exec(compile(program, "program.py", "exec"), {"__name__": name})
    assert made == count * ["stand.plugins.vllm.LookupProposer"]


def test_texts_of_another_kind_are_refused():
    known = KnownTexts(2, num_notes=1)
    tokens, rows, lengths = np.zeros((2, 30), np.int32), np.array([0, 1]), np.array([20, 20])
    good = (tokens, rows, lengths)
    for place, wrong in [(0, tokens.astype(np.int64)), (0, tokens[0]), (0, tokens[:, ::2]), (1, rows.astype(np.int32)),
                         (1, rows[:1]), (2, lengths[::-1])]:  # fmt: skip
        given = [wrong if at == place else array for at, array in enumerate(good)]
        with pytest.raises(ValueError, match="int64"):
            known.find(*given)
        with pytest.raises(ValueError, match="int64"):
            known.keep(*given, np.zeros((2, 1), np.int64))
    for rows, lengths in [([0, -1], [20, 20]), ([0, 2], [20, 20]), ([0, 1], [20, 31]), ([0, 1], [-1, 20])]:
        with pytest.raises(ValueError, match="rows and lengths must lie in tokens"):
            known.keep(tokens, np.array(rows), np.array(lengths), np.zeros((2, 1), np.int64))
    known.keep(*good, np.array([[3], [4]]))
    assert known.find(*good)[1].tolist() == [[3], [4]]


def test_texts_that_left_are_forgotten_in_the_end():
    known = KnownTexts(1, num_notes=1, most_parked=2)
    texts = np.arange(4 * 30, dtype=np.int32).reshape(4, 30)
    row, length = np.zeros(1, np.int64), np.array([20], np.int64)
    for number, text in enumerate(texts):
        before, _ = known.find(text[None].copy(), row, length)
        assert before.tolist() == [0]
        known.keep(text[None].copy(), row, length, np.array([[number]]))
    found = [known.find(text[None].copy(), row, length) for text in texts]
    assert [int(before[0]) for before, _ in found] == [0, 0, 20, 20]  # what has left last goes last
    assert [int(notes[0, 0]) for before, notes in found if before[0]] == [2, 3]


def test_scopes_are_numbered_as_problems_come():
    scopes = Scopes()
    numbers = [scopes.of(key) for key in range(300)]
    assert numbers == [key % 254 for key in range(300)]
    assert scopes.of(0) == 0 and 299 in scopes and 300 not in scopes


def test_the_door_needs_neither_torch_nor_vllm():
    names = "('torch', 'transformers', 'vllm', 'sglang')"
    code = f"import sys, stand.plugins.vllm, stand.plugins.sglang; print([n for n in {names} if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["[]"], result.stderr


@pytest.mark.parametrize(("tick", "clock"), [(1e-7, "thread_time"), (0.01, "perf_counter")])
def test_steps_on_a_cpu_are_timed_by_processor_time_where_it_is_fine(monkeypatch, tick, clock):
    """In gVisor its ticks are 10 ms: all sizes of steps would seem to take as long, and all drafts to pay."""
    now = itertools.count(tick, tick)
    monkeypatch.setattr("stand.drafters.costs.step_cost.parallel_region", lambda: 1)
    monkeypatch.setattr(time, "thread_time", lambda: next(now))
    expected = getattr(time, clock)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    assert vllm._clock_of(config) is expected
    assert vllm._clock_of(SimpleNamespace()) is time.perf_counter


def test_temperatures_are_spread_over_draft_positions():
    """What vLLM's sampler on a CPU leaves as uninitialised memory."""
    torch = pytest.importorskip("torch")
    from stand.plugins.vllm import expand_batch_to_tokens

    ends = torch.tensor([3, 3, 4], dtype=torch.int32)
    spread = expand_batch_to_tokens(torch.tensor([0.6, 0.9, 0.0]), ends, 4, replace_from=0, replace_to=1)
    assert spread.dtype == torch.float32 and spread.tolist() == pytest.approx([0.6, 0.6, 0.6, 1.0])
    spread = expand_batch_to_tokens(torch.tensor([20, 5, 7], dtype=torch.int32), ends, 4)
    assert spread.dtype == torch.int32 and spread.tolist() == [20, 20, 20, 7]


def test_numbers_are_drawn_for_rows_with_drafts_alone():
    torch = pytest.importorskip("torch")
    from stand.plugins.vllm import only_for_drafts

    @dataclass
    class Metadata:
        generators: dict

    def sample(max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs,
               sampling_metadata, device):  # fmt: skip
        calls.append((num_draft_tokens, cu_num_draft_tokens.tolist(), sampling_metadata.generators, device))
        return draft_token_ids + 1

    calls, patched = [], only_for_drafts(sample)
    ends, ids, metadata = torch.tensor([0, 2, 2, 3]), torch.tensor([5, 6, 7]), Metadata({0: "a", 1: "b", 3: "d"})
    assert patched(2, [0, 2, 0, 1], ends, ids, None, None, metadata, device="cpu").tolist() == [6, 7, 8]
    assert calls == [([2, 1], [2, 3], {0: "b", 1: "d"}, "cpu")] and metadata.generators[0] == "a"
    assert patched(0, [0, 0], torch.tensor([0, 0]), ids[:0], None, None, metadata, "cpu").tolist() == []
    assert len(calls) == 1
    assert only_for_drafts(len) is len  # another vLLM
