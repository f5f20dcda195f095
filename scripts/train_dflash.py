"""Train a head that guesses blocks (DFlash, DFlash 2 or DSpark) for a model from the model's own generations
(docs/learned_drafters.md).

    python scripts/train_dflash.py --minutes 20                               # scripts/drafters/dflash, bundled model
    python scripts/train_dflash.py --model smollm2 --output dflash_smollm2    # a head of your own
    python scripts/train_dflash.py --evaluate                                 # agreement per place, held out

Generations are written to `--checkpoints` first, then the head learns from them; both go on where a run was ended,
unless `--fresh` is given. Problems that are held out are never generated from, but by `--evaluate`.
"""

from __future__ import annotations

import argparse
import sys

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.option_types import positive_integer
from training.head_command import completed, options_of, run_command
from training.recipes.dflash import EXTRAS, RECIPE


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(RECIPE, __doc__)
    parser.add_argument("--kind", dest="head_kind", choices=EXTRAS, default="dflash2", help="of head (%(default)s)")
    parser.add_argument("--block-size", type=positive_integer, default=8, help="places of a block (%(default)s)")
    parser.add_argument("--layers", type=positive_integer, default=2, help="of the head (%(default)s)")
    parser.add_argument("--layers-read", type=positive_integer, default=3, help="of the target, at most (%(default)s)")
    parser.add_argument(
        "--rank", type=positive_integer, default=64, help="of a selector or a Markov head (%(default)s)"
    )
    parser.add_argument("--mask-token-id", type=int, help="token of the places to guess (default: the last one)")
    return completed(RECIPE, parser, command_line)


def main() -> int:
    return run_command(RECIPE, read_arguments)


if __name__ == "__main__":
    sys.exit(main())
