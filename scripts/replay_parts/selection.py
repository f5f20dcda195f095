"""Which recordings of a file a command replays, as its options say."""

from __future__ import annotations

import argparse

from measuring.option_types import positive_integer
from workloads.recordings import Selection


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Options that `selection_of` reads."""
    parser.add_argument("--samples", type=positive_integer, help="at most so many samples per problem")
    parser.add_argument("--max-problems", type=positive_integer, help="at most so many problems per file")
    parser.add_argument("--every", type=positive_integer, default=1, help="every n-th problem (%(default)s)")
    parser.add_argument("--max-tokens", type=positive_integer, help="cut samples to so many tokens")


def selection_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Selection:
    """Ends the command with an error where samples are cut to what no step decodes."""
    if options.max_tokens == 1:
        parser.error("--max-tokens must be at least 2, got 1; a sample's first token comes from the prompt")
    return Selection(options.every, options.max_problems, options.samples, options.max_tokens)
