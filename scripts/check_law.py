"""Is what the engine writes distributed like plain sampling? An end-to-end check, apart from the exact tests.

    python scripts/check_law.py law    [--verifiers traversal,match] [--kinds sampled,mixed] [--continuations 20000]
    python scripts/check_law.py tokens [--verifiers match,coupled] [--prompts 50] [--rows 16] [--tokens 256]
    python scripts/check_law.py law --model smollm2 --verifiers traversal --tokens 8 --kept counts.jsonl
    python scripts/check_law.py law --drafter blended --verifiers traversal      # the lookup and the shipped head

`law`: continuations of fixed prompts (held-out problems, cut at various places of a written-out solution), drafted by
a lookup that was warmed up on the same prompts and is then frozen, and as many without drafts. The law of plain
sampling is worked out exactly, by forwards of the model and products of probabilities (law_parts/continuation_law.py).
Per prompt the frequencies of whole continuations, and of places where they leave the likely ones, are compared with
it by chi-square; rare cells count as one. One statistic over all prompts, one p-value per verifier and draft kind.
--drafter blended adds the laws of an EAGLE head to the lookup's, eagle drafts by the head alone (sampled), streams
and streams-blended are the same with streams (Speculative Streaming), dflash and dflash-blended with a head that
guesses blocks, neighbours adds the laws of `NeighbourLaws`.
The lossy rule `typical` is run too, on a quarter of the continuations: a test that does not refuse it is blind.

`tokens`: with `match` and `coupled` the token ids must equal those of plain sampling with the same seed (float32).
Without the engine's CPU kernels a packed forward rounds differently from a plain one, so a draw that falls within 1e-5
of the border between two tokens may go either way; such rows are counted apart (seen: one in 168,000 tokens). With them
the bits are equal.

The bundled model draws at temperature 1 without filters, other models at 0.8 with top_p 0.95, from the word problems
of scripts/workloads. --kept FILE keeps the counts of every finished arm and prompt, and a run with the same settings
goes on from there.

Last line: JSON. Exit status 1 where a p-value is below --level (default 1e-4: that is the false-alarm rate per test) or
tokens differ; 2 where the lossy rule alone passes, as it does with few continuations, and for options that are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from law_parts.engines import DRAFTER_NAMES, HEADLESS, shipped_head
from law_parts.law_check import CONTROL, check_law
from law_parts.token_check import check_tokens
from measuring.interruption import run_command
from measuring.option_types import positive_integer, positive_number, probability, share, whole_number
from measuring.output_file import check_writable
from measuring.setup import REASONER, from_model
from measuring.trajectories import REPEATING
from transformers import AutoModelForCausalLM, AutoTokenizer

import stand
from stand.trees.kinds import KINDS

OWN = {  # defaults of the options that one check alone has
    "law": {
        "kinds": None, "drafter": "lookup", "head": None, "continuations": 20_000, "sample": 1, "no_plain": False,
        "level": 1e-4, "kept": None,
    },
    "tokens": {"rows": 16, "budget": 32},
}  # fmt: skip


def names(text: str) -> list[str]:
    return text.split(",")


def options_of_both(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "check",
        choices=("law", "tokens"),
        help="law: frequencies against the exact law; tokens: equal tokens with equal seeds",
    )
    parser.add_argument(
        "--verifiers", type=names, help="rules (default: traversal,match of `law`, match,coupled of `tokens`)"
    )
    parser.add_argument(
        "--prompts",
        type=positive_integer,
        help="fixed prompts (default: 10 of `law`, 50 of `tokens`, 12 of another model)",
    )
    parser.add_argument("--tokens", type=positive_integer, help="new tokens (default: 4 of `law`, 256 of `tokens`)")
    parser.add_argument(
        "--temperature", type=positive_number, help="of the draws (default: 1, other models than the bundled one 0.8)"
    )
    parser.add_argument("--top-p", type=share, help="of the draws (default: none, other models 0.95)")
    parser.add_argument(
        "--threads", type=positive_integer, default=torch.get_num_threads(), help="CPU threads (default: torch's)"
    )
    parser.add_argument("--model", default=str(REASONER), help="folder, hub id or short name (default: bundled model)")


def options_of_one(parser: argparse.ArgumentParser) -> None:
    """Those that one check alone has; `OWN` names their defaults."""
    parser.add_argument("--kinds", type=names, help="draft kinds for `law` (default: sampled,mixed)")
    parser.add_argument("--drafter", choices=DRAFTER_NAMES, help="of `law` (default: lookup)")
    parser.add_argument("--head", type=Path, help="EAGLE head or streams (default: those shipped)")
    parser.add_argument(
        "--continuations", type=positive_integer, help="of one arm of `law`, all prompts together (default: 20000)"
    )
    parser.add_argument("--sample", type=positive_integer, help="2, 3, ...: other seeds of `law`, for a further test")
    parser.add_argument(
        "--no-plain", action="store_true", default=None, help="leave the arm of `law` without drafts out"
    )
    parser.add_argument("--level", type=probability, help="p-values of `law` below it are refused (default: 1e-4)")
    parser.add_argument("--kept", type=Path, help="file of finished counts of `law`, read and added to")
    parser.add_argument("--rows", type=positive_integer, help="rows per prompt in `tokens` (default: 16)")
    parser.add_argument(
        "--budget", type=whole_number, help="draft nodes of all rows together in `tokens` (default: 32)"
    )


def fill_own(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what the chosen check, or drafter, would ignore; then its defaults."""
    for check, own in OWN.items():
        for name, value in own.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
            elif check != options.check:
                parser.error(f"--{name.replace('_', '-')} has no effect on `{options.check}`, but on `{check}`")
    if options.drafter in ("eagle", "streams", "dflash"):
        if options.kinds not in (None, ["sampled"]):
            parser.error(f"--kinds must be sampled with --drafter {options.drafter}, got {','.join(options.kinds)}")
        options.kinds = ["sampled"]
    if options.drafter in HEADLESS and options.head is not None:
        parser.error("--head has no effect without a --drafter that has one, such as blended; give both")
    options.kinds = options.kinds or ["sampled", "mixed"]
    options.head = options.head or shipped_head(options.drafter)


def arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of_both(parser)
    options_of_one(parser)
    options = parser.parse_args(command_line)
    fill_own(parser, options)
    is_law, bundled = options.check == "law", Path(options.model).resolve() == REASONER
    options.verifiers = options.verifiers or (["traversal", "match"] if is_law else list(REPEATING))
    known = stand.verifiers.verifier_names() if is_law else REPEATING
    for option, given, allowed in (("--verifiers", options.verifiers, known), ("--kinds", options.kinds, KINDS)):
        if unknown := [name for name in given if name not in allowed]:
            parser.error(f"{option} of `{options.check}` must be among {', '.join(allowed)}, got {', '.join(unknown)}")
    options.prompts = options.prompts or (10 if is_law else 50 if bundled else 12)
    options.tokens = options.tokens or (4 if is_law else 256)
    if options.temperature is None:
        options.temperature = 1.0 if bundled else 0.8
    if options.top_p is None:
        options.top_p = 1.0 if bundled else 0.95
    return options


def run(options: argparse.Namespace) -> bool:
    """Whether all is as it should be. Raises ValueError where that is not known, since the control has passed."""
    torch.set_num_threads(options.threads)
    check_writable(options.kept, "--kept")
    model = from_model(options.model, AutoModelForCausalLM, dtype=torch.float32).eval()
    tokenizer = from_model(options.model, AutoTokenizer)
    result = (check_law if options.check == "law" else check_tokens)(model, tokenizer, options)
    print(json.dumps({**result, "model": options.model, "torch": torch.__version__}))
    few = [arm["verifier"] for arm in result["arms"] if arm.get("degrees_of_freedom") == 0]
    if few:
        raise ValueError(
            f"continuations must fill at least two cells, got one of {', '.join(few)}: nothing was tested; raise "
            f"--continuations ({options.continuations})"
        )
    wrong = [arm["verifier"] for arm in result["arms"] if not arm["as_it_should"]]
    if wrong and set(wrong) <= {CONTROL}:
        raise ValueError(
            f"the lossy rule {CONTROL} must be refused, got a p-value of at least --level: the test is blind; raise "
            f"--continuations ({options.continuations})"
        )
    return not wrong


def main(command_line: Sequence[str] | None = None) -> int:
    options, results = arguments(command_line), []
    status = run_command("check_law", lambda interruption: results.append(run(options)))
    return status or int(not results[0])


if __name__ == "__main__":
    sys.exit(main())
