"""Parts of the benchmark as processes: whatever a part leaves behind, the others go on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_parts import part_process
from gpu_parts.part_process import run_part

SCRIPTS = str(Path(part_process.__file__).parents[1])


def test_what_a_part_printed_last_may_end_within_a_character(tmp_path):
    program = r"import sys; sys.stdout.buffer.write(b'half a caf\xc3'); sys.stdout.flush(); sys.exit(9)"
    run = run_part(lambda output: [sys.executable, "-c", program], tmp_path / "part.json", limit=60)
    assert run.result is None and run.failure == "its process ended with status 9"
    assert run.printed.startswith("half a caf")


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such signal")
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGKILL))
def test_a_part_ends_when_the_bench_is_killed(tmp_path, number):
    """As `timeout` does, or a limit on a command: the part would hold the GPU while the next command is timed."""
    part = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(60)"
    bench = (
        f"import sys; sys.path.insert(0, {SCRIPTS!r}); from pathlib import Path; from gpu_parts.part_process import *;"
        f"run_part(lambda output: [sys.executable, '-c', {part!r}], Path({str(tmp_path / 'part.json')!r}), limit=60)"
    )
    process, pid = subprocess.Popen([sys.executable, "-c", bench]), ""
    while not pid.endswith("."):
        assert process.poll() is None
        time.sleep(0.02)
        pid = (tmp_path / "pid").read_text() if (tmp_path / "pid").is_file() else ""
    process.send_signal(number)
    process.wait()
    stat = Path(f"/proc/{pid[:-1]}/stat")
    for _ in range(200):  # until the system has taken it in
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("the part must end with the bench, got one that goes on")
