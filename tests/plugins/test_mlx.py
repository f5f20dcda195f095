"""The engine around models of mlx-lm: against mlx-lm's own generation, on whatever MLX runs on here."""

import json
import math
import types
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed (make test-mlx)")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (make test-mlx)")

import mlx.nn as nn  # noqa: E402
import mlx_lm  # noqa: E402
import torch  # noqa: E402
from mlx_lm.models import base  # noqa: E402
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache  # noqa: E402
from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: E402
from mlx_lm.tuner.utils import linear_to_lora_layers  # noqa: E402
from plain_logprobs import difference  # noqa: E402
from tiny_mlx import HYBRIDS, SERVED, VOCABULARY_SIZE, WINDOW, own_greedy, tiny_model  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import stand  # noqa: E402
from stand.forward.cache.key_shape import key_shape  # noqa: E402
from stand.forward.cache.tree_cache import DRAFT_ROOM, CacheMemoryError  # noqa: E402
from stand.forward.packed_plan import StepPlan  # noqa: E402
from stand.forward.self_check import UnsupportedModelError, check_tree  # noqa: E402
from stand.plugins.foreign import tree_check  # noqa: E402
from stand.plugins.mlx import attention, cache, recurrent, wrap  # noqa: E402
from stand.plugins.mlx.cache import RoomCache  # noqa: E402
from stand.plugins.mlx.self_check import text_logits  # noqa: E402
from stand.scheduling.free_memory import SHARE  # noqa: E402
from stand.trees import DraftBatch  # noqa: E402

REASONER = "scripts/reasoner"
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [11, 12, 13]]


def drafting(model, *, budget=12, **settings):
    return wrap(model, drafter=stand.BlendedDrafter(budget=budget), **settings)


@pytest.mark.parametrize("architecture", SERVED)
def test_greedy_tokens_are_mlx_lms_own(architecture):
    """Two rows of other lengths, behind more tokens than a window holds, with drafts that are kept."""
    model = tiny_model(architecture)
    output = drafting(model).generate(input_ids=PROMPTS, max_new_tokens=30, do_sample=False)
    assert output.token_ids == [own_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert output.stats.num_accepted_draft_tokens > 0


def test_logprobs_are_those_of_whole_texts():
    model = tiny_model("qwen3")
    asked = {"max_new_tokens": 20, "temperature": 0.7, "seed": 3, "logprobs": 2}
    output = drafting(model).generate(input_ids=PROMPTS, **asked)
    for prompt, tokens, found in zip(PROMPTS, output.token_ids, output.logprobs, strict=True):
        logits = text_logits(model, np.array([*prompt, *tokens[:-1]]), len(tokens))
        laws = torch.log_softmax(logits, dim=-1)
        assert difference(found, tokens, laws) < 1e-3


def test_the_page_tells_how_many_architectures_were_tried():
    page = Path("docs/mlx.md").read_text(encoding="utf-8")
    assert f"tiny random models of {len(SERVED)} of mlx-lm's architectures" in " ".join(page.split())


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_served_as_they_are(bits):
    model = tiny_model("qwen3")
    nn.quantize(model, group_size=32, bits=bits)
    engine = drafting(model)
    output = engine.generate(input_ids=PROMPTS, max_new_tokens=30, do_sample=False)
    assert output.token_ids == [own_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert engine.model.get_memory_footprint() < tiny_mlx_bytes() / 3


def tiny_mlx_bytes() -> int:
    return wrap(tiny_model("qwen3")).model.get_memory_footprint()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_adapters_act_on_drafts_too(architecture):
    model = tiny_model(architecture)
    without = own_greedy(model, PROMPTS[0], 30)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.1})
    for _, module in model.named_modules():
        if hasattr(module, "lora_b"):
            module.lora_b = mx.random.normal(module.lora_b.shape, key=mx.random.key(1))
    model.eval()
    output = drafting(model).generate(input_ids=PROMPTS, max_new_tokens=30, do_sample=False)
    assert output.token_ids == [own_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert output.token_ids[0] != without and output.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("architecture", ["gemma3_text", *HYBRIDS])
def test_a_prompt_of_one_token_has_nothing_behind_it(architecture):
    model = tiny_model(architecture)
    output = drafting(model).generate(input_ids=[[5]], max_new_tokens=20, do_sample=False)
    assert output.token_ids == [own_greedy(model, [5], 20)]


@pytest.mark.parametrize("architecture", ["gemma3_text", *HYBRIDS])
def test_a_prompt_is_read_in_chunks_and_seen_whole(architecture):
    model = tiny_model(architecture)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY_SIZE, 700).tolist()
    output = drafting(model).generate(input_ids=[prompt], max_new_tokens=12, do_sample=False)
    assert output.token_ids == [own_greedy(model, prompt, 12)]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "nemotron_h"])
def test_sampled_rows_are_those_without_drafts(architecture):
    """Under `match` a draft changes no token."""
    settings = {"input_ids": PROMPTS, "num_return_sequences": 3, "max_new_tokens": 40, "temperature": 0.8, "seed": 3}
    engine = drafting(tiny_model(architecture), verifier="match")
    drafted = engine.generate(**settings)
    assert drafted.token_ids == engine.generate(**settings, draft=False).token_ids
    assert drafted.stats.num_accepted_draft_tokens > 3
    assert len({tuple(row) for row in drafted.token_ids}) == 6


@pytest.mark.long
def test_the_bundled_model_gives_mlx_lms_texts():
    model, tokenizer = mlx_lm.load(REASONER)
    model.set_dtype(mx.float32)
    engine = wrap(model, tokenizer)
    chat = [{"role": "user", "content": "Find 8^34 mod 5."}]
    output = engine.generate(chat, max_new_tokens=300, do_sample=False)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    expected = own_greedy(model, prompt, 300)
    end = tokenizer.eos_token_id
    assert output.token_ids[0] == expected[: expected.index(end) + 1] and output.finish_reasons == ["eos"]
    assert output.texts[0].endswith("Answer: 4")
    assert "".join(piece for _, piece in engine.stream(chat, max_new_tokens=300, do_sample=False)) == output.texts[0]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "lfm2"])
def test_many_requests_share_rooms_that_grow(architecture):
    """One of them begins with its only token: no state is behind it, whatever its place had before."""
    model = tiny_model(architecture)
    engine = drafting(model)
    lengths = [3, 300, 17, 5, 1, 40, 280]
    texts = [np.random.default_rng(length).integers(0, VOCABULARY_SIZE, length).tolist() for length in lengths]
    requests = [stand.Request(text, max_new_tokens=20) for text in texts]
    ended = sorted(engine.run(requests, max_rows=3, do_sample=False), key=lambda trajectory: trajectory.row)
    assert [trajectory.token_ids for trajectory in ended] == [own_greedy(model, text, 20) for text in texts]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_prompts_are_kept_until_weights_change(architecture):
    model = tiny_model(architecture)
    engine = drafting(model)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY_SIZE, 600).tolist()
    settings = {"max_new_tokens": 8, "do_sample": False}
    with engine.keep_prompts(1e8):
        engine.generate(input_ids=[[*prompt, 1]], **settings)
        again = engine.generate(input_ids=[[*prompt, 2]], **settings)
        assert again.stats.num_copied_prompt_tokens == 512
        assert again.token_ids == [own_greedy(model, [*prompt, 2], 8)]
        layer = model.layers[0].mlp.up_proj
        layer.weight = layer.weight * 2
        changed = engine.generate(input_ids=[[*prompt, 2]], **settings)
        assert changed.stats.num_copied_prompt_tokens == 0
        assert changed.token_ids == [own_greedy(model, [*prompt, 2], 8)]


def test_memory_is_counted_by_what_layers_keep():
    engine = wrap(tiny_model("gemma4_text"))
    keys = engine.model.new_cache(2, 256)
    plan = StepPlan.for_prompt(np.arange(3, dtype=np.int32), 0, row=1)
    keys.begin(plan)
    keys.run(plan, 1)
    assert keys.nbytes == 2 * 256 * key_shape(engine.model).token_bytes
    assert key_shape(engine.model).token_bytes == (2 * 16 + 2 * 32) * 4
    assert key_shape(wrap(tiny_model("llama")).model).token_bytes == 4 * 2 * (16 + 16) * 4  # layers, heads, numbers
    with pytest.raises(CacheMemoryError, match="must fit into memory"):
        engine.model.new_cache(10**6, 10**6).enter(0, keys, 3)


def test_a_model_without_drafts_before_its_end_tokens_ends():
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    model, wrapped = mlx_lm.load(REASONER)
    assert wrap(model, wrapped).model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    assert wrap(model, tokenizer).model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    assert wrap(model).model.generation_config.eos_token_id is None
    several = TokenizerWrapper(tokenizer, eos_token_ids=[9, 7])
    assert wrap(model, several).model.generation_config.eos_token_id == [3, 7, 9]  # mlx-lm adds the tokenizer's own


def test_rows_take_turns_where_metal_recommends_little(monkeypatch):
    """Room for two rows of 3 + 20 tokens and their drafts, beside what is in use."""
    engine = drafting(tiny_model("llama"))
    assert engine.model.free_bytes() == math.inf
    row = (3 + 20 + DRAFT_ROOM) * key_shape(engine.model).token_bytes
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1000)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000 + 2.1 * row / SHARE})
    most, step = [], RoomCache.keep_states
    monkeypatch.setattr(RoomCache, "keep_states", lambda cache, ends: (most.append(len(ends)), step(cache, ends)))
    engine.generate(input_ids=[[1, 2, 3]], num_return_sequences=6, max_new_tokens=20, temperature=1.0, seed=0)
    assert max(most) == 2
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 7})
    assert engine.model.free_bytes() == 0


def test_a_template_of_mlx_lms_own_is_told():
    tokenizer = TokenizerWrapper(AutoTokenizer.from_pretrained(REASONER), chat_template=lambda *chat, **options: "")
    model, _ = mlx_lm.load(REASONER)
    with pytest.warns(UserWarning, match="rendered by the tokenizer's template, not by mlx-lm's own.*pass texts that"):
        wrap(model, tokenizer)


def test_steps_are_timed_by_the_time_of_day():
    engine = wrap(tiny_model("llama"))
    assert engine.backend.computes_elsewhere and engine.backend.name == "mlx"
    assert str(engine.backend) == engine.backend.reason == engine.model.way
    assert engine.model.way.startswith(f"mlx {mx.__version__} ")
    assert engine.measure_cost(most_tokens=4, length=8, seconds=0.1).tokens[-1] <= 4
    assert engine.model.config.max_position_embeddings == 2048 and engine.model.config.vocab_size == VOCABULARY_SIZE


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_5", "lfm2"])
def test_mlx_lms_own_calls_are_as_before(architecture):
    model = tiny_model(architecture)
    before = own_greedy(model, PROMPTS[0], 30)
    wrap(model)
    wrap(model)
    assert own_greedy(model, PROMPTS[0], 30) == before
    names = type(tiny_model("gpt_oss").layers[0].self_attn).__call__.__globals__
    wrap(tiny_model("gpt_oss"))
    assert names[attention.NAME] is not base.scaled_dot_product_attention
    assert names[attention.NAME].__wrapped__ is base.scaled_dot_product_attention  # once


def slots_for_positions(patch):
    made = attention.PackedStep.__init__

    def new(step, plan):
        made(step, plan)
        step.positions = step.slots

    patch.setattr(attention.PackedStep, "__init__", new)


def rows_in_another_order(patch):
    unpad = attention.PackedStep.unpad
    patch.setattr(attention.PackedStep, "unpad", lambda step, padded: mx.roll(unpad(step, padded), 1, 0))


WRONG = {
    "everybody sees all": lambda patch: patch.setattr(attention.PackedStep, "mask", lambda step, window: None),
    "slots for positions": slots_for_positions,
    "keys stay where they were": lambda patch: patch.setattr(cache.RoomCache, "compact", lambda *arguments: None),
    "rows in another order": rows_in_another_order,
}


def states_of_the_root(patch):
    keep = recurrent.RoomStates.keep
    patch.setattr(recurrent.RoomStates, "keep", lambda states, plan, ends: keep(states, plan, [0] * len(ends)))


def inputs_of_neighbours(patch):
    """A convolution that looks at places instead of paths."""
    patch.setattr(recurrent.RecurrentLayer, "windows", lambda layer, place, padded: mx.concatenate(
        [mx.roll(padded[:, -1:], count, 0) for count in range(padded.shape[1] - 1, -1, -1)], axis=1
    ))  # fmt: skip


WRONG |= {"states of the root": states_of_the_root, "inputs of neighbours": inputs_of_neighbours}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_scores_trees_otherwise_is_refused(monkeypatch, wrong):
    model = tiny_model("qwen3_5")
    assert tree_check.tree_difference(wrap(model).model, lambda *text: text_logits(model, *text)) < 1e-4
    WRONG[wrong](monkeypatch)
    with pytest.raises(UnsupportedModelError, match="trees must be scored as texts are.*got .*this build of mlx-lm"):
        wrap(model)


def test_a_window_is_that_of_the_models_own_mask():
    """Windows are no longer than the check's text here, so that it sees them."""
    assert WINDOW < 6 + len(check_tree(np.arange(7)).token_ids)
    model = tiny_model("llama")
    expected = own_greedy(model, PROMPTS[0], 30)
    model.make_cache = lambda: [KVCache() for _ in range(4)]  # the masks have windows, and the caches have none
    settings = {"input_ids": [PROMPTS[0]], "max_new_tokens": 30, "do_sample": False}
    assert drafting(model).generate(**settings).token_ids == [expected]
    model.make_cache = lambda: [RotatingKVCache(WINDOW + 1), KVCache()] * 2
    with pytest.raises(UnsupportedModelError, match="must keep the window of its mask, got 9 and 8 tokens"):
        wrap(model)


def test_a_mask_that_a_layer_computes_with_keeps_its_window():
    keys = wrap(tiny_model("llama")).model.new_cache()
    layer = cache.LayerCache(keys, 0, types.SimpleNamespace(positions=None), WINDOW)
    assert layer.make_mask(1, return_array=True) is layer.make_mask(1, True, WINDOW) is None
    assert layer.make_mask(1).window == layer.make_mask(1, window_size=WINDOW).window == WINDOW
    with pytest.raises(ValueError, match="must have its window in its cache, too, got 9 and 8 tokens"):
        layer.make_mask(1, return_array=True, window_size=WINDOW + 1)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: [ChunkedKVCache(8), KVCache()] * 2, "keys and values, or a state, got a ChunkedKVCache"),
        (lambda: [CacheList(RotatingKVCache(8, keep=4))] * 4, "keys and values, or a state, got a RotatingKVCache"),
    ],
)
def test_layers_that_keep_other_things_are_refused(made, reason):
    model = tiny_model("llama")
    model.make_cache = made
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*call stand.wrap"):
        wrap(model)


def test_attention_of_a_models_own_is_refused():
    own = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    with pytest.raises(
        UnsupportedModelError, match=r"gemma2\.Model must run packed tokens over a cache.*cannot be served"
    ):
        wrap(tiny_model("gemma2", **own))
    model = tiny_model("llama")
    wrap(model)
    model.model.__class__ = type("Own", (type(model.model),), {"__call__": masked_forward})
    with pytest.raises(UnsupportedModelError, match="must take its mask from a cache, got one of its own"):
        wrap(model)


def masked_forward(model, inputs, cache=None, *others):
    hidden = model.embed_tokens(inputs)
    for layer, kept in zip(model.layers, cache, strict=True):
        hidden = layer(hidden, mx.zeros((1, 1, 1, 1)), kept)
    return model.norm(hidden)


def test_dropout_in_training_mode_is_refused_whenever_it_comes():
    model = tiny_model("llama")
    model.layers[0].mlp.dropout = nn.Dropout(0.0)
    model.layers[0].mlp.train()
    engine = wrap(model)  # nothing is left out
    settings = {"input_ids": [PROMPTS[0]], "max_new_tokens": 3, "do_sample": False}
    engine.generate(**settings)
    model.layers[0].mlp.dropout = nn.Dropout(0.5)
    with pytest.raises(
        UnsupportedModelError, match="in evaluation mode, got training mode with dropout; call model.eval"
    ):
        engine.generate(**settings)
    with pytest.raises(UnsupportedModelError, match="call model.eval"):
        wrap(model)
    model.eval()
    engine.generate(**settings)


@pytest.mark.parametrize(("name", "split"), [
    ("sharding_group", types.SimpleNamespace(size=lambda: 2)), ("group", types.SimpleNamespace(size=lambda: 2)),
    ("pipeline_size", 2),
])  # fmt: skip
def test_a_model_that_processes_share_is_refused(name, split):
    model = tiny_model("llama")
    setattr(model.layers[1].mlp, name, types.SimpleNamespace(size=lambda: 1) if name != "pipeline_size" else 1)
    wrap(model)
    setattr(model.layers[1].mlp, name, split)
    with pytest.raises(UnsupportedModelError, match="must be whole in one process, got one of 2 that share it"):
        wrap(model)


def test_what_is_no_model_of_mlx_lm_is_refused():
    with pytest.raises(UnsupportedModelError, match="needs a model of mlx-lm, got Linear"):
        wrap(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="got a model of mlx-lm; use stand.plugins.mlx.wrap"):
        stand.wrap(tiny_model("llama"))
    needy = stand.BlendedDrafter()
    needy.requires_features = True
    with pytest.raises(ValueError, match="must do without its hidden states, got BlendedDrafter"):
        wrap(tiny_model("llama"), drafter=needy)


def test_rows_of_unequal_drafts_are_padded_and_unpadded():
    trees = [check_tree(np.arange(7)), check_tree(np.arange(7))]
    uneven = types.SimpleNamespace(token_ids=np.arange(3, dtype=np.int32))
    plan = StepPlan(
        np.concatenate([trees[0].token_ids, uneven.token_ids]).astype(np.int32),
        np.array([0, 7, 10]),
        np.array([0, 1, 1, 2, 2, 2, 3, 0, 1, 2]),
        np.eye(10, 7, dtype=bool),
        np.array([4, 2]),
    )
    step = attention.PackedStep(plan)
    packed = mx.arange(10 * 2 * 3, dtype=mx.float32).reshape(10, 2, 1, 3)
    padded = step.pad(packed)
    assert padded.shape == (2, 2, 7, 3)
    assert mx.array_equal(padded[1, :, 1], packed[8, :, 0]) and mx.array_equal(step.unpad(padded), packed)
    assert step.mask(None).shape == (2, 1, 7, 11) and step.mask(None) is step.mask(None)
    assert DraftBatch.concatenate(trees).num_nodes == 14


def test_generation_settings_are_transformers_own(tmp_path):
    engine = drafting(tiny_model("llama"))
    output = engine.generate(input_ids=[PROMPTS[0]], max_new_tokens=9, suppress_tokens=[5, 6, 7], do_sample=False)
    assert not {5, 6, 7} & set(output.token_ids[0])
    engine.lookup.save(tmp_path / "learned.lookup")
    assert json.dumps(output.finish_reasons) == '["length"]'
