"""Programs of the operating system that are asked for what it tells in no other way."""

from __future__ import annotations

import subprocess
from functools import cache

LONGEST_SECONDS = 5.0
SYSCTL = "/usr/sbin/sysctl"


def printed_by(*command: str) -> str | None:
    """What a command prints; None where its program is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace")


@cache
def kernel_value(name: str) -> str:
    """What `sysctl` tells under a name, such as "kern.bootsessionuuid" on macOS; "" where it knows no such name."""
    return (printed_by(SYSCTL, "-n", name) or "").strip()
