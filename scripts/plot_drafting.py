"""Draw docs/figures/drafting.png from docs/figures/drafting.json.

    python scripts/plot_drafting.py [--data docs/figures/drafting.json] [--output docs/figures/drafting.png]

Left: by how much path probabilities err, bins of 0.1 with at least 500 nodes, 80 nodes. Right: tokens per step by
draft nodes. Nothing is forgotten between problems (setting `all`), for any drafter. The five held-out families have
colours; the other eleven are grey.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.option_types import existing_file, picture_file
from measuring.progress import say

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
SETTING, NODES, FEWEST = "all", 80, 500
BAND = 0.03  # what was asked of the largest error
HELD_OUT = {  # keys of the data -> (name, colour)
    "math": ("R1-Llama-8B MATH-500", "#0072b2"),
    "mmlu": ("Gemma-4-12B MMLU-Pro", "#009e73"),
    "gaokao": ("Qwen3.6-27B Gaokao", "#d55e00"),
    "qwq": ("QwQ-32B riddles", "#e69f00"),
    "aime": ("Qwen3-32B AIME", "#8a4fae"),
}
DRAFTERS = {"lookup": ("ours", "o-"), "arctic": ("Arctic tree", "s--"), "stand": ("STAND's rule", "^:")}
GREY = "#bbbbbb"


def errors(result: dict) -> list[tuple[float, float]]:
    """(path probability, accepted minus it) of the bins with enough nodes."""
    return [(expected, seen - expected) for expected, seen, count in result["calibration"] if count >= FEWEST]


def tokens_by_nodes(results: list[dict], family: str, drafter: str) -> list[tuple[int, float]]:
    chosen = [one for one in results if (one["family"], one["drafter"]) == (family, drafter)]
    return sorted((one["budget"], one["tau"]) for one in chosen)


def plot(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    results = [one for one in results if one["setting"] == SETTING]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4))
    ours = {one["family"]: one for one in results if (one["drafter"], one["budget"]) == ("lookup", NODES)}
    left.axhspan(-BAND, BAND, color="#f0f0f0")
    left.axhline(0, color="black", linewidth=0.6)
    for family in sorted(ours, key=lambda name: name in HELD_OUT):  # grey ones below
        colour = HELD_OUT[family][1] if family in HELD_OUT else GREY
        left.plot(*zip(*errors(ours[family]), strict=True), ".-", color=colour, linewidth=1.2)
    left.set(title=f"{NODES} nodes; band: ±{BAND}", xlabel="path probability", ylabel="share accepted − probability")
    left.set(xlim=(0, 1), ylim=(-0.06, 0.06))
    for family, (_, colour) in HELD_OUT.items():
        for drafter, (_, style) in DRAFTERS.items():
            points = tokens_by_nodes(results, family, drafter)
            right.plot(*zip(*points, strict=True), style, color=colour, markersize=4, linewidth=1.2)
    right.set(title="nothing forgotten between problems", xlabel="draft nodes", ylabel="tokens per step", xscale="log")
    right.set_xticks(ticks := [1, 4, 8, 16, 32, 80], list(map(str, ticks)))
    right.minorticks_off()
    families = [Line2D([], [], color=colour, label=name) for name, colour in HELD_OUT.values()]
    styles = [Line2D([], [], color="black", marker=s[0], linestyle=s[1:], markersize=4, label=n)
              for n, s in DRAFTERS.values()]  # fmt: skip
    left.legend(handles=[*families, Line2D([], [], color=GREY, label="eleven others")], fontsize=7.5, ncols=2)
    right.legend(handles=styles, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def read_results(path: Path) -> list[dict]:
    """Raises ValueError where the file does not hold the figures, OSError where it cannot be read."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        families = {(one["family"], one["drafter"]) for one in results if one["setting"] == SETTING}
    except (ValueError, TypeError, LookupError) as error:
        rule = "--data must hold results as docs/figures/drafting.json does"
        raise ValueError(f"{rule}, got {path} ({error!r})") from error
    if missing := sorted({(family, drafter) for family in HELD_OUT for drafter in DRAFTERS} - families):
        raise ValueError(f"--data must hold results of {len(HELD_OUT)} families, got none of {missing[0]} in {path}")
    return results


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=existing_file, default=FIGURES / "drafting.json", help="default: docs/figures/drafting.json"
    )
    parser.add_argument(
        "--output", type=picture_file, default=str(FIGURES / "drafting.png"), help="default: docs/figures/drafting.png"
    )
    options = parser.parse_args(command_line)
    try:
        plot(read_results(options.data), options.output)
    except (ValueError, OSError) as error:
        say(f"plot_drafting: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
