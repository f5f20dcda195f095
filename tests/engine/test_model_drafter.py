"""A smaller model as drafter: its recorded laws, its cache, and what the engine writes with it."""

import copy
from functools import lru_cache

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from exact_drafts import recorded_probability
from failures import failing_after
from tiny_models import VOCABULARY_SIZE, tiny_model
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel
from two_tokens import plain_greedy, two_token_statistic

import stand
from stand import ModelDrafter
from stand.drafters import draft_model
from stand.trees import DraftBatch

PROMPTS = [[5, 9, 11, 4, 5, 9], [7], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32]]
TARGET, SMALL = "llama", "qwen2"


def engine_of(verifier: str = "block", *, small: str = SMALL, **settings) -> stand.Engine:
    return stand.wrap(tiny_model(TARGET), verifier=verifier, drafter=ModelDrafter(tiny_model(small), **settings))


@torch.inference_mode()
def plain_law(family: str, context: list[int]) -> np.ndarray:
    """[V] float64: the model's law after `context`, by one plain forward."""
    logits = tiny_model(family)(torch.tensor([context]), use_cache=False).logits[0, -1]
    return torch.softmax(logits.double(), dim=0).numpy()


def truncated(law: np.ndarray, size: int, temperature: float = 1.0) -> np.ndarray:
    """The `size` most likely tokens of `law` at `temperature`."""
    weights = np.where(law >= np.sort(law)[-size], law, 0.0) ** (1 / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("verifier", ["block", "token", "match", "traversal"])
@pytest.mark.parametrize("small", [SMALL, TARGET])
def test_greedy_equals_transformers(verifier, small):
    output = engine_of(verifier, small=small, gamma=4).generate(input_ids=PROMPTS, max_new_tokens=30, temperature=0.0)
    assert output.token_ids == [plain_greedy(tiny_model(TARGET), tuple(prompt), 30) for prompt in PROMPTS]
    if small == TARGET:
        assert output.stats.mean_acceptance_length > 4


class CheckedDrafter(ModelDrafter):
    """Compares every recorded law with a plain forward over the node's whole context."""

    num_checked = 0

    def draft(self, request) -> DraftBatch:
        batch = super().draft(request)
        batch.check()
        for row, history in enumerate(request.histories):
            chain = batch[row]
            assert chain.num_nodes - 1 == min(self.gamma, request.max_depths[row])
            for node in range(1, chain.num_nodes):
                recorded = np.zeros(VOCABULARY_SIZE)
                recorded[chain.support_ids[node - 1]] = chain.law[node]
                law = plain_law(SMALL, [*history.tolist(), *chain.token_ids[1:node].tolist()])
                expected = truncated(law, self.law_size, self.temperature)
                np.testing.assert_allclose(recorded, expected, atol=1e-5)
                type(self).num_checked += 1
        return batch


def test_recorded_laws_are_the_models_own_whatever_happens_to_the_rows():
    """Rejections, rows that end and move, a second call with other prompts, a third with the first ones again."""
    drafter = CheckedDrafter(tiny_model(SMALL), gamma=3, temperature=0.8, num_candidates=9)
    engine = stand.wrap(tiny_model(TARGET), verifier="token", drafter=drafter)
    ends = list(range(0, VOCABULARY_SIZE, 9))  # rows end at different steps
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:1] * 2, PROMPTS):
        output = engine.generate(
            input_ids=prompts, num_return_sequences=2, max_new_tokens=14, temperature=1.0, seed=2, stop_token_ids=ends
        )
        assert len({len(tokens) for tokens in output.token_ids}) > 1
    assert drafter.num_checked > 200


def test_only_new_tokens_are_computed(monkeypatch):
    """What was rejected is forgotten, a step that gained all it could goes on, and one more token begins anew."""
    prefilled, forwarded = [], []
    prefill, run_plan = draft_model.prefill, draft_model.run_plan

    def counted_prefill(model, cache, prefix, **place):
        prefilled.append(len(prefix))
        return prefill(model, cache, prefix, **place)

    def counted_run(model, cache, plan):
        forwarded.append(plan.num_tokens)
        return run_plan(model, cache, plan)

    monkeypatch.setattr(draft_model, "prefill", counted_prefill)
    monkeypatch.setattr(draft_model, "run_plan", counted_run)
    drafter = CheckedDrafter(tiny_model(SMALL), gamma=3, num_candidates=9)
    history, drafted = list(range(3, 23)), []
    for step, num_gained in enumerate([0, 1, 4, 4, 5]):
        other = 7 if 7 not in drafted else 8
        history += [other] * num_gained
        forwarded.clear()
        drafted = drafter.draft(draft_request([np.array(history, np.int32)], step=step)).token_ids.tolist()
        assert forwarded == [1 if num_gained in (0, 5) else num_gained, 1, 1]
    assert prefilled == [19, 33]


def test_a_row_that_enters_leaves_the_others_keys_as_they_are(monkeypatch):
    """In a run places are handed on: the draft model reads every prompt once, equal ones that enter together, too."""
    prefilled = []
    prefill = draft_model.prefill

    def counted_prefill(model, cache, prefix, **place):
        prefilled.append(len(prefix))
        return prefill(model, cache, prefix, **place)

    monkeypatch.setattr(draft_model, "prefill", counted_prefill)
    CheckedDrafter.num_checked = 0
    drafter = CheckedDrafter(tiny_model(SMALL), gamma=3, temperature=0.8, num_candidates=9)
    engine = stand.wrap(tiny_model(TARGET), verifier="token", drafter=drafter)
    requests = [stand.Request(list(range(3, 20 + number)), max_new_tokens=5 + 7 * (number % 3)) for number in range(8)]
    run = engine.run([requests[0], requests[0], *requests], max_rows=3, temperature=1.0, seed=2, stop_token_ids=[])
    assert len(list(run)) == 10 and drafter.num_checked > 100
    assert prefilled == [len(request.prompt) - 1 for request in requests]


@pytest.mark.parametrize(
    ("verifier", "sharpened", "is_exact"),
    [
        ("block", 1.0, True),
        pytest.param("token", 1.0, True, marks=pytest.mark.slow),  # it reads what `block` reads
        ("match", 1.0, True),
        ("block", 0.5, False),
        pytest.param("token", 0.5, False, marks=pytest.mark.slow),
    ],
)
def test_the_first_two_tokens_follow_the_target(verifier, sharpened, is_exact):
    """Chi-square against the exact law; a drafter that records a flatter law than it draws from must be seen."""
    drafter = LyingDrafter(near_target(), gamma=3, num_candidates=8, sharpened=sharpened)
    engine = stand.wrap(tiny_model(TARGET), verifier=verifier, drafter=drafter)
    statistic = two_token_statistic(engine, tiny_model(TARGET), written=4, prompt=PROMPTS[0])
    assert (statistic < 50) == is_exact, statistic


@lru_cache
def near_target() -> PreTrainedModel:
    """The target with other weights, but much of its law: one step in five keeps a draft."""
    model, generator = copy.deepcopy(tiny_model(TARGET)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.3 * weights.std() * torch.randn(weights.shape, generator=generator)
    return model


class LyingDrafter(ModelDrafter):
    """Draws from the recorded law sharpened to temperature `sharpened` (1: honest)."""

    def __init__(self, model, *, sharpened: float, **settings):
        super().__init__(model, **settings)
        self.sharpened = sharpened

    def _draw(self, logits, points, *, is_greedy):
        drawn, support, _, _ = super()._draw(logits / self.sharpened, points, is_greedy=is_greedy)
        _, same_support, law, is_law = super()._draw(logits, points, is_greedy=is_greedy)
        assert np.array_equal(support, same_support)
        return drawn, support, law, is_law


class RememberingDrafter(ModelDrafter):
    """Keeps the batches that it drafted."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.batches = []

    def draft(self, *args, **kwargs) -> DraftBatch:
        self.batches.append(super().draft(*args, **kwargs))
        return self.batches[-1]


def test_every_chain_is_drawn_and_none_beside_its_law():
    """The recorded probabilities of all different chains come to 1: each depth has a random number of its own.

    Equal histories, three tokens of two candidates each: eight chains, the rarest of which 500 rows miss once in 10,000
    seeds.
    """
    drafter = RememberingDrafter(tiny_model(SMALL), gamma=3, num_candidates=2, temperature=4.0)
    engine = stand.wrap(tiny_model(TARGET), verifier="block", drafter=drafter)
    engine.generate(input_ids=PROMPTS[:1], num_return_sequences=500, max_new_tokens=4, temperature=1.0, seed=6)
    batch = drafter.batches[0]
    chains = {tuple(draft.token_ids[1:].tolist()): draft for draft in (batch[row] for row in range(500))}
    probabilities = [recorded_probability(DraftBatch.concatenate([draft])) for draft in chains.values()]
    assert len(chains) == 8 and min(probabilities) > 0.02
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-6)


def test_a_draft_model_like_the_target_is_never_rejected():
    engine = engine_of(small=TARGET, gamma=5, num_candidates=VOCABULARY_SIZE)
    settings = {
        "input_ids": PROMPTS,
        "max_new_tokens": 60,
        "temperature": 1.0,
        "top_k": 0,
        "seed": 4,
        "stop_token_ids": [],
    }
    stats = engine.generate(**settings).stats
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens == 150
    assert stats.mean_acceptance_length == 6.0


def test_the_same_seed_gives_the_same_rows_whatever_was_drafted_before():
    settings = {"input_ids": PROMPTS, "num_return_sequences": 2, "max_new_tokens": 20, "temperature": 1.0}
    fresh = engine_of().generate(**settings, seed=7)
    used = engine_of()
    used.generate(**settings, seed=8)
    assert used.generate(**settings, seed=7).token_ids == fresh.token_ids
    alone = engine_of().generate(**{**settings, "input_ids": PROMPTS[:1]}, seed=7)
    assert alone.token_ids == fresh.token_ids[:2]


def small_of(**changes) -> PreTrainedModel:
    """A model of learned positions, which has no more of them than its context."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    config.update(changes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("size", [VOCABULARY_SIZE - 30, VOCABULARY_SIZE + 3, VOCABULARY_SIZE + 400])
def test_vocabularies_of_unlike_sizes_draft_what_both_have(size, recwarn):
    """Qwen2.5's models have 151,936 tokens or 152,064, of which as many mean something."""
    engine = stand.wrap(tiny_model(TARGET), verifier="match", drafter=ModelDrafter(small_of(vocab_size=size)))
    told = [str(one.message) for one in recwarn if "target's vocabulary" in str(one.message)]
    assert len(told) == (size != VOCABULARY_SIZE + 3)  # too unlike for padding
    settings = {"input_ids": PROMPTS, "max_new_tokens": 16, "temperature": 2.0, "top_k": 0, "seed": 1}
    output = engine.generate(**settings, stop_token_ids=[])
    assert max(map(max, output.token_ids)) > VOCABULARY_SIZE - 30 and output.stats.num_draft_tokens > 0
    assert output.token_ids == engine.generate(**settings, stop_token_ids=[], draft=False).token_ids


def test_a_row_that_outgrows_the_draft_models_context_gets_no_draft():
    """The others go on, also where the row would end within the context that it has."""
    drafter = ModelDrafter(small_of(n_positions=16), gamma=3)
    histories = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 14, 15, 30)]
    assert [len(draft) - 1 for draft in chains_of(drafter, histories)] == [3, 3, 0, 0]
    engine = stand.wrap(tiny_model(TARGET), drafter=drafter, verifier="block")
    output = engine.generate(input_ids=PROMPTS, max_new_tokens=20, temperature=1.0, seed=1, stop_token_ids=[])
    assert [len(tokens) for tokens in output.token_ids] == [20, 20, 20] and output.stats.num_draft_tokens > 0


def test_a_chain_may_be_as_long_as_the_draft_models_context_and_no_longer():
    """The last token of a chain is not run."""
    model = small_of(n_positions=16)
    assert [len(draft) - 1 for draft in chains_of(ModelDrafter(model, gamma=16), [np.array([5], np.int32)])] == [16]
    with pytest.raises(ValueError, match="at most the draft model's context of 16 tokens, got 17: no row .*; 4 is"):
        ModelDrafter(model, gamma=17)


def chains_of(drafter: ModelDrafter, histories: list[np.ndarray]) -> list[list[int]]:
    batch = drafter.draft(draft_request(histories))
    return [batch[row].token_ids.tolist() for row in range(len(batch))]


@pytest.mark.parametrize("run", [1, 2, 3])
def test_a_chain_ends_before_the_token_whose_law_overflowed(run, monkeypatch):
    """No law of the draft model's is behind that token. The other row goes on."""
    draw, calls = ModelDrafter._draw, []

    def overflowing(self, logits, points, **settings):
        calls.append(0)
        if len(calls) == run:
            logits = logits.clone()
            logits[-1] = float("inf")
        return draw(self, logits, points, **settings)

    monkeypatch.setattr(ModelDrafter, "_draw", overflowing)
    histories = [np.array(prompt, np.int32) for prompt in PROMPTS[:2]]
    assert [len(draft) - 1 for draft in chains_of(ModelDrafter(tiny_model(SMALL), gamma=3), histories)] == [3, run - 1]


def test_after_an_error_a_call_is_as_before_it(monkeypatch):
    """Where the draft model's cache was being filled for other rows."""
    engine = engine_of(small=TARGET, gamma=4, num_candidates=VOCABULARY_SIZE)
    settings = {"input_ids": PROMPTS[2:], "max_new_tokens": 20, "temperature": 1.0, "top_k": 0, "stop_token_ids": []}
    before = engine.generate(**settings, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(draft_model, "prefill", failing_after(0, draft_model.prefill, MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            engine.generate(**settings, num_return_sequences=3, seed=1)
    after = engine.generate(**settings, seed=1)
    assert after.token_ids == before.token_ids
    assert after.stats.num_accepted_draft_tokens == after.stats.num_draft_tokens == 16


@pytest.mark.parametrize(
    "settings",
    [
        *({"gamma": gamma} for gamma in (0, True, 2.0, 513, 10**40)),
        {"num_candidates": 0},
        *({"temperature": temperature} for temperature in (0.0, -1.0, 1e-40, 1e39, np.nan, True, "1")),
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ModelDrafter(tiny_model(SMALL), **settings)


def test_only_a_lookup_drafter_has_a_lookup_tree():
    with pytest.raises(AttributeError, match="ModelDrafter"):
        _ = engine_of().lookup
