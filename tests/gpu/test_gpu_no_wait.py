"""The whole body of a captured step on fake CUDA tensors: the host never waits for the device inside it.

The packet goes up and the verdict comes down by copies that do not wait; everything else stays on the device.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from fake_cuda import fake_cuda, mirrored, onto_fake_device
from fake_device import FakePacket, fake_device
from grammar_cases import PROCESSORS, xgrammar_processor
from longrope_models import FACTORS_OF_64, ONE_HEAD_OF_64, longrope_phi3
from no_host_copy import HostCopyError, NoHostCopy, NoWaitingUpload, WaitingUploadError
from no_kernel import Launches
from page_tables import alike
from plain_streams import random_streams
from recurrent_models import RECURRENT, new_recurrent_model, recurrent_kernel_model
from tiny_models import CONFIGS, SHAPE, VOCABULARY_SIZE, kernel_model, tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from transformers.generation import logits_process as library
from unequal_models import new_deepseek, new_gemma4, unequal_model

import stand
from stand.forward import latent_keys
from stand.forward.cache.key_shape import LayerKeys, layer_keys
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.latent_keys import unexpanded_keys
from stand.forward.model import run_plan, waiting_ropes
from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent.layers import recurrent_forwards
from stand.forward.recurrent.states import LayerStates, RecurrentStates
from stand.forward.self_check import check_case, tree_logits
from stand.forward.tree_attention import tree_attention
from stand.fusion.fusion import fuse
from stand.gpu import device_rule, kernel_attention, kernel_scan, step_body, tails
from stand.gpu.device_cache import DeviceCache
from stand.gpu.device_rule import CoupledRule, GreedyRule, MatchRule, TraversalRule
from stand.gpu.kernel_attention import KERNEL_ATTENTION_NAME
from stand.gpu.kernels import attention
from stand.gpu.packets.page_table import PageTable
from stand.gpu.packets.step_packet import StepPacket
from stand.gpu.packets.step_size import StepSize
from stand.gpu.step_body import StepBody, StepOutput
from stand.gpu.tails import TailBody, Tails
from stand.gpu.tuning.attention_tiles import PAGE_SIZE
from stand.laws import output_penalties, seen_tokens
from stand.laws.grammars import masks as grammar_masks
from stand.laws.processors import ProcessorChain
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.row import Row
from stand.trees import DraftBatch, DraftTree

NUM_ROWS, ROOM = 2, 128
MANY_ROWS = 200  # more than give an H100 a program per key head: none is split
RULES = {"match": MatchRule, "coupled": CoupledRule, "traversal": TraversalRule}
LAWS = {
    "plain": SamplingParams(temperature=0.6),
    "filtered": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01),
    "greedy": SamplingParams(temperature=0.0),
}


def fake_table(
    config, dtype: torch.dtype, layers: Sequence[tuple[int, LayerKeys]] = (), states: dict | None = None
) -> PageTable:
    """layers: those that keep keys, default all alike; states: shapes and types of what the others keep of a row."""
    recurrent = RecurrentStates(NUM_ROWS)
    for index, kept in (states or {}).items():
        recurrent.layers[index] = LayerStates(
            *[torch.zeros(NUM_ROWS, *shape, dtype=kind, device="cuda") for shape, kind in kept]
        )
    cache = DeviceCache(
        layers=layers or alike(range(config.num_hidden_layers), config.num_key_value_heads, 64),
        num_pages=NUM_ROWS * ROOM // PAGE_SIZE, page_size=PAGE_SIZE, dtype=dtype, device=torch.device("cuda"),
        recurrent=recurrent,
    )  # fmt: skip
    return PageTable(cache, num_places=NUM_ROWS, width=ROOM // PAGE_SIZE)


def run_body(
    family: str, rule: str, law: SamplingParams, *, fusion=None, model=None, num_rows: int = NUM_ROWS,
    dtype: torch.dtype = torch.float32, is_split: bool = False,
) -> None:  # fmt: skip
    """is_split: in two parts, as where processors run between them."""
    model = kernel_model(family) if model is None else model
    # experts are multiplied in groups, without a wait, in bfloat16 only
    dtype = torch.bfloat16 if hasattr(model.config, "num_experts_per_tok") else dtype
    fake = copy.deepcopy(model).to(dtype)
    device, kept = torch.device("cuda"), kept_by(fake)
    tree_logits(fake, *check_case(fake))  # which tells the kinds of its layers
    with fake_device(), torch.inference_mode():
        fake = onto_fake_device(fake)
        table = fake_table(fake.config, dtype, *kept)
        verification = GreedyRule() if law.is_greedy else RULES[rule]()
        output = StepOutput(fake, num_rows, has_processors=is_split)
        size = StepSize.covering(13, num_rows, tilings=output.tilings(8), room=ROOM)
        filled = StepPacket(size, device, more=verification.fields(size), table=table)
        body = StepBody(fake, table.cache, TargetLaw(law), verification, filled, output)
        with ExitStack() as stack:
            stack.enter_context(tree_attention(fake, KERNEL_ATTENTION_NAME))
            stack.enter_context(recurrent_forwards(fake))
            stack.enter_context(unexpanded_keys(fake))
            if fusion is not None:
                stack.enter_context(mirrored(fusion, fake).active())
            for part in (body.score, body.decide) if is_split else (body.run,):
                part()
            body.find_best()


def kept_by(model) -> tuple[Sequence[tuple[int, LayerKeys]], dict]:
    """What its layers keep, as `fake_table` takes it."""
    cache = TreeCache(1, 8)
    with torch.inference_mode(), tree_attention(model):
        run_plan(model, cache, StepPlan.for_prompt(np.array([3, 4], dtype=np.int32), 0, row=0))
    layers = cache.recurrent.layers.items()
    return layer_keys(cache), {index: [(one.shape[1:], one.dtype) for one in layer.stored] for index, layer in layers}


def shallow(family: str, num_layers: int):
    """The family's model with so many layers."""
    config = copy.deepcopy(CONFIGS[family])
    config.num_hidden_layers, config.head_dim = num_layers, 64
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return AutoModelForCausalLM.from_config(config).eval()


# Kernels of a step beside the model's layers, packet and verdict included; three more where a law has filters.
MOST_LAUNCHES = {"traversal": 9, "match": 8, "coupled": 8, "greedy": 7}


def count_launches(monkeypatch, rule: str, law: str) -> list[str]:
    """Names of the kernels that a step runs beside the model's forward."""
    found = []

    def counted(body):
        with Launches(monkeypatch) as whole:
            run(body)
        with Launches(monkeypatch) as layers:
            body.forward()
        found.extend((Counter(whole.names) - Counter(layers.names)).elements())

    run = StepBody.run
    monkeypatch.setattr(StepBody, "run", counted)
    for name in ("upload", "download"):
        monkeypatch.setattr(FakePacket, name, lambda packet, name=name: found.append(name))
    run_body("qwen2", rule, LAWS[law])
    return found[: -1 if found[-1] == "download" else None]  # that of the best tokens, beside the step


@pytest.mark.parametrize("law", ["plain", "filtered"])
@pytest.mark.parametrize("rule", RULES)
def test_few_launches_beside_the_layers(monkeypatch, rule, law):
    names = count_launches(monkeypatch, rule, law)
    most = MOST_LAUNCHES[rule] + (3 if law == "filtered" else 0)
    assert len(names) == most, names


def test_few_launches_beside_the_layers_when_greedy(monkeypatch):
    names = count_launches(monkeypatch, "match", "greedy")
    assert len(names) == MOST_LAUNCHES["greedy"], names


@pytest.mark.parametrize(
    "more",
    [lambda laws: laws.sum(), lambda laws: step_body.softmax_rows(laws, laws, 1.0), lambda laws: laws.T.reshape(-1)],
    ids=["torch", "ours", "a copy"],
)
def test_one_more_operation_is_counted(monkeypatch, more):
    """Controls: an operation of torch's in a rule, two further kernels of ours, and what might have been a view."""
    follow = device_rule.follow_drawn
    monkeypatch.setattr(device_rule, "follow_drawn", lambda d, laws, *rest: (more(laws), follow(d, laws, *rest)))
    assert len(count_launches(monkeypatch, "match", "plain")) > MOST_LAUNCHES["match"]


def launches_per_layer(monkeypatch, family: str, models=None, **options: object) -> list[str]:
    """Names of the kernels that a fused forward of two layers runs more than one of a single layer; models: two that
    differ by a layer."""
    models = [shallow(family, num_layers) for num_layers in (1, 2)] if models is None else models
    fusions, counts = [fuse(model) for model in models], []  # tried while the kernels are still there

    def counted(body):
        with Launches(monkeypatch) as layers:
            body.forward()
        counts.append(Counter(layers.names))

    monkeypatch.setattr(StepBody, "run", counted)
    for model, fusion in zip(models, fusions, strict=True):
        run_body(family, "match", LAWS["plain"], fusion=fusion, model=model, **options)
    return sorted((counts[1] - counts[0]).elements())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_few_launches_per_layer(monkeypatch, family):
    """Four products, two norms with the additions before them, rotation, attention, gate; where a row's keys may be
    split, their merge."""
    names = launches_per_layer(monkeypatch, family)
    assert len(names) == 10 and names.count("tree_attention") == 2, names


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_few_launches_per_layer_of_a_mixture(monkeypatch, family):
    """For the gate and two products of a feed-forward block: router and routes, pairs by expert, two products and the
    sum of a token's experts."""
    names = launches_per_layer(monkeypatch, family)
    assert len(names) == 13 and names.count("mixed_experts") == 4 and names.count("softmax_route") == 1, names


def glm4_moe_with(count: int):
    config = Glm4MoeConfig(
        **SHAPE | {"num_hidden_layers": count}, head_dim=64, moe_intermediate_size=16, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_few_launches_per_layer_of_a_mixture_with_groups(monkeypatch):
    """A shared expert beside the others, and a router that computes in float32."""
    names = launches_per_layer(monkeypatch, "glm4_moe", [glm4_moe_with(count) for count in (1, 2)])
    assert len(names) == 19 and names.count("sigmoid_route") == 1 and names.count("to") == 2, names


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_that_cannot_be_split_need_no_merge(monkeypatch, family):
    names = launches_per_layer(monkeypatch, family, num_rows=MANY_ROWS)
    assert len(names) == 9 and names.count("tree_attention") == 1, names


def with_recurrent_layers(family: str, count: int):
    """The family's model with so many of them before one of attention."""
    config = copy.deepcopy(RECURRENT[family])
    kinds = ["conv" if family == "lfm2" else "linear_attention"] * count + ["full_attention"]
    if family == "nemotron_h":
        config.layers_block_type = config.layer_types = kinds
    else:
        config.num_hidden_layers = count + 1
        if family == "bamba":
            config.attn_layer_indices = [count]
        else:
            config.layer_types = kinds
    config.head_dim = 64
    return new_recurrent_model(config)


# In bfloat16, with norms, additions and, but for Nemotron-H, a feed-forward block: of three launches where norms are
# joined with additions; LFM2's is not fused.
MOST_OF_A_LAYER = {"qwen3_5": 13, "qwen3_next": 24, "olmo_hybrid": 16, "bamba": 17, "nemotron_h": 12, "lfm2": 14}


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in MOST_OF_A_LAYER if family in RECURRENT])
def test_few_launches_per_recurrent_layer(monkeypatch, family):
    """Two products (OLMo Hybrid: five), the convolution, four kernels of the rule (Mamba-2: two), the gated norm; a
    feed-forward block has three, and two norms with additions. Mamba-2 has three operations more for A, and a cast;
    LFM2 multiplies twice around its convolution. Qwen3-Next puts its inputs into order, and has a mixture of experts
    with a shared one, which has a gate."""
    models = [with_recurrent_layers(family, count) for count in (1, 2)]
    names = launches_per_layer(monkeypatch, family, models, dtype=torch.bfloat16)
    assert len(names) == MOST_OF_A_LAYER[family], names


def gemma4_with(count: int):
    """So many layers with a window before one without."""
    kinds = ["sliding_attention"] * count + ["full_attention"]
    config = new_gemma4(num_hidden_layers=count + 1, layer_types=kinds, hidden_size_per_layer_input=0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def dense_deepseek_with(count: int):
    config = new_deepseek()
    config.num_hidden_layers = config.first_k_dense_replace = count
    config.mlp_layer_types = ["dense"] * count
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_few_launches_per_layer_of_gemma4(monkeypatch):
    """Four products, four norms, two additions, gate and scale, rotation, attention and its merge."""
    names = launches_per_layer(monkeypatch, "gemma4", [gemma4_with(count) for count in (1, 2)], dtype=torch.bfloat16)
    assert len(names) == 15 and names.count("rope_and_store") == 1, names


def test_launches_per_layer_of_latent_attention(monkeypatch):
    """Nothing is expanded: five products of the layer's own, one for the gate, two with latents. The rotation is one
    kernel; cache write and what joins parts are torch's, five of them."""
    monkeypatch.setattr(latent_keys, "_is_plain", lambda layer: True)
    models = [dense_deepseek_with(count) for count in (1, 2)]
    names = launches_per_layer(monkeypatch, "deepseek_v3", models, dtype=torch.bfloat16)
    assert len(names) == 21 and names.count("linear") == 6 and names.count("bmm") == 2, names


def test_a_second_kernel_of_the_attention_is_counted(monkeypatch):
    """Control: the launcher launches twice."""
    attend = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda *arguments: (attend(*arguments), attend(*arguments)))
    assert len(launches_per_layer(monkeypatch, "llama", num_rows=MANY_ROWS)) == 10


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", RULES)
def test_no_rule_and_no_law_waits(rule, law):
    run_body("qwen2", rule, LAWS[law])


@pytest.mark.parametrize("law", LAWS)
def test_no_part_of_a_step_in_two_parts_waits(law):
    run_body("qwen2", "traversal", LAWS[law], is_split=True)


@pytest.mark.parametrize("family", RECURRENT)
def test_no_part_waits_where_layers_keep_states(family):
    run_body(family, "traversal", LAWS["plain"], model=recurrent_kernel_model(family), is_split=True)


def processed_on_the_device(*processors, device: str = "meta"):
    """Scores of two rows' drafts, which lie on a device that cannot tell a number."""
    rows = [Row(index, np.array([3, 4, 5], dtype=np.int32), 9) for index in range(2)]
    tree = DraftTree.branching(np.array([5, 6, 7, 8], dtype=np.int32), 2)
    law = TargetLaw(LAWS["plain"], processors=ProcessorChain(processors))
    law.process(torch.zeros(8, VOCABULARY_SIZE, device=device), DraftBatch.concatenate([tree, tree]), rows)


ON_THE_DEVICE = {
    "penalty": lambda: [library.RepetitionPenaltyLogitsProcessor(1.3), library.SuppressTokensLogitsProcessor([9])],
    "grammar": lambda: [xgrammar_processor("[a-k]+")],
    "outlines grammar": lambda: [PROCESSORS["outlines_core"]("[a-k]+")],
    "output penalties": lambda: [stand.OutputPenalties(presence=0.6, frequency=0.4)],
    "thinking budget": lambda: [stand.ThinkingBudget(0, begin=None, end=9)],
}


@pytest.mark.parametrize("chain", ON_THE_DEVICE)
def test_processors_wait_for_nothing(chain):
    processed_on_the_device(*ON_THE_DEVICE[chain]())


@pytest.mark.parametrize("is_locked", [True, False])
@pytest.mark.parametrize(
    ("chain", "module"),
    [
        ("penalty", seen_tokens),
        ("outlines grammar", grammar_masks),
        ("output penalties", output_penalties),
        ("thinking budget", grammar_masks),
    ],
)
def test_processors_upload_without_a_wait(monkeypatch, chain, module, is_locked):
    """Control: from memory that is not page-locked. A mask of xgrammar is written into a tensor, a fake one here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # this torch may have no GPU to lock it for
    if not is_locked:
        monkeypatch.setattr(module, "uploaded", lambda array, device: torch.from_numpy(array).to(device))
    expected = nullcontext() if is_locked else pytest.raises(WaitingUploadError)
    with fake_cuda(), NoHostCopy(), NoWaitingUpload(), expected:
        processed_on_the_device(ON_THE_DEVICE[chain]()[0], device="cuda")


@pytest.mark.parametrize("make", [tiny_model, kernel_model])
def test_models_that_are_kept_have_values(make):
    """Whoever asks first: later tests hand their weights to compiled code."""
    with fake_cuda():
        model = make.__wrapped__("llama")
    assert not any(isinstance(weight, FakeTensor) for weight in model.parameters())


def test_a_processor_that_may_forbid_what_was_drafted_waits():
    """Whether it did is read from the scores. Control of the test above."""
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        processed_on_the_device(library.ForcedBOSTokenLogitsProcessor(4))


@pytest.mark.parametrize("family", CONFIGS)
def test_no_family_waits(family):
    run_body(family, "traversal", LAWS["plain"])


def test_longrope_waits_only_where_its_kind_is_refused():
    """As `waiting_ropes` says of this transformers."""
    config = longrope_phi3(64, 512, factors=FACTORS_OF_64, **ONE_HEAD_OF_64)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = pytest.raises(DataDependentOutputException) if waiting_ropes(model) else nullcontext()
    with expected:
        run_body("phi3", "traversal", LAWS["plain"], model=model)


@pytest.mark.parametrize("family", RECURRENT)
def test_no_model_with_recurrent_states_waits(family):
    run_body(family, "traversal", LAWS["plain"], model=recurrent_kernel_model(family))


def test_a_wait_in_a_recurrent_layer_is_noticed(monkeypatch):
    keep = kernel_scan.keep_states
    monkeypatch.setattr(kernel_scan, "keep_states", lambda keys, *rest: (keep(keys, *rest), keys.sum().item()))
    with pytest.raises(DataDependentOutputException):
        run_body("qwen3_5", "traversal", LAWS["plain"], model=recurrent_kernel_model("qwen3_5"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_e2b", "deepseek_v3", "minicpm3"])
def test_no_model_whose_layers_differ_waits(family, fused, monkeypatch):
    """Parameters without values are of a class of their own, which is not taken for plain weights."""
    monkeypatch.setattr(latent_keys, "_is_plain", lambda layer: True)
    model = copy.deepcopy(unequal_model(family))
    fusion = fuse(model) if fused else None
    attended, attend = [], kernel_attention.tree_attention
    monkeypatch.setattr(kernel_attention, "tree_attention", lambda *given: attended.append(given[-1]) or attend(*given))
    run_body(family, "traversal", LAWS["plain"], model=model, fusion=fusion)
    assert attended == [family in ("deepseek_v3", "minicpm3")] * model.config.num_hidden_layers  # latents


def run_tail(monkeypatch, *, restricted: bool) -> None:
    """A step's forward with streams, and their tail."""
    model = copy.deepcopy(kernel_model("qwen2"))
    streams = random_streams(model)
    if restricted:
        streams.restrict(range(0, 40, 2))
    drafter = stand.StreamingDrafter(streams)
    drafter.rider.attach(model)
    monkeypatch.setattr(tails, "Packet", FakePacket)
    with fake_device(), torch.inference_mode():
        fake = onto_fake_device(model)
        for part in (streams, *streams._layers, streams._lm_head[0]):
            onto_fake_device(part)
        if restricted:
            streams.vocabulary = torch.empty(20, dtype=torch.int64, device="cuda")
        table, output = fake_table(fake.config, torch.float32), StepOutput(fake, NUM_ROWS, rider=drafter.rider)
        size = StepSize.covering(13, NUM_ROWS, tilings=output.tilings(8), room=ROOM)
        packet = StepPacket(size, torch.device("cuda"), more={}, table=table)
        runner = SimpleNamespace(record_alone=lambda body: body)
        with tree_attention(fake, KERNEL_ATTENTION_NAME):
            StepBody(fake, table.cache, TargetLaw(LAWS["plain"]), GreedyRule(), packet, output).forward()
            body, _ = Tails(fake, output, NUM_ROWS, runner)._recorded_for(NUM_ROWS, table)
            body.run()


@pytest.mark.parametrize("restricted", [False, True])
def test_a_tail_does_not_wait(monkeypatch, restricted):
    run_tail(monkeypatch, restricted=restricted)


def test_a_wait_in_a_tail_is_noticed(monkeypatch):
    run = TailBody.run
    monkeypatch.setattr(TailBody, "run", lambda body: (run(body), body._output.watched.cpu()))
    with pytest.raises(HostCopyError):
        run_tail(monkeypatch, restricted=False)


def test_a_fused_step_does_not_wait():
    run_body("qwen3", "traversal", LAWS["plain"], fusion=fuse(copy.deepcopy(kernel_model("qwen3"))))


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda drawn: drawn + drawn.max().item(), DataDependentOutputException),
        (lambda drawn: drawn.cpu(), HostCopyError),
    ],
)
def test_a_wait_in_a_rule_is_noticed(monkeypatch, read, error):
    draw = device_rule.draw_nodes
    monkeypatch.setattr(device_rule, "draw_nodes", lambda *arguments: read(draw(*arguments)))
    with pytest.raises(error):
        run_body("qwen2", "match", LAWS["plain"])
