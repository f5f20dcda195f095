"""Each part of a step is charged with its own time."""

from types import SimpleNamespace

from stand.stats import Stats


def test_time_goes_to_what_is_worked_on(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("stand.stats.time", SimpleNamespace(perf_counter=lambda: now[0]))
    stats = Stats()
    for verb, seconds in [("draft", 1.0), ("forward", 2.0), (None, 4.0), ("draft", 8.0)]:
        stats.work_on(verb)
        now[0] += seconds
    stats.work_on(None)
    now[0] += 16.0
    stats.work_on("commit")
    assert stats.seconds == {"draft": 9.0, "forward": 2.0, "verify": 0.0, "commit": 0.0, "learn": 0.0}


def test_learning_within_a_forward_is_not_the_forwards(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("stand.stats.time", SimpleNamespace(perf_counter=lambda: now[0]))
    stats = Stats()
    stats.work_on("forward")
    now[0] += 1.0
    interrupted = stats.work_on("learn")
    now[0] += 2.0
    stats.work_on(interrupted)
    now[0] += 4.0
    assert stats.work_on(None) == "forward"
    assert (stats.seconds["forward"], stats.seconds["learn"]) == (5.0, 2.0)
