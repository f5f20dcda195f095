"""What `check_wheel.py` finds wrong with wheels that are wrong."""

import subprocess
import sys
import zipfile
from pathlib import Path

import check_wheel
import pytest
from check_wheel import MOST_BYTES, drafts_digest, main, pythons_here, size_faults, tag_faults, version_of

import stand.trees


def test_a_fit_wheel_has_no_faults(tmp_path):
    wheel = tmp_path / "stand_decoding-0.1.0-cp311-abi3-linux_x86_64.whl"
    wheel.write_bytes(b"0" * 1000)
    assert size_faults(wheel) == tag_faults(wheel) == []


def test_faults_are_found(tmp_path):
    for name in ("stand_decoding-0.1.0-cp311-cp311-linux_x86_64.whl", "stand_decoding-0.1.0-cp312-abi3-any.whl"):
        assert "cp311-abi3" in tag_faults(tmp_path / name)[0]
    wheel = tmp_path / "stand_decoding-0.1.0-cp311-abi3-linux_x86_64.whl"
    wheel.write_bytes(b"0" * MOST_BYTES)
    assert "below" in size_faults(wheel)[0]


def test_the_digest_follows_from_the_drafts(monkeypatch):
    first = drafts_digest()
    assert drafts_digest() == first
    monkeypatch.setattr(stand.trees, "BlendedLookup", lambda: OtherLookup(fade=0.5))
    assert drafts_digest() != first


class OtherLookup(stand.trees.BlendedLookup):
    """Forgets faster."""


def test_the_command_prints_the_digest():
    script = Path(__file__).resolve().parents[2] / "scripts" / "check_wheel.py"
    done = subprocess.run([sys.executable, script, "--drafts"], capture_output=True, text=True)
    assert done.stdout.strip() == drafts_digest(), done.stderr


def test_what_is_no_wheel_is_refused(tmp_path, capsys):
    for name in ("text.txt", "text.whl"):
        (tmp_path / name).write_text("no archive")
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path / name)])
        assert f"a wheel must be a .whl file, got {tmp_path / name}" in capsys.readouterr().err


def test_every_interpreter_is_asked_and_what_fails_is_told(tmp_path, monkeypatch, capsys):
    """The first that did not run, or into which the wheel could not be installed, ended the check with a traceback."""
    wheel, asked = tmp_path / "stand_decoding-0.1.0-cp311-abi3-linux_x86_64.whl", []
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nothing", "")

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, int("pip" in command))

    monkeypatch.setattr(check_wheel, "audit_faults", lambda wheel: [])
    monkeypatch.setattr(check_wheel, "version_of", lambda python: None if python == "none" else (3, 11))
    monkeypatch.setattr(check_wheel.subprocess, "run", run)
    assert main([str(wheel), "--python", "none", "one", "two"]) == 1
    assert [command[0] for command in asked if "venv" in command] == ["one", "two"]
    told = capsys.readouterr().err
    assert "--python must name interpreters that run and are not free-threaded, got none" in told
    assert all(f"the wheel must install with {python}, got status 1" in told for python in ("one", "two"))


def test_pythons_are_found():
    assert version_of(sys.executable) == sys.version_info[:2]
    assert version_of("/no/such/python") is None
    found = [version_of(python) for python in pythons_here()]
    assert found == sorted(set(found)) and (3, 11) <= found[0] <= sys.version_info[:2] <= found[-1]
