"""Train an EAGLE-1 head for a model from the model's own generations (docs/learned_drafters.md).

    python scripts/train_eagle.py --minutes 20                                # scripts/drafters/eagle, bundled model
    python scripts/train_eagle.py --model smollm2 --output eagle_smollm2      # a head of your own
    python scripts/train_eagle.py --evaluate                                  # first-token agreement, held out

Generations are written to `--checkpoints` first, then the head learns from them; both go on where a run was ended,
unless `--fresh` is given. Problems that are held out are never generated from, but by `--evaluate`.
"""

from __future__ import annotations

import argparse
import sys

import measuring.interruption  # noqa: F401  (before what loads slowly)
from training.eagle import RECIPE
from training.head_command import completed, options_of, run_command


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    return completed(RECIPE, options_of(RECIPE, __doc__), command_line)


def main() -> int:
    return run_command(RECIPE, read_arguments)


if __name__ == "__main__":
    sys.exit(main())
