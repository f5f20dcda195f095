"""Problems to measure on: generated ones, a JSON-lines file, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from measuring.option_types import check_readable

from workloads.problems import held_out_problems

AIME_2024 = "HuggingFaceH4/aime_2024"


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve and its integer answer."""

    name: str
    statement: str
    answer: int


def generated_tasks(count: int, *, seed: int) -> list[Task]:
    """Held-out problems of the bundled model, the families in turn."""
    drawn = held_out_problems(count, seed=seed)
    return [Task(f"{index} {item.family}", item.problem, item.answer) for index, item in enumerate(drawn)]


def read_tasks(source: str, *, count: int | None = None) -> list[Task]:
    """The first `count` problems of a JSON-lines file or hub dataset with fields `problem` and `answer`.

    A source that exists as a file, or ends in .jsonl, is a file. Raises ValueError for missing fields, for answers that
    are not integers and for a file that cannot be read, OSError for a dataset that cannot.
    """
    records = _read_lines(Path(source)) if _is_file(source) else _read_hub(source)
    tasks = []
    for place, record in enumerate(records):
        if count is not None and len(tasks) == count:
            break
        tasks.append(_task(record, where=f"{source}, record {place + 1}", place=place))
    if not tasks:
        raise ValueError(f"a problem set must hold at least one problem, got none in {source}; give another one")
    return tasks


def _is_file(source: str) -> bool:
    return source.endswith(".jsonl") or Path(source).is_file()


def _read_lines(path: Path) -> Iterable[Mapping]:
    check_readable(path, "--problems")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"every line must be one JSON object, got {error} in line {number} of {path}; mend that line"
                ) from error


def _read_hub(name: str) -> Iterable[Mapping]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{name!r} is not a file, and reading it from the hub needs the package `datasets`; "
            'pip install --editable ".[hub]", or give a .jsonl file with fields problem and answer'
        ) from error
    splits = datasets.load_dataset(name)
    return splits["test"] if "test" in splits else next(iter(splits.values()))


def _task(record: object, *, where: str, place: int) -> Task:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: must be an object with fields problem and answer, got {type(record).__name__}")
    fields = {str(key).lower(): value for key, value in record.items()}
    for name in ("problem", "answer"):
        if name not in fields:
            raise ValueError(f"{where}: must have fields problem and answer, got {', '.join(map(str, record))}")
    name = str(fields.get("problem_id", fields.get("id", place)))
    return Task(name, str(fields["problem"]), _integer(fields["answer"], where))


def _integer(value: object, where: str) -> int:
    text = str(value).replace(",", "").strip()
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f"{where}: the answer must be an integer, got {value!r}; leave out problems with other answers"
        ) from error
