"""What options of commands may be: types for argparse whose errors name the rule and the value."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from measuring.output_file import check_writable

PICTURES = (".png", ".svg", ".pdf", ".jpg")


def positive_integer(text: str) -> int:
    return _integer(text, least=1)


def whole_number(text: str) -> int:
    """0 is allowed, too."""
    return _integer(text, least=0)


def positive_number(text: str) -> float:
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return number


def number_from_zero(text: str) -> float:
    number = _number(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return number


def probability(text: str) -> float:
    """In [0, 1]."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return number


def share(text: str) -> float:
    """In (0, 1], as of top_p and of what is kept of old evidence."""
    number = _number(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be a number in (0, 1], got {text!r}; use 1 to switch it off")
    return number


def device_name(text: str) -> str:
    """A device that torch has here, as cpu, cuda or cuda:1."""
    import torch  # commands without a model need none

    try:
        if torch.device(text).type == "meta":
            raise ValueError("it holds no numbers")
        torch.empty(1, device=text)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        there = ", ".join(["cpu", *(f"cuda:{place}" for place in range(torch.cuda.device_count()))])
        raise argparse.ArgumentTypeError(f"must be one that torch has here, got {text!r}; take {there}") from error
    return text


@contextmanager
def named(option: str) -> Iterator[None]:
    """ValueErrors and OSErrors within are about what this option names, and say so."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{option}: {error}") from error


def existing_file(text: str) -> Path:
    """A file that can be read, tried before the work begins."""
    worded(lambda name: check_readable(Path(name), "it"))(text)
    return Path(text)


def check_readable(path: Path, option: str) -> None:
    """Raise ValueError unless there is a file at `path` that can be read. option: what names it, for the message."""
    try:
        path.open("rb").close()
    except OSError as error:
        got = f"{str(path)!r} ({error.strerror.lower()})"
        raise ValueError(f"{option} must be a file that can be read, got {got}; name another") from error


def new_file(text: str) -> Path:
    """A file that can be written, tried before the work begins."""
    worded(lambda name: check_writable(Path(name), "it"))(text)
    return Path(text)


def picture_file(text: str) -> Path:
    """A new file of a kind that matplotlib draws everywhere, where it is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('needs matplotlib, which is not installed; pip install --editable ".[plot]"')
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"must end in one of {', '.join(PICTURES)}, got {text!r}")
    return new_file(text)


def count_list(text: str) -> list[int]:
    """Numbers of at least 1 with commas between, as 1,4,8,16."""
    return [positive_integer(part) for part in text.split(",")]


def worded(read: Callable[[str], object]) -> Callable[[str], object]:
    """`read`, whose ValueErrors become the option's error in their own words: argparse drops them otherwise."""

    def parse(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _integer(text: str, *, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
    return number


def _number(text: str) -> float:
    """Finite, else no number: every comparison with it fails."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan
