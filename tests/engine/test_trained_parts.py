"""What heads and streams have in common: damaged files are refused by name, and one overflow costs a draft only."""

import copy
import sys

import pytest
import torch
from plain_eagle import random_head
from plain_streams import random_streams
from safetensors.torch import save_file
from tiny_models import VOCABULARY_SIZE, tiny_model

import stand
from stand.drafters.eagle.head import EagleHead
from stand.drafters.heads.trained_part import likeliest
from stand.drafters.streams.weights import Streams

PROMPT = {"input_ids": [[5, 9, 11, 4, 5, 9]] * 2, "max_new_tokens": 24, "stop_token_ids": []}
SAMPLED = {"temperature": 1.0, "seed": 3}
PARTS = {EagleHead: random_head, Streams: random_streams}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("content", [b"", b"abc", b"\x80" * 300])
def test_damaged_files_are_refused_by_name(part, content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors must hold tensors, got \w+: \w.*; fetch or write"):
        part.load(tiny_model("llama"), tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"abc", "pytorch_model.bin must hold tensors"), ([torch.zeros(2)], "must hold tensors by name, got list")],
)
def test_damaged_pickles_are_refused_by_name(content, message, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        EagleHead.load(tiny_model("llama"), tmp_path)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(part, value, tmp_path):
    tensors = {name: tensor.clone() for name, tensor in PARTS[part](tiny_model("llama")).state_dict().items()}
    name = sorted(tensors)[0]
    tensors[name].view(-1)[3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} in .*model.safetensors must be finite"):
        part.load(tiny_model("llama"), tmp_path)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_quantised_weights_are_refused(part, dtype, tmp_path):
    tensors = {name: tensor.clone() for name, tensor in PARTS[part](tiny_model("llama")).state_dict().items()}
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].to(getattr(torch, dtype))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} in .* must hold floats of .*got torch.{dtype}; dequantise it first"):
        part.load(tiny_model("llama"), tmp_path)


@pytest.mark.parametrize("given", [torch.tensor([1.0, 2.5]), [True, False]])
def test_a_vocabulary_is_of_integers(given):
    with pytest.raises(ValueError, match="must hold token ids, got numbers of torch"):
        random_head(tiny_model("llama")).restrict(given)


@pytest.mark.parametrize("given", [None, "abc", [[1], [2, 3]], [10**40], [None]])
def test_what_is_no_vocabulary_is_refused(given):
    with pytest.raises(ValueError, match="must hold token ids, got .*; give integers"):
        random_head(tiny_model("llama")).restrict(given)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("target", [None, "a/model", torch.nn.Linear(2, 2)])
def test_a_target_is_a_model(part, target):
    with pytest.raises(ValueError, match="must have a transformers model as its target, got .*; load the model"):
        part(target)


def test_flags_are_true_or_false():
    with pytest.raises(ValueError, match="always must be True or False, got 'no'; leave it out"):
        stand.StreamLaws("no file", always="no")
    with pytest.raises(ValueError, match="has_input_norm must be True or False, got 'no'"):
        EagleHead(tiny_model("llama"), has_input_norm="no")


def test_laws_that_are_not_finite_say_nothing():
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, float("inf"), 0.0], [float("nan"), 0.0, 0.0]])
    _, probs = likeliest(logits, temperature=0.7, count=2)
    assert probs[0].sum() > 0.9 and not probs[1:].any()
    torch.testing.assert_close(probs[0], torch.softmax(logits[0] / 0.7, -1).topk(2).values)


def eagle(head):
    return stand.EagleDrafter(head, budget=12)


def eagle_blended(head):
    return stand.BlendedDrafter(budget=12, source=stand.EagleLaws(head, runs=2))


def streaming(streams):
    return stand.StreamingDrafter(streams, budget=12)


def streams_blended(streams):
    return stand.BlendedDrafter(budget=12, source=stand.StreamLaws(streams, always=True))


@pytest.mark.parametrize("make", [eagle, eagle_blended, streaming, streams_blended])
def test_an_overflow_costs_a_draft_and_not_the_call(make, monkeypatch):
    """As float16 may give one: every third run of the LM head has laws of NaN."""
    part = (random_head if "eagle" in make.__name__ else random_streams)(tiny_model("llama"))
    best_tokens, calls = type(part).best_tokens, []

    def overflowing(self, features, **settings):
        calls.append(0)
        if len(calls) % 3 == 2:
            features = torch.full_like(features, float("inf"))
        return best_tokens(self, features, **settings)

    monkeypatch.setattr(type(part), "best_tokens", overflowing)
    output = stand.wrap(tiny_model("llama"), drafter=make(part)).generate(**PROMPT, **SAMPLED)
    assert len(calls) > 5 and {len(tokens) for tokens in output.token_ids} == {24}
    assert output.stats.num_draft_tokens > 0
    assert all(0 <= token < VOCABULARY_SIZE for tokens in output.token_ids for token in tokens)


@pytest.mark.parametrize("is_greedy", [False, True])
def test_an_overflow_of_a_draft_model_ends_a_chain(is_greedy, monkeypatch):
    """Every third run of it has logits of NaN, those of the second row."""
    drafter = stand.ModelDrafter(tiny_model("qwen2"), gamma=3)
    draw, calls = stand.ModelDrafter._draw, []

    def overflowing(self, logits, points, **settings):
        calls.append(0)
        if len(calls) % 3 == 2:
            logits = logits.clone()
            logits[-1] = float("nan")
        return draw(self, logits, points, **settings)

    monkeypatch.setattr(stand.ModelDrafter, "_draw", overflowing)
    settings = {"temperature": 0.0} if is_greedy else SAMPLED
    output = stand.wrap(tiny_model("llama"), drafter=drafter).generate(**PROMPT, **settings)
    assert len(calls) > 5 and {len(tokens) for tokens in output.token_ids} == {24}
    drafted = output.stats.num_draft_tokens / output.stats.num_steps
    assert 1.0 < drafted < 2.5  # three but for what the last steps of a row have no room for
    if is_greedy:
        plain = stand.wrap(tiny_model("llama"), drafter=stand.BlendedDrafter(budget=0))
        assert output.token_ids == plain.generate(**PROMPT, **settings).token_ids


@pytest.mark.parametrize("make", [eagle, streaming])
def test_a_part_of_a_model_that_was_cast_since_is_refused(make):
    model = copy.deepcopy(tiny_model("llama"))
    part = (random_head if make is eagle else random_streams)(model)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="must be where its model is, in torch.bfloat16 on cpu, got torch.float32"):
        stand.wrap(model, drafter=make(part))


@pytest.mark.parametrize("part", [None, random_streams(tiny_model("llama"))])
def test_what_is_no_head_is_refused(part):
    with pytest.raises(ValueError, match="EagleHead must be one, a file or a folder, got"):
        stand.wrap(tiny_model("llama"), drafter=stand.EagleDrafter(part))


@pytest.mark.parametrize("make", [streaming, streams_blended])
def test_a_repeated_call_has_nothing_of_rows_that_ended_with_its_text(make):
    """The row that ended with this very text had made a step; the new one has not."""
    engine = stand.wrap(tiny_model("llama"), drafter=make(random_streams(tiny_model("llama"))))
    first = engine.generate(input_ids=[[5, 9, 11, 4]], max_new_tokens=5, temperature=1.0, seed=0, learn=False)
    text = [5, 9, 11, 4, *first.token_ids[0]]
    settings = {"input_ids": [text], "max_new_tokens": 20, "temperature": 1.0, "seed": 1, "learn": False}
    outputs = [engine.generate(**settings) for _ in range(3)]
    assert len({(tuple(output.token_ids[0]), output.stats.num_draft_tokens) for output in outputs}) == 1


@pytest.mark.parametrize("make", [stand.EagleDrafter, stand.StreamingDrafter])
def test_a_budget_beyond_any_step_is_refused(make):
    assert make("anywhere", budget=65536).budget == 65536
    with pytest.raises(ValueError, match=r"budget must be an integer in \[0, 65536\], got 1000000000"):
        make("anywhere", budget=10**9)


@pytest.mark.parametrize(
    ("part", "drafter"), [(EagleHead, stand.EagleDrafter), (Streams, stand.StreamingDrafter)], ids=["eagle", "streams"]
)
def test_a_drafter_without_a_budget_takes_each_models_default(part, drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[drafter.__module__], "default_budget", lambda model: 5 if model is first else 9)
    first, second = tiny_model("llama"), copy.deepcopy(tiny_model("llama"))
    PARTS[part](first).save(tmp_path)
    for budget, expected in ((None, [5, 9]), (7, [7, 7]), (0, [0, 0])):
        drafts = drafter(tmp_path, budget=budget)
        found = []
        for model in (first, second):
            drafts.attach(model, b"")
            found.append(drafts.most_nodes(2))
        assert found == expected
