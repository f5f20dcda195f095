"""The memory of nearest neighbours against a slow twin that keeps a list, and its limits."""

import numpy as np
import pytest

from stand.drafters.neighbours.memory import MOST_ASKED, NUM_NEAREST, SHARPNESS, Entries, NeighbourMemory
from stand.trees import NO_TOKEN

DIM, WIDTH = 5, 4


def some_entries(rng, count, *, num_tokens=6) -> Entries:
    ids = rng.permuted(np.tile(np.arange(9, dtype=np.int32), (count, 1)), axis=1)[:, :WIDTH].copy()
    ids[rng.random((count, WIDTH)) < 0.2] = NO_TOKEN
    probs = np.where(ids < 0, 0.0, rng.random((count, WIDTH)) / WIDTH).astype(np.float32)
    states = rng.standard_normal((2, count, DIM)).astype(np.float32) + 3.0  # they have a part in common
    return Entries(rng.integers(0, num_tokens, count).astype(np.int32), *states, ids, probs)


class SlowMemory:
    """The same with a list of entries that never ends."""

    def __init__(self, most_entries):
        self.held, self.befores, self.most_entries = [], [], most_entries

    def mean(self):
        return np.mean(self.befores, axis=0, dtype=np.float64)

    def add(self, entries):
        self.befores += list(entries.befores)
        centred = [before - self.mean() for before in entries.befores]
        columns = (entries.tokens, centred, entries.afters, entries.top_ids, entries.top_probs)
        self.held += list(zip(*columns, strict=True))

    def nearest(self, token, before):
        found, other = [], before - self.mean()
        for held, one, after, ids, probs in self.held[-self.most_entries :]:
            if held == token:
                found.append((one @ other / np.linalg.norm(one) / np.linalg.norm(other), after, ids, probs))
        found = sorted(found[-MOST_ASKED:], key=lambda one: -one[0])[:NUM_NEAREST]
        if not found:
            return None
        best = found[0][0]
        shares = np.array([np.exp(SHARPNESS * (one[0] - best)) for one in found])
        shares /= shares.sum()
        law = dict.fromkeys(range(9), 0.0)
        for share, (_, _, ids, probs) in zip(shares, found, strict=True):
            for token_id, prob in zip(ids.tolist(), probs.tolist(), strict=True):
                if token_id >= 0:
                    law[token_id] += share * prob * min(max(best, 0.1), 1.0) ** 2
        likeliest = sorted(law.values(), reverse=True)[:WIDTH]
        return law, likeliest, shares @ np.array([one[1] for one in found])


@pytest.mark.parametrize(("most_entries", "num_tokens"), [(4000, 2), (4000, 40), (50, 6), (1, 2)])
def test_it_answers_as_a_slow_twin(most_entries, num_tokens):
    rng = np.random.default_rng(most_entries + num_tokens)
    fast, slow = NeighbourMemory(dim=DIM, width=WIDTH, most_entries=most_entries), SlowMemory(most_entries)
    fast.add(some_entries(rng, 0))  # as a first prompt of two tokens: there is no mean yet
    assert fast.nearest([0], np.ones((1, DIM), np.float32)) is None
    for count in (7, 0, 300, 900, 1, 20):
        entries = some_entries(rng, count, num_tokens=num_tokens)
        fast.add(entries)
        slow.add(entries)
        assert len(fast) == min(len(slow.held), most_entries)
        asked = [*range(0, num_tokens + 1, max(num_tokens // 6, 1)), 0, num_tokens + 9]
        befores = rng.standard_normal((len(asked), DIM)).astype(np.float32) + 3.0
        expected = [slow.nearest(token, before) for token, before in zip(asked, befores, strict=True)]
        answers = fast.nearest(asked, befores)
        known = [place for place, answer in enumerate(expected) if answer is not None]
        assert answers.places.tolist() == known
        assert answers.ids.shape == answers.probs.shape == (len(known), WIDTH)
        assert (np.diff(answers.probs, axis=1) <= 0).all() and ((answers.ids < 0) == (answers.probs == 0)).all()
        for place, ids, probs, state in zip(known, answers.ids, answers.probs, answers.states, strict=True):
            law, likeliest, after = expected[place]
            np.testing.assert_allclose(probs, likeliest, atol=1e-4)
            np.testing.assert_allclose(probs, [law[one] if one >= 0 else 0.0 for one in ids.tolist()], atol=1e-4)
            np.testing.assert_allclose(state, after, atol=1e-3)


def test_the_nearer_state_decides():
    """One token, two states, two laws; far from both, probabilities are small."""
    memory = NeighbourMemory(dim=2, width=1, most_entries=8)
    states = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=np.float32)  # their mean is zero
    ids = np.arange(4, dtype=np.int32)[:, None]
    memory.add(Entries(np.array([7, 7, 8, 8], np.int32), states, states, ids, np.ones((4, 1), np.float32)))
    answers = memory.nearest([7, 7, 8, 8], states)
    assert answers.ids[:, 0].tolist() == [0, 1, 2, 3] and (answers.probs > 0.99).all()
    np.testing.assert_allclose(answers.states, states, atol=1e-6)
    assert memory.nearest([7], np.array([[-1.0, -0.2]], np.float32)).probs < 0.02
    assert memory.nearest([9], states[:1]) is None


def test_a_token_of_no_chance_is_no_answer():
    memory = NeighbourMemory(dim=2, width=2, most_entries=8)
    states, ids = np.eye(2, dtype=np.float32), np.array([[3, 4], [5, 6]], np.int32)
    memory.add(Entries(np.array([7, 8], np.int32), states, states, ids, np.array([[1, 0], [0.5, 0.25]], np.float32)))
    answers = memory.nearest([7, 8], states)
    assert answers.ids.tolist() == [[3, NO_TOKEN], [5, 6]]


def test_memory_doubles_where_entries_do_not_fit():
    memory, rng = NeighbourMemory(dim=DIM, width=WIDTH, most_entries=5000), np.random.default_rng(0)

    def room_for(count: int) -> int:
        memory.add(some_entries(rng, count))
        return len(memory._entries.tokens)

    assert [room_for(count) for count in (1024, 1, 1023, 1, 3000)] == [1024, 2048, 2048, 4096, 5000]
