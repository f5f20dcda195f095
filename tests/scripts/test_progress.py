"""Progress lines: the share that is done, and the time left at the pace so far."""

import io
from types import SimpleNamespace

import pytest
from measuring import progress

import stand


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (42.4, "42 s"), (59.9, "60 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations(seconds, text):
    assert progress.duration(seconds) == text


def test_time_left_follows_the_pace(monkeypatch, capsys):
    clock = iter([100.0, 100.0, 110.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    counted = progress.Progress(4)
    counted.add(0, "nothing yet")
    counted.add(1, "one")
    counted.add(3, "all")
    said = ["nothing yet (0 % done)", "one (25 % done, 30 s left)", "all (100 % done, 0 s left)"]
    assert capsys.readouterr() == ("", "\n".join(said) + "\n")


def test_work_of_an_earlier_session_took_none_of_this_ones_time(monkeypatch, capsys):
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    counted = progress.Progress(4, 2)
    counted.add(1, "one")
    counted.add(3, "more than asked for")
    assert capsys.readouterr().err == "one (75 % done, 10 s left)\nmore than asked for (100 % done, 0 s left)\n"


@pytest.mark.parametrize(("num_put_back", "said"), [(0, ""), (3, ", 3 times a row was put back")])
def test_rows_that_were_put_back_are_counted(num_put_back, said):
    stats = stand.Stats(num_put_back=num_put_back)
    stream = io.StringIO()
    progress.RunProgress(2, 0, stream=stream).close(SimpleNamespace(stats=stats, num_live=1))
    assert stream.getvalue() == f"0 of 2 trajectories, 1 rows live, 0.00 tokens/step{said}\n"
