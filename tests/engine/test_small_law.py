"""The whole path on a vocabulary so small that 10,000 continuations tell their law: counts against an enumeration.

The expected law comes from plain forwards and from processors written out here in the order of transformers' documents.
"""

import numpy as np
import pytest
import torch
from small_law import Law, continuation_law, p_of_continuations, small_model
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as library

import stand
from stand.trees import LookupTree, TreeShape

SIZE, TOKENS, COUNT = 7, 3, 10_000
PROMPT, END = [3, 5, 1, 3], 2
FALSE_ALARM = 1e-3
OTHER = (torch.arange(SIZE) + torch.arange(2)[:, None]) % 2  # by the last token's parity


class Alternate(LogitsProcessor):
    """The user's own: makes a token of the other parity than the last one likelier, the more the longer the text."""

    def __call__(self, input_ids, scores):
        return scores + 0.25 * input_ids.shape[1] * OTHER[int(input_ids[0, -1]) % 2]


SETTINGS = {
    "temperature": 0.8,
    "top_k": 6,
    "top_p": 0.93,
    "typical_p": 0.9,
    "repetition_penalty": 1.5,
    "begin_suppress_tokens": [0],
    "min_new_tokens": 1,
    "stop_token_ids": [END],
    "max_new_tokens": TOKENS,
}


def processors(order: str) -> LogitsProcessorList:
    """`order`: the letters of penalty, minimum, begin, own, temperature, k, nucleus, typical, as they run."""
    made = {
        "p": library.RepetitionPenaltyLogitsProcessor(1.5),
        "m": library.MinNewTokensLengthLogitsProcessor(len(PROMPT), 1, END),
        "b": library.SuppressTokensAtBeginLogitsProcessor([0], len(PROMPT)),
        "o": Alternate(),
        "t": library.TemperatureLogitsWarper(0.8),
        "k": library.TopKLogitsWarper(6),
        "n": library.TopPLogitsWarper(0.93),
        "y": library.TypicalLogitsWarper(0.9),
    }
    return LogitsProcessorList([made[letter] for letter in order])


IN_ORDER, WRONG_ORDERS = "pmbotkny", ("ompbtkny", "pmbotkyn", "pmbtknyo")


def exact_law(order: str) -> Law:
    return continuation_law(small_model(SIZE), PROMPT, processors(order), end=END, tokens=TOKENS)


def counted(verifier: str, num_calls: int) -> tuple[dict[tuple[int, ...], int], float]:
    drafter = stand.FixedShapeDrafter(LookupTree(), TreeShape.from_branching([2, 1]))
    engine = stand.wrap(small_model(SIZE), drafter=drafter, verifier=verifier)
    asked = {"input_ids": PROMPT, "logits_processors": [Alternate()], **SETTINGS}
    engine.generate(**asked, num_return_sequences=200, seed=10**6)
    counts: dict[tuple[int, ...], int] = {}
    for call in range(num_calls):
        output = engine.generate(**asked, num_return_sequences=COUNT // 4, seed=call, learn=False)
        for tokens in output.token_ids:
            counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    return counts, output.stats.mean_acceptance_length


@pytest.mark.long
@pytest.mark.parametrize("num_calls", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_continuations_follow_the_exact_law_and_another_order_is_seen(num_calls):
    """Half of COUNT; all of it, which finds two percent too much in a cell, among the slow tests."""
    counts, tokens_per_step = counted("traversal", num_calls)
    assert sum(counts.values()) == num_calls * COUNT // 4 and tokens_per_step > 1.2
    law = exact_law(IN_ORDER)
    assert len(law) > 40 and {len(path) for path in counts} == {2, 3}
    assert p_of_continuations(counts, law) > FALSE_ALARM
    for order in WRONG_ORDERS:
        assert p_of_continuations(counts, exact_law(order)) < 1e-6, order


def test_the_test_finds_two_percent_too_much_in_one_of_ten_cells():
    """Its power and its false alarms, on laws of its own."""
    generator = np.random.default_rng(0)
    law = {(cell,): 0.1 for cell in range(10)}
    shifted = [0.12, *[0.88 / 9] * 9]

    def drawn(weights) -> dict[tuple[int, ...], int]:
        return {(cell,): count for cell, count in enumerate(generator.multinomial(COUNT, weights).tolist())}

    assert p_of_continuations(drawn(shifted), law) < FALSE_ALARM
    assert p_of_continuations({(99,): COUNT}, law) == 0.0
    values = [p_of_continuations(drawn([0.1] * 10), law) for _ in range(400)]
    assert np.mean([value < 0.1 for value in values]) == pytest.approx(0.1, abs=0.05)
