"""The throughput script in small: arms, tables, JSON line, problem sets, lookup files, refusals."""

import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import throughput
import torch
from measuring.interruption import Interruption
from measuring.setup import REASONER, prompt_ids
from measuring.text_table import format_table
from measuring.trajectories import ARMS, chunk_sizes, derived_seed
from transformers import AutoTokenizer
from workloads.problem_sets import generated_tasks, read_tasks

from stand.drafters.costs import step_cost


def run(capsys, *options: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["throughput.py", *options])
        status = throughput.main()
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def problem_file(folder: Path, *records: object) -> str:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict:
    """The JSON line of one small run that also writes its lookup."""
    path = tmp_path_factory.mktemp("lookup") / "lookup.msgpack"
    options = ["--num-problems", "2", "--trajectories", "1,3", "--rows", "2", "--max-new-tokens", "32"]
    arguments = throughput.read_arguments([*options, "--save-lookup", str(path)])
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        throughput.run(arguments, Interruption())
    assert path.exists()
    return json.loads(stdout.getvalue().splitlines()[-1])


@pytest.mark.long
def test_document_has_every_problem_and_arm(document):
    assert [(item["name"], item["trajectories"]) for item in document["problems"]] == [
        ("0 remainder", 1),
        ("1 power", 1),
        ("0 remainder", 3),
        ("1 power", 3),
    ]
    for item in document["problems"]:
        assert list(item["arms"]) == list(ARMS)
        assert len(item["arms"]["drafted"]["answers"]) == item["trajectories"]
        assert item["arms"]["plain"]["mean_acceptance_length"] == 1.0


def test_totals_are_sums(document):
    for total in document["totals"]:
        parts = [item for item in document["problems"] if item["trajectories"] == total["trajectories"]]
        for arm in ARMS:
            for name in ("num_tokens", "num_steps", "wall_seconds"):
                assert total["arms"][arm][name] == pytest.approx(sum(item["arms"][arm][name] for item in parts))
        rates = {arm: total["arms"][arm]["tokens_per_second"] for arm in ARMS}
        assert total["speedup_over_plain"] == pytest.approx(rates["drafted"] / rates["plain"])
        ratios = sorted(item["speedup_over_plain"] for item in parts)
        assert total["median_speedup_over_plain"] == pytest.approx(sum(ratios) / 2)  # of two problems
        drafted = total["arms"]["drafted"]
        assert sum(drafted["accepted_by_depth"]) == drafted["num_accepted_draft_tokens"]


def test_document_has_settings_and_versions(document):
    assert {"stand", "torch", "transformers", "numpy", "python"} <= set(document["versions"])
    assert document["settings"]["seed"] == 0
    assert document["settings"]["trajectories"] == [1, 3]
    assert document["settings"]["dtype"] == "float32" and document["is_complete"]


def test_few_trajectories_may_have_more_problems(capsys):
    options = ["--problem-counts", "2,1", "--trajectories", "1,2", "--max-new-tokens", "8", "--budget", "4"]
    status, out, err = run(capsys, *options)
    document = json.loads(out.splitlines()[-1])
    assert status == 0 and document["is_complete"] and "100 % done" in err
    assert [item["trajectories"] for item in document["problems"]] == [1, 1, 2]
    assert [total["arms"]["plain"]["num_steps"] for total in document["totals"]] == [16, 16]


@pytest.mark.parametrize("options", [("--problem-counts", "2"), ("--problem-counts", "2,1", "--num-problems", "2")])
def test_problem_counts_that_fit_nothing_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        throughput.read_arguments(["--trajectories", "1,2", *options])
    assert "--problem-counts needs one number for each" in capsys.readouterr().err


def test_drafts_are_accepted(document):
    assert document["totals"][-1]["arms"]["drafted"]["mean_acceptance_length"] > 1.2


@pytest.mark.long
def test_saved_lookup_helps_from_the_start(capsys, tmp_path):
    path = tmp_path / "lookup.msgpack"
    small = ("--budget", "32", "--num-problems", "1", "--max-new-tokens", "48", "--rows", "1")
    cold = run(capsys, *small, "--trajectories", "1,3", "--save-lookup", str(path))  # of three, which begin anew
    warm = run(capsys, *small, "--trajectories", "1", "--lookup", str(path))
    assert [cold[0], warm[0]] == [0, 0]
    documents = [json.loads(out.splitlines()[-1]) for _, out, _ in (cold, warm)]
    assert documents[0]["step_costs"] is None  # of a fixed budget
    assert [document["totals"][0]["trajectories"] for document in documents] == [1, 1]
    lengths = [document["totals"][0]["arms"]["drafted"]["mean_acceptance_length"] for document in documents]
    assert lengths[1] > lengths[0]


def test_own_problem_file_and_lookup_per_problem(capsys, tmp_path):
    records = [{"problem": "Find gcd(12, 18).", "answer": "6"}, {"problem": "Find gcd(9, 6).", "answer": 3}]
    status, out, err = run(
        capsys,
        *("--problems", problem_file(tmp_path, *records), "--trajectories", "1", "--max-new-tokens", "24"),
        *("--lookup-scope", "problem", "--verifier", "block", "--shape", "chain:3", "--temperature", "0"),
    )
    assert status == 0, err
    assert "drafted tok/s" in out and "problem 2 of 2" in err
    assert json.loads(out.splitlines()[-1])["settings"]["shape"] == "parents:-1,0,1,2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--problems", "missing.jsonl"], "missing.jsonl"),
        (["--verifier", "hope"], "verifier must be one of"),
        (["--lookup", __file__], f"--lookup: {__file__} must start with"),
        (["--costs", __file__], f"--costs: {__file__} must hold"),
        (["--save-lookup", "no/such/folder/file"], "--save-lookup must name a file in an existing folder"),
        (["--output", "no/such/folder/file"], "--output must name a file in an existing folder"),
        (["--costs", "no/such/folder/file"], "--costs must name a file in an existing folder"),
        (["--max-new-tokens", "100000"], "context of 2048"),
    ],
)
def test_bad_input_is_one_error(capsys, options, message):
    budget = [] if "--costs" in options else ["--budget", "4"]
    status, out, err = run(capsys, "--num-problems", "1", "--trajectories", "1", *budget, *options)
    assert status == 2
    assert message in err
    assert "Traceback" not in err and out == ""


def test_missing_model_is_one_error(capsys, tmp_path):
    path = problem_file(tmp_path, {"problem": "1 + 1?", "answer": 2})
    status, out, err = run(capsys, "--model", "no/such/model-folder", "--problems", path)
    assert (status, out) == (2, "")
    assert "no/such/model-folder" in err


ONLY = ("--trajectories", "1", "--output", "results.jsonl", "--only")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shape", "paper", "--budget", "5"), "--budget has no effect beside --shape"),
        (("--shape", "paper", "--costs", "file"), "--costs has no effect beside"),
        (("--budget", "5", "--costs", "file"), "--costs has no effect beside"),
        ((*ONLY, "plain", "--lookup", __file__), "--lookup has no effect on --only plain"),
        ((*ONLY, "plain", "--save-lookup", "file"), "--save-lookup has no effect on --only plain"),
        ((*ONLY, "plain", "--draft-kind", "mixed"), "--draft-kind has no effect on --only plain"),
        ((*ONLY, "drafted", "--lookup-scope", "problem"), "--lookup-scope has no effect with --only"),
        ((*ONLY, "drafted", "--cache-gb", "0"), "--cache-gb: must be a number > 0"),
        (("--rows", "-1"), "--rows: must be an integer >= 0"),
        (("--shape", "foo"), "--shape: a shape must be paper"),
    ],
)
def test_options_without_effect_or_meaning_are_refused(capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        throughput.read_arguments([*options])
    assert message in capsys.readouterr().err


def test_a_refused_long_run_leaves_its_file_empty(capsys, tmp_path):
    path = tmp_path / "run.jsonl"
    options = ("--num-problems", "1", "--trajectories", "1", "--max-new-tokens", "8", "--budget", "4")
    options = (*options, "--output", str(path), "--only", "drafted")
    assert run(capsys, *options, "--cache-gb", "0.0000001")[0] == 2
    assert not path.read_bytes()
    assert run(capsys, *options)[0] == 0
    assert ["settings" in json.loads(line) for line in path.read_text().splitlines()] == [True, False]


@pytest.mark.parametrize("text", ["0", "1,,2", "x", "-1", ""])
def test_bad_trajectories_are_refused(text):
    with pytest.raises(SystemExit):
        throughput.read_arguments([f"--trajectories={text}"])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"problem": "1 + 1?"}, "must have fields problem and answer"),
        ({"problem": "x?", "answer": "p - q"}, "must be an integer"),
        (["1 + 1?", 2], "must be an object"),
    ],
)
def test_bad_records_are_refused(tmp_path, record, message):
    with pytest.raises(ValueError, match=message):
        read_tasks(problem_file(tmp_path, record))


def test_broken_and_empty_files_are_refused(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"problem": \n', encoding="utf-8")
    with pytest.raises(ValueError, match="in line 1"):
        read_tasks(str(broken))
    with pytest.raises(ValueError, match="at least one problem"):
        read_tasks(problem_file(tmp_path))


def test_field_names_and_number_forms(tmp_path):
    path = problem_file(tmp_path, {"ID": "a", "Problem": "p", "Answer": "1,024"}, {"problem": "q", "answer": 7})
    tasks = read_tasks(path)
    assert [(task.name, task.answer) for task in tasks] == [("a", 1024), ("1", 7)]
    assert len(read_tasks(path, count=1)) == 1


def test_bundled_prompt_ends_where_reasoning_begins():
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    task = generated_tasks(1, seed=0)[0]
    text = tokenizer.decode(prompt_ids(tokenizer, task, ""))
    assert text == f"<|problem|>{task.statement}<|think|>"


def test_chunks_and_seeds():
    assert chunk_sizes(7, 3) == [3, 3, 1]
    assert chunk_sizes(2, 5) == [2]
    seeds = {derived_seed(seed, problem, chunk) for seed in range(3) for problem in range(3) for chunk in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**63 for seed in seeds)


def test_table_is_aligned():
    lines = format_table(("name", "x"), [("a", 1.234), ("longer", None)]).splitlines()
    assert lines == ["name       x", "------  ----", "a       1.23", "longer     -"]


@pytest.mark.long
def test_runs_with_saved_costs_repeat(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(step_cost, "REPEATS", 1)
    options = ["--num-problems", "1", "--trajectories", "2", "--max-new-tokens", "24"]
    options += ["--costs", str(tmp_path / "costs")]
    documents = []
    for _ in range(2):
        status, out, _ = run(capsys, *options)
        assert status == 0
        documents.append(json.loads(out.strip().splitlines()[-1]))
    first, second = (document["problems"][0]["arms"]["drafted"] for document in documents)
    assert documents[0]["step_costs"] == documents[1]["step_costs"] and len(documents[0]["step_costs"]) == 1
    for name in ("num_draft_tokens", "num_tokens", "answers"):
        assert first[name] == second[name]
    (tmp_path / "costs").write_text("{}")
    assert "measure it again" in run(capsys, *options)[2]


def test_a_gpu_drafts_by_the_costs_of_its_engines(monkeypatch, tmp_path):
    """Those that are computed are what a user gets there; a file of costs is asked for."""
    model, table = SimpleNamespace(device=torch.device("cuda")), step_cost.StepCost(1, 32, (1, 2), (0.1, 0.2))
    monkeypatch.setattr(throughput.stand, "wrap", lambda *given: SimpleNamespace(measure_cost=lambda **sizes: table))
    assert throughput.step_costs(throughput.read_arguments([]), model, None) is None
    options = throughput.read_arguments(["--costs", str(tmp_path / "costs")])
    assert throughput.step_costs(options, model, None).costs == (table, table)
