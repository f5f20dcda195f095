"""The tables that need no model: their arms, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from measuring.text_table import format_table
from verifier_parts.verifier_tables import estimate, gain, resampled, with_error

import stand
from stand.drafters.costs.step_cost import CostTable, StepCost
from stand.trees import BlendedLookup, LookupTree, TreeShape
from table_parts.estimates import calibration_table
from table_parts.law_recording import NUM_TOP
from table_parts.law_replay import OnPathDrafter, Replayed
from table_parts.path_laws import PathLawsDrafter, kept_lesson
from table_parts.token_drafter import TokenDrafter

COUNTS = (1, 2, 4, 8, 16)  # samples per problem
EVIDENCE = {"tokens": (TokenDrafter, 10), **{f"laws, {k} a row": (PathLawsDrafter, k) for k in (4, 10, NUM_TOP)}}


@dataclass(frozen=True, slots=True)
class ReplayArm:
    """One drafter on one recording. `what` and `nodes` are its names in the tables."""

    tables: tuple[str, ...]
    what: str
    nodes: int
    rows: int
    make: Callable[[], stand.Drafter]

    @property
    def name(self) -> str:
        return f"{self.what}, {self.nodes} nodes, {self.rows} rows"


def ours(nodes: int, kind: str = "deterministic") -> stand.Drafter:
    return PathLawsDrafter(BlendedLookup(), budget=nodes, kind=kind)


def with_lookup(make: Callable[..., stand.Drafter]) -> stand.Drafter:
    drafter = make(BlendedLookup())
    drafter.budget = drafter.costs.most_tokens
    return drafter


def evidence(name: str, nodes: int) -> stand.Drafter:
    drafter, count = EVIDENCE[name]
    return drafter(BlendedLookup(num_candidates=count), budget=nodes, kind="deterministic")


def fixed_shape() -> stand.Drafter:
    return OnPathDrafter(stand.FixedShapeDrafter(LookupTree()), kept_lesson)


def recycling() -> stand.Drafter:
    return OnPathDrafter(stand.TokenRecyclingDrafter(TreeShape.paper()), kept_lesson)


def replay_arms(costs: CostTable | None = None) -> Iterator[ReplayArm]:
    """Every arm once; an arm may serve several tables. costs: of steps of one row, for drafts that pay by them."""
    paper = TreeShape.paper().num_nodes - 1
    kind = "deterministic"
    for nodes, rows, tables in (
        (32, 1, ("samples", "nodes", "kinds", "time")),
        (8, 1, ("nodes", "time")),
        (80, 1, ("nodes", "drafters", "calibration", "time")),
        (32, 4, ("samples",)),
        (64, 8, ("nodes",)),
    ):
        yield ReplayArm(tables, kind, nodes, rows, partial(ours, nodes))
    for kind in ("mixed", "sampled"):
        yield ReplayArm(("kinds",), kind, 32, 1, partial(ours, 32, kind))
    for name in EVIDENCE:
        for nodes in (8, 32, 80):
            yield ReplayArm(("evidence",), name, nodes, 1, partial(evidence, name, nodes))
    yield ReplayArm(("drafters", "time"), "prompt lookup", 8, 1, stand.PromptLookupDrafter)
    yield ReplayArm(("drafters", "time"), "token recycling", paper, 1, recycling)
    yield ReplayArm(("drafters", "time"), "STAND's rule", paper, 1, fixed_shape)
    if costs is not None:
        make = partial(PathLawsDrafter, costs=costs, kind="deterministic")
        yield ReplayArm(("time",), "deterministic, by cost", 0, 1, partial(with_lookup, make))


def result_of(replayed: Replayed) -> dict[str, object]:
    """What of a replay is kept as JSON."""
    return {
        "tokens": replayed.tokens,
        "steps": replayed.steps,
        "nodes": replayed.nodes,
        "sizes": [[sorted(call.items()) for call in calls] for calls in replayed.sizes],
        "calibration": replayed.estimates.as_lists(),
    }


def up_to(result: dict, samples: int) -> dict[str, object]:
    """Tokens and steps by problem of the first so many samples, as `gain` wants them."""
    tokens, steps = ([float(sum(one[:samples])) for one in result[name]] for name in ("tokens", "steps"))
    return {"steps": steps, "tokens": {"match": tokens}}


def rate(result: dict, samples: int) -> str:
    """Tokens per step with its standard error over problems."""
    part = up_to(result, samples)
    return with_error(*estimate(resampled(part["steps"], part["tokens"]["match"])))


def more(one: dict, other: dict, samples: int) -> str:
    """Per cent more tokens per step than `other`, paired by problem."""
    return with_error(*gain(up_to(one, samples), "match", up_to(other, samples), "match"), "+")


def replay_tables(results: dict[tuple[str, str], dict], settings: list[str], costs: CostTable | None = None) -> str:
    """All tables of the arms that were run; `results` by setting and arm."""
    arms = list(replay_arms(costs))
    made = [_rate_table(table, arms, results, settings) for table in ("samples", "nodes", "kinds", "drafters")]
    made += [_evidence_table(arms, results, settings), _calibration_table(arms, results, settings)]
    made += [_time_table(arms, results, settings, costs.costs[0])] if costs is not None else []
    return "\n\n".join(made)


def _time_table(arms: list[ReplayArm], results: dict, settings: list[str], cost: StepCost) -> str:
    """What steps of one row would take by their costs, without drafts over with them: by samples of a problem."""
    rows = []
    for setting in settings:
        for arm in arms:
            if "time" not in arm.tables or (setting, arm.name) not in results:
                continue
            found = results[setting, arm.name]
            cells = []
            for count in COUNTS:
                with_drafts = [
                    sum(steps * seconds_of(cost, size) for call in calls[:count] for size, steps in call)
                    for calls in found["sizes"]
                ]
                without = [sum(tokens[:count]) * cost.seconds[0] for tokens in found["tokens"]]
                cells.append(with_error(*estimate(resampled(with_drafts, without))))
            rows.append([setting, arm.name, *cells])
    table = format_table(["setting", "draft", *(f"N = {count}" for count in COUNTS)], rows)
    return f"time without drafts over time with them, by costs\n{table}"


def seconds_of(cost: StepCost, size: int) -> float:
    """Of a step with so many tokens, between and beyond the timed sizes by straight lines."""
    sizes, seconds = np.array(cost.tokens), np.array(cost.seconds)
    beyond = max(0, size - sizes[-1]) * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return float(np.interp(size, sizes, seconds) + beyond)


def _rate_table(table: str, arms: list[ReplayArm], results: dict, settings: list[str]) -> str:
    """Tokens per step by number of samples; against the first arm where kinds or drafters are compared."""
    rows = []
    for setting in settings:
        chosen = [arm for arm in arms if table in arm.tables and (setting, arm.name) in results]
        for arm in chosen:
            one, base = results[setting, arm.name], results[setting, chosen[0].name]
            cells = [rate(one, count) for count in COUNTS if count >= arm.rows]
            cells = ["-"] * (len(COUNTS) - len(cells)) + cells
            if table in ("kinds", "drafters"):
                cells += [more(one, base, count) if arm is not chosen[0] else "-" for count in (2, COUNTS[-1])]
            rows.append([setting, arm.what, arm.nodes, arm.rows, *cells])
    header = ["setting", "draft", "nodes", "rows", *(f"N = {count}" for count in COUNTS)]
    header += ["% at N = 2", f"% at N = {COUNTS[-1]}"] if table in ("kinds", "drafters") else []
    return f"{table}\n{format_table(header, rows)}"


def _evidence_table(arms: list[ReplayArm], results: dict, settings: list[str]) -> str:
    """Per cent that laws give over tokens, by nodes and samples."""
    rows = []
    for setting in settings:
        for arm in arms:
            base = results.get((setting, f"tokens, {arm.nodes} nodes, 1 rows"))
            if "evidence" in arm.tables and base is not None and (setting, arm.name) in results:
                one = results[setting, arm.name]
                cells = [rate(one, COUNTS[-1]), *(more(one, base, count) for count in COUNTS)]
                rows.append([setting, arm.nodes, arm.what, *cells])
    header = ["setting", "nodes", "learns from", f"tokens per step, N = {COUNTS[-1]}", *(f"% N = {n}" for n in COUNTS)]
    return f"evidence\n{format_table(header, rows)}"


def _calibration_table(arms: list[ReplayArm], results: dict, settings: list[str]) -> str:
    named = [
        ([setting, arm.name], results[setting, arm.name]["calibration"])
        for setting in settings
        for arm in arms
        if "calibration" in arm.tables and (setting, arm.name) in results
    ]
    return calibration_table(named, ["setting", "drafts"])
