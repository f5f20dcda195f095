"""Features together, drawn at random: greedy rows are transformers' own, sampled ones those of plain decoding."""

import importlib.util
import warnings
from contextlib import nullcontext

import pytest
import torch
from combinations import Combination
from letter_tokenizer import letter_tokenizer
from plain_logprobs import difference, plain_log_laws

import stand
from stand.plugins.generate import ATTRIBUTE, stand_generate, use_engine

DAILY, ALL = 16, 600
SEEDS = [*range(DAILY), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(DAILY, ALL))]
TOLERANCE = 2e-3


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    """Captured steps by torch's operations; without Triton every case is eager."""
    if importlib.util.find_spec("triton") is not None:
        from plain_kernels import use_plain_kernels

        use_plain_kernels(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "steps are eager in this call|a captured step ended in StepLimitError")
        yield


def drawn(seed: int, *, is_sampled: bool) -> Combination:
    made = Combination.drawn(seed, is_sampled=is_sampled)
    if made.is_captured:
        pytest.importorskip("triton")
    return made


def rows_of(engine: stand.Engine, made: Combination, prompts) -> tuple[list[list[int]], list]:
    """(new tokens of each prompt, log-probabilities where they were asked for) through the combination's door."""
    settings = {**made.settings, **made.door_settings}
    if made.door == "run":
        found = sorted(engine.run(prompts, **settings), key=lambda one: one.row)
        return [one.token_ids for one in found], [one.logprobs for one in found]
    if made.door == "stream":
        pieces = [""] * len(prompts)
        for row, piece in engine.stream(prompts, **settings):
            pieces[row] += piece
        return [engine.tokenizer(text)["input_ids"] if text else [] for text in pieces], []
    if made.door == "custom":
        return [by_custom_generate(engine, prompt, made) for prompt in prompts], []
    output = engine.generate(prompts, **settings)
    return output.token_ids, output.logprobs or []


def by_custom_generate(engine: stand.Engine, prompt: list[int], made: Combination) -> list[int]:
    ids = torch.tensor([prompt])
    use_engine(engine)
    try:
        output = engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), custom_generate=stand_generate,
            logits_processor=made.settings.get("logits_processors"), **made.for_transformers(),
        )  # fmt: skip
    finally:
        delattr(engine.model, ATTRIBUTE)  # the model outlives this test, and the engine would with it
    return output[0, len(prompt) :].tolist()


def check_logprobs(made: Combination, tokens: list[list[int]], found: list) -> None:
    for prompt, new, one in zip(made.prompts, tokens, found, strict=False):
        if one is not None:
            assert difference(one, new, plain_log_laws(made.model, prompt, new)) < TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_rows_are_transformers_own(seed):
    """Twice, the second time by drafts from what was learned; then a plain call, as if nothing had been."""
    made = drawn(seed, is_sampled=False)
    expected = made.by_transformers()
    engine = made.engine(letter_tokenizer() if made.door == "stream" else None)
    with engine.keep_prompts(1e8) if made.keeps_prompts else nullcontext():
        for _ in range(2):
            tokens, logprobs = rows_of(engine, made, made.prompts)
            if made.door == "stream":
                plain = engine.generate(made.prompts, **made.settings, draft=False)
                assert plain.token_ids == expected
                assert [engine.tokenizer.decode(row, skip_special_tokens=True) for row in tokens] == plain.texts
            else:
                assert tokens == expected
            check_logprobs(made, tokens, logprobs)
    settings = {"max_new_tokens": 5, "temperature": 0}
    assert engine.generate(made.prompts, **settings).token_ids == plain_rows(made, settings)


def plain_rows(made: Combination, settings: dict) -> list[list[int]]:
    return stand.wrap(made.model, backend="sdpa").generate(made.prompts, **settings, draft=False).token_ids


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_rows_are_those_of_plain_decoding(seed):
    """Under `match` a token follows from seed, prompt and row, whatever is drafted, learned, kept or waits."""
    made = drawn(seed, is_sampled=True)
    expected = stand.wrap(made.model, backend="sdpa", verifier="match").generate(
        made.prompts, **made.settings, draft=False
    )
    engine = made.engine()
    with engine.keep_prompts(1e8) if made.keeps_prompts else nullcontext():
        for _ in range(2):
            tokens, logprobs = rows_of(engine, made, made.prompts)
            assert tokens == expected.token_ids
            check_logprobs(made, tokens, logprobs)
