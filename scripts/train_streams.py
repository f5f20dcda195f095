"""Train the streams of Speculative Streaming for a frozen model from its own generations (docs/learned_drafters.md).

    python scripts/train_streams.py --minutes 30                                  # scripts/drafters/streams
    python scripts/train_streams.py --model smollm2 --output streams_smollm2      # streams of your own
    python scripts/train_streams.py --evaluate                                    # agreement of each, held out

Generations are written to `--checkpoints` first, then the streams learn from them; both go on where a run was ended,
unless `--fresh` is given. Problems that are held out are never generated from, but by `--evaluate`.
"""

from __future__ import annotations

import argparse
import sys

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.option_types import positive_integer
from training.head_command import completed, options_of, run_command
from training.recipes.streams import RECIPE


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(RECIPE, __doc__)
    parser.add_argument(
        "--streams", type=positive_integer, default=3, help="gamma: tokens guessed after the next one (%(default)s)"
    )
    parser.add_argument(
        "--layers", type=positive_integer, default=2, help="upper layers that streams go through (%(default)s)"
    )
    parser.set_defaults(learning_rate=4e-3, tokens_per_batch=2_000)
    parser.add_argument("--rank", type=positive_integer, default=32, help="of the adapters (%(default)s)")
    return completed(RECIPE, parser, command_line)


def main() -> int:
    return run_command(RECIPE, read_arguments)


if __name__ == "__main__":
    sys.exit(main())
