"""Reading answers out of texts, and voting."""

from collections import Counter
from itertools import product

import pytest
from workloads.answers import boxed_text, extract_answer, is_decided, majority_answer


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


@pytest.mark.parametrize("num_known", range(5))
@pytest.mark.parametrize("num_missing", range(4))
def test_a_vote_is_decided_where_nothing_could_change_it(num_known, num_missing):
    """For of two that are level the one found first wins, whenever it was found."""

    def leading(answers) -> set:
        votes = Counter(answer for answer in answers if answer is not None)
        return {answer for answer, count in votes.items() if count == max(votes.values())}

    for known in product([1, 2, None], repeat=num_known):
        ways = [leading([*known, *others]) for others in product([1, 2, 3, None], repeat=num_missing)]
        assert is_decided(known, num_missing) == (len(ways[0]) == 1 and all(way == ways[0] for way in ways)), known


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed{1} or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{} {", ""),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"\boxed 7", None),
        (r"} \boxed{8}} {\boxed{9", "8"),
        (r"\boxed{a \boxed{b} c}", "b"),
        pytest.param(r"\boxed{" * 100_000, None, id="a loop of boxes"),
        ("", None),
    ],
)
def test_what_a_box_holds(text, found):
    assert boxed_text(text) == found
