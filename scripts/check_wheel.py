"""Is this wheel fit to hand out? Size, stable ABI, and the drafter's tests on the oldest and newest Python here.

    python scripts/check_wheel.py build/wheel/stand_decoding-0.1.0-cp311-abi3-linux_x86_64.whl
    python scripts/check_wheel.py --drafts      # a digest of the drafts of the installed package

The wheel alone is installed into an empty environment for each Python, so without torch: what is tested is what a
serving engine gets. abi3audit and, on Linux, auditwheel are asked too (`pip install ".[wheel]"`). The tests are those
of the folder `tests` where the command runs; run it away from the source, as `make wheel` does. Exit status 1 says that
a check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import is_zipfile

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
from measuring.progress import say

OLDEST = (3, 11)
MOST_BYTES = 1 << 20
TEST_PACKAGES = ("pytest>=8", "hypothesis>=6.100")
TESTS = ("tests/trees", "tests/test_drafter_alone.py", "tests/test_installed.py")
NEEDS_ENGINE = "tests/trees/test_draft_kinds.py"  # it verifies its drafts


def drafts_digest() -> str:
    """Hex digest of drafts of every kind by the installed package, after some learning."""
    from stand.trees import BlendedLookup, LookupTree, TreeShape
    from stand.trees.kinds import KINDS

    steps = np.arange(4000, dtype=np.int64)
    run = ((steps * steps * 7 + steps // 13) % 97).astype(np.int32)
    digest = hashlib.sha256()
    lookup, table = BlendedLookup(), LookupTree()
    for learner in (lookup, table):
        learner.learn(run[:0], run)
    for end in range(10, 1000, 45):
        noise = {"seed": 5, "rows": [0, 1], "steps": [end, end]}
        histories = [run[:end], run[3 : end + 5]]
        for kind in KINDS:
            grown = lookup.draft(histories, 24, kind=kind, **noise)
            shaped = table.draft(histories, TreeShape.paper(), kind=kind, **noise)
            for batch in (grown, shaped):
                for array in (batch.token_ids, batch.parents, batch.offsets, batch.support_ids, batch.law):
                    digest.update(np.ascontiguousarray(array).tobytes())
            digest.update(grown.path_probabilities.tobytes())
    return digest.hexdigest()


def version_of(python: str) -> tuple[int, int] | None:
    """None for what does not run, or is free-threaded: the stable ABI is not for it."""
    code = "import sys, sysconfig; print(*sys.version_info[:2], int(bool(sysconfig.get_config_var('Py_GIL_DISABLED'))))"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    answer = asked.stdout.split()
    return (int(answer[0]), int(answer[1])) if asked.returncode == 0 and answer[2] == "0" else None


def pythons_here() -> list[str]:
    """The oldest and the newest Python of this machine that the wheel is for: on the path, or one of pyenv's."""
    names = [shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], OLDEST[1] + 10)]
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    by_version: dict[tuple[int, int], str] = {}
    for python in [sys.executable, *filter(None, names), *map(str, pyenv)]:
        version = version_of(python)
        if version is not None and version >= OLDEST:
            by_version.setdefault(version, python)
    versions = sorted(by_version)
    return [by_version[version] for version in dict.fromkeys([versions[0], versions[-1]])]


def size_faults(wheel: Path) -> list[str]:
    size = wheel.stat().st_size
    say(f"{wheel.name}: {size:,} bytes")
    return [f"the wheel must be below {MOST_BYTES:,} bytes, got {size:,}"] if size >= MOST_BYTES else []


def tag_faults(wheel: Path) -> list[str]:
    if re.search(r"-cp311-abi3-[^-]+\.whl$", wheel.name):
        return []
    return [f"the wheel's name must have the tag cp311-abi3, got {wheel.name}"]


def audit_faults(wheel: Path) -> list[str]:
    """What abi3audit finds; auditwheel only says which Linux the wheel needs."""
    audits = {"abi3audit": ["abi3audit", "--strict", "--summary", str(wheel)]}
    if sys.platform == "linux":
        audits["auditwheel"] = ["auditwheel", "show", str(wheel)]
    faults = []
    for name, command in audits.items():
        program = Path(sys.executable).parent / command[0]
        if not program.is_file():
            faults.append(f"{name} must be installed beside {sys.executable}; pip install {name}")
            continue
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
        say(f"{name}: {' '.join((done.stdout + done.stderr).split())}")
        if done.returncode != 0:
            faults.append(f"{name} must pass, got exit status {done.returncode}")
    return faults


def test_on(python: str, wheel: Path) -> tuple[str | None, list[str]]:
    """(digest of the drafts, faults) of the wheel alone in an empty environment of this Python."""
    with tempfile.TemporaryDirectory() as folder:
        own = str(Path(folder) / "bin" / "python")
        install = [own, "-m", "pip", "install", "--quiet", str(wheel), *TEST_PACKAGES]
        for command in ([python, "-m", "venv", folder], install):
            if (status := subprocess.run(command).returncode) != 0:
                return None, [f"the wheel must install with {python}, got status {status} of {' '.join(command)}"]
        tested = subprocess.run([own, "-m", "pytest", "-q", *TESTS, f"--ignore={NEEDS_ENGINE}"])
        script = Path(__file__).resolve()
        drafted = subprocess.run([own, str(script), "--drafts"], capture_output=True, text=True)
    faults = [] if tested.returncode == 0 else [f"the tests must pass with {python}, got status {tested.returncode}"]
    if drafted.returncode != 0:
        faults.append(f"the wheel must draft with {python}, got {drafted.stderr}")
    return drafted.stdout.strip() or None, faults


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", type=Path, help="the .whl file")
    parser.add_argument("--drafts", action="store_true", help="only print the digest of the installed package's drafts")
    parser.add_argument("--python", nargs="+", help="interpreters (default: the oldest and the newest of this machine)")
    options = parser.parse_args(arguments)
    if options.drafts:
        print(drafts_digest())
        return 0
    if options.wheel is None or not options.wheel.is_file():
        given = "none" if options.wheel is None else options.wheel
        parser.error(f"a wheel must be given, or --drafts, got {given}; build it with pip wheel --no-deps .")
    if options.wheel.suffix != ".whl" or not is_zipfile(options.wheel):
        parser.error(f"a wheel must be a .whl file, got {options.wheel}; build it with pip wheel --no-deps .")
    faults = size_faults(options.wheel) + tag_faults(options.wheel) + audit_faults(options.wheel)
    digests = {}
    for python in options.python or pythons_here():
        version = version_of(python)
        if version is None:
            faults.append(
                f"--python must name interpreters that run and are not free-threaded, got {python}; name others"
            )
            continue
        say(f"Python {'.'.join(map(str, version))}: {python}")
        digests[python], found = test_on(python, options.wheel)
        faults += found
    say("drafts: " + ", ".join(f"{digest} ({python})" for python, digest in digests.items()))
    if len(set(digests.values())) > 1:
        faults.append("drafts must be the same on every Python, got different ones")
    for fault in faults:
        say(f"check_wheel: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
