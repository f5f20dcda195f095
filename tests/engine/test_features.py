"""What a drafter that requires features is told, and that nobody else pays for it."""

import numpy as np
import pytest
import torch
from plain_eagle import plain_features
from plain_eagle3 import layer_inputs
from tiny_models import tiny_model
from workloads.tiny_classes import tiny_model as tiny_class

import stand
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.features import feature_width, no_features, prefill_features, taken_features
from stand.forward.tree_attention import tree_attention
from stand.trees import DraftBatch, DraftTree

PROMPTS = [[5, 9, 11, 4, 5, 9], [7], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32]]
FAMILIES = ("llama", "qwen2", "gemma2")
LAYERS = (1, 0, 1)  # not in their own order, one of them twice


class Recorder(stand.Drafter):
    """Drafts the pending token's successors in the alphabet, two of them siblings; keeps what it is told."""

    requires_features = True

    def __init__(self, layers=()):
        self.feature_layers = layers
        self.prompts, self.lessons = [], []

    def draft(self, request):
        return DraftBatch.concatenate([_draft(int(history[-1])) for history in request.histories])

    def follow_prompt(self, token_ids, features):
        self.prompts.append((token_ids.copy(), features))

    def follow(self, lesson):
        self.lessons.append(lesson)


class Plain(Recorder):
    requires_features = False


def _draft(pending: int) -> DraftTree:
    tokens = np.array([pending, (pending + 1) % 60, (pending + 2) % 60, (pending + 3) % 60], np.int32)
    support = np.array([[tokens[1], tokens[2]], [tokens[3], -1], [-1, -1], [-1, -1]], np.int32)
    law = np.array([[0, 0], [1, 0], [0, 1], [1, 0]], np.float32)
    return DraftTree(tokens, np.array([-1, 0, 0, 1], np.int32), support, law)


def generate(drafter, family="llama", **settings):
    return generate_by(stand.wrap(tiny_model(family), drafter=drafter), **settings)


def generate_by(engine, **settings):
    settings = {"input_ids": PROMPTS, "num_return_sequences": 2, "max_new_tokens": 8, "temperature": 0.0} | settings
    return engine.generate(**settings)


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_plain_forwards(family, learn):
    drafter = Recorder()
    output = generate(drafter, family, learn=learn)
    assert [prompt.tolist() for prompt, _ in drafter.prompts] == PROMPTS
    assert_plain(drafter, tiny_model(family))
    assert output.stats.num_forwards == len(drafter.lessons)


def assert_plain(drafter, model):
    """Features of every prompt but its last token, and of every node of a step after its own ancestors."""

    def plain(tokens):
        layers = drafter.feature_layers
        return layer_inputs(model, tokens, layers) if layers else plain_features(model, tokens)

    for prompt, features in drafter.prompts:
        assert features.shape == (len(prompt) - 1, model.config.hidden_size * max(len(drafter.feature_layers), 1))
        if len(prompt) > 1:
            torch.testing.assert_close(features, plain(prompt[:-1].tolist()), atol=1e-4, rtol=1e-3)
    for lesson in drafter.lessons[::3]:
        for row, history in enumerate(lesson.request.histories[:3]):
            first = int(lesson.batch.offsets[row])
            for node, path in ((0, []), (2, [2]), (3, [1, 3])):
                tokens = [*history.tolist(), *lesson.batch.token_ids[first + np.array(path, int)].tolist()]
                torch.testing.assert_close(lesson.features[first + node], plain(tokens)[-1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_inputs_of_layers_are_those_of_plain_forwards(family, fuse):
    """Also where modules are fused; no hook is left behind."""
    model = tiny_model.__wrapped__(family)  # without the hooks that transformers leaves
    drafter = Recorder(LAYERS)
    engine = stand.wrap(model, drafter=drafter, fuse=fuse)
    generate_by(engine)
    assert (engine.backend.fusion is not None) == fuse and len(drafter.lessons) > 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert_plain(drafter, tiny_model(family))


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_no_hook_is_left_behind_by_an_error(layers):
    model = tiny_model.__wrapped__("llama")
    with pytest.raises(MemoryError), taken_features(model, layers) as taken:
        assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) > 0
        raise MemoryError
    assert not taken
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_of_no_tokens_there_are_no_features():
    model = tiny_model("llama")
    for layers, width in (((), 32), (LAYERS, 96)):
        empty = prefill_features(model, TreeCache(1, 4), np.array([], dtype=np.int32), row=0, layers=layers)
        assert empty.shape == no_features(model, layers).shape == (0, width) == (0, feature_width(model, layers))


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_prompts_are_told_whenever_rows_of_theirs_enter(layers, monkeypatch):
    """Two places: a prompt's features are told again to its later row, of all its chunks, and run once."""
    monkeypatch.setattr("stand.forward.model.PROMPT_CHUNK", 4)
    drafter, model = Recorder(layers), tiny_model("llama")
    output = generate(drafter, max_rows=2, num_return_sequences=3)
    told = [prompt.tolist() for prompt, _ in drafter.prompts]
    assert told[0] == PROMPTS[0] and len(told) > 3 and {*map(tuple, told)} == {*map(tuple, PROMPTS)}
    assert output.stats.num_prompt_tokens == sum(map(len, PROMPTS))
    assert_plain(drafter, model)


def test_the_models_outputs_are_bit_equal_with_features_and_without():
    model, token_ids = tiny_model("llama"), torch.tensor(PROMPTS[2:])
    with torch.inference_mode():
        before = model(token_ids).logits
        with_features, of_layers, without = (generate(each) for each in (Recorder(), Recorder(LAYERS), Plain()))
        after = model(token_ids).logits
    assert with_features.token_ids == of_layers.token_ids == without.token_ids
    assert torch.equal(before, after)
    assert not model.base_model._forward_hooks


def test_nothing_is_taken_where_nobody_asks(monkeypatch):
    def refuse(*_):
        raise AssertionError("features were taken")

    drafter = Plain()
    generate(drafter)
    assert not drafter.prompts and not drafter.lessons
    monkeypatch.setattr("stand.forward.features._hooks", refuse)
    generate(Plain())
    with pytest.raises(AssertionError, match="features were taken"):
        generate(Recorder())


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2", "mllama", "gemma3", "ctrl"])
def test_features_are_what_the_head_takes(kind):
    """Whatever a class calls its decoder: Mllama's text model calls itself so, and would give logits."""
    model, asked = tiny_class(kind).eval(), []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: asked.append(args[0][0, -1]))
    try:
        with torch.inference_mode(), tree_attention(model):
            features = prefill_features(model, TreeCache(1, 64), np.array(PROMPTS[0], dtype=np.int32), row=0)
    finally:
        hook.remove()
    assert len(features) == len(PROMPTS[0]) and torch.equal(features[-1], asked[0])
