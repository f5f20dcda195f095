"""Reading answers out of texts, and voting."""

import pytest
from workloads.answers import extract_answer, majority_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is 4.\n</think>\nAnswer: 17", 17),
        ("The answer is 12", 12),
        ("**Final Answer:** 3", 3),
        (r"Answer: 5, no: \boxed{6}", 6),
        (r"\boxed{1} and then \boxed{ 023 }", 23),
        (r"\boxed{\text{42}}", 42),
        (r"\boxed{1,024}", 1024),
        ("Answer: -7", -7),
        ("Answer: 5\nAnswer: 6", 6),
        (r"\boxed{4}</think> still thinking", 4),
        (r"maybe \boxed{4}</think>Answer: 9", 9),
        ("I do not know, perhaps 12", None),
        (r"\boxed{x + 1}", None),
        ("Answer: 12.5", None),
        ("Answer: 3/4", None),
        ("Answer: 12.", 12),
        pytest.param("Answer: " + "3" * 5000, None, id="more digits than Python reads"),
        ("", None),
    ],
)
def test_extract(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("votes", "winner"),
    [([1, 2, 2], 2), ([3, None, None, None], 3), ([5, 4, 4, 5], 5), ([None, None], None), ([], None)],
)
def test_majority(votes, winner):
    assert majority_answer(votes) == winner
