"""The tables of the documents say what the files of figures beside them hold."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from table_parts import replay_tables
from verifier_parts import verifier_tables

DOCS = Path(__file__).resolve().parents[2] / "docs"
pytestmark = pytest.mark.skipif(not (DOCS / "figures").is_dir(), reason="needs the documents")
FAMILIES = {
    "R1-Llama-8B MATH-500": "math", "QwQ-32B riddles": "qwq", "Gemma-4-12B MMLU-Pro": "mmlu",
    "Qwen3.6-27B Gaokao": "gaokao", "Qwen3-32B AIME": "aime", "GLM-Z1 riddles": "glm",
    "Qwen3.8-27B Gaokao": "gaokao38", "gpt-oss-120b APIFlow": "apiflow", "gpt-oss-20b code": "codeexec",
    "Sky-T1 AMC": "amcsky", "Qwen3-30B riddles": "qwen3_30b", "Qwen3.6-35B Gaokao": "gaokao35",
    "Phi-4 riddles": "phi4", "Qwen3-235B riddles": "qwen3_235b", "Sky-T1 AIME": "aimesky",
    "Llama-4 CodeIO": "codeio",
}  # fmt: skip


def figures(name: str) -> dict | list:
    return json.loads((DOCS / "figures" / name).read_text(encoding="utf-8"))


def rows_under(page: str, header: str, number: int = 0) -> list[list[str]]:
    """Cells of the rows of a table, without marks of emphasis: that of this number whose header line begins so."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    first = [place for place, line in enumerate(lines) if line.startswith(header)][number]
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
    rows = rows_under("drafting.md", "| family (tokens) | ours, `all`: 8 nodes | 32 | 80 | ours, `same`: 8 nodes |")
    assert len(rows) == len(FAMILIES)
    wrong = []
    for name, *cells in rows:
        family, count = re.fullmatch(r"(.*) \(([\d,]+)\)", name).groups()
        key = FAMILIES[family]
        assert int(count.replace(",", "")) == counts[key]
        values = [
            *([tau[key, "lookup", "all", budget]] for budget in (8, 32, 80)),
            *([tau[key, "lookup", "same", budget]] for budget in (8, 80)),
            *([tau[key, drafter, setting, 80]] for drafter, setting in
              (("stand", "all"), ("stand", "same"), ("arctic", "all"))),
            *([tau[key, "lookup", setting, 80] / tau[key, "stand", setting, 80]] for setting in ("all", "same")),
        ]  # fmt: skip
        wrong += [(name, pair) for cell, known in zip(cells, values, strict=True) for pair in differing(cell, known)]
    assert wrong == []


def test_the_table_of_the_held_out_half():
    """SGLang's column is not in the file; the others are, each by its drafter and setting."""
    tau = {
        (r["family"], r["drafter"], r["setting"], r["budget"]): r["tau"] for r in figures("drafting.json")["results"]
    }
    arms = [(drafter, setting) for drafter in ("lookup", "stand") for setting in ("all", "same")]
    arms.append(("arctic", "all"))
    rows = rows_under("drafting_measured.md", "| family (tokens) | nodes |")
    assert len(rows) == 3 * 5
    wrong = []
    for name, budget, *cells in rows:
        key = FAMILIES[name.partition(" (")[0]]
        known = [[tau[key, drafter, setting, int(budget)]] for drafter, setting in arms]
        wrong += [
            (name, budget, pair)
            for cell, value in zip(cells[:5], known, strict=True)
            for pair in differing(cell, value)
        ]
    assert wrong == []


def rules_asked(part: str, temperature: float) -> dict[tuple[str, str], dict]:
    """By (drafts, rule): the arm that was asked about the rule, seeds pooled."""
    arms = [
        one for one in figures("compare_verifiers.json")["arms"]
        if (one["part"], one["temperature"]) == (part, temperature)
    ]  # fmt: skip
    return {(arm["drafts"], rule): arm for arm in verifier_tables.pooled(arms) for rule in arm["tokens"]}


@pytest.mark.parametrize(
    ("part", "header", "number"),
    [
        ("shape", "| drafts, rule | T = 0.2 ", 0),
        ("own", "| drafts, rule, own steps |", 0),
        ("blended", "| drafts, rule | T = 0.2 ", 1),
    ],
)
def test_tables_of_rules(part, header, number):
    wrong = []
    for column, temperature in enumerate((0.2, 0.6, 1.0, 2.0), start=1):
        asked = rules_asked(part, temperature)
        base = asked["sampled", "traversal"]
        for row in rows_under("verifiers_measured.md", header, number):
            drafts, rule = re.match(r"(\w+), `(\w+)`", row[0]).groups()
            arm = asked[drafts, rule]
            known = (
                arm["tokens_per_step"][rule]
                if row[0].endswith("(tokens per step)")
                else verifier_tables.gain(arm, rule, base, "traversal")
            )
            wrong += [(row[0], temperature, pair) for pair in differing(row[column], list(known))]
    assert wrong == []


def test_the_table_of_chains():
    arms = {
        (one["drafts"], one["temperature"]): one
        for one in figures("compare_verifiers.json")["arms"]
        if (one["part"], one["gamma"]) == ("chains", 8)
    }
    wrong, drafts = [], None
    for name, what, *cells in rows_under("verifiers_measured.md", "| drafts, gamma 8 |"):
        drafts = name or drafts
        for temperature, cell in zip((0.2, 0.6, 1.0, 2.0), cells, strict=True):
            arm = arms[drafts, temperature]
            known = (
                list(verifier_tables.gain(arm, "block", arm, "token"))
                if "gains" in what
                else arm["tokens_per_step"]["token"][:1]
            )
            wrong += [(drafts, temperature, pair) for pair in differing(cell, known)]
    assert wrong == []


MODELS = {"SmolLM2": "smollm2", "Gemma": "gemma3-270m", "Qwen 1.5B": "qwen2.5-coder-1.5b"}


def replayed() -> dict[tuple[str, str, str], dict]:
    """By model, setting and arm."""
    lines = [one for one in figures("real_models.json") if one["key"][0] == "replay"]
    return {(one["model"], one["key"][1], one["key"][2]): one["result"] for one in lines}


def known_rate(result: dict, samples: int) -> tuple[float, float]:
    part = replay_tables.up_to(result, samples)
    return verifier_tables.estimate(verifier_tables.resampled(part["steps"], part["tokens"]["match"]))


def known_gain(one: dict, other: dict, samples: int) -> tuple[float, float]:
    pair = [replay_tables.up_to(result, samples) for result in (one, other)]
    return verifier_tables.gain(pair[0], "match", pair[1], "match")


def test_replayed_tokens_per_step_of_real_models():
    results, wrong = replayed(), []
    main = rows_under("real_models.md", "| model | setting | tokens per step: N = 1 |")
    rest = rows_under("real_models_measured.md", "| model | setting | 8 nodes: N = 1 |")
    for (name, setting, *cells), others in zip(main, rest, strict=True):
        assert others[:2] == [name, setting]
        ours = {
            size: results[MODELS[name], setting, f"deterministic, {size[0]} nodes, {size[1]} rows"]
            for size in ((8, 1), (32, 1), (80, 1), (32, 4), (64, 8))
        }
        columns = [
            *((8, 1, count) for count in (1, 4, 16)),
            *((80, 1, count) for count in (1, 4, 16)),
            *((32, 4, count) for count in (4, 16)),
            *((64, 8, count) for count in (8, 16)),
        ]
        known = [
            *(list(known_rate(ours[32, 1], count)) for count in (1, 4, 16)),
            *([known_rate(ours[nodes, rows], count)[0]] for nodes, rows, count in columns),
        ]
        wrong += [
            (name, setting, pair)
            for cell, one in zip([*cells[:3], *others[2:]], known, strict=True)
            for pair in differing(cell, one)
        ]
    assert wrong == []


@pytest.mark.parametrize(
    ("header", "pairs"),
    [
        (
            "| model | setting | N | ours, 80 nodes |",
            [
                ("STAND's rule, 79", "deterministic, 80"),
                ("token recycling, 79", "deterministic, 80"),
                ("prompt lookup, 8", "deterministic, 80"),
            ],
        ),
        (
            "| model | setting | N | 8 nodes |",
            [(f"laws, 10 a row, {nodes}", f"tokens, {nodes}") for nodes in (8, 32, 80)],
        ),
        (
            "| model | setting | N | mixed | sampled |",
            [("mixed, 32", "deterministic, 32"), ("sampled, 32", "deterministic, 32")],
        ),
    ],
)
def test_gains_of_real_models(header, pairs):
    results, wrong = replayed(), []
    for name, setting, samples, *cells in rows_under("real_models_measured.md", header):
        gains = [cell for cell in cells if "±" in cell]
        for cell, names in zip(gains, pairs, strict=True):
            one, other = (results[MODELS[name], setting, f"{arm} nodes, 1 rows"] for arm in names)
            known = list(known_gain(one, other, int(samples)))
            wrong += [(name, setting, samples, names[0], pair) for pair in differing(cell, known)]
    assert wrong == []
