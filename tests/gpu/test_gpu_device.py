"""On a real GPU only (`pytest -m gpu`): every piece of scripts/gpu_first_contact.py, in one process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import gpu_first_contact
import pytest
import torch

SCRIPT = Path(gpu_first_contact.__file__)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")]


@pytest.fixture(scope="module")
def printed() -> str:
    """What the script prints; compiled kernels, although the suite around it interprets them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("piece", gpu_first_contact.PIECES)
def test_the_piece_is_well(printed, piece):
    assert f"ok   {piece}:" in printed, printed
