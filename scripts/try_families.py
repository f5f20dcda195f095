"""Which model classes of the installed transformers are served?

A tiny random model of each causal class is wrapped, and its greedy tokens are compared with those of `model.generate`.

    python scripts/try_families.py                                   # all, about two minutes on a core
    python scripts/try_families.py --only llama,deepseek_v3,mamba
    python scripts/try_families.py --page docs/families.md           # and write what came out as a page

A class that is refused is refused with a reason. The exit status is 1 where tokens differ or an error is no refusal. A
tiny random model shows that positions, masks and caches are right, and nothing about acceptance.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
import transformers
from measuring.interruption import run_and_report
from measuring.option_types import new_file, positive_integer
from measuring.progress import say
from measuring.text_table import format_table
from transformers import PreTrainedModel
from workloads.tiny_classes import CLASSES, NotTinyError, tiny_model

import stand

PROMPT = [3, 4, 5, 6, 7, 3, 4, 5, 9, 11]
NEW_TOKENS = 24
EQUAL, OF_FORWARDS, DIFFERENT, REFUSED, ERROR, NOT_TRIED = (
    "equal", "equal to whole forwards", "DIFFERENT", "refused", "ERROR", "no tiny model",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """What came of one class."""

    kind: str  # of its configuration
    class_name: str
    result: str
    tokens_per_step: float | None = None
    note: str = ""

    HEADER = ("configuration", "class", "result", "tokens per step", "note")

    def cells(self) -> tuple[object, ...]:
        return self.kind, self.class_name, self.result, self.tokens_per_step, self.note[:90]


class TooSlowError(BaseException):
    """A class took longer than it may. No Exception, so that nothing that is tried takes it for its own error."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(kind: str, *, seconds: int) -> Family:
    """One class, in at most so many seconds."""
    name = CLASSES[kind]
    try:
        with within(seconds):
            return _compared(kind, name, tiny_model(kind))
    except (NotTinyError, TooSlowError) as error:
        return Family(kind, name, NOT_TRIED, note=str(error))
    except stand.UnsupportedModelError as error:
        return Family(kind, name, REFUSED, note=str(error))
    except Exception as error:  # what a model's own code raises may be anything
        return Family(kind, name, ERROR, note=" ".join(f"{type(error).__name__}: {error}".split()))


def _compared(kind: str, name: str, model: PreTrainedModel) -> Family:
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=16))
    for _ in range(2):  # in the second call drafts are accepted
        output = engine.generate(input_ids=[PROMPT], max_new_tokens=NEW_TOKENS, temperature=0, stop_token_ids=[])
    tokens, tau = output.token_ids[0], output.stats.mean_acceptance_length
    try:
        expected = generated(model)
    except Exception as error:
        return Family(kind, name, NOT_TRIED, note=f"generate: {type(error).__name__}: {error}")
    if tokens == expected:
        return Family(kind, name, EQUAL, tau)
    if tokens == by_whole_forwards(model):
        return Family(kind, name, OF_FORWARDS, tau, "the steps of its own generate differ from its forwards")
    return Family(kind, name, DIFFERENT, tau, f"{tokens} for {expected}")


def generated(model: PreTrainedModel) -> list[int]:
    """New tokens of `model.generate`."""
    sequence = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0
    )
    return sequence[0, len(PROMPT) :].tolist()


@torch.inference_mode()
def by_whole_forwards(model: PreTrainedModel) -> list[int]:
    """New tokens, each the best one of a forward over all tokens before it."""
    tokens = list(PROMPT)
    for _ in range(NEW_TOKENS):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def report(families: Sequence[Family], page: Path | None) -> None:
    print(format_table(Family.HEADER, [family.cells() for family in families]))
    if page is not None:
        page.write_text(page_of(families), encoding="utf-8")
    print(json.dumps({"transformers": transformers.__version__, "families": [asdict(family) for family in families]}))


def page_of(families: Sequence[Family]) -> str:
    """Markdown."""
    served = [family for family in families if family.result in (EQUAL, OF_FORWARDS)]
    lines = [
        "# Which models are served",
        "",
        f"**{len(served)} of {len(families)} are served.** These are causal language models of transformers, named by",
        "their configurations (`model.config.model_type`). `wrap` repeats its checks on your own model.",
        "",
        *_wrapped(_what_was_tried(families)),
        "",
        "- That shows that positions, masks and caches are right.",
        "- It shows neither acceptance nor speed nor captured steps on a GPU.",
        "- Models that take images or sound besides text (`gemma3`, `qwen3_5` ...) were given text. Parts that only",
        "  images run may be left out.",
        "",
        "## Served",
        "",
        *_wrapped(_names(served) + "."),
        "",
        *_of_forwards(families),
        *_section("Refused", "Each with its reason:", _by_reason(families)),
        *_section("Not tried", "The script could make no tiny model:", _not_tried(families)),
        *_wrong(families),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _what_was_tried(families: Sequence[Family]) -> str:
    is_all = {family.kind for family in families} >= CLASSES.keys()
    options, count = ("", "every") if is_all else ("--only NAMES ", f"{len(families)} of the {len(CLASSES)}")
    return (
        f"`python scripts/try_families.py {options}--page FILE` wrote this page with transformers "
        f"{transformers.__version__} and torch {torch.__version__.split('+')[0]} on a CPU. A tiny random model of "
        f"{count} causal language {'model' if is_all else 'models'} of transformers was wrapped. Its greedy tokens "
        "were compared with those of `model.generate`, in float32."
    )


def _wrapped(text: str) -> list[str]:
    """Lines as long as a document's may be."""
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _names(families: Sequence[Family]) -> str:
    return ", ".join(f"`{family.kind}`" for family in families) or "none"


def _section(title: str, text: str, rows: Sequence[str]) -> list[str]:
    return [f"## {title}", "", text, "", "| configurations | reason |", "|---|---|", *rows, ""] if rows else []


def _of_forwards(families: Sequence[Family]) -> list[str]:
    others = [family for family in families if family.result == OF_FORWARDS]
    text = "Here the tokens are those of whole forwards, and the steps of `generate` differ from these:"
    return [f"{text} {_names(others)}.", ""] if others else []


def _wrong(families: Sequence[Family]) -> list[str]:
    """What ends the script with status 1."""
    found = [f"`{family.kind}` ({family.result})" for family in families if family.result in (DIFFERENT, ERROR)]
    return [f"**Wrong**: {', '.join(found)}."] if found else []


REASONS = {  # the beginning of a refusal's rule, and what a reader needs of it
    "a layer at least must keep": "no layer keeps keys",
    "every layer must keep": "a state, a compressed or chunked attention in which a tree cannot be held",
    "call its attention through": "computes its attention by itself, not through transformers' `AttentionInterface`",
    "a tree forward of": "positions or attention follow the places of tokens in the cache, or attention is not causal",
    "a layer's attention must be told": "its masks have a window that its attention is not told of",
    "must run one packed forward": "does not hand the plan of a step on to its attention, or takes no `position_ids`",
    "steps of": "its steps over a cache differ from its forwards, so it is not known which are meant",
    "positions must be rotary": "ALiBi",
}


def _by_reason(families: Sequence[Family]) -> list[str]:
    refused = [family for family in families if family.result == REFUSED]
    return _grouped(
        (family, next((text for rule, text in REASONS.items() if rule in family.note), family.note))
        for family in refused
    )


def _not_tried(families: Sequence[Family]) -> list[str]:
    return _grouped((family, f"`{family.note}`") for family in families if family.result == NOT_TRIED)


def _grouped(reasons: Iterable[tuple[Family, str]]) -> list[str]:
    """Rows of a table, the most frequent reason first."""
    groups: dict[str, list[Family]] = {}
    for family, reason in reasons:
        groups.setdefault(reason.replace("|", "\\|"), []).append(family)
    return [f"| {_names(alike)} | {reason} |" for reason, alike in sorted(groups.items(), key=lambda one: -len(one[1]))]


def known_kinds(text: str) -> list[str]:
    kinds = text.split(",")
    unknown = [kind for kind in kinds if kind not in CLASSES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"must be configurations of causal language models, got {unknown[0]!r}; llama and qwen3_moe are such"
        )
    return kinds


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=known_kinds, metavar="NAME,NAME", help="configurations; default: all of them")
    parser.add_argument("--seconds", type=positive_integer, default=60, help="for each, at most (%(default)s)")
    parser.add_argument("--page", type=new_file, help="write a page of Markdown there")
    options = parser.parse_args(command_line)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found: list[Family] = []

    def families() -> Iterator[Family]:
        kinds = options.only or sorted(CLASSES)
        for place, kind in enumerate(kinds, start=1):
            family = tried(kind, seconds=options.seconds)
            say(f"{place}/{len(kinds)} {kind}: {family.result}")
            found.append(family)
            yield family

    status = run_and_report("try_families", families(), lambda results: report(results, options.page))
    return status or int(any(family.result in (DIFFERENT, ERROR) for family in found))


if __name__ == "__main__":
    sys.exit(main())
