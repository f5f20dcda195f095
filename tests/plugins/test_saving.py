"""Files that doors write while they serve and when their processes end, however those end."""

import multiprocessing
import threading
import time
from types import SimpleNamespace

import pytest

from stand.plugins import saving
from stand.plugins.saving import Saver
from stand.plugins.serving.options import ServingOptions
from stand.trees import BlendedLookup


class Owner:
    """What a door is for its saver."""


def lookup_of(*tokens: int) -> BlendedLookup:
    lookup = BlendedLookup()
    lookup.learn([], tokens)
    return lookup


def serve(path: str) -> None:
    """A process like vLLM's: a thread holds the door, and SIGTERM ends it by SystemExit."""
    owner = Owner()
    owner.saver = Saver(owner, lookup_of(1, 2, 3), path)
    threading.Thread(target=lambda held: time.sleep(1000), args=(owner,), daemon=True).start()
    raise SystemExit


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_end_of_a_process_writes_the_file(tmp_path, method):
    path = tmp_path / "served.lookup"
    process = multiprocessing.get_context(method).Process(target=serve, args=(str(path),))
    process.start()
    process.join()
    assert process.exitcode == 0 and len(BlendedLookup.load(path)) == len(lookup_of(1, 2, 3))


def test_an_empty_lookup_does_not_take_the_place_of_a_file(tmp_path):
    """A process that ends before its first request; one that has learned writes."""
    path = tmp_path / "served.lookup"
    lookup_of(1, 2, 3).save(path)
    owner, empty = Owner(), BlendedLookup()
    saver = Saver(owner, empty, str(path))
    saver.finish()
    assert size_of(path) == len(lookup_of(1, 2, 3))
    empty.learn([], [7, 8])
    Saver(owner, empty, str(path)).finish()
    assert size_of(path) == len(lookup_of(7, 8))


def test_a_relative_path_is_of_the_folder_at_the_start(tmp_path, monkeypatch):
    """inspect-ai enters the folders of its tasks; the file stays where it was checked."""
    (tmp_path / "task").mkdir()
    monkeypatch.chdir(tmp_path)
    owner = Owner()
    saver = Saver(owner, lookup_of(1, 2, 3), "served.lookup")
    monkeypatch.chdir(tmp_path / "task")
    saver.finish()
    assert size_of(tmp_path / "served.lookup") == len(lookup_of(1, 2, 3))
    assert not any((tmp_path / "task").iterdir())


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def size_of(path) -> int:
    return len(BlendedLookup.load(path)) if path.exists() else 0


def test_a_lookup_in_use_is_written_now_and_then(tmp_path, monkeypatch):
    """So that a killed process has left a file; what is unchanged is not written again."""
    monkeypatch.setattr(saving, "PAUSE", 0.01)
    path, owner, lookup = tmp_path / "served.lookup", Owner(), lookup_of(1, 2, 3)
    monkeypatch.setattr(saving, "PAUSE_PER_BYTE", 0)
    write, rounds = Saver._write, []
    monkeypatch.setattr(Saver, "_write", lambda saver: (write(saver), rounds.append(len(lookup))))
    saver = Saver(owner, lookup, str(path))
    wait_for(lambda: size_of(path) == len(lookup))
    first, seen = path.stat().st_ino, len(rounds)
    wait_for(lambda: len(rounds) >= seen + 3)
    assert path.stat().st_ino == first
    lookup.learn([], [4, 5, 6])
    wait_for(lambda: size_of(path) == len(lookup))
    saver.finish()


def test_large_lookups_are_written_less_often():
    for num_bytes, least, most in ((0, 60, 60), (256 << 20, 500, 600)):
        waits = []
        one = object.__new__(Saver)
        one._lookup = SimpleNamespace(nbytes=num_bytes)
        one._is_over = SimpleNamespace(wait=lambda seconds, waits=waits: waits.append(seconds) or True)
        one._run()
        assert len(waits) == 1 and least <= waits[0] <= most


def test_a_failure_is_told_and_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saving, "PAUSE", 0.01)
    monkeypatch.setattr(saving, "PAUSE_PER_BYTE", 0)
    path, owner, lookup = tmp_path / "folder" / "served.lookup", Owner(), lookup_of(1, 2, 3)
    saver = Saver(owner, lookup, str(path))
    wait_for(lambda: "could not be written" in caplog.text)
    path.parent.mkdir()
    wait_for(lambda: size_of(path) > 0)
    saver.finish()


def test_a_lack_of_memory_does_not_end_the_saving(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saving, "PAUSE", 0.01)
    monkeypatch.setattr(saving, "PAUSE_PER_BYTE", 0)
    path, owner, lookup = tmp_path / "served.lookup", Owner(), lookup_of(1, 2, 3)
    save, fails = BlendedLookup.save, [True]

    class Short:
        """The lookup while memory is short."""

        nbytes, digest = lookup.nbytes, lookup.digest

        def __len__(self):
            return len(lookup)

        def save(self, path):
            if fails:
                fails.pop()
                raise MemoryError
            save(lookup, path)

    saver = Saver(owner, Short(), str(path))
    saver._written = None
    wait_for(lambda: size_of(path) > 0)
    assert "could not be written" in caplog.text
    saver.finish()


def test_who_is_freed_writes_the_file(tmp_path):
    path, owner, lookup = tmp_path / "served.lookup", Owner(), lookup_of(1, 2, 3)
    owner.saver = Saver(owner, lookup, str(path))
    assert not path.exists()
    del owner
    assert size_of(path) == len(lookup)


def test_files_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "a.lookup", tmp_path, tmp_path / "file" / "a.lookup"):
        with pytest.raises(ValueError, match="save must name a file that can be written"):
            ServingOptions.read({"save": str(path)}, {})
    assert ServingOptions.read({"save": str(tmp_path / "a.lookup")}, {}).save
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
