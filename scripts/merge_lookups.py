"""Merge saved lookups into one file that knows what all of them know.

    python scripts/merge_lookups.py monday.lookup tuesday.lookup --output week.lookup

The files must be of one vocabulary and have equal settings. How contexts are merged: `stand.merge_lookups`. The output
may be one of the files. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.option_types import existing_file, positive_integer
from measuring.output_file import check_writable
from measuring.progress import say

import stand


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=existing_file, metavar="FILE", help="lookups (`BlendedLookup.save`)")
    parser.add_argument("--output", required=True, type=Path, help="the merged lookup's file")
    parser.add_argument(
        "--max-bytes",
        type=positive_integer,
        help="its memory cap (default: the largest cap of the files, or more where they need it together)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check_writable(options.output, "--output")
        merged = stand.merge_lookups(options.files, options.output, max_bytes=options.max_bytes)
    except (ValueError, OSError) as error:
        say(f"merge_lookups: {error}")
        return 2
    figures = {"num_files": len(options.files), "num_contexts": len(merged), "nbytes": merged.nbytes}
    figures |= {"max_bytes": merged.max_bytes, "file_bytes": options.output.stat().st_size}
    print(json.dumps({"output": str(options.output), **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
