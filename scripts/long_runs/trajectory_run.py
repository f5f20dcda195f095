"""All trajectories of all problems as one run of the scheduler: each one in the file as it ends, so that a run that was
stopped goes on where it ended."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from measuring.interruption import Interruption
from measuring.output_file import JsonLines, check_same_settings
from measuring.progress import RunProgress
from measuring.setup import prompt_ids, sampling_for
from measuring.text_table import format_table
from measuring.throughput_report import plain_setting
from measuring.trajectories import REPEATING, law_settings
from workloads.answers import extract_answer, is_decided, majority_answer
from workloads.problem_sets import Task

import stand

FIXED = (  # what a run must not change where it goes on: the law, the seed and the problems
    "model", "problems", "num_problems", "instruction", "max_new_tokens", "temperature", "top_k", "top_p", "seed",
    "dtype", "verifier", "only",
)  # fmt: skip
NUMBERING = "row = sample * problems + problem"


@dataclass(slots=True)
class LongRun:
    """Samples of every problem, numbered sample by sample, so that a run can go on with more of them; `done` are those
    of earlier sessions and of this one."""

    arguments: argparse.Namespace
    tasks: Sequence[Task]
    count: int  # trajectories per problem
    done: dict[int, Mapping[str, object]] = field(default_factory=dict)  # lines by row
    _given_up: dict[int, int] = field(default_factory=dict)  # by problem: rows

    @classmethod
    def of(cls, arguments: argparse.Namespace, tasks: Sequence[Task], earlier: Sequence[Mapping]) -> LongRun:
        """earlier: lines of the file that is gone on with. Raises ValueError where they belong to another run."""
        this = cls(arguments, tasks, arguments.trajectories[0])
        if earlier:
            _check_same_run(arguments, tasks, earlier[0])
        this.done = {line["row"]: line for line in earlier if "row" in line}
        for place in range(len(tasks)):
            this._needed(place)
        drawn = 1 + max(this.done, default=-1) // len(tasks)
        if this.count < drawn:
            raise ValueError(
                f"--resume may ask for more --trajectories of a problem, not for fewer, got {this.count} after "
                f"{drawn}; give {drawn} or more"
            )
        return this

    @property
    def total(self) -> int:
        return self.count * len(self.tasks)

    @property
    def num_given_up(self) -> int:
        """Rows that the votes do not need any more."""
        return sum(self._given_up.values())

    @property
    def num_over(self) -> int:
        """Rows that are drawn, or not needed any more."""
        return len(self.done) + self.num_given_up

    def _needed(self, place: int) -> list[int]:
        """Rows of a problem that no session has finished; none where its vote is decided."""
        rows = range(place, self.total, len(self.tasks))
        found = [self.done[row]["found"] for row in rows if row in self.done]
        missing = [row for row in rows if row not in self.done]
        is_over = self.arguments.until_decided and is_decided(found, len(missing))
        self._given_up[place] = len(missing) if is_over else 0
        return [] if is_over else missing

    def requests(self, tokenizer) -> Iterator[stand.Request]:
        """The rows of every problem that are needed."""
        for place, task in enumerate(self.tasks):
            if rows := self._needed(place):
                yield stand.Request(prompt_ids(tokenizer, task, self.arguments.instruction), rows=rows, id=place)

    def draw(
        self,
        engine: stand.Engine,
        lines: JsonLines,
        progress: RunProgress,
        interruption: Interruption,
        *,
        header: Mapping[str, object] | None,
    ) -> None:
        """Decode what is missing; every trajectory is with the operating system when the next one is asked for.

        header: first line of a new file, written after the first step, so that a refused run leaves the file empty.
        """
        waiting = [] if header is None else [header]

        def on_step(run: stand.Run) -> None:
            interruption.check()
            if waiting:
                lines.add(waiting.pop())
            progress.step(run)

        sampling = sampling_for(self.arguments, self.total)
        run = engine.run(
            self.requests(engine.tokenizer),
            max_rows=self.arguments.rows or None,
            max_cache_bytes=None if self.arguments.cache_gb is None else 1e9 * self.arguments.cache_gb,
            max_new_tokens=sampling.max_new_tokens,
            **law_settings(sampling),
            seed=sampling.seed,
            draft=self.arguments.only == "drafted",
            on_step=on_step,
        )
        try:
            for trajectory in run:
                line = self._line(trajectory)
                lines.add(line)
                self.done[trajectory.row] = line
                if not self._needed(trajectory.id):
                    run.cancel(trajectory.id)
                progress.count(self.num_over)
        finally:
            progress.close(run)

    def _line(self, one: stand.Trajectory) -> dict[str, object]:
        task = self.tasks[one.id]
        return {
            "problem_id": task.name,
            "problem": task.statement,
            "answer": task.answer,
            "row": one.row,
            "sample": one.row // len(self.tasks),
            "seed": one.seed,
            "finish_reason": one.finish_reason,
            "found": extract_answer(one.text),
            "num_tokens": len(one.token_ids),
            "num_steps": one.num_steps,
            "num_draft_tokens": one.num_draft_tokens,
            "tokens_per_step": len(one.token_ids) / one.num_steps,
            "started": one.started,
            "ended": one.ended,
            "token_ids": one.token_ids,
            "text": one.text,
        }

    def table(self) -> str:
        """A line per problem that has trajectories, sessions together. `single` is the share of right ones, where all
        trajectories were wanted: those that end before a vote is decided are the short ones."""
        rows = []
        for place, task in enumerate(self.tasks):
            own = [line for row, line in sorted(self.done.items()) if row % len(self.tasks) == place]
            if own:
                found = [line["found"] for line in own]
                tokens, steps = (sum(line[name] for line in own) for name in ("num_tokens", "num_steps"))
                share = sum(value == task.answer for value in found) / len(own)
                single = None if self.arguments.until_decided else share
                is_right = float(majority_answer(found) == task.answer)
                rows.append((task.name, f"{len(own)} of {self.count}", tokens, tokens / steps, single, is_right))
        return format_table(("problem", "trajectories", "tokens", "tok/step", "single", "majority"), rows)

    def document(self) -> dict[str, object]:
        """Sums over all sessions, as plain JSON values."""
        tokens, steps = (sum(line[name] for line in self.done.values()) for name in ("num_tokens", "num_steps"))
        return {
            "trajectories": len(self.done),
            "is_complete": self.num_over == self.total,
            "num_given_up": self.num_given_up,
            "num_tokens": tokens,
            "num_steps": steps,
            "tokens_per_step": tokens / steps if steps else None,
        }


def check_resumable(arguments: argparse.Namespace) -> None:
    """Raise ValueError where a run cannot go on exactly.

    Rows that were live when a run stopped are drawn again, and long rows are likelier to be live than short ones. Were
    they given new tokens, every stop would favour short trajectories.
    """
    if arguments.resume and arguments.verifier not in REPEATING:
        raise ValueError(
            f"--resume needs a rule that draws a row's tokens again as they were, {' or '.join(REPEATING)}, got "
            f"{arguments.verifier}; begin such runs with --verifier match"
        )


def digest_of(tasks: Sequence[Task]) -> str:
    """Of names, statements and answers, and of how their rows are numbered."""
    return hashlib.sha256(json.dumps([NUMBERING, *map(astuple, tasks)]).encode()).hexdigest()


def _check_same_run(arguments: argparse.Namespace, tasks: Sequence[Task], first: Mapping[str, object]) -> None:
    earlier = first.get("settings")
    if not isinstance(earlier, Mapping):
        raise ValueError("--resume needs a file that a run has begun, got one without settings in its first line")
    now = {name: plain_setting(getattr(arguments, name)) for name in FIXED}
    check_same_settings(arguments.output, earlier, now, remedy="keep them, or begin another file without --resume")
    if first.get("problems_digest") != digest_of(tasks):
        raise ValueError(
            f"--resume must go on with the problems that the run began with, got others from {arguments.problems}; "
            "restore them, or begin another file"
        )


def lookup_to_start_with(arguments: argparse.Namespace) -> Path | None:
    """What the stopped run has saved, or else `--lookup`."""
    saved = arguments.save_lookup
    return saved if arguments.resume and saved is not None and saved.exists() else arguments.lookup
