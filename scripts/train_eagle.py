"""Train an EAGLE-1 or EAGLE-3 head for a model from the model's own generations (docs/learned_drafters.md).

    python scripts/train_eagle.py --minutes 20                                # scripts/drafters/eagle, bundled model
    python scripts/train_eagle.py --model smollm2 --output eagle_smollm2      # a head of your own
    python scripts/train_eagle.py --version 3 --output eagle3                 # of EAGLE-3
    python scripts/train_eagle.py --evaluate                                  # first-token agreement, held out

Generations are written to `--checkpoints` first, then the head learns from them; both go on where a run was ended,
unless `--fresh` is given. Problems that are held out are never generated from, but by `--evaluate`.
"""

from __future__ import annotations

import argparse
import sys

import measuring.interruption  # noqa: F401  (before what loads slowly)
from training.head_command import completed, options_of, run_command
from training.head_training import Recipe
from training.recipes import eagle, eagle3

RECIPES = {"1": eagle.RECIPE, "3": eagle3.RECIPE}  # by version


def recipe_of(command_line: list[str] | None = None) -> Recipe:
    """Of the version that the command names; its options' defaults depend on it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--version", default="1")
    return RECIPES.get(parser.parse_known_args(command_line)[0].version, eagle.RECIPE)


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    recipe = recipe_of(command_line)
    parser = options_of(recipe, __doc__)
    parser.add_argument("--version", choices=RECIPES, default="1", help="of EAGLE (%(default)s)")
    return completed(recipe, parser, command_line)


def main() -> int:
    return run_command(recipe_of(), read_arguments)


if __name__ == "__main__":
    sys.exit(main())
