"""Recorded trajectories and texts, as token ids."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from tokenizers import Tokenizer

LARGEST_ID = 2**31 - 1  # of an int32
RECORDED = {"text", "token_ids"}  # a record has one of them
FIELDS = {"text": (str, "text"), "problem": (str, "text"), "token_ids": (list, "a list"),
          "problem_id": (str | int | float, "text or a number")}  # fmt: skip
SHORTEST = 64  # tokens; shorter samples say little and are skipped


@dataclass(frozen=True, slots=True)
class Recording:
    """One sample of one problem."""

    problem: int  # number of the problem, in order of first appearance
    sample: int  # number among the problem's samples
    prompt: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [L]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which recordings of a file: every n-th problem, at most so many problems, samples and tokens."""

    every: int = 1
    max_problems: int | None = None
    samples: int | None = None
    max_tokens: int | None = None


def read_records(path: Path) -> Iterator[dict]:
    """The objects of a .jsonl or .jsonl.gz file, but the settings that a run of `throughput.py` begins with. Raises
    ValueError on a line that is no object, or has a field of FIELDS that is something else."""
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8")
    with opened as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            try:
                record = json.loads(line) if line.strip() else {}
            except ValueError as error:
                raise ValueError(f"{path} must hold JSON lines, got another line {number} ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path} must hold one object per line, got {type(record).__name__} in line {number}")
            for name, (kind, said) in FIELDS.items():
                if not isinstance(record.get(name), kind | None):
                    raise ValueError(f"{path} must hold {name} as {said}, got {record[name]!r} in line {number}")
            is_header = number == 1 and "settings" in record and not RECORDED & record.keys()
            if record and not is_header:
                yield record


def lines_of(file: TextIO, path: Path) -> Iterator[str]:
    """Raises ValueError with the file's name where it holds no text, or a .gz was cut off or damaged."""
    try:
        yield from file
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must hold text in UTF-8, whole, got something else ({error})") from error


def read_recordings(path: Path, tokenizer: Tokenizer, selection: Selection) -> list[Recording]:
    """Problems in order of first appearance, samples in file order, or by `row` where they have one; samples under 64
    tokens are skipped.

    A record has `problem_id` and `text` or `token_ids`; `problem`, the text of the prompt, may be missing.
    Raises ValueError where a record lacks a field.
    """
    by_problem: dict[object, list[dict]] = {}
    for record in read_records(path):
        if "problem_id" not in record or not ("text" in record or "token_ids" in record):
            raise ValueError(f"{path} must have problem_id and text or token_ids, got fields {sorted(record)}")
        by_problem.setdefault(record["problem_id"], []).append(record)
    chosen = list(by_problem.values())[:: selection.every][: selection.max_problems]
    recordings = []
    for problem, records in enumerate(chosen):
        prompt = encode(tokenizer, records[0].get("problem") or "")
        if all(isinstance(record.get("row"), int) for record in records):
            records.sort(key=lambda record: record["row"])  # of a run, whose rows are in the order of their ends
        samples = [record_tokens(record, tokenizer) for record in records[: selection.samples]]
        kept = [tokens[: selection.max_tokens] for tokens in samples if len(tokens) >= SHORTEST]
        recordings += [Recording(problem, sample, prompt, tokens) for sample, tokens in enumerate(kept)]
    if not recordings:
        raise ValueError(f"{path} must hold samples of at least {SHORTEST} tokens, got none")
    return recordings


def by_problem(recordings: Iterable[Recording]) -> list[list[Recording]]:
    """The samples of each problem, in order of first appearance."""
    problems: dict[int, list[Recording]] = {}
    for one in recordings:
        problems.setdefault(one.problem, []).append(one)
    return list(problems.values())


def read_tokenizer(path: Path) -> Tokenizer:
    """Raises ValueError where the file is no tokenizer.json, OSError where it cannot be read."""
    text = path.read_text(encoding="utf-8")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # tokenizers has no class of its own for it
        raise ValueError(f"--tokenizer must be a tokenizer.json, got {path} ({error}); name another file") from error


def record_tokens(record: dict, tokenizer: Tokenizer) -> np.ndarray:
    """Recorded ids where there are any, else the text's, without special tokens. Raises ValueError for other ids, and
    where there is neither."""
    token_ids, text = record.get("token_ids"), record.get("text")
    if not token_ids and text is None:
        raise ValueError(
            f"records must have text or token_ids, got neither in one of problem {record.get('problem_id')!r}; "
            "leave that record out"
        )
    if not token_ids:
        return encode(tokenizer, text)
    wrong = [token for token in token_ids if not isinstance(token, int) or not 0 <= token <= LARGEST_ID]
    if wrong:
        raise ValueError(f"token_ids must be integers from 0 to {LARGEST_ID}, got {wrong[0]!r}; mend that record")
    return np.array(token_ids, dtype=np.int32)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Raises ValueError where the text holds half of a surrogate pair, as an escape that was cut in two leaves."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"texts must hold whole characters, got {text[error.start]!r} at place {error.start}; mend that record"
        ) from error
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
