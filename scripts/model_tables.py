"""Tables of what drafts give on one model: by samples, sampling, nodes, evidence, kinds, drafters and rules.

    python scripts/model_tables.py --model smollm2                          # everything, resumable
    python scripts/model_tables.py --model gemma3-270m --parts replay --settings 0.8:0.95,1.0:1.0

Trajectories are drawn once per sampling setting (TEMPERATURE:TOP_P), with the target's 32 best tokens at every
position, and kept in --folder. Then

replay: drafters on these recordings, with what the engine would keep under the rule `match`; minutes, no model.
rules: the model in the loop; along the steps of `match`, every rule is asked how many tokens it keeps of the same
  draft on average (verifier_parts/expected_kept.py), on drafts of every kind and on chains of the lookup.
loop: the model in the loop; a lookup that learns the laws of all nodes, of kept paths alone, or tokens.
calibration: the model in the loop, one row at a time; how often nodes are kept that the lookup thought likely.
time: the model in the loop, one row at a time; wall-clock and processor time of every drafter beside transformers'
  own `generate` with and without prompt lookup, in turn within every sample. For many rows together: throughput.py.

Every finished arm (of `time`: problem) is a line of FOLDER/MODEL.jsonl; a run with the same options goes on from
there. Tables to stdout, errors are standard errors over problems (bootstrap; one problem has none), gains are paired by
problem. A lookup starts empty at every problem, but in `rules` and `loop`, where one learns from all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from measuring.option_types import existing_file, number_from_zero, positive_integer, share, worded
from measuring.output_file import JsonLines
from measuring.progress import Progress, say
from measuring.setup import BOXED_INSTRUCTION, REASONER, WORD_PROBLEMS, load_model, load_trained, prompt_ids
from table_parts.estimates import CalibrationArm, calibration_arms, calibration_table, run_calibration_arm
from table_parts.law_recording import LawRecording, record
from table_parts.law_replay import replay
from table_parts.loop_tables import ROOM, LoopArm, loop_arms, loop_tables, run_loop_arm
from table_parts.replay_tables import COUNTS, ReplayArm, replay_arms, replay_tables, result_of
from table_parts.time_tables import time_problem, time_table
from workloads.problem_sets import Task, generated_tasks, read_tasks
from workloads.real_models import MODELS

from stand.drafters.costs.step_cost import CostTable
from stand.drafters.eagle.attached import attached
from stand.drafters.eagle.feature_head import FeatureHead

PARTS = ("replay", "rules", "loop", "calibration", "time")
SETTINGS = "0.8:0.95,0.6:0.95,1.0:0.95,0.3:0.95,0.8:1.0,1.0:1.0"
SEED = 11


class Run:
    """One model with its options; the model is loaded when it is needed first."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._loaded = None
        name = Path(options.model).name
        self._recordings = options.folder / f"{name}-{options.num_problems}x{COUNTS[-1]}x{options.tokens}"
        options.folder.mkdir(parents=True, exist_ok=True)
        self._file = JsonLines(options.folder / f"{name}.jsonl", "--folder", goes_on=True)
        self._check_same_run()
        self._known = {tuple(line["key"]): line["result"] for line in self._file.earlier[1:]}

    def _check_same_run(self) -> None:
        """The file begins with what its results depend on and their keys do not name."""
        options = self.options
        costs = None if options.costs is None else options.costs.read_text(encoding="utf-8")
        is_folder = options.model not in MODELS and Path(options.model).is_dir()
        model = str(Path(options.model).resolve()) if is_folder else options.model
        head = None if options.head is None else [str(options.head.resolve()), digest_of_head(options.head)]
        run = {"model": model, "head": head, "costs": costs}
        if not self._file.earlier:
            self._file.add(run)
        elif self._file.earlier[0] != run:
            raise ValueError(
                f"--folder must hold results of this model, --head and --costs, got {options.folder} with those of "
                f"{self._file.earlier[0]}; name another folder"
            )

    @property
    def model(self):
        """(model, tokenizer)."""
        if self._loaded is None:
            self._loaded = load_model(self.options)
        return self._loaded

    @cached_property
    def head(self) -> FeatureHead:
        """What --head names."""
        return load_trained(attached, self.model[0], self.options.head, option="--head", model=self.options.model)

    def prompts(self, count: int) -> list[list[int]]:
        """Token ids of the first problems."""
        tokenizer, tasks = self.model[1], self._tasks(count)
        is_bundled = Path(self.options.model).resolve() == REASONER
        return [prompt_ids(tokenizer, task, "" if is_bundled else BOXED_INSTRUCTION) for task in tasks]

    def _tasks(self, count: int) -> list[Task]:
        if Path(self.options.model).resolve() == REASONER:
            return generated_tasks(count, seed=SEED)
        return read_tasks(str(WORD_PROBLEMS), count=count)

    def recording(self, setting: str) -> LawRecording:
        """Drawn on first use."""
        path = self._recordings / f"{setting.replace(':', '-')}.npz"
        if not path.exists():
            say(f"{setting}: drawing {self.options.num_problems} x {COUNTS[-1]} trajectories")
            prompts = self.prompts(self.options.num_problems)
            law = law_settings(setting)
            record(*self.model, prompts, COUNTS[-1], max_new_tokens=self.options.tokens, seed=SEED, **law).save(path)
        return LawRecording.load(path)

    def result(self, key: tuple[str, ...], compute: Callable[[], dict]) -> dict:
        """What is known of an arm, or what `compute` finds; `key` begins with the part."""
        options = self.options
        size = f"{options.num_problems} problems"
        if key[0] != "replay":
            size = f"{options.loop_problems} problems x {options.loop_samples} samples"
        if key[0] == "time":
            size += f", {options.threads} threads"
        key = (*key, f"{size}, {options.tokens} tokens")
        if key not in self._known:
            self._known[key] = json.loads(json.dumps(compute()))
            self._file.add({"key": key, "result": self._known[key]})
        return self._known[key]


def digest_of_head(path: Path) -> str:
    """Of what a run reads there; of a folder all files count."""
    digest = blake2b(digest_size=16)
    for file in [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def law_settings(setting: str) -> dict[str, float]:
    temperature, top_p = setting.split(":")
    return {"temperature": number_from_zero(temperature), "top_p": share(top_p), "top_k": 0}


def run_replays(run: Run, settings: list[str]) -> str:
    costs = None if run.options.costs is None else CostTable.load(run.options.costs)
    results, arms = {}, list(replay_arms(costs))
    progress = Progress(len(settings) * len(arms))
    for setting in settings:
        recording = run.recording(setting)
        for arm in arms:
            found = run.result(("replay", setting, arm.name), partial(run_replay, recording, arm, setting))
            results[setting, arm.name] = found
            total = sum(map(sum, found["tokens"])) / sum(map(sum, found["steps"]))
            progress.add(1, f"{setting}, {arm.name}: {total:.2f} tokens/step")
    return replay_tables(results, settings, costs)


def run_loops(run: Run, part: str, settings: list[str]) -> str:
    arms = [
        (setting, arm)
        for setting in settings
        for arm in loop_arms(part, head=run.options.head, temperature=law_settings(setting)["temperature"])
    ]
    results: dict[tuple[str, LoopArm], dict] = {}
    progress = Progress(len(arms))
    for setting, arm in sorted(arms, key=lambda pair: pair[1].head is None):  # a wrong head is told first
        found = run.result((part, setting, arm.name), partial(run_loop, run, setting, arm))
        results[setting, arm] = found
        means = {rule: round(sum(tokens) / sum(found["steps"]), 2) for rule, tokens in found["tokens"].items()}
        progress.add(1, f"{setting}, {arm.name}: {means}")
    return loop_tables(part, {pair: results[pair] for pair in arms})


def run_calibrations(run: Run, settings: list[str]) -> str:
    arms = [(setting, arm) for setting in settings for arm in calibration_arms()]
    named, progress = [], Progress(len(arms))
    for setting, arm in arms:
        found = run.result(("calibration", setting, arm.name), partial(run_calibration, run, setting, arm))
        named.append(([setting, arm.name], found["calibration"]))
        progress.add(1, f"{setting}, {arm.name}")
    return calibration_table(named, ["setting", "drafts"])


def run_replay(recording: LawRecording, arm: ReplayArm, setting: str) -> dict[str, object]:
    is_greedy = law_settings(setting)["temperature"] == 0
    return result_of(replay(recording, arm.make, rows=arm.rows, is_greedy=is_greedy))


def run_loop(run: Run, setting: str, arm: LoopArm) -> dict[str, object]:
    options = run.options
    how = {**law_settings(setting), "max_new_tokens": options.tokens, "seed": SEED}
    arm = arm if arm.head is None else replace(arm, head=run.head)
    return run_loop_arm(*run.model, run.prompts(options.loop_problems), arm, samples=options.loop_samples, **how)


def run_calibration(run: Run, setting: str, arm: CalibrationArm) -> dict[str, object]:
    options = run.options
    how = {**law_settings(setting), "max_new_tokens": options.tokens, "seed": SEED}
    return run_calibration_arm(*run.model, run.prompts(options.loop_problems), arm, samples=options.loop_samples, **how)


def run_times(run: Run, settings: list[str]) -> str:
    results: dict[str, list[dict]] = {setting: [] for setting in settings}
    progress = Progress(len(settings) * run.options.loop_problems)
    for setting in settings:
        for problem in range(run.options.loop_problems):
            found = run.result(("time", setting, f"problem {problem}"), partial(run_time, run, setting, problem))
            results[setting].append(found)
            progress.add(1, f"{setting}, problem {problem + 1}")
    return time_table(results)


def run_time(run: Run, setting: str, problem: int) -> dict[str, object]:
    options = run.options
    how = {**law_settings(setting), "max_new_tokens": options.tokens, "seed": SEED}
    prompt = run.prompts(options.loop_problems)[problem]
    return time_problem(*run.model, prompt, samples=options.loop_samples, problem=problem, **how)


def settings_list(text: str) -> list[str]:
    settings = text.split(",")
    try:
        for setting in settings:
            law_settings(setting)
    except ValueError as error:
        raise ValueError(f"must be TEMPERATURE:TOP_P with commas between, as 0.8:0.95; got {text!r}") from error
    return settings


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(REASONER), help="folder, hub id or short name (default: bundled model)")
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=list(PARTS),
        help="of replay, rules, loop, calibration, time, with commas between (default: all)",
    )
    parser.add_argument(
        "--settings",
        type=worded(settings_list),
        default=settings_list(SETTINGS),
        metavar="T:P,T:P,...",
        help="TEMPERATURE:TOP_P of `replay` (default: six of them)",
    )
    parser.add_argument(
        "--loop-settings",
        type=worded(settings_list),
        default=["0.8:0.95", "1.0:1.0"],
        metavar="T:P,...",
        help="those of the other parts (default: 0.8:0.95,1.0:1.0)",
    )
    parser.add_argument("--num-problems", type=positive_integer, default=6, help="recorded for `replay` (%(default)s)")
    parser.add_argument("--tokens", type=positive_integer, default=128, help="new tokens per trajectory (%(default)s)")
    parser.add_argument(
        "--loop-problems", type=positive_integer, default=4, help="problems with the model in the loop (%(default)s)"
    )
    parser.add_argument(
        "--loop-samples",
        type=positive_integer,
        default=4,
        help="samples per problem, together, in `time` in turn (%(default)s)",
    )
    parser.add_argument(
        "--costs", type=existing_file, help="file of step costs of one row: what drafts would do to the time"
    )
    parser.add_argument("--head", type=Path, help="an EAGLE head of the model: `rules` with chains that it draws, too")
    parser.add_argument(
        "--folder", type=Path, default=Path("results/model_tables"), help="of recordings and results (%(default)s)"
    )
    parser.add_argument(
        "--threads", type=positive_integer, default=torch.get_num_threads(), help="CPU threads (default: torch's)"
    )
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts must be among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if idle := idle_options(options):
        parser.error(idle)
    options.device, options.dtype = "cpu", "float32"
    return options


def idle_options(options: argparse.Namespace) -> str | None:
    """What is wrong with options for the parts that were chosen."""
    parts, greedy = set(options.parts), [one for one in options.loop_settings if law_settings(one)["temperature"] == 0]
    if options.head is not None and "rules" not in parts:
        return "--head has no effect without `rules` among --parts; leave it out"
    if options.head is not None and not options.head.exists():
        return f"--head must be a file or a folder, got {options.head}; check the path"
    if options.costs is not None and "replay" not in parts:
        return "--costs has no effect without `replay` among --parts; leave it out"
    if options.costs is not None:
        try:
            CostTable.load(options.costs)
        except ValueError as error:
            return f"--costs must be a file of step costs, got {options.costs} ({error}); time steps again"
    if parts & {"rules", "loop"} and options.tokens <= ROOM:
        return f"--tokens must be above {ROOM} for `rules` and `loop`, which need that room, got {options.tokens}"
    if parts - {"replay"} and greedy:
        return f"--loop-settings must have temperatures above 0, got {greedy[0]}; raise it"
    return None


def tables(run: Run) -> Iterator[str]:
    for part in run.options.parts:
        if part == "replay":
            yield run_replays(run, run.options.settings)
        elif part == "time":
            yield run_times(run, run.options.loop_settings)
        elif part == "calibration":
            yield run_calibrations(run, run.options.loop_settings)
        else:
            yield run_loops(run, part, run.options.loop_settings)


def main() -> int:
    options = read_arguments()
    torch.set_num_threads(options.threads)
    try:
        for table in tables(Run(options)):
            print(table, end="\n\n", flush=True)
    except (ValueError, OSError) as error:
        say(f"model_tables: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
