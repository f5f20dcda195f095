"""The tables of the documents say what the files of figures beside them hold."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
pytestmark = pytest.mark.skipif(not (DOCS / "drafting.json").is_file(), reason="needs the documents")
FAMILIES = {
    "R1-Llama-8B MATH-500": "math", "QwQ-32B riddles": "qwq", "Gemma-4-12B MMLU-Pro": "mmlu",
    "Qwen3.6-27B Gaokao": "gaokao", "Qwen3-32B AIME": "aime", "GLM-Z1 riddles": "glm",
    "Qwen3.8-27B Gaokao": "gaokao38", "gpt-oss-120b APIFlow": "apiflow", "gpt-oss-20b code": "codeexec",
    "Sky-T1 AMC": "amcsky", "Qwen3-30B riddles": "qwen3_30b", "Qwen3.6-35B Gaokao": "gaokao35",
    "Phi-4 riddles": "phi4", "Qwen3-235B riddles": "qwen3_235b", "Sky-T1 AIME": "aimesky",
    "Llama-4 CodeIO": "codeio",
}  # fmt: skip


def figures(name: str) -> dict | list:
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def rows_under(page: str, header: str) -> list[list[str]]:
    """Cells of the rows of the first table whose header line begins so, without marks of emphasis."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
    return rows


def differing(cell: str, values: list[float]) -> list[tuple[str, float]]:
    """Numbers of a cell that are no rounding of the values, which come in its order."""
    found = re.findall(r"[-+]?\d+(?:\.\d+)?", cell)
    assert len(found) == len(values), (cell, values)
    digits = [len(text.partition(".")[2]) for text in found]
    return [
        (text, value)
        for text, value, places in zip(found, values, digits, strict=True)
        if abs(float(text) - value) > 0.5 * 10**-places + 1e-4
    ]


def test_drafters_of_a_family_saw_the_same_tokens():
    seen = defaultdict(set)
    for one in figures("drafting.json")["results"]:
        seen[one["family"]].add(one["num_tokens"])
        assert one["tau"] == pytest.approx(one["num_tokens"] / one["num_steps"], abs=1e-4)
    assert {family: counts for family, counts in seen.items() if len(counts) > 1} == {}


def test_the_table_of_all_families():
    results = figures("drafting.json")["results"]
    tau = {(r["family"], r["drafter"], r["setting"], r["budget"]): r["tau"] for r in results}
    counts = {r["family"]: r["num_tokens"] for r in results}
    rows = rows_under("drafting.md", "| family (tokens) | ours, `all`: 8 / 32 / 80 | ours, `same`: 8 / 80 |")
    assert len(rows) == len(FAMILIES)
    wrong = []
    for name, *cells in rows:
        family, count = re.fullmatch(r"(.*) \(([\d,]+)\)", name).groups()
        key = FAMILIES[family]
        assert int(count.replace(",", "")) == counts[key]
        values = [
            [tau[key, "lookup", "all", budget] for budget in (8, 32, 80)],
            [tau[key, "lookup", "same", budget] for budget in (8, 80)],
            *([tau[key, drafter, setting, 80]] for drafter, setting in
              (("stand", "all"), ("stand", "same"), ("arctic", "all"))),
            *([tau[key, "lookup", setting, 80] / tau[key, "stand", setting, 80]] for setting in ("all", "same")),
        ]  # fmt: skip
        wrong += [(name, pair) for cell, known in zip(cells, values, strict=True) for pair in differing(cell, known)]
    assert wrong == []
