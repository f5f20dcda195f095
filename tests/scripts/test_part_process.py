"""Parts of the benchmark as processes: whatever a part leaves behind, the others go on."""

import sys

from gpu_parts.part_process import run_part


def test_what_a_part_printed_last_may_end_within_a_character(tmp_path):
    program = r"import sys; sys.stdout.buffer.write(b'half a caf\xc3'); sys.stdout.flush(); sys.exit(9)"
    run = run_part(lambda output: [sys.executable, "-c", program], tmp_path / "part.json", limit=60)
    assert run.result is None and run.failure == "its process ended with status 9"
    assert run.printed.startswith("half a caf")
