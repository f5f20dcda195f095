"""Files of long runs: what cannot be written is found before the work, and every line is there once it was added."""

import errno
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest
from measuring import output_file
from measuring.output_file import JsonLines, check_writable, replace_text


def test_lines_are_there_while_the_file_is_open(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path, "--output")
    for number in range(3):
        lines.add({"number": number})
        assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == list(range(number + 1))


def test_a_line_that_was_taken_in_parts_is_written_whole(tmp_path):
    """A raw file may take a part of a line; the next write says that the disk is full."""
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path, "--output")
    whole = lines._file

    class Sparing:
        room = 60

        def write(self, data):
            part = data[: min(7, self.room)]
            if not part:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= len(part)
            return whole.write(part)

    lines._file = Sparing()
    lines.add({"text": "longer than a part"})
    assert json.loads(path.read_text())["text"] == "longer than a part"
    with pytest.raises(OSError, match="No space left"):
        lines.add({"text": "longer than what is left of the disk"})


def test_no_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    JsonLines(None, "--output").add({"number": 1})
    assert not list(tmp_path.iterdir())


def test_earlier_results_are_not_overwritten(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="--output must name a new file, got .* move it away"):
        JsonLines(path, "--output")
    assert path.read_text() == "{}\n"


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_file_that_another_run_writes_is_refused(tmp_path, goes_on):
    """Both would draw the rows that are missing, and cut off what the other one is writing."""
    path = tmp_path / "lines.jsonl"
    with closing(JsonLines(path, "--output", is_alone=True)) as lines:
        for _ in range(2):
            with pytest.raises(ValueError, match="--output must name a file that no other run writes, got .*; wait"):
                JsonLines(path, "--output", goes_on=goes_on, is_alone=True)
            lines.add({"number": 1})
    assert JsonLines(path, "--output", goes_on=True, is_alone=True).earlier == [{"number": 1}] * 2


@pytest.mark.parametrize(("text", "goes_on"), [("{}\n", False), ("no line\n", True)])
def test_a_refusal_leaves_no_lock_behind(tmp_path, text, goes_on):
    """While somebody looks at the error, which holds what was made."""
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="--output must") as caught:
        JsonLines(path, "--output", goes_on=goes_on, is_alone=True)
    path.write_text("{}\n")
    with closing(JsonLines(path, "--output", goes_on=True, is_alone=True)) as lines:
        assert lines.earlier == [{}] and caught.value is not None


def test_a_file_system_without_locks_is_served(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output_file.fcntl, "flock", no_locks)
    JsonLines(tmp_path / "lines.jsonl", "--output", is_alone=True).add({"number": 1})
    assert (tmp_path / "lines.jsonl").read_text() == '{"number": 1}\n'


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--save must name a file in an existing folder, got .* make the folder first"):
        check_writable(tmp_path / "missing" / "file", "--save")
    with pytest.raises(ValueError, match="--save must name a file, got the folder"):
        check_writable(tmp_path, "--save")


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that even root cannot write to")
def test_folders_without_rights_are_refused():
    with pytest.raises(ValueError, match="--save must name a file that can be written"):
        check_writable(Path("/proc/file"), "--save")


def test_a_check_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "new", "--save")
    check_writable(None, "--save")
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old", "--save")
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "kept"


def test_texts_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "text"
    replace_text(path, "old")
    monkeypatch.setattr("os.replace", lambda *_: 1 / 0)  # killed before the end
    with pytest.raises(ZeroDivisionError):
        replace_text(path, "new")
    assert path.read_text() == "old"
