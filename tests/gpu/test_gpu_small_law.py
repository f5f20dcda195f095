"""The captured step on a vocabulary so small that counts tell the law of whole continuations.

The step's own code throughout: packets, cache, rules on the device. Its kernels are the array twins where many
continuations are counted, and the real ones, in Triton's interpreter, where few are. The expected law comes from plain
forwards and transformers' warpers.
"""

import pytest

pytest.importorskip("triton")

from plain_kernels import tree_attention, use_plain_kernels
from small_law import continuation_law, p_of_continuations, small_model
from transformers import LogitsProcessorList
from transformers.generation import logits_process as library

import stand
from stand.gpu import kernel_attention
from stand.gpu.pooled_step import PooledStep
from stand.trees import LookupTree, TreeShape
from stand.verifiers import VerifierNoise

SIZE, TOKENS, ROWS = 7, 3, 100
PROMPT, END = [5, 2], 1
SETTINGS = {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.2}  # each takes a token out, in this order alone
SHARPER = {"temperature": 0.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # so that thresholds lie between 0 and 1
WRONG_ORDERS = ("tnkm", "kntm", "tmnk", "tkn", "tnm")
MANY = pytest.param(20_000, marks=pytest.mark.slow)
PENALTY = 3.0
FALSE_ALARM = 1e-3


class PromptPenalty(library.RepetitionPenaltyLogitsProcessor):
    """Wrong: of the prompt alone."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids[:, : len(PROMPT)], scores)


def model():
    return small_model(SIZE, num_attention_heads=1, num_key_value_heads=1, head_dim=64, num_hidden_layers=1)


def exact_law(order: str):
    """`order`: the letters of penalty, temperature, k, nucleus, min_p, as they run; w: one with another prefix."""
    made = {
        "p": library.RepetitionPenaltyLogitsProcessor(PENALTY),
        "w": PromptPenalty(PENALTY),
        "t": library.TemperatureLogitsWarper(SETTINGS["temperature"]),
        "k": library.TopKLogitsWarper(SETTINGS["top_k"]),
        "n": library.TopPLogitsWarper(SETTINGS["top_p"]),
        "m": library.MinPLogitsWarper(SETTINGS["min_p"]),
    }
    chain = LogitsProcessorList([made[letter] for letter in order])
    return continuation_law(model(), PROMPT, chain, end=END, tokens=TOKENS)


def counted(verifier: str, count: int, *, rows: int = ROWS, branching=(2, 1), **more) -> dict[tuple[int, ...], int]:
    """How often each continuation came; drafts from a lookup that has read 200 of a sharper law and stays as it is."""
    lookup, shape = LookupTree(), TreeShape.from_branching(branching)
    asked = {"input_ids": PROMPT, "stop_token_ids": [END], "max_new_tokens": TOKENS, **SETTINGS, **more}
    drafter = stand.FixedShapeDrafter(lookup, shape, kind="coupled" if verifier == "coupled" else "sampled")
    teacher = stand.wrap(model(), drafter=stand.FixedShapeDrafter(lookup, shape), backend="sdpa")
    teacher.generate(**{**asked, **SHARPER}, num_return_sequences=200, seed=10**6)
    engine = stand.wrap(model(), drafter=drafter, verifier=verifier, backend="triton", fuse=False)
    counts: dict[tuple[int, ...], int] = {}
    for call in range(count // rows):
        output = engine.generate(**asked, num_return_sequences=rows, seed=call, learn=False)
        for tokens in output.token_ids:
            counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    assert str(engine.backend) == "triton" and output.stats.mean_acceptance_length > 1.2
    return counts


@pytest.mark.parametrize("count", [3000, MANY])
@pytest.mark.parametrize("verifier", ["traversal", "match", "coupled"])
def test_continuations_follow_the_exact_law_and_another_order_is_seen(monkeypatch, verifier, count):
    use_plain_kernels(monkeypatch)
    counts, law = counted(verifier, count), exact_law("tknm")
    assert len(law) > 10 and sum(counts.values()) == count and {len(path) for path in counts} == {1, 2, 3}
    assert p_of_continuations(counts, law) > FALSE_ALARM
    for order in WRONG_ORDERS:
        assert p_of_continuations(counts, exact_law(order)) < 1e-6, order


@pytest.mark.parametrize("count", [3000, MANY])
@pytest.mark.parametrize("verifier", ["traversal", "match", "coupled"])
def test_continuations_behind_a_penalty_follow_the_exact_law(monkeypatch, verifier, count):
    """Steps in two parts. Controls: no penalty, one behind the filters, one of the prompt alone."""
    use_plain_kernels(monkeypatch)
    monkeypatch.setattr(PooledStep, "starting", None)  # no eager step
    counts = counted(verifier, count, repetition_penalty=PENALTY)
    assert p_of_continuations(counts, exact_law("ptknm")) > FALSE_ALARM
    for order in ("tknm", "tknmp", "wtknm"):
        assert p_of_continuations(counts, exact_law(order)) < 1e-6, order


def test_a_draw_that_uses_its_noise_twice_is_seen(monkeypatch):
    """The residual draw with the number that tested the last node of the row."""
    use_plain_kernels(monkeypatch)
    fill_tests = VerifierNoise.fill_tests

    def once(noise, batch, accept, resample):
        fill_tests(noise, batch, accept, resample)
        resample[: len(batch)] = accept[batch.offsets[1:] - 1]

    monkeypatch.setattr(VerifierNoise, "fill_tests", once)
    assert p_of_continuations(counted("traversal", 3000, branching=(1, 1)), exact_law("tknm")) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("count", "rows"), [(50, 25), (2000, 100)])
def test_the_real_kernels_follow_the_law(monkeypatch, count, rows):
    """All but attention's: its programs would be most of the time."""
    monkeypatch.setattr(kernel_attention, "tree_attention", tree_attention)
    assert p_of_continuations(counted("traversal", count, rows=rows), exact_law("tknm")) > FALSE_ALARM
