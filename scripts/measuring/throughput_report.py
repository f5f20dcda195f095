"""What `throughput.py` found: tables, and one JSON document with every figure."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from dataclasses import asdict, dataclass

import numpy
import torch
import transformers
from workloads.problem_sets import Task

import stand
from measuring.text_table import format_table
from measuring.trajectories import ARMS, Drawn
from stand.drafters.costs.step_cost import CostTable

SHOWN_DEPTHS = 12  # in the table; the JSON document has all


@dataclass(frozen=True, slots=True)
class Measured:
    """One problem with one number of trajectories: what every arm drew."""

    task: Task
    trajectories: int
    arms: dict[str, Drawn]


def speedup(arms: dict[str, stand.Stats], over: str) -> float | None:
    """Ratio of tokens per second, drafted to another arm."""
    slow = arms[over].tokens_per_second
    return arms["drafted"].tokens_per_second / slow if slow else None


def summary_row(name: str, arms: dict[str, stand.Stats], single: float, majority: float) -> list[object]:
    drafted = arms["drafted"]
    return [
        name,
        drafted.num_tokens,
        drafted.num_steps,
        drafted.mean_acceptance_length,
        *(round(arms[arm].tokens_per_second) for arm in ARMS),
        speedup(arms, "plain"),
        speedup(arms, "generate"),
        single,
        majority,
    ]


HEADER = (
    "problem",
    "tokens",
    "steps",
    "tok/step",
    "generate tok/s",
    "plain tok/s",
    "drafted tok/s",
    "x plain",
    "x generate",
    "single",
    "majority",
)


def median_speedup(measured: list[Measured], over: str) -> float | None:
    """Median over problems of the speed-up: one stall of the machine does not move it."""
    ratios = [speedup({arm: drawn.stats for arm, drawn in item.arms.items()}, over) for item in measured]
    return None if None in ratios else statistics.median(ratios)


def total_stats(measured: list[Measured], arm: str) -> stand.Stats:
    return sum((item.arms[arm].stats for item in measured), stand.Stats())


def total_accuracy(measured: list[Measured], arm: str) -> dict[str, float]:
    """Mean over problems of single-sample accuracy and of the majority vote."""
    drawn = [(item.arms[arm], item.task.answer) for item in measured]
    return {
        "single": sum(each.accuracy(answer) for each, answer in drawn) / len(drawn),
        "majority": sum(each.vote_is_right(answer) for each, answer in drawn) / len(drawn),
    }


def problem_table(measured: list[Measured]) -> str:
    rows = []
    for item in measured:
        drafted, answer = item.arms["drafted"], item.task.answer
        stats = {arm: drawn.stats for arm, drawn in item.arms.items()}
        rows.append(summary_row(item.task.name, stats, drafted.accuracy(answer), float(drafted.vote_is_right(answer))))
    return format_table(HEADER, rows)


def total_table(groups: dict[int, list[Measured]]) -> str:
    rows = []
    for trajectories, measured in groups.items():
        stats = {arm: total_stats(measured, arm) for arm in ARMS}
        row = summary_row(f"all, N = {trajectories}", stats, **total_accuracy(measured, "drafted"))
        rows.append([*row, *(median_speedup(measured, arm) for arm in ("plain", "generate"))])
    return format_table((*HEADER, "median x plain", "median x generate"), rows)


def depth_table(groups: dict[int, list[Measured]]) -> str:
    """Where drafts were accepted and where the time of a step went."""
    rows = []
    for trajectories, measured in groups.items():
        stats = total_stats(measured, "drafted")
        shares = [f"{number / stats.num_steps:.2f}" for number in stats.accepted_by_depth]
        depths = " ".join(shares[:SHOWN_DEPTHS]) + (" ..." if len(shares) > SHOWN_DEPTHS else "")
        overhead = f"{100 * stats.overhead:.0f} %"
        rows.append([f"N = {trajectories}", stats.draft_acceptance_rate, overhead, depths])
    return format_table(("drafted", "acceptance rate", "not forward", "accepted per step, depth 1, 2, ..."), rows)


def run_tables(groups: dict[int, list[Measured]]) -> str:
    """Every problem of every number of trajectories, then totals and depths."""
    tables = [f"N = {trajectories} trajectories\n{problem_table(items)}" for trajectories, items in groups.items()]
    return "\n\n".join([*tables, total_table(groups), depth_table(groups)])


def by_trajectories(measured: list[Measured]) -> dict[int, list[Measured]]:
    groups: dict[int, list[Measured]] = {}
    for item in measured:
        groups.setdefault(item.trajectories, []).append(item)
    return groups


def run_document(
    arguments: argparse.Namespace, costs: CostTable | None, groups: dict[int, list[Measured]]
) -> dict[str, object]:
    """Every figure, setting and version, as plain JSON values."""
    return {
        **conditions(arguments, costs),
        "problems": [problem_document(item) for measured in groups.values() for item in measured],
        "totals": [total_document(trajectories, measured) for trajectories, measured in groups.items()],
    }


def conditions(arguments: argparse.Namespace, costs: CostTable | None) -> dict[str, object]:
    """Settings, step costs, versions and machine."""
    return {
        "settings": {name: plain_setting(value) for name, value in vars(arguments).items()},
        "step_costs": None if costs is None else asdict(costs)["costs"],
        "versions": {
            "stand": stand.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(arguments.device) if "cuda" in str(arguments.device) else None,
        },
    }


def plain_setting(value: object) -> object:
    """As JSON holds it."""
    return value if isinstance(value, (bool, int, float, str, list, type(None))) else str(value)


def arm_document(task: Task, drawn: Drawn) -> dict[str, object]:
    return {
        **drawn.stats.as_dict(),
        "answers": list(drawn.answers),
        "single": drawn.accuracy(task.answer),
        "majority": drawn.vote_is_right(task.answer),
    }


def problem_document(item: Measured) -> dict[str, object]:
    stats = {arm: drawn.stats for arm, drawn in item.arms.items()}
    return {
        "name": item.task.name,
        "answer": item.task.answer,
        "trajectories": item.trajectories,
        "speedup_over_plain": speedup(stats, "plain"),
        "speedup_over_generate": speedup(stats, "generate"),
        "arms": {arm: arm_document(item.task, drawn) for arm, drawn in item.arms.items()},
    }


def total_document(trajectories: int, measured: list[Measured]) -> dict[str, object]:
    stats = {arm: total_stats(measured, arm) for arm in ARMS}
    return {
        "trajectories": trajectories,
        "problems": len(measured),
        "speedup_over_plain": speedup(stats, "plain"),
        "speedup_over_generate": speedup(stats, "generate"),
        "median_speedup_over_plain": median_speedup(measured, "plain"),
        "median_speedup_over_generate": median_speedup(measured, "generate"),
        "arms": {arm: {**stats[arm].as_dict(), **total_accuracy(measured, arm)} for arm in ARMS},
    }
