"""Texts in rows of one array as histories: what lookups read there is what lists of token ids would give them."""

import numpy as np
import pytest

from stand.trees import BlendedLookup, LookupTree, TreeShape
from stand.trees.layouts.text_rows import TextRows


def made(seed: int = 0) -> tuple[TextRows, list[np.ndarray]]:
    """Texts of 1 to 40 tokens in rows out of order, and the same as lists."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 4, (9, 40)).astype(np.int32)
    rows, lengths = generator.permutation(9)[:6], np.array([40, 1, 7, 13, 39, 2])
    return TextRows(tokens, lengths, rows), [tokens[row, :end] for row, end in zip(rows, lengths, strict=True)]


def arrays(batch) -> list[list]:
    return [getattr(batch, name).tolist() for name in ("token_ids", "parents", "offsets", "law")]


@pytest.mark.parametrize("kind", ["deterministic", "sampled"])
def test_drafts_are_those_of_lists(kind):
    texts, lists = made()
    blended, longest = BlendedLookup(), LookupTree()
    noise = {"seed": 3, "rows": np.arange(6), "steps": np.arange(6), "kind": kind}
    for lookup in (blended, longest):
        lookup.learn([], np.random.default_rng(1).integers(0, 4, 500))
    assert arrays(blended.draft(texts, 30, **noise)) == arrays(blended.draft(lists, 30, **noise))
    shape = TreeShape.paper()
    assert arrays(longest.draft(texts, shape, **noise)) == arrays(longest.draft(lists, shape, **noise))
    backwards = TextRows(texts.tokens, texts.lengths, texts.rows[::-1].copy())
    assert arrays(blended.draft(backwards, 30, **noise)) != arrays(blended.draft(lists, 30, **noise))


def test_laws_are_learned_as_with_lists():
    texts, lists = made()
    digests = []
    for befores in (TextRows(texts.tokens, texts.lengths - 1, texts.rows), [text[:-1] for text in lists]):
        lookup = BlendedLookup()
        lookup.learn([], lists[0])
        batch = lookup.draft(texts, 12, seed=0, rows=np.zeros(6), steps=np.zeros(6))
        ids = np.tile(np.array([1, 3], np.int32), (batch.num_nodes, 1))
        lookup.learn_batch(batch, befores, ids, np.full(ids.shape, 0.5, np.float32))
        digests.append([lookup.predict(text)[1].tolist() for text in lists])
    assert digests[0] == digests[1]


def test_it_is_a_sequence_of_texts():
    texts, lists = made()
    assert len(texts) == 6 and all(np.array_equal(one, other) for one, other in zip(texts, lists, strict=False))
    first_ones = TextRows(texts.tokens, texts.lengths)
    assert first_ones[2].tolist() == texts.tokens[2, :7].tolist()


def test_lists_become_one_array():
    lists = [[5, 6, 7], [], [9], (1, 2), np.array([3, 4, 5])]
    texts = TextRows.from_lists(lists)
    assert texts.tokens.tolist() == [[5, 6, 7], [0, 0, 0], [9, 0, 0], [1, 2, 0], [3, 4, 5]]
    assert [texts[row].tolist() for row in range(5)] == [list(one) for one in lists]
    assert TextRows.from_lists([]).tokens.shape == (0, 0)
    for wrong in ([[1], [2**31]], [["a"]]):
        with pytest.raises(ValueError, match="below 2\\*\\*31"):
            TextRows.from_lists(wrong)


def test_what_is_no_such_array_is_refused():
    tokens, lengths = np.zeros((3, 5), np.int32), np.array([5, 5])
    for wrong in (tokens.astype(np.int64), tokens.tolist(), tokens[:, ::2], tokens[0]):
        with pytest.raises(ValueError, match="tokens must be"):
            TextRows(wrong, lengths)
    with pytest.raises(ValueError, match="lengths must be"):
        TextRows(tokens, lengths.astype(np.int32))
    with pytest.raises(ValueError, match="one row per text"):
        TextRows(tokens, lengths, np.array([0]))


@pytest.mark.parametrize(
    ("length", "row", "token", "message"),
    [(6, 0, 0, "in their array"), (-1, 0, 0, "in their array"), (5, 3, 0, "in their array"), (5, -1, 0, "in their"),
     (5, 0, -1, "negative"), (0, 0, 0, "empty")],
)  # fmt: skip
def test_what_lies_outside_is_refused_where_it_is_read(length, row, token, message):
    texts = TextRows(np.full((3, 5), token, np.int32), np.array([length]), np.array([row]))
    with pytest.raises(ValueError, match=message):
        BlendedLookup().draft(texts, 3, seed=0, rows=[0], steps=[0])
