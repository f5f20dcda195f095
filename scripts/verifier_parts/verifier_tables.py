"""What `compare_verifiers.py` found: standard errors, tables and a plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from measuring.text_table import format_table

RESAMPLES = 2000
REFERENCE = {"shape": ("sampled", "traversal"), "blended": ("sampled", "traversal")}  # what gains are told against
TITLES = {"shape": "lookup tree, fixed shape", "blended": "blended lookup tree, growing drafts"}
STYLES = {"good": "-", "good+1": "--", "good+2": "-.", "good+3": (0, (1, 1)), "weak": ":"}


def resampled(steps: list[float], tokens: list[float]) -> np.ndarray:
    """[1 + RESAMPLES] tokens per step: of all prompts, then of prompts drawn with replacement (always the same).

    [1] of one prompt, which says nothing of how prompts differ.
    """
    counts = np.array([tokens, steps], dtype=np.float64)
    num_prompts = counts.shape[1]
    if num_prompts == 1:
        return counts[0] / counts[1]
    drawn = np.random.default_rng(0).integers(0, num_prompts, (RESAMPLES, num_prompts))
    totals = counts[:, np.vstack([np.arange(num_prompts), drawn])].sum(axis=2)
    return totals[0] / totals[1]


def estimate(ratios: np.ndarray) -> tuple[float, float | None]:
    """(estimate, standard error) from what `resampled` gave, or from what was computed of it; None where unknown."""
    return float(ratios[0]), float(ratios[1:].std()) if len(ratios) > 1 else None


def add_estimates(result: dict) -> dict:
    """Tokens per step of every rule, and their standard errors."""
    rates = {rule: resampled(result["steps"], tokens) for rule, tokens in result["tokens"].items()}
    means = {rule: list(estimate(rate)) for rule, rate in rates.items()}
    return {**result, "tokens_per_step": means}


def gain(one: dict, rule: str, other: dict, over: str) -> tuple[float, float | None]:
    """(per cent more tokens per step, standard error), paired by prompt; None of one prompt.

    Raises ValueError where the two were not run on as many prompts.
    """
    if len(one["steps"]) != len(other["steps"]):
        raise ValueError(
            f"paired arms must have the same prompts, got {len(one['steps'])} and {len(other['steps'])}; run both anew"
        )
    first = resampled(one["steps"], one["tokens"][rule])
    second = resampled(other["steps"], other["tokens"][over])
    return estimate(100 * (first / second - 1))


def with_error(value: float, error: float | None, sign: str = "") -> str:
    return f"{value:{sign}.2f}" + ("" if error is None else f" ± {error:.2f}")


def chain_table(arms: list[dict]) -> str:
    header = ("draft", "T", "gamma", "alpha", "hopeless %", "token", "block", "block gains %")
    rows = [
        (arm["drafts"], str(arm["temperature"]), arm["gamma"], arm["alpha"], 100 * arm["hopeless"],
         with_error(*arm["tokens_per_step"]["token"]), with_error(*arm["tokens_per_step"]["block"]),
         with_error(*gain(arm, "block", arm, "token"), "+"))
        for arm in arms
    ]  # fmt: skip
    return format_table(header, rows)


def lookup_table(arms: list[dict], reference: tuple[str, str]) -> str:
    header = ("kind", "rule", "T", "nodes", "tokens per step", f"% over {'+'.join(reference)}")
    by_kind = {(arm["temperature"], arm["drafts"]): arm for arm in arms}
    rows = []
    for (temperature, kind), arm in by_kind.items():
        base = by_kind[temperature, reference[0]]
        for rule, rate in arm["tokens_per_step"].items():
            percent = with_error(*gain(arm, rule, base, reference[1]), "+")
            rows.append((kind, rule, str(temperature), arm["nodes_per_step"], with_error(*rate), percent))
    return format_table(header, rows)


def pooled(arms: list[dict]) -> list[dict]:
    """Arms that differ in nothing but their seed as one, with all of their prompts."""
    groups: dict[tuple, dict] = {}
    for arm in arms:
        group = groups.setdefault(
            (arm["drafts"], arm["driver"], arm["temperature"]), {**arm, "steps": [], "tokens": {}}
        )
        group["steps"] = group["steps"] + arm["steps"]
        for rule, tokens in arm["tokens"].items():
            group["tokens"][rule] = group["tokens"].get(rule, []) + tokens
    return [add_estimates(group) for group in groups.values()]


def own_table(arms: list[dict]) -> str:
    """Rules along their own steps."""
    arms = pooled(arms)
    base = {arm["temperature"]: arm for arm in arms if (arm["drafts"], arm["driver"]) == ("sampled", "traversal")}
    rows = []
    for arm in arms:
        ((rule, rate),) = arm["tokens_per_step"].items()
        percent = gain(arm, rule, base[arm["temperature"]], "traversal")
        rows.append((arm["drafts"], rule, str(arm["temperature"]), with_error(*rate), with_error(*percent, "+")))
    return format_table(("kind", "rule, own steps", "T", "tokens per step", "% over sampled+traversal"), rows)


def synthetic_table(gains: list[dict]) -> str:
    header = ("target", "distance", "gamma", "token", "block", "block gains %")
    rows = [
        (one["target"], str(one["distance"]), one["gamma"], one["token"], one["block"],
         with_error(one["gain"], one["gain_error"], "+"))
        for one in gains
    ]  # fmt: skip
    return format_table(header, rows)


def tables(document: dict) -> str:
    """Every part that was run."""
    arms = {part: [arm for arm in document["arms"] if arm["part"] == part] for part in ("chains", "own", *TITLES)}
    made = [f"{TITLES[part]}\n{lookup_table(arms[part], REFERENCE[part])}" for part in TITLES if arms[part]]
    made += [own_table(arms["own"])] if arms["own"] else []
    made += [chain_table(arms["chains"])] if arms["chains"] else []
    made += [synthetic_table(document["synthetic"])] if document["synthetic"] else []
    return "\n\n".join(made)


def plot(path: Path, document: dict) -> None:
    """Left: what block gains on chains. Middle and right: tokens per step on the lookup trees."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), width_ratios=(1, 1.3, 1))
    _plot_chains(axes[0], [arm for arm in document["arms"] if arm["part"] == "chains"])
    for axis, part in zip(axes[1:], TITLES, strict=True):
        _plot_trees(axis, [arm for arm in document["arms"] if arm["part"] == part])
        axis.set_title(TITLES[part])
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _plot_chains(axis, arms: list[dict]) -> None:
    lines = dict.fromkeys((arm["drafts"], arm["temperature"]) for arm in arms)
    heats = sorted({temperature for _, temperature in lines})
    for drafts, temperature in lines:
        line = [arm for arm in arms if (arm["drafts"], arm["temperature"]) == (drafts, temperature)]
        gained, errors = zip(*(gain(arm, "block", arm, "token") for arm in line), strict=True)
        axis.errorbar([arm["gamma"] for arm in line], gained, [error or 0.0 for error in errors], capsize=2,
                      color=f"C{heats.index(temperature)}", linestyle=STYLES[drafts],
                      label=f"{drafts}, T = {temperature}")  # fmt: skip
    axis.axhline(0, color="grey", linewidth=0.6)
    axis.set(xlabel="gamma", ylabel="block over token, %", title="chains from a draft model")
    axis.set_xticks(sorted({arm["gamma"] for arm in arms}))
    if lines:
        axis.legend(fontsize=6, ncols=max(1, len(heats)), loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _plot_trees(axis, arms: list[dict]) -> None:
    pairs = list(dict.fromkeys((arm["drafts"], rule) for arm in arms for rule in arm["tokens_per_step"]))
    for place, temperature in enumerate(sorted({arm["temperature"] for arm in arms})):
        found = {
            (arm["drafts"], rule): rate
            for arm in arms
            if arm["temperature"] == temperature
            for rule, rate in arm["tokens_per_step"].items()
        }
        axis.errorbar(range(len(pairs)), [found[pair][0] for pair in pairs], [found[pair][1] or 0.0 for pair in pairs],
                      fmt="o", capsize=2, color=f"C{place}", label=f"T = {temperature}")  # fmt: skip
    axis.set_xticks(range(len(pairs)), [f"{kind} {rule}" for kind, rule in pairs], rotation=60, ha="right", fontsize=7)
    axis.set(ylabel="tokens per step")
    if pairs:
        axis.legend(fontsize=7)
