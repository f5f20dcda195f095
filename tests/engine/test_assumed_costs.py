"""Costs of steps that are computed where nobody has timed one, and drafts that end at the sizes that steps have."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from recurrent_models import recurrent_model
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, LlamaConfig, ModernBertDecoderConfig, Qwen2Config
from unequal_models import unequal_model

import stand
from stand.drafters import blended
from stand.drafters.costs import assumed as assumed_costs
from stand.drafters.costs.assumed import (
    BYTES_PER_SECOND,
    LATE,
    LATE_RISE,
    ROW_BYTES,
    STEP_BYTES,
    TOKEN_RISE,
    AssumedCosts,
    ModelSizes,
)
from stand.drafters.costs.step_cost import StepCost, StepTimer
from stand.forward.cache.key_shape import key_shape
from stand.forward.self_check import check_model

SHAPES = {
    "qwen2.5-7b": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064,
    ),
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    ),
}  # fmt: skip

# Milliseconds of steps on an H100 by tokens (docs/figures/gpu_h100.json), and how far from them computed ones may be.
MEASURED = [
    ("qwen2.5-7b", 1, 2048, {1: 6.78, 64: 7.70, 128: 8.17, 256: 9.66}, (0.89, 1.0)),
    ("qwen2.5-7b", 1, 16384, {1: 6.88, 64: 8.63, 128: 10.29, 256: 14.07}, (0.89, 1.0)),
    ("qwen2.5-7b", 1, 32768, {1: 7.55, 64: 10.13, 128: 13.19, 256: 19.63}, (0.84, 1.0)),
    ("qwen2.5-7b", 16, 16384, {16: 12.92, 64: 13.50, 128: 13.98, 256: 14.90}, (0.94, 1.0)),
    ("qwen2.5-7b", 64, 2048, {64: 11.43, 128: 12.39, 256: 13.87}, (0.95, 1.04)),
    ("llama-3.1-8b", 1, 2048, {1: 6.81, 64: 7.85, 128: 8.35, 256: 10.05}, (0.93, 1.0)),
    ("llama-3.1-8b", 16, 2048, {16: 9.13, 64: 9.40, 128: 10.02, 256: 11.38}, (0.96, 1.0)),
    ("llama-3.1-8b", 64, 2048, {64: 14.80, 128: 15.60, 256: 16.86}, (1.0, 1.05)),
]
PADDED = (1, 4, 8, 16, 32)


def model_of(name: str):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16)


@pytest.mark.parametrize(("name", "num_rows", "length", "measured", "span"), MEASURED)
def test_computed_times_are_near_those_of_an_h100(name, num_rows, length, measured, span):
    cost = AssumedCosts(ModelSizes.of(model_of(name)), 206).at(length, num_rows=num_rows)
    computed = 1e3 * np.interp(list(measured), cost.tokens, cost.seconds)
    ratios = computed / list(measured.values())
    assert span[0] <= ratios.min() and ratios.max() <= span[1], ratios


def test_what_a_step_reads_is_counted():
    model = model_of("qwen2.5-7b")
    table = 152064 * 3584 * 2
    assert ModelSizes.of(model).weights == 2 * model.num_parameters() - table  # of the table a step reads a few rows
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert ModelSizes.of(model).weights == 2 * model.num_parameters()  # the head is the table
    assert ModelSizes.of(model).key_bytes(10) == 10 * 28 * 2 * 4 * 128 * 2 and ModelSizes.of(model).groups == 7


def test_no_table_of_which_a_step_reads_a_few_rows_is_counted():
    """Gemma 3n and 4 have a second one, of all layers: a third and more of all weights."""
    config = Gemma3nTextConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_kv_shared_layers=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    of_layers = model.get_decoder().embed_tokens_per_layer.weight.numel()
    assert ModelSizes.of(model).weights == 2 * (model.num_parameters() - of_layers)  # the other one is the head


def test_a_decoder_that_is_a_head_is_not_all_that_is_counted():
    """ModernBERT's class calls its head so."""
    config = ModernBertDecoderConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.get_decoder() is model.get_output_embeddings()
    assert ModelSizes.of(model).weights == 4 * model.num_parameters()  # the head is the table


def test_a_layer_without_keys_reads_none():
    """Of four layers of LFM2 three are convolutions, and so is the last one."""
    model = recurrent_model("lfm2")
    check_model(model)
    assert len(ModelSizes.of(model).layers) == 1


def test_a_layer_that_no_configuration_tells_of_sees_the_whole_text(monkeypatch):
    monkeypatch.setattr(assumed_costs, "layer_windows", lambda model: [8])
    assert [window for _, window in ModelSizes.of(tiny_model("mistral")).layers] == [8, 0]


def test_windows_end_what_is_read():
    sizes = ModelSizes.of(tiny_model("gemma3"))
    assert {window for _, window in sizes.layers} <= {0, 8} and any(window == 8 for _, window in sizes.layers)
    per_token = sum(size for size, _ in sizes.layers)
    whole = sum(size for size, window in sizes.layers if not window)
    assert sizes.key_bytes(8) == 8 * per_token and sizes.key_bytes(100) == 100 * whole + 8 * (per_token - whole)


def test_layers_that_keep_unlike_keys_are_counted_apart():
    """Gemma 4 E2B's layers that see the whole text have heads twice as large, and the last two of six reuse the keys of
    the two before. What layers keep, the check has seen."""
    model = unequal_model("gemma4_e2b")
    check_model(model)
    sizes = ModelSizes.of(model)
    assert len(key_shape(model).layers) == 4
    assert sizes.layers == ((256, 8), (512, 0)) * 3
    assert sizes.key_bytes(100) == 3 * (8 * 256 + 100 * 512)


def test_a_gpu_that_computes_less_asks_more_for_many_tokens():
    sizes = ModelSizes.of(model_of("qwen2.5-7b"))
    fast, slow = (AssumedCosts(sizes, ridge).at(2048, num_rows=64) for ridge in (280, 117))
    assert fast.seconds[0] == slow.seconds[0] and slow.seconds[-1] > 1.2 * fast.seconds[-1]


def test_each_further_token_costs_the_same_as_far_as_products_do_not_weigh():
    """And none would cost what is read. Beyond 128 tokens each costs more."""
    cost = AssumedCosts(ModelSizes(10**10, (), 1), ridge=10**6).at(1)
    read = (10**10 + STEP_BYTES + ROW_BYTES) / BYTES_PER_SECOND
    times = dict(zip(cost.tokens, cost.seconds, strict=True))
    rise = times[2] - times[1]
    assert all(times[size] == pytest.approx(read + size * rise) for size in cost.tokens if size <= LATE)
    later = [(times[size] - times[LATE]) / (size - LATE) for size in cost.tokens if size > LATE]
    assert later == pytest.approx([(TOKEN_RISE + LATE_RISE) / TOKEN_RISE * rise] * len(later))


def test_costs_are_those_of_rows_and_lengths_that_are_near():
    costs = AssumedCosts(ModelSizes.of(model_of("qwen2.5-7b")), 206)
    assert costs.at(2000, num_rows=3) is costs.at(2100, num_rows=3)
    assert costs.at(4100, num_rows=3).seconds[-1] > costs.at(2000, num_rows=3).seconds[-1]
    assert costs.at(0, num_rows=1).length == 1 and costs.at(5, num_rows=300).most_tokens == 300


def test_the_next_size_is_asked_for_at_its_first_node():
    cost = StepCost(num_rows=1, length=1, tokens=(1, 4, 8, 16, 32), seconds=(1.0, 1.0, 1.5, 1.5, 3.0))
    rises = cost.rises(2, 16, PADDED)
    assert np.flatnonzero(rises).tolist() == [2, 14]  # in front of tokens 5 and 17; 9 costs nothing more
    half = np.log(2)  # of the first node's worth that the nodes of a size twice as large have on average
    np.testing.assert_allclose(rises[[2, 14]], [0.5 / (4 * half), 1.0 / (16 * half)], rtol=1e-6)
    by_half = cost.rises(1, 20, (1, 16, 24))  # of the next size, half as large again
    np.testing.assert_allclose(by_half[15], 0.75 / 1.5 / (8 * np.log(1.5) / 0.5), rtol=1e-6)
    assert not cost.rises(40, 3, PADDED).any() and len(cost.rises(32, 0, PADDED)) == 0


def taught(**settings) -> stand.BlendedDrafter:
    drafter = stand.BlendedDrafter(kind="deterministic", **settings)
    drafter.attach(tiny_model("qwen2"), b"")
    generator = np.random.default_rng(0)
    for _ in range(100):
        drafter.lookup.learn(np.array([3], np.int32), text_of(generator, 100))
    return drafter


def text_of(generator: np.random.Generator, length: int) -> np.ndarray:
    """Some tokens are likely after any other, most are not."""
    return np.minimum(generator.zipf(1.5, length), 60).astype(np.int32)


@pytest.mark.parametrize(("padded", "ends"), [(PADDED, {4, 8, 16, 32}), ((), None)])
def test_drafts_end_at_the_sizes_of_steps(padded, ends):
    """Control: where steps are not padded, drafts end anywhere."""
    slope = StepCost(num_rows=1, length=1, tokens=(1, 4, 8, 16, 32), seconds=(1.0, 1.01, 1.03, 1.08, 1.2))
    drafter = taught(costs=stand.CostTable((slope,)))
    drafter.prepare(1, StepTimer(None, "triton", padded))
    generator, sizes = np.random.default_rng(1), set()
    for _ in range(60):
        sizes.add(drafter.draft(draft_request([text_of(generator, 12)])).num_nodes)
    assert len(sizes) > 1 and (sizes <= ends if ends else sizes - set(PADDED))


@pytest.fixture
def on_hopper(monkeypatch):
    """Models seem to lie on an H100 and to have a 7B's sizes."""
    for module in (blended, assumed_costs):
        monkeypatch.setattr(module, "input_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(blended, "saved_costs", lambda model, folder: None)
    monkeypatch.setattr(assumed_costs, "capability_of", lambda model: (9, 0))
    sizes = ModelSizes(int(14.1e9), ((2048, 0),) * 28, 7)
    monkeypatch.setattr(assumed_costs.ModelSizes, "of", lambda model: sizes)


def timing(seconds: float) -> tuple[list[int], Callable[..., StepCost]]:
    """The rows of every step that is timed, and what times it: one token takes a second, four take `seconds`."""
    timed: list[int] = []

    def measure(**sizes: float) -> StepCost:
        timed.append(sizes["num_rows"])
        return StepCost(num_rows=1, length=32, tokens=(1, 4), seconds=(1.0, seconds))

    return timed, measure


@pytest.mark.parametrize(("is_kept", "is_saved"), [(True, False), (False, False), (True, True)])
def test_eager_steps_of_such_a_gpu_are_timed(on_hopper, monkeypatch, tmp_path, is_kept, is_saved):
    """What is computed, or saved by gpu_bench.py, is the cost of captured steps. The times of one way stay when calls
    of the other begin."""
    monkeypatch.setenv("STAND_COSTS", str(tmp_path) if is_kept else "off")
    table = stand.CostTable((StepCost(num_rows=1, length=32, tokens=(1, 256), seconds=(1.0, 2.0)),))
    monkeypatch.setattr(blended, "saved_costs", lambda model, folder: table if is_saved else None)
    timed, measure = timing(9.0)
    drafter = taught()
    for _ in range(2):
        for way, padded, most in (("triton", PADDED, 255), ("sdpa unfused", (), 3 if is_kept else 255)):
            drafter.prepare(1, StepTimer(measure, way, padded))
            assert drafter.most_nodes(1) == most
    assert timed == ([1] if is_kept else [])


def test_a_gpu_drafts_less_behind_long_texts_and_more_for_many_rows(on_hopper):
    drafter = taught()
    assert drafter.budget is None and drafter.most_nodes(16) == 240
    costs = drafter.costs
    drafter.attach(tiny_model("llama"), b"")
    assert drafter.costs is not costs and isinstance(drafter.costs, AssumedCosts)  # another model's
    given = stand.BlendedDrafter(budget=8)
    given.attach(tiny_model("qwen2"), b"")
    assert given.budget == 8 and given.costs is None

    def nodes(num_rows: int, length: int) -> int:
        drafter.prepare(num_rows, StepTimer(None, "triton", (*PADDED, 64, 96, 128, 160, 192, 256)))
        generator = np.random.default_rng(2)
        histories = [text_of(generator, length) for _ in range(num_rows)]
        return drafter.draft(draft_request(histories)).num_nodes

    assert nodes(1, 32768) < nodes(1, 512) <= 256 and nodes(64, 512) > nodes(1, 512)
    assert nodes(256, 9) == 256 and drafter.most_nodes(256) == 0  # no draft: no such step was timed


@pytest.mark.parametrize(("capability", "is_one"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)])
def test_which_gpus_have_captured_steps(on_hopper, monkeypatch, capability, is_one):
    monkeypatch.setattr(assumed_costs, "capability_of", lambda model: capability)
    assert assumed_costs.has_captured_steps(tiny_model("qwen2")) == is_one


@pytest.mark.parametrize("is_saved", [False, True])
def test_saved_times_of_a_mixture_are_taken_and_none_are_measured(on_hopper, monkeypatch, tmp_path, is_saved):
    """Control: without them its steps are timed."""
    monkeypatch.setenv("STAND_COSTS", str(tmp_path))
    monkeypatch.setattr(blended, "is_mixture", lambda model: True)
    table = stand.CostTable((StepCost(num_rows=1, length=32, tokens=(1, 8), seconds=(1.0, 1.1)),))
    monkeypatch.setattr(blended, "saved_costs", lambda model, folder: table if is_saved else None)
    timed, measure = timing(1.2)
    drafter = taught()
    assert not is_saved or drafter.most_nodes(1) == 7
    drafter.prepare(1, StepTimer(measure, "triton", PADDED))
    assert (timed, drafter.most_nodes(1)) == (([], 7) if is_saved else ([1], 3))


class NoLaws(stand.LawSource):
    def laws(self, request, plan):
        return None


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("settings", [{}, {"share": True}, {"source": True}])
def test_processes_of_one_model_share_nothing(monkeypatch, tmp_path, settings, is_shared):
    """And are given no laws from outside: all draft and learn the same anyway."""
    monkeypatch.setattr(blended, "tensor_group", lambda model: object() if is_shared else None)
    settings = {name: tmp_path if name == "share" else NoLaws() for name in settings}
    drafter = stand.BlendedDrafter(budget=3, **settings)
    if is_shared and settings:
        with pytest.raises(ValueError, match="source and share must be left out under tensor parallelism"):
            drafter.attach(tiny_model("qwen2"), b"")
    else:
        drafter.attach(tiny_model("qwen2"), b"")
