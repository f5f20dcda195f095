"""A draft that is revealed node by node: which tokens the random numbers name, at the ends of their range too."""

import numpy as np
import pytest

from stand.drafters.growing_draft import GrowingDraft
from stand.trees import ROOT

LARGEST = np.nextafter(1.0, 0.0)  # of random numbers in [0, 1)


def revealed(uniform, law):
    draft = GrowingDraft(np.full(2, uniform), max_depth=1, is_greedy=False, token_ids=[0])
    draft.open(ROOT, np.arange(1, len(law) + 1, dtype=np.int32), law)
    return draft.token_ids[draft.reveal(ROOT)]


def test_the_largest_random_number_names_the_last_possible_token():
    """Also where the law's running sum ends below or above 1, which is its rounding."""
    ends = set()
    for num_tokens in range(2, 200):
        law = np.append(np.full(num_tokens, 1.0 / num_tokens), 0.0)
        ends.add(np.sign((law / law.sum()).cumsum()[-1] - 1.0))
        assert revealed(LARGEST, law) == num_tokens
    assert ends == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 2), (0.2499, 2), (0.2501, 3), (0.74, 3), (0.76, 5)])
def test_a_random_number_names_the_token_in_whose_share_it_lies(uniform, token):
    assert revealed(uniform, np.array([0.0, 0.25, 0.5, 0.0, 0.25])) == token
