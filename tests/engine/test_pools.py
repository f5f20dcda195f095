"""Threads that help others to compute: they go where nothing is computed, so that other threads compute faster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stand.simd.threads import parallel_region, release_pool

ORACLES = Path(__file__).resolve().parents[1] / "oracles"
PATIENCE = 100  # seconds

pytestmark = pytest.mark.skipif(
    not parallel_region() or not os.path.isdir("/proc/self/task"), reason="threads are GOMP's, and are counted in Linux"
)

PROGRAM = """
import os, time, torch
torch.set_num_threads(3)
def count():
    time.sleep(0.2)  # an ended thread leaves after its pool was given back
    return len(os.listdir("/proc/self/task"))
def compute():
    return torch.randn(512, 512).matmul(torch.randn(512, 512)).relu()
"""
RELEASED = """
from stand.simd.threads import release_pool
before = count()
compute()
computing = count()
release_pool()
print(computing - before, count() - before)
compute()
print(count() - before)
"""
OPEN = """
import stand
from tiny_models import tiny_model
engine = stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=12))
before = count()
with engine.open_run(max_rows=4) as run:
    run.submit(stand.Request([5, 9] * 200, num_return_sequences=4, max_new_tokens=20)).result()
    print(count() - before)  # the run's own
print(count() - before)
"""


def printed(program: str) -> list[int]:
    asked = [sys.executable, "-c", PROGRAM + program]
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "STAND_COSTS": "off"}
    done = subprocess.run(
        asked, capture_output=True, text=True, timeout=PATIENCE, check=True, cwd=ORACLES, env=environment
    )
    return [int(number) for number in done.stdout.split()]


def test_threads_go_and_come_again():
    assert printed(RELEASED) == [2, 0, 2]


@pytest.mark.long
def test_an_open_run_that_waits_holds_no_threads_but_its_own():
    assert printed(OPEN) == [1, 0]


def test_another_library_is_left_alone(monkeypatch):
    from stand.simd import threads

    def absent():
        raise OSError("libgomp.so.1")

    monkeypatch.setattr(threads, "_gomp", absent)
    release_pool()
    assert torch.ones(3).sum() == 3
