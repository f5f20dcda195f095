"""Train the two draft models that `compare_verifiers.py` puts before the bundled model: `good` and `weak`.

    python scripts/train_drafters.py                 # both, side by side, into scripts/drafters
    python scripts/train_drafters.py --only weak

Same problems, same tokenizer and same recipe as `train_reasoner.py`; they differ in depth and in training time.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import run
from sys import executable

from measuring.setup import REASONER
from training.trainer import train
from transformers import AutoTokenizer

DRAFTERS = Path(__file__).resolve().parent / "drafters"
SIZES = {"good": {"layers": 2, "minutes": 9.0}, "weak": {"layers": 1, "minutes": 3.0}}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def train_drafter(name: str, *, minutes: float | None) -> None:
    """Train one draft model with the bundled model's tokenizer and write it to DRAFTERS / name."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder)
        AutoTokenizer.from_pretrained(REASONER).save_pretrained(checkpoints / "tokenizer")
        train(argparse.Namespace(
            minutes=minutes or size["minutes"], steps=0, processes=1, rows=32, hidden=128, intermediate=352,
            layers=size["layers"], attention="eager", learning_rate=4e-3, save_minutes=60.0, checkpoints=checkpoints,
            output=DRAFTERS / name, fresh=False, seed=1,
        ))  # fmt: skip
    for file in TOKENIZER_FILES:
        (DRAFTERS / name / file).unlink(missing_ok=True)  # the bundled model's serves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(SIZES))
    parser.add_argument("--minutes", type=float, help="instead of each model's own training time")
    options = parser.parse_args()
    if options.only is not None:
        train_drafter(options.only, minutes=options.minutes)
        return
    minutes = [] if options.minutes is None else ["--minutes", str(options.minutes)]
    with ThreadPoolExecutor() as pool:
        commands = [[executable, __file__, "--only", name, *minutes] for name in SIZES]
        list(pool.map(lambda command: run(command, check=True), commands))


if __name__ == "__main__":
    main()
