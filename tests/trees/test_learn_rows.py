"""Texts that lie in rows of one array, as serving engines hold them; long lessons let others in."""

import threading

import numpy as np
import pytest

from stand.trees import BlendedLookup, problem_key


def texts(seed: int, num_rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 40, (num_rows, length)).astype(np.int32)


def saved(lookup: BlendedLookup, path) -> bytes:
    lookup.save(path)
    return path.read_bytes()


def test_it_is_learning_text_by_text(tmp_path):
    tokens = texts(0, 5, 700)
    rows, lengths, num_new, scopes = [3, 0, 4, 1], [700, 30, 5, 400], [600, 30, 0, 1], [7, 0, 1, 254]
    one, other = BlendedLookup(), BlendedLookup()
    one.learn_rows(tokens, lengths, num_new, rows=rows, scopes=scopes)
    for row, length, new, scope in zip(rows, lengths, num_new, scopes, strict=True):
        if new:
            other.learn(tokens[row, : length - new], tokens[row, length - new : length], scope=scope)
    assert one.digest == other.digest != 0
    assert saved(one, tmp_path / "one") == saved(other, tmp_path / "other")
    for row, scope in zip(rows, scopes, strict=True):
        mine, its = (lookup.predict(tokens[row, :25], scope=scope) for lookup in (one, other))
        assert mine[0].tolist() == its[0].tolist() and mine[1].tolist() == its[1].tolist()


def test_rows_are_the_first_ones_unless_named():
    tokens, one, other = texts(1, 3, 20), BlendedLookup(), BlendedLookup()
    one.learn_rows(tokens, np.array([20, 9], np.int32), np.array([20, 4], np.int32))
    other.learn_rows(tokens, [20, 9], [20, 4], rows=[0, 1], scopes=[0, 0])
    assert one.digest == other.digest and len(one) == len(other) > 0


@pytest.mark.parametrize(
    "kind",
    [
        lambda numbers: np.array(numbers, np.int64),
        lambda numbers: np.repeat(np.array(numbers, np.int64), 2)[::2],
        lambda numbers: np.array(numbers, ">i8"),
        lambda numbers: np.array(numbers, np.uint8),
    ],
    ids=["int64", "strided", "swapped", "uint8"],
)
def test_numbers_of_any_kind_are_the_same(kind):
    tokens, one, other = texts(5, 3, 20), BlendedLookup(), BlendedLookup()
    one.learn_rows(tokens, [20, 9], [20, 4], rows=[2, 1])
    other.learn_rows(tokens, kind([20, 9]), kind([20, 4]), rows=kind([2, 1]))
    assert one.digest == other.digest and len(one) == len(other) > 0


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1500])
def test_a_long_run_is_learned_as_a_whole(size, tmp_path):
    """In parts inside, as one for whoever asks: the same as token by token from a walk along its contexts."""
    text = np.random.default_rng(size).integers(0, 12, size + 20).astype(np.int32)
    whole, parts = BlendedLookup(), BlendedLookup()
    whole.learn(text[:20], text[20:])
    for end in range(20, len(text), 50):
        parts.learn(text[:end], text[end : end + 50])
    assert saved(whole, tmp_path / "whole")[100:] != b""
    assert len(whole) == len(parts) and whole.nbytes == parts.nbytes
    for end in range(13, len(text), max(1, size // 40)):
        mine, its = whole.predict(text[:end]), parts.predict(text[:end])
        assert mine[0].tolist() == its[0].tolist() and mine[1].tolist() == its[1].tolist()


def test_a_long_lesson_lets_others_in():
    """A reader beside a lesson of many tokens has its turn long before the lesson's end."""
    lookup, text = BlendedLookup(), np.random.default_rng(3).integers(0, 50_000, 80_000).astype(np.int32)
    started, sizes = threading.Event(), []

    def teach():
        started.set()
        lookup.learn(text[:0], text)

    teacher = threading.Thread(target=teach)
    teacher.start()
    started.wait()
    while teacher.is_alive():
        sizes.append(len(lookup))
    teacher.join()
    assert len({size for size in sizes if 0 < size < len(lookup)}) > 10
    lookup.check()


GOOD = {"tokens": np.zeros((3, 8), np.int32), "lengths": [8, 8], "num_new": [1, 2], "rows": [0, 2], "scopes": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.zeros((3, 8), np.int64)}, "int32"),
        ({"tokens": np.zeros(8, np.int32)}, "int32"),
        ({"tokens": np.zeros((3, 16), np.int32)[:, ::2]}, "C-contiguous"),
        ({"tokens": np.full((3, 8), -1, np.int32)}, "negative"),
        ({"rows": [0, 3]}, "rows"),
        ({"rows": [0, -1]}, "rows"),
        ({"rows": [0]}, "rows"),
        ({"rows": np.array([0, 2, 1])}, "rows"),
        ({"rows": np.array([[0], [2]])}, "rows"),
        ({"lengths": [8, 9]}, "length"),
        ({"num_new": [1, -1]}, "num_new"),
        ({"num_new": [1, 9]}, "num_new"),
        ({"num_new": [1.0, 2.0]}, "num_new"),
        ({"scopes": [0]}, "scopes"),
        ({"scopes": [0, 255]}, "scope"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    lookup, given = BlendedLookup(), GOOD | changes
    tokens, lengths, num_new = given.pop("tokens"), given.pop("lengths"), given.pop("num_new")
    with pytest.raises(ValueError, match=message):
        lookup.learn_rows(tokens, lengths, num_new, **given)
    assert lookup.digest == 0 and len(lookup) == 0


def test_what_is_right_is_taken():
    lookup, given = BlendedLookup(), dict(GOOD)
    tokens, lengths, num_new = given.pop("tokens"), given.pop("lengths"), given.pop("num_new")
    lookup.learn_rows(tokens, lengths, num_new, **given)
    assert len(lookup) > 0
    lookup.learn_rows(tokens, [], [])


def test_a_problems_key_never_changes():
    """Golden bytes: what is stored by key must be found by later releases, on any machine."""
    assert problem_key([1, 2, 3]).hex() == "b30a3c159d7e8193559a42a84f1fcae1"
    assert problem_key(np.array([1, 2, 3], np.int64)) == problem_key((1, 2, 3)) != problem_key([1, 2, 3, 0])
    for wrong in ([1.5], [2**31], [[1]], [-1]):
        with pytest.raises(ValueError, match="prompt"):
            problem_key(wrong)
