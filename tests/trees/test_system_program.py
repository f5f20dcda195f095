"""What programs of the system are asked: what they print, and nothing of those that fail."""

import sys

import pytest

from stand.trees import system_program
from stand.trees.system_program import kernel_value, printed_by


def test_what_a_program_prints_is_told():
    assert printed_by(sys.executable, "-c", "print('4 pages')") == "4 pages\n"
    assert printed_by(sys.executable, "-c", "import sys; sys.stdout.buffer.write(b'a\\xffb')") == "a\ufffdb"
    assert printed_by(sys.executable, "-c", "import sys; print(len(sys.stdin.read()))") == "0\n"  # no terminal is read


def test_a_program_that_fails_tells_nothing(tmp_path, monkeypatch, capfd):
    assert printed_by(str(tmp_path / "missing")) is None
    assert printed_by(str(tmp_path)) is None
    assert printed_by(sys.executable, "-c", "import sys; print(4); sys.exit('no such name')") is None
    monkeypatch.setattr(system_program, "LONGEST_SECONDS", 0.2)
    assert printed_by(sys.executable, "-c", "import time; print(4, flush=True); time.sleep(60)") is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "value"), [("made.known", "Apple M4 Pro"), ("made.unknown", "")])
def test_a_value_of_the_kernel_is_asked_for_once(name, value, tmp_path, monkeypatch):
    program, asked = tmp_path / "sysctl", tmp_path / "asked"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {asked}\n[ "$2" = made.known ] || exit 1\necho " Apple M4 Pro"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(system_program, "SYSCTL", str(program))
    kernel_value.cache_clear()
    assert [kernel_value(name), kernel_value(name)] == [value, value]
    assert asked.read_text() == f"-n {name}\n"
