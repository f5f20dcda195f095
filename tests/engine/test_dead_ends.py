"""Texts behind which processors leave no token: what is asked there, and whose error that is. As without drafts."""

import threading

import pytest
import torch
from tiny_models import tiny_model
from transformers import LogitsProcessor, StoppingCriteria
from waiting_prompt import PATIENCE, WaitingPrompt

import stand

PROMPT, OTHER, LAST = [7], [5, 9, 11, 4, 5, 9], 60
SETTINGS = {"max_new_tokens": 12, "temperature": 0.9, "stop_token_ids": []}


def engine_of() -> stand.Engine:
    return stand.wrap(tiny_model("qwen2"), verifier="match", drafter=stand.BlendedDrafter(budget=12))


def outcome(**asked) -> list | str:
    """The tokens, or the error's kind and what it begins with. Twice, so that drafts are what the row says."""
    engine = engine_of()
    try:
        engine.generate(input_ids=[PROMPT], seed=0, **{**SETTINGS, "draft": asked.get("draft", True)})
        return list(engine.generate(input_ids=[PROMPT], **SETTINGS, **asked).token_ids[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:60]


class NoLaw(LogitsProcessor):
    """Leaves no law behind so many tokens of a row that begins with 7: its scores have this value."""

    def __init__(self, length: int, value: float):
        self.length, self.value = length, value

    def __call__(self, input_ids, scores):
        is_meant = input_ids[0, 0] == 7 and input_ids.shape[1] == self.length
        return torch.full_like(scores, self.value) if is_meant else scores


class Shorter(StoppingCriteria):
    """Is asked for no row of more tokens."""

    def __init__(self, most: int):
        self.most = most

    def __call__(self, input_ids, scores, **beside):
        assert input_ids.shape[1] <= self.most, "asked about a token that nothing allows"
        return torch.zeros(len(input_ids), dtype=torch.bool)


def trie(length: int):
    """No token behind so many, and an error beyond."""

    def allowed(number: int, tokens: torch.Tensor) -> list[int]:
        return {length: []}.get(len(tokens), list(range(3, LAST))) if len(tokens) <= length else {}[len(tokens)]

    return allowed


LOWEST = torch.finfo(torch.float32).min
BROKEN = [-torch.inf, torch.nan, torch.inf, LOWEST, -LOWEST]  # the last two overflow at temperature 0.9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize(
    "asked_at",
    [
        *[lambda length, value=value: {"logits_processors": [NoLaw(length, value)]} for value in BROKEN],
        lambda length: {"prefix_allowed_tokens_fn": trie(length)},
        lambda length: {"logits_processors": [NoLaw(length, -torch.inf)], "stopping_criteria": [Shorter(length)]},
        lambda length: {"prefix_allowed_tokens_fn": trie(length), "stopping_criteria": [Shorter(length)]},
    ],
    ids=[*map(str, BROKEN), "trie", "criterion", "trie and criterion"],
)
def test_errors_are_those_without_drafts(asked_at, length, seed):
    plain = outcome(**asked_at(length), seed=seed, draft=False)
    assert outcome(**asked_at(length), seed=seed) == plain and plain.startswith("ValueError: ")


@pytest.mark.long
@pytest.mark.parametrize("value", BROKEN)
def test_dead_ends_that_no_row_comes_to_change_nothing(value):
    """They are drafted: behind a token that is allowed, and not drawn this time."""
    token = int(engine_of().generate(input_ids=[PROMPT], **SETTINGS, seed=0).token_ids[0][2])

    class Avoids(LogitsProcessor):
        def __call__(self, input_ids, scores):
            is_meant = input_ids.shape[1] > 1 and input_ids[0, -1] == token
            return torch.full_like(scores, value) if is_meant else scores

    seeds, asked = range(1, 30), {"logits_processors": [Avoids()]}
    plain = [outcome(**asked, seed=seed, draft=False) for seed in seeds]
    assert [outcome(**asked, seed=seed) for seed in seeds] == plain
    assert any(isinstance(found, list) for found in plain) and any(isinstance(found, str) for found in plain)


def served_beside(failing, **asked) -> tuple[list, list]:
    """What `OTHER` is answered in an open run beside a request that fails so, and without it."""
    found = []
    for has_failing in (True, False):
        gate = threading.Event()
        with engine_of().open_run(**SETTINGS, seed=3, **asked) as run:

            def submit(prompt: list[int], row: int, run=run, gate=gate):
                return run.submit(stand.Request(WaitingPrompt(gate, prompt), rows=[row]))

            failed = submit(PROMPT, 0) if has_failing else None
            other = submit(OTHER, 1)
            gate.set()
            found.append(other.result(PATIENCE)[0].token_ids)
            if has_failing:
                with pytest.raises(failing) as raised:
                    failed.result(PATIENCE)
                del raised
    return found


class Insists(LogitsProcessor):
    """Brings a token back in rows that begin with 7."""

    def __call__(self, input_ids, scores):
        is_meant = (input_ids[:, 0] == 7) & (input_ids.shape[1] == 3)
        return torch.where(is_meant[:, None], scores.index_fill(1, torch.tensor([8]), 90.0), scores)


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("value", BROKEN)
def test_the_others_of_a_run_are_served(value, draft):
    beside, alone = served_beside(ValueError, logits_processors=[NoLaw(4, value)], draft=draft)
    assert beside == alone


@pytest.mark.parametrize("draft", [True, False])
def test_a_token_that_is_brought_back_is_its_own_requests_error(draft):
    laws = [stand.ThinkingBudget(2, begin=None, end=9), Insists()]
    beside, alone = served_beside(RuntimeError, logits_processors=laws, draft=draft)
    assert beside == alone


@pytest.mark.parametrize("draft", [True, False])
def test_criteria_are_asked_about_what_was_drawn_alone(draft):
    asked = {"logits_processors": [NoLaw(4, -torch.inf)], "stopping_criteria": [OfSevens()]}
    beside, alone = served_beside(ValueError, **asked, draft=draft)
    assert beside == alone


class OfSevens(Shorter):
    def __init__(self):
        super().__init__(4)

    def __call__(self, input_ids, scores, **beside):
        return super().__call__(input_ids if input_ids[0, 0] == 7 else input_ids[:, :1], scores)


@pytest.mark.parametrize("is_mended", [True, False])
def test_what_is_broken_in_the_model_is_nobodys_own(monkeypatch, is_mended):
    """One logit that is no number: with `remove_invalid_values` all but the row without a law are served."""
    engine = engine_of()
    hook = engine.model.lm_head.register_forward_hook(
        lambda module, inputs, output: output.index_fill(-1, torch.tensor([30]), torch.nan)
    )
    try:
        run = engine.open_run(
            **SETTINGS, seed=3, remove_invalid_values=is_mended, logits_processors=[NoLaw(4, torch.nan)], draft=False
        )
        with run:
            gate = threading.Event()
            futures = [run.submit(stand.Request(WaitingPrompt(gate, prompt))) for prompt in (PROMPT, OTHER)]
            gate.set()
            errors = [future.exception(PATIENCE) for future in futures]
        assert [error is None for error in errors] == [False, is_mended]
        assert "NaN" in str(errors[1]) or is_mended
        del errors, futures
    finally:
        hook.remove()
