"""The simulator of long runs in small: nothing is lost, costs by hand, and waiting for the slowest is seen."""

import json
import signal

import numpy as np
import pytest
import simulate_run
from long_runs.simulated_run import Acceptance, Roofline, Simulation, Workload
from workloads.model_shapes import SMOKE_SHAPE

from stand.scheduling.admission import AtMost
from stand.scheduling.memory import WithinMemory
from stand.scheduling.page_allocator import PageAllocator
from stand.scheduling.within_pages import WithinPages

ROOFLINE = Roofline(SMOKE_SHAPE, bytes_per_second=1e9, flops_per_second=1e10, host_seconds=1e-4)
ACCEPTANCE = Acceptance((0.0, 8.0, 80.0), (1.0, 2.0, 3.0))


def workload(seed: int = 0) -> Workload:
    generator = np.random.default_rng(seed)
    samples = tuple(tuple(generator.integers(20, 400, count).tolist()) for count in (7, 1, 24, 16))
    return Workload((5, 1, 30, 12), samples, 400)


def simulation(one: Workload, budget: int = 16) -> Simulation:
    return Simulation(one, ROOFLINE, ACCEPTANCE, budget=budget, seed=3)


@pytest.mark.parametrize("max_rows", [1, 6, 48, 99])
def test_every_token_is_decoded_in_places_and_in_blocks(max_rows):
    one = workload()
    for trace in (simulation(one).places(AtMost(max_rows)), simulation(one).blocks(max_rows, AtMost(max_rows))):
        assert trace.tokens.sum() == one.num_tokens
        assert trace.live.max() <= max_rows and trace.live.min() >= 1
        assert (trace.steps > 0).all() and 0 < trace.occupancy(max_rows) <= 1
        assert (trace.taken_tokens >= trace.live_tokens).all()


def test_places_are_fuller_and_faster_than_blocks_but_for_one_place():
    one = workload()
    places, blocks = simulation(one).places(AtMost(6)), simulation(one).blocks(6, AtMost(6))
    assert places.occupancy(6) > 0.85 > blocks.occupancy(6) + 0.15
    assert places.rate() > 1.1 * blocks.rate()
    alone, single = simulation(one).places(AtMost(1)), simulation(one).blocks(1, AtMost(1))
    assert alone.occupancy(1) == pytest.approx(1.0, abs=0.05) and len(alone.live) == len(single.live)


def test_a_step_costs_what_the_roofline_says():
    weights, element = SMOKE_SHAPE.weight_count(), SMOKE_SHAPE.cache_elements()
    assert ROOFLINE.seconds(1, 1000, 1000) == pytest.approx((2 * weights + 2000 * element) / 1e9 + 1e-4)
    pairs = SMOKE_SHAPE.attention_flops() * 50_000
    assert ROOFLINE.seconds(500, 100, 50_000) == pytest.approx((2 * weights * 500 + pairs) / 1e10 + 1e-4)


def test_rows_keep_as_many_tokens_as_was_measured():
    assert ACCEPTANCE.mean(0) == 1 and ACCEPTANCE.mean(8) == pytest.approx(2) and ACCEPTANCE.mean(500) == 3
    assert 2 < ACCEPTANCE.mean(20) < 3
    one = Workload((1,), ((10_000,) * 8,), 10_000)
    trace = simulation(one, budget=64).places(AtMost(8))
    assert trace.tokens.sum() / trace.live.sum() == pytest.approx(2.0, rel=0.02)
    plain = simulation(one, budget=0).places(AtMost(8))
    assert len(plain.live) == 10_000


def test_rows_that_end_hand_their_nodes_on():
    trace = simulation(workload()).places(AtMost(48))
    assert trace.nodes_per_row[0] == pytest.approx(16 / 48) and trace.nodes_per_row[-1] == 16


def test_memory_admits_fewer_rows():
    one, token = workload(), ROOFLINE.cache_bytes
    trace = simulation(one).places(WithinMemory(5.5 * (30 + 400 + 256) * token, token))
    assert trace.live.max() in (5, 6) and trace.tokens.sum() == one.num_tokens


def paged(num_pages: int, size: int, **options) -> WithinPages:
    return WithinPages(PageAllocator(size, num_pages), most_slots=lambda rows: 16, **options)


@pytest.mark.parametrize("growth", [0, 64])
def test_rows_are_put_back_and_come_back_where_pages_run_out(growth):
    one, worst = workload(), 30 + 400
    allowed = paged(4 * worst // 8, 8, growth=growth)
    trace = simulation(one).places(allowed)
    assert trace.tokens.sum() == one.num_tokens and allowed.pages.num_used == 0
    assert trace.taken_tokens.max() <= 4 * worst and trace.live.max() > 4
    assert (trace.num_put_back > 0) == (growth == 0) or trace.num_put_back < 20
    assert (trace.num_replayed > 0) == (trace.num_put_back > 0)


def test_prompts_are_held_once():
    one = Workload((400,), ((8,) * 12,), 8)
    trace = simulation(one).places(paged(10**6, 16))
    assert trace.live_tokens[0] == 12 * 399 and trace.taken_tokens[0] == 16 * (24 + 12 * 2)  # 399 + 2 tokens each


def test_rows_end_with_their_problems_vote():
    """The leading answer, of the shortest samples, is decided with the fifth of eight; or nobody agrees."""
    lengths = ((10, 20, 30, 40, 50, 500, 500, 500), (9,) * 8)
    votes, certain = ("a",) * 8, Acceptance((0.0, 80.0), (1.0, 1.0))
    for answers, expected in (
        (votes, 10 + 20 + 30 + 40 + 50 * 4),
        (tuple("abcdefgh"), sum(lengths[0])),
        ((None,) * 8, 0),
    ):
        one = Workload((1, 1), lengths, 500, (answers, votes))
        trace = Simulation(one, ROOFLINE, certain, budget=0).places(AtMost(16), until_decided=True)
        assert trace.tokens.sum() == (expected or sum(lengths[0])) + 8 * 9
        whole = Simulation(one, ROOFLINE, certain, budget=0).places(AtMost(16))
        assert whole.tokens.sum() == one.num_tokens and whole.seconds[-1] >= trace.seconds[-1]


def test_the_command_tells_all_ways_and_draws(tmp_path, capsys):
    path = tmp_path / "run.png"
    options = ["--made-up", "--mean-length", "60", "--rows", "16,70", "--max-rows", "8", "--memory", "1"]
    options += ["--page-size", "16,64", "--growth", "8"]
    assert simulate_run.main([*options, "--plot", str(path)]) == 0
    *table, _, document = capsys.readouterr().out.splitlines()
    lines = json.loads(document)
    assert [(line["rows"], line["way"]) for line in lines] == [
        (rows, way)
        for rows in (16, 70)
        for way in ("blocks", "places", "rooms", "pages of 16, growth 8", "pages of 64, growth 8")
    ]
    assert all(0 < line["occupancy %"] <= 100 and line["tokens/s"] > 0 for line in lines)
    assert len(table) == 2 + len(lines) and path.stat().st_size > 1000


def test_lengths_of_a_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    records = [{"problem_id": n // 2, "problem": "a a", "text": "a " * (70 + n)} for n in range(4)]
    (tmp_path / "file.jsonl").write_text("\n".join(map(json.dumps, records)))
    arguments = [str(tmp_path / "file.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json"), "--scale", "2"]
    options = simulate_run.read_arguments(arguments)
    one = simulate_run.workload_of(options, simulate_run.problems_of(options), 130)
    assert one.prompts == (2, 2, 2) and [len(own) for own in one.samples] == [64, 64, 2]
    assert {*one.samples[0]} == {140, 142} and {*one.samples[1]} == {144, 146} and one.limit == 146
    assert {*one.answers[0], *one.answers[1]} == {None}


def test_answers_of_a_file_go_with_their_lengths(tmp_path, capsys):
    """And are none where a row would have been cut off."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["a", r"\boxed{7}", r"\boxed{8}", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["a " * 80 + words[1], "a " * 90 + words[2], "a " * 100]
    records = [{"problem_id": 0, "problem": "a a", "text": text} for text in texts]
    (tmp_path / "file.jsonl").write_text("\n".join(map(json.dumps, records)))
    paths = [str(tmp_path / "file.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    options = [*paths, "--until-decided", "--per-problem", "20"]
    for limit, known in ((100, {(81, "7"), (91, "8"), (100, None)}), (85, {(81, "7"), (85, None)})):
        arguments = simulate_run.read_arguments([*options, "--limit", str(limit)])
        one = simulate_run.workload_of(arguments, simulate_run.problems_of(arguments), 40)
        assert [len(own) for own in one.samples] == [20, 20]
        assert {pair for own in zip(one.samples, one.answers, strict=True) for pair in zip(*own, strict=True)} == known
    assert simulate_run.main([*options, "--rows", "40"]) == 0
    lines = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [line["way"] for line in lines] == ["blocks", "places", "decided"]


@pytest.mark.parametrize("text", ["8:2,80:3", "0:1,8:0.5", "0:1,80:3,8:2", "x", "0:nan", "0:1,8:inf", "0:1,nan:2"])
def test_acceptance_that_means_nothing_is_refused(text):
    with pytest.raises(ValueError, match="must rise from 0 nodes"):
        simulate_run.read_acceptance(text)


def test_a_file_or_made_up_lengths_are_needed():
    for options in ([], ["file", "--made-up"], ["file"]):
        with pytest.raises(SystemExit):
            simulate_run.read_arguments(options)


@pytest.mark.parametrize(
    "options",
    [("--memory", "0"), ("--limit", "0"), ("--bandwidth", "0"), ("--acceptance", "x"), ("--acceptance", "1:2"),
     ("--mean-length", "0"), ("--plot", "no/such/folder/plot.png")],
)  # fmt: skip
def test_options_without_meaning_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        simulate_run.main(["--made-up", *options])
    assert f"argument {options[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--made-up --tokenizer FILE", "--tokenizer is for a file of recordings"),
        ("FILE --tokenizer FILE --mean-length 9", "--mean-length is of made-up lengths"),
        ("--made-up --until-decided", "--until-decided needs answers, got --made-up; give a file of recordings"),
        ("--made-up --most-rows 3", "--most-rows is of lines in which memory decides; give --memory"),
        ("--made-up --memory 5 --page-size 64,1000000", "--memory must hold a page of 1000000 slots, got 5.0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, said, tmp_path, capsys):
    (tmp_path / "file").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        simulate_run.read_arguments(options.replace("FILE", str(tmp_path / "file")).split())
    assert said in capsys.readouterr().err


def test_a_run_without_a_full_step_has_no_steady_rate(capsys):
    """Blocks are of one problem, 64 rows at most."""
    options = ["--made-up", "--mean-length", "60", "--rows", "80", "--max-rows", "80"]
    assert simulate_run.main(options) == 0
    lines = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [line["of steady %"] is None for line in lines] == [True, False]


@pytest.mark.parametrize("options", [("--page-size", "16"), ("--growth", "64")])
def test_options_of_pages_without_memory_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        simulate_run.main(["--made-up", *options])
    assert "are of lines by pages; give --memory" in capsys.readouterr().err


def test_an_interrupted_simulation_prints_the_lines_that_are_finished(monkeypatch, capsys):
    def places(self, admission):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Simulation, "places", places)
    options = ["--made-up", "--mean-length", "60", "--rows", "4", "--max-rows", "2"]
    assert simulate_run.main(options) == 143
    captured = capsys.readouterr()
    assert captured.err.startswith("4 rows, blocks: ")
    assert captured.err.endswith("simulate_run: ended early by SIGTERM\n")
    assert [line["way"] for line in json.loads(captured.out.splitlines()[-1])] == ["blocks"]


def test_memory_that_holds_no_row_is_refused(capsys):
    options = ["--made-up", "--mean-length", "60", "--limit", "200", "--rows", "2", "--max-rows", "1", "--memory"]
    assert simulate_run.main([*options, "0.01"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("simulate_run: --memory must hold a row of 200 new tokens, got 0.01; give ")
    assert simulate_run.main([*options, said.split("give ")[1].split()[0]]) == 0
