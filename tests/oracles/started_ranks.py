"""Two processes of one program, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

from free_port import free_port

SECONDS = 240  # ranks that go apart would wait for ever


def run_two_ranks(program: str, *arguments: str) -> None:
    """program: a file of this folder. Raises AssertionError with what it has printed where a rank fails."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    searched = os.pathsep.join([str(Path(program).parent), *filter(None, sys.path)])
    processes = [
        subprocess.Popen(
            [sys.executable, program, *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": searched},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
