"""Set-up of the Makefile with a made-up pip: it says what it does, and takes the build of torch that pip finds."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Called as `python -m venv FOLDER`: makes a folder whose pip notes its arguments and knows the builds in $BUILDS.
# With -c a real Python answers, which takes itself for $VERSION.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then exec "$REAL" -c "import sys; sys.version_info = ($VERSION, 0); $2"; fi
mkdir -p "$3/bin"
cat > "$3/bin/pip" <<'END'
#!/bin/sh
echo "$@" >> "$NOTES"
case "$*" in *" torch") ;; *) exit 0;; esac
wanted=$(grep '== "linux"' "$4" | sed 's/;.*//')
case " $BUILDS " in *" $wanted "*) exit 0;; esac
echo "ERROR: $COMPLAINT" >&2
exit 1
END
chmod +x "$3/bin/pip"
"""

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="away from the source there is no Makefile")


def pinned_version() -> str:
    return re.search(r"torch==([0-9.]+)\+cpu", (ROOT / "constraints.txt").read_text()).group(1)


def set_up(folder: Path, builds: str, complaint: str = "No matching distribution found for torch", version=None):
    """(the finished process, what pip was called with, the constraints that were settled)."""
    python, notes, environment = folder / "python", folder / "notes", folder / "venv"
    python.write_text(PYTHON)
    python.chmod(0o755)
    notes.touch()
    (environment / "constraints.txt").parent.mkdir()
    (environment / "constraints.txt").touch()
    variables = {
        "BUILDS": builds,
        "NOTES": str(notes),
        "COMPLAINT": complaint,
        "REAL": sys.executable,
        "VERSION": version or f"{sys.version_info[0]}, {sys.version_info[1]}",  # whose headers are looked for
    }
    target = f"{environment}/.ready"
    command = ["make", "--no-print-directory", target, f"VENV={environment}", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    return done, notes.read_text().splitlines(), (environment / "constraints.txt").read_text()


def test_the_makefile_has_only_what_make_3_81_knows():
    """The make of macOS. What came later: other assignments, functions and special names, and `define` with a `=`."""
    text = re.sub(r"\\\n", " ", (ROOT / "Makefile").read_text())
    lines = [line for line in text.splitlines() if not line.startswith(("\t", "#"))]
    assert len(lines) > 40
    later = r"::=|!=|^define .*=|^(undefine|private|load|export define)\b|^\.(ONESHELL|RECIPEPREFIX|SHELLFLAGS)|&:"
    assert not [line for line in lines if re.search(later, line)]
    assert not re.search(r"\$\((file|guile|let|intcmp) ", text)


def test_every_commit_takes_other_cases_also_in_a_clone_without_history(tmp_path):
    def run(*command, folder=tmp_path / "whole", date=0):
        dates = {name: f"{1_800_000_000 + date} +0000" for name in ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE")}
        own = {name: value for name, value in os.environ.items() if name not in ("TURN", "MAKEFLAGS")}
        asked = {"capture_output": True, "text": True, "timeout": 60, "check": True}
        return subprocess.run(command, cwd=folder, env=own | dates, **asked).stdout

    (tmp_path / "whole").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path / "whole")
    (tmp_path / "turn.mk").write_text("turn:; @echo $(TURN)\n")  # macOS has make 3.81, which takes no --eval
    run("git", "init", "-q")
    run("git", "add", "Makefile")
    identity, turns = ("-c", "user.name=a", "-c", "user.email=a@b.example"), set()
    for commit in range(3):
        run("git", *identity, "commit", "-qm", "x", "--allow-empty", date=commit)
        clone = tmp_path / str(commit)
        run("git", "clone", "-q", "--depth", "1", f"file://{tmp_path}/whole", str(clone))
        turns.add(int(run("make", "-s", "-f", "Makefile", "-f", "../turn.mk", "turn", folder=clone)))
    assert len(turns) == 3


def test_the_pinned_build_is_taken_where_pip_finds_it(tmp_path):
    done, calls, constraints = set_up(tmp_path, f"torch=={pinned_version()}+cpu torch=={pinned_version()}")
    assert done.returncode == 0 and (tmp_path / "venv" / ".ready").exists()
    assert constraints == (ROOT / "constraints.txt").read_text()
    assert "installing torch (a download of 0.2 GB" in done.stdout and "compiling the modules" in done.stdout
    assert "no build of torch" not in done.stdout and sum(call.endswith(" torch") for call in calls) == 1


def test_the_build_with_cuda_is_taken_where_there_is_no_other(tmp_path):
    done, calls, constraints = set_up(tmp_path, f"torch=={pinned_version()}")
    assert done.returncode == 0, done.stderr
    assert "pip finds no build of torch without CUDA" in done.stdout and "2.7 GB" in done.stdout
    assert "+cpu" not in constraints and f"torch=={pinned_version()}; sys_platform" in constraints
    assert all(f"--constraint {tmp_path}/venv/constraints.txt" in call for call in calls)


def test_other_failures_are_shown_and_fetch_nothing_else(tmp_path):
    done, calls, _ = set_up(tmp_path, f"torch=={pinned_version()}", complaint="Connection timed out")
    assert done.returncode != 0 and "Connection timed out" in done.stderr
    assert len(calls) == 1 and not (tmp_path / "venv" / ".ready").exists()


def test_an_old_python_is_refused_before_anything_is_made(tmp_path):
    done, calls, constraints = set_up(tmp_path, f"torch=={pinned_version()}", version="3, 10")
    assert done.returncode != 0 and not calls and not constraints
    assert "Python must be 3.11 or newer, got 3.10; name one: PYTHON=python3.12 make" in done.stderr


def test_the_oldest_constraints_are_those_of_the_package():
    """As pip reads them on this Python, so that `make test-wheel` runs on what pyproject.toml promises."""
    requirements = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    given = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {}
    for one in map(requirements.Requirement, given):
        if one.marker is None or one.marker.evaluate({"python_version": "3.11"}):
            pinned[one.name] = re.sub(r"\+cpu$", "", next(iter(one.specifier)).version)
    promised = [*project["dependencies"], *extras["engine"], *(line for line in extras["test"] if "triton" in line)]
    oldest = {
        one.name: next(bound.version for bound in one.specifier if bound.operator == ">=")
        for one in map(requirements.Requirement, promised)
    }
    padded = {name: tuple(map(int, (version.split(".") + ["0", "0"])[:3])) for name, version in oldest.items()}
    assert {name: tuple(map(int, version.split("."))) for name, version in pinned.items()} == padded
