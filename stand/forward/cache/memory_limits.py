"""What the limits of control groups leave to this process: containers and batch systems bound memory by them, and the
system's own figures are those of the whole machine there."""

from __future__ import annotations

from pathlib import Path

GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
MOUNTS = {  # by version: where memory's groups are, and names of its files, of the caches among its figures
    1: (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
}


def within_limits(free: float) -> float:
    """Of so many free bytes, those that can be allocated until one of this process's control groups is full; idle
    caches of files count as free."""
    try:
        lines = GROUPS_OF_PROCESS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return free
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, *files = MOUNTS[1 if controllers else 2]
        group = mount / name.lstrip("/")
        for folder in (group, *group.parents):  # a container may not see its own group by the name that it has outside
            if folder.is_relative_to(mount):
                free = _within(free, folder, *files)
    return free


def _within(free: float, group: Path, limit: str, used: str, caches: str) -> float:
    """All of them where the group has no limit, or is none. Where it does not tell of its caches they count as used."""
    try:
        left = int((group / limit).read_text(encoding="ascii")) - int((group / used).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return free if left >= free else min(free, max(left + _idle(group / "memory.stat", caches), 0))


def _idle(figures: Path, caches: str) -> int:
    try:
        return int(dict(line.split() for line in figures.read_text(encoding="ascii").splitlines())[caches])
    except (OSError, ValueError, KeyError):
        return 0
