"""A model that a trainer changes between calls, and whose `generate` the trainer calls itself (`draft_always`)."""

import copy

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from stand.plugins.generate import draft_always, engine_of, stand_generate

PADDED = {  # left-padded, prompts of 6, 4 and 2 tokens
    "input_ids": torch.tensor([[5, 9, 11, 4, 5, 9], [0, 0, 7, 8, 30, 21], [0, 0, 0, 0, 40, 41]]),
    "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]),
}
GREEDY = {**PADDED, "do_sample": False, "max_new_tokens": 12}


@pytest.fixture(params=["llama", "gemma3", "qwen3_moe"])
def model(request) -> PreTrainedModel:
    made = copy.deepcopy(tiny_model(request.param))
    draft_always(made)
    return made


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """One step, in training mode, as a trainer leaves it for the next rollouts."""
    model.train()
    texts = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    model(input_ids=texts, labels=texts).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def check(model: PreTrainedModel) -> torch.Tensor:
    """Greedy tokens are those of transformers."""
    drafted = model.generate(**GREEDY)
    assert torch.equal(drafted, GenerationMixin.generate(model, **GREEDY))
    return drafted


def test_tokens_are_those_of_the_weights_of_the_moment(model):
    """Whose products are packed, merged and fused."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    engine, seen = engine_of(model), [check(model)]
    for _ in range(4):
        train(model, optimizer)
        seen.append(check(model))
    assert engine_of(model) is engine
    assert any(not torch.equal(seen[0], other) for other in seen)


def test_tokens_follow_weights_in_new_memory(model):
    """As some optimisers and adapters leave them."""
    check(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape, generator=generator)
    check(model)


def test_what_is_drafted_in_every_call(model):
    engine, calls = engine_of(model), []
    original = engine.generate
    engine.generate = lambda *given, **named: calls.append(named["seed"]) or original(*given, **named)
    torch.manual_seed(0)
    model.generate(**PADDED, do_sample=True, max_new_tokens=4)
    model.generate(PADDED["input_ids"], max_new_tokens=4, do_sample=True, custom_generate=stand_generate)
    assert len(calls) == 2 and calls[0] != calls[1]
    del model.generate
    model.generate(**GREEDY)
    assert len(calls) == 2


def test_copies_of_a_model_draft_by_engines_of_their_own(model):
    """A trainer copies its model where it needs a reference that stays."""
    train(model, torch.optim.AdamW(model.parameters(), lr=0.03))
    twin = copy.deepcopy(model)
    before = check(twin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for _ in range(3):
        train(model, optimizer)
    check(model)
    assert torch.equal(check(twin), before) and engine_of(twin) is not engine_of(model)


def test_a_model_is_saved_as_ever(model, tmp_path):
    check(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def test_another_object_is_refused():
    with pytest.raises(ValueError, match="must be a PreTrainedModel, got Linear; give the model inside"):
        draft_always(torch.nn.Linear(2, 2))
