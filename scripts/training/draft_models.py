"""The two draft models that `compare_verifiers.py` puts before the bundled model: `good` and `weak`.

Same problems, same tokenizer and same recipe as the bundled model's; they differ in depth and in training time.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measuring.setup import DRAFTERS, REASONER
from transformers import AutoTokenizer

from training.checkpoint import TOKENIZER_FILES
from training.trainer import train

SIZES = {"good": {"layers": 2, "minutes": 9.0}, "weak": {"layers": 1, "minutes": 3.0}}


def train_draft_model(name: str, *, minutes: float | None) -> None:
    """Train one draft model with the bundled model's tokenizer and write it to DRAFTERS / name."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder)
        train(argparse.Namespace(
            layout="llama", hidden=128, intermediate=352, layers=size["layers"], attention="eager",
            precision="bfloat16", minutes=minutes or size["minutes"], steps=0, processes=1, rows=32,
            learning_rate=4e-3, save_minutes=60.0, checkpoints=checkpoints, output=DRAFTERS / name, fresh=False, seed=1,
        ), AutoTokenizer.from_pretrained(REASONER))  # fmt: skip
    for file in TOKENIZER_FILES:
        (DRAFTERS / name / file).unlink(missing_ok=True)  # the bundled model's serves
