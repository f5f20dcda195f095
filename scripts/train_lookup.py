"""Learn a blended lookup from texts or trajectories and write it to a file.

    python scripts/train_lookup.py FILE... --tokenizer tokenizer.json --output warm.blend
    python scripts/replay.py RECORDINGS --tokenizer tokenizer.json --lookup warm.blend

FILE is .jsonl or .jsonl.gz with `text` or `token_ids` (and `problem`, learned before it), or any other file, which is
one text. The file carries the vocabulary's fingerprint, so that no other tokenizer can load it by mistake. Progress
goes to stderr; the last stdout line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
from measuring.option_types import existing_file, positive_integer
from measuring.output_file import check_writable
from measuring.progress import Progress, say
from tokenizers import Tokenizer
from workloads.recordings import encode, lines_of, read_records, read_tokenizer, record_tokens

from stand.trees import BlendedLookup, vocabulary_fingerprint


def read_runs(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(prompt, tokens) of every record, or of a whole plain text."""
    if ".jsonl" not in path.suffixes:
        with open(path, encoding="utf-8") as file:
            yield np.empty(0, np.int32), encode(tokenizer, "".join(lines_of(file, path)))
        return
    for record in read_records(path):
        if not ("text" in record or "token_ids" in record):
            raise ValueError(f"{path} must have text or token_ids in every record, got fields {sorted(record)}")
        yield encode(tokenizer, record.get("problem") or ""), record_tokens(record, tokenizer)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=existing_file, metavar="FILE", help="texts or recordings to learn from"
    )
    parser.add_argument("--tokenizer", required=True, type=existing_file, help="tokenizer.json")
    parser.add_argument("--output", required=True, type=Path, help="the lookup's file")
    parser.add_argument(
        "--max-bytes", type=positive_integer, default=256 << 20, help="memory cap, kept in the file (default: 256 MB)"
    )
    parser.add_argument("--max-tokens", type=positive_integer, help="cut every record to so many tokens")
    parser.add_argument("--depth", type=positive_integer, default=12, help="longest context in tokens (%(default)s)")
    return parser.parse_args(arguments)


def train(options: argparse.Namespace) -> dict[str, object]:
    """Learns every file, writes the lookup and returns its figures. Says on stderr how far it is."""
    check_writable(options.output, "--output")
    tokenizer = read_tokenizer(options.tokenizer)
    fingerprint = vocabulary_fingerprint(tokenizer.get_vocab())
    lookup = BlendedLookup(depth=options.depth, max_bytes=options.max_bytes, fingerprint=fingerprint)
    progress = Progress(sum(path.stat().st_size for path in options.files))
    num_tokens = 0
    for path in options.files:
        for prompt, tokens in read_runs(path, tokenizer):
            run = np.concatenate([prompt, tokens[: options.max_tokens]]).astype(np.int32)
            lookup.learn([], run)
            num_tokens += len(run)
        progress.add(path.stat().st_size, f"{path.name}: {num_tokens} tokens, {len(lookup)} contexts")
    if num_tokens == 0:
        raise ValueError(f"files must hold tokens to learn, got none in {', '.join(map(str, options.files))}")
    lookup.save(options.output)
    return {
        "output": str(options.output),
        "num_tokens": num_tokens,
        "num_contexts": len(lookup),
        "num_evicted": lookup.num_evicted,
        "nbytes": lookup.nbytes,
        "file_bytes": options.output.stat().st_size,
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        print(json.dumps(train(options)))
    except (ValueError, OSError) as error:
        say(f"train_lookup: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
