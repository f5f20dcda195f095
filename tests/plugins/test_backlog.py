"""Texts that wait to be learned: which come first, and which never."""

import numpy as np
import pytest

from stand.plugins.serving.backlog import MOST_STEPS, Backlog
from stand.trees import BlendedLookup


@pytest.fixture
def lessons():
    return []


@pytest.fixture
def backlog(lessons) -> Backlog:
    class Witness(BlendedLookup):
        def learn(self, context, token_ids, *, scope=0, **laws):
            assert len(context) == 0 or context[-1] == token_ids[0] - 1
            lessons.append((*np.asarray(token_ids).tolist(),))
            super().learn(context, token_ids, scope=scope, **laws)

    return Backlog(Witness(), tokens_per_step=4)


def text(start: int, length: int) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def test_the_newest_prompt_comes_first_and_corpora_last(backlog, lessons):
    backlog.add_corpus("book", [text(700, 3), text(800, 0), text(900, 5)], 0)
    backlog.add(text(10, 6), 1)
    backlog.work()
    backlog.add(text(50, 5), 2)
    for num_waiting in (11, 7, 3, 0, 0):
        backlog.work()
        assert len(backlog) == num_waiting
    news = [(50, 51, 52, 53), (54,), (14, 15), (700,), (701, 702), (900, 901), (902, 903, 904)]
    assert lessons == [(10, 11, 12, 13), *news]


def test_the_oldest_prompts_are_dropped_and_no_corpus(backlog, lessons):
    """A server that gets more prompts than it learns: what waits is bounded, and what is learned is recent."""
    backlog.add_corpus("book", [text(10_000, 1_000)], 0)
    for number in range(200):
        backlog.add(text(40 * number, 30), 1)
        backlog.work()
    assert len(backlog) <= 1_000 + MOST_STEPS * 4
    learned = {lesson[0] // 40 for lesson in lessons}
    assert len(learned) == 200, "the newest prompt is learned at once"
    while len(backlog) > 1_000:
        backlog.work()
    assert all(lesson[0] >= 40 * 180 for lesson in lessons[200:])
    for _ in range(250):
        backlog.work()
    assert len(backlog) == 0 and lessons[-1][-1] == 10_999


def test_a_prompt_longer_than_the_bound_is_learned_whole(backlog, lessons):
    length = 4 * MOST_STEPS + 50
    backlog.add(text(5, 7), 1)
    backlog.add(text(20, length), 1)
    for _ in range(MOST_STEPS + 20):
        backlog.work()
    assert [token for lesson in lessons for token in lesson] == text(20, length).tolist()


def test_what_is_known_of_a_text_is_its_context(backlog, lessons):
    backlog.add(text(20, 9), 1, num_known=6)
    backlog.add(text(60, 6), 1, num_known=6)
    assert len(backlog) == 3
    backlog.work()
    assert lessons == [(26, 27, 28)] and len(backlog) == 0


def test_a_removed_corpus_is_not_learned(backlog, lessons):
    for name in ("first", "second"):
        backlog.add_corpus(name, [text(10, 9)], 0)
    backlog.work()
    backlog.remove_corpus("first")
    backlog.remove_corpus("unknown")
    assert len(backlog) == 9 and lessons == [(10, 11, 12, 13)]


def test_a_backlog_that_takes_nothing_is_empty():
    lookup = BlendedLookup()
    backlog = Backlog(lookup, tokens_per_step=0)
    backlog.add(np.arange(5, dtype=np.int32), 0)
    backlog.add_corpus("book", [np.arange(5, dtype=np.int32)], 0)
    backlog.work()
    assert len(backlog) == 0 == len(lookup)
