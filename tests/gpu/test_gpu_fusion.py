"""Fused forwards on tiny models of every family: same logits, same cache, and swaps that are wrong do not survive."""

import copy
from functools import lru_cache

import pytest
import torch
import transformers

pytest.importorskip("triton")

from fake_cuda import fake_cuda, mirrored, onto_fake_device
from nearest_bfloat16 import nearest_bfloat16
from page_tables import alike
from tiny_models import CONFIGS, SHAPE
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM

from stand.forward.cache.cache_argument import cache_argument
from stand.forward.tree_attention import tree_attention
from stand.fusion import fusion as fusion_module
from stand.fusion.forwards import merged_linear
from stand.fusion.forwards.norm import FusedNorm
from stand.fusion.fusion import fuse
from stand.fusion.kernels import triton_kernels
from stand.fusion.on_cpu import fuse_on_cpu
from stand.gpu.device_cache import DeviceCache

NAME = "stand_test_dense"
NUM_ROWS, ROOM = 2, 8
NUM_SLOTS = (NUM_ROWS + 1) * ROOM  # with the page that padding writes to
SIZES = (3, 4)  # tokens of the two packed forwards: both rows' prompts, then two tokens of each
ROWS = torch.tensor([0, 0, 1, 0, 0, 1, 1])
POSITIONS = torch.tensor([0, 1, 0, 2, 2, 1, 2])  # siblings behind row 0, a chain behind row 1
PLACES = torch.tensor([0, 1, 0, 2, 3, 1, 2])
NUM_LAYERS = 2
DENSE = [name for name in CONFIGS if name not in {"qwen3_moe", "gpt_oss"}]  # routing looks at its data


@torch.library.custom_op("stand_test::dense", mutates_args=())
def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of [1, H, M, D] over all slots [R, Hkv, S, D] under mask [M, R * S]: [1, M, H, D]."""
    groups = query.shape[1] // keys.shape[1]
    flat = [s.transpose(0, 1).flatten(1, 2).repeat_interleave(groups, dim=0) for s in (keys, values)]
    mixed = torch.nn.functional.scaled_dot_product_attention(query[0], *flat, attn_mask=mask)
    return mixed.transpose(0, 1)[None].contiguous()


@dense.register_fake
def _(query, keys, values, mask):
    return query.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def attend(module, query, key, value, attention_mask, *, stand_mask, **kwargs):
    return dense(query, key, value, stand_mask), None


AttentionInterface.register(NAME, attend)


def cache_for(model, device="cpu") -> DeviceCache:
    """A page per row, as long as a row."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DeviceCache(
        layers=alike(range(config.num_hidden_layers), config.num_key_value_heads, size), num_pages=NUM_ROWS,
        page_size=ROOM, dtype=model.dtype, device=torch.device(device),
    )  # fmt: skip


def packed_forwards(model) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [7, V], cache) of two packed forwards over two rows."""
    cache, logits, first = cache_for(model), [], 0
    tokens = torch.arange(len(ROWS)) * 7 % model.config.vocab_size
    slots = ROWS * ROOM + PLACES
    with torch.inference_mode(), tree_attention(model, NAME):
        for size in SIZES:
            now = slice(first, first + size)
            first += size
            same_row = ROWS[now, None] == torch.arange(NUM_SLOTS)[None] // ROOM
            seen = torch.zeros(size, NUM_SLOTS, dtype=torch.bool)
            seen[:, slots[:first]] = POSITIONS[None, :first] < POSITIONS[now, None]
            seen[torch.arange(size), slots[now]] = True
            cache.begin(slots[now])
            output = model(
                input_ids=tokens[None, now], position_ids=POSITIONS[None, now], use_cache=True,
                stand_mask=seen & same_row, **{cache_argument(model): cache},
            )  # fmt: skip
            logits.append(output.logits[0])
    return torch.cat(logits), cache.blocks[0]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


@lru_cache
def small_config(family: str, num_layers: int):
    """The family's tiny configuration with fewer layers; Gemma 3's second one looks at everything."""
    config = copy.deepcopy(CONFIGS[family])
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types[: num_layers - 1], "full_attention"]
    return config


def fresh(family: str, num_layers: int = NUM_LAYERS, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(family, num_layers), dtype=dtype).eval()


def kept(fusion) -> dict[str, int]:
    """How many modules each kind of swap was kept for."""
    counts = {}
    for swap in fusion.report:
        if swap.is_kept:
            counts[swap.kind] = counts.get(swap.kind, 0) + swap.count
    return counts


QKV, GATE_UP, NORM = "merged q/k/v", "merged gate/up", "RMSNorm"
MLP, ATTENTION = "gated feed-forward", "attention with rotary cache write"
ADDED, EXPERTS = "additions joined with norms", "mixture of experts"
ROUTER = "router of a mixture"
PLAIN = {QKV: 2, GATE_UP: 2, NORM: 5, MLP: 2, ATTENTION: 2, ADDED: 2}
GEMMA = {QKV: 2, GATE_UP: 2, MLP: 2, ATTENTION: 2}  # a norm before each addition too
EXPECTED = {
    "llama": PLAIN,
    "qwen2": PLAIN,
    "mistral": PLAIN,
    "qwen3": {**PLAIN, NORM: 9},
    "gemma2": {**GEMMA, NORM: 9},
    "gemma3": {**GEMMA, NORM: 13},
    "phi3": {NORM: 5, MLP: 2, ATTENTION: 2, ADDED: 2},  # merged by the model itself
    "qwen3_moe": {QKV: 2, NORM: 9, EXPERTS: 2, ROUTER: 2, ATTENTION: 2, ADDED: 2},
    "gpt_oss": {QKV: 2, NORM: 5, EXPERTS: 2, ROUTER: 2, ATTENTION: 2, ADDED: 2},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_fused_logits_and_cache_equal_the_models_own(family):
    model = fresh(family)
    own_logits, own_storage = packed_forwards(model)
    fusion = fuse(model)
    assert kept(fusion) == EXPECTED[family]
    assert all(swap.is_kept and swap.max_error <= 1e-6 for swap in fusion.report)
    with fusion.active():
        logits, storage = packed_forwards(model)
    assert relative_error(logits, own_logits) <= 1e-5
    assert relative_error(storage, own_storage) <= 1e-5
    assert torch.equal(packed_forwards(model)[0], own_logits)  # outside nothing is swapped


@pytest.mark.parametrize("family", ["Glm4", "Cohere2", "Ernie4_5"])
def test_heads_whose_pairs_lie_side_by_side_are_fused(family):
    """Each with columns of cos and sin in another order. A CPU's kernels know halves alone."""
    settings = {**SHAPE, "head_dim": 16, "num_hidden_layers": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**settings)).eval()
    own_logits, own_storage = packed_forwards(model)
    fusion = fuse(model)
    assert kept(fusion)[ATTENTION] == 2
    with fusion.active():
        logits, storage = packed_forwards(model)
    assert relative_error(logits, own_logits) <= 1e-5
    assert relative_error(storage, own_storage) <= 1e-5
    assert all(swap.is_kept == (swap.kind != ATTENTION) for swap in fuse_on_cpu(model).report)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_bfloat16_within_its_rounding(family):
    """Fused logits are no further from the float32 model's than twice the bfloat16 model's own."""
    model = fresh(family)
    truth, _ = packed_forwards(model)
    weights = model.state_dict()
    model = fresh(family, dtype=torch.bfloat16)
    model.load_state_dict(weights)
    own, _ = packed_forwards(model)
    with nearest_bfloat16():
        fusion = fuse(model)
        assert kept(fusion) == EXPECTED[family]
        with fusion.active():
            logits, _ = packed_forwards(model)
    assert relative_error(logits, truth) <= 2 * relative_error(own, truth)


def test_merging_alone_needs_no_kernel():
    model = fresh("qwen2")
    own, _ = packed_forwards(model)
    fusion = fuse(model, kernels=False)
    assert kept(fusion) == {QKV: 2, GATE_UP: 2}
    with fusion.active(), CountedLaunches() as counted:
        logits, _ = packed_forwards(model)
    assert relative_error(logits, own) <= 1e-5
    assert counted.calls["linear"] == 2 * (2 * 4 + 1)  # qkv, o, gate/up, down, and the head


def twice(layer):
    own = layer.forward
    layer.forward = lambda states: 2 * own(states)


def of_another_class(layer):
    layer.__class__ = type(
        "Twice", (torch.nn.Linear,), {"forward": lambda self, x: 2 * torch.nn.Linear.forward(self, x)}
    )


@pytest.mark.parametrize("change", [twice, of_another_class])
@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_a_merged_layer_whose_forward_was_replaced_since_runs_it(part, change):
    """As adapters do; the first one of a product computes for all."""
    model = fresh("qwen2")
    fusion = fuse(model, kernels=False)
    before, _ = packed_forwards(model)
    change(model.model.layers[0].self_attn.get_submodule(part))
    own, _ = packed_forwards(model)
    with fusion.active():
        logits, _ = packed_forwards(model)
    assert relative_error(logits, own) <= 1e-5 < relative_error(before, own)


def test_other_caches_get_the_modules_own_attention():
    model = fresh("qwen3")
    tokens = torch.arange(6)[None]
    with torch.inference_mode():
        own = model(tokens).logits
        with fuse(model).active():
            assert relative_error(model(tokens).logits, own) <= 1e-5  # no cache
            assert relative_error(model(tokens, use_cache=True).logits, own) <= 1e-5  # a dynamic one


def test_parameters_stay_the_same_objects_and_values(tmp_path):
    model = fresh("qwen2")
    parameters, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    fusion = fuse(model)
    layer = model.model.layers[0].self_attn
    joined = [layer.q_proj, layer.k_proj, layer.v_proj]
    assert len({part.weight.untyped_storage().data_ptr() for part in joined}) == 1
    assert layer.q_proj.weight.untyped_storage().nbytes() == sum(part.weight.nbytes for part in joined)  # no copy
    for _ in range(2):
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert model.state_dict().keys() == values.keys()
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        with fusion.active():
            model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(value, values[name]) for name, value in loaded.items())
        fusion.undo()
    assert len({part.weight.untyped_storage().data_ptr() for part in joined}) == 3
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_change_of_a_weight_is_seen():
    model = fresh("llama")
    fusion = fuse(model)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight *= 1.5
        model.model.layers[1].self_attn.k_proj.weight *= -1
        model.model.norm.weight *= 2
    own, _ = packed_forwards(model)
    with fusion.active():
        assert relative_error(packed_forwards(model)[0], own) <= 1e-5


def test_weights_that_moved_are_refused():
    model = fresh("llama")
    fusion = fuse(model)
    model.model.layers[1].mlp.double().float()
    with pytest.raises(RuntimeError, match="model.layers.1.mlp"):
        with fusion.active():
            pass
    fusion.undo()
    assert relative_error(packed_forwards(model)[0], packed_forwards(fresh("llama"))[0]) == 0


@pytest.mark.parametrize("change", ["tied", "tied attention", "exchanged"])
def test_parts_that_are_tied_or_exchanged_are_refused(change):
    """They lie in the merged tensor still, in another place."""
    model = fresh("llama")
    fusion = fuse(model)
    mlp, attention = model.model.layers[1].mlp, model.model.layers[1].self_attn
    if change == "tied":
        mlp.up_proj.weight = mlp.gate_proj.weight
    elif change == "tied attention":
        attention.v_proj.weight = attention.k_proj.weight
    else:
        mlp.up_proj.weight.data, mlp.gate_proj.weight.data = mlp.gate_proj.weight.data, mlp.up_proj.weight.data
    with pytest.raises(RuntimeError, match="model.layers.1"):
        with fusion.active():
            pass


def test_two_fusions_of_one_model_share_its_memory():
    model = fresh("qwen2")
    own, _ = packed_forwards(model)
    with torch.inference_mode():
        first = fuse(model)
    assert not model.model.layers[0].mlp.up_proj.weight.is_inference()
    address = model.model.layers[0].mlp.up_proj.weight.data_ptr()
    second = fuse(model)
    assert kept(second) == kept(first) and model.model.layers[0].mlp.up_proj.weight.data_ptr() == address
    with first.active(), second.active():
        assert relative_error(packed_forwards(model)[0], own) <= 1e-5
    second.undo()
    assert model.model.layers[0].mlp.up_proj.weight.data_ptr() == address  # the first one's memory
    with first.active():
        pass
    third = fuse(model)
    first.undo()
    with pytest.raises(RuntimeError, match="another engine's fusion"), third.active():
        pass


def test_undo_waits_for_the_end_of_the_block():
    fusion = fuse(fresh("llama"))
    with fusion.active(), pytest.raises(RuntimeError, match="while it is active"):
        fusion.undo()


TRITON = triton_kernels()


def wrong_epsilon(states, weight, eps, rule):
    return TRITON.rms_norm(states, weight, 10 * eps, rule)


def wrong_rotation(query, key, value, cos, sin, *rest):
    return TRITON.rope_and_store(query, key, value, cos, -sin, *rest)


def wrong_slots(query, key, value, cos, sin, keys, values, slots, *rest):
    return TRITON.rope_and_store(query, key, value, cos, sin, keys, values, slots.roll(1), *rest)


def wrong_gate(gate, up, activation):
    return TRITON.gated_product(up, gate, activation)


def failing_gate(gate, up, activation):
    raise RuntimeError("no such instruction")


def wrong_product(states, weight, bias):
    return merged_linear.own_linear(states, weight[: len(weight) // 2].repeat(2, 1), bias)


@pytest.mark.parametrize(
    "name, wrong, kind, reason",
    [
        ("rms_norm", wrong_epsilon, NORM, "rounding"),
        ("rope_and_store", wrong_rotation, ATTENTION, "rounding"),
        ("rope_and_store", wrong_slots, ATTENTION, "rounding"),
        ("gated_product", wrong_gate, MLP, "rounding"),
        ("gated_product", failing_gate, MLP, "no such instruction"),
        ("linear", wrong_product, GATE_UP, "rounding"),
    ],
)
def test_a_wrong_swap_is_noticed_and_reverted(name, wrong, kind, reason, monkeypatch):
    monkeypatch.setattr(merged_linear, "own_linear", merged_linear.linear, raising=False)
    if name == "linear":
        monkeypatch.setattr(merged_linear, name, wrong)
    else:
        monkeypatch.setattr(fusion_module, "triton_kernels", lambda: TRITON._replace(**{name: wrong}))
    model = fresh("qwen2", 1)
    own, _ = packed_forwards(model)
    fusion = fuse(model)
    reverted = [swap for swap in fusion.report if swap.kind == kind]
    assert reverted and not any(swap.is_kept for swap in reverted)
    assert all(reason in swap.reason and swap.max_error > 1e-3 for swap in reverted)
    with fusion.active():
        assert relative_error(packed_forwards(model)[0], own) <= 1e-5  # what is left is right


def test_linear_layers_that_cannot_merge_are_left_alone():
    class Adapter(torch.nn.Linear):
        """Stands for a LoRA layer: a subclass with a forward of its own."""

        def forward(self, states):
            return 1.5 * super().forward(states)

    model = fresh("llama", 3)
    layers = model.model.layers
    adapted = Adapter(32, 32, bias=False)
    adapted.weight = layers[0].self_attn.q_proj.weight
    layers[0].self_attn.q_proj = adapted
    layers[1].self_attn.v_proj.bias = torch.nn.Parameter(torch.ones(16))
    layers[2].self_attn.v_proj.weight = layers[2].self_attn.k_proj.weight
    layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    layers[1].mlp.register_forward_hook(lambda *_: None)
    own, _ = packed_forwards(model)
    fusion = fuse(model)
    reasons = {swap.reason for swap in fusion.report if swap.kind in (QKV, GATE_UP)}
    assert {"a bias on some parts only", "weights shared with another module"} <= reasons
    assert any("Adapter" in reason for reason in reasons) and any("a hook" in reason for reason in reasons)
    assert kept(fusion)[ATTENTION] == 3  # the kernel takes three outputs as well as slices of one
    assert kept(fusion)[MLP] == 2 and kept(fusion)[GATE_UP] == 1
    with fusion.active():
        assert relative_error(packed_forwards(model)[0], own) <= 1e-5


def in_buffer(weights, gaps):
    """Their values lie behind each other in one tensor, each before so many numbers of nobody's."""
    buffer, place = torch.zeros(sum(weight.numel() for weight in weights) + sum(gaps)), 0
    for weight, gap in zip(weights, gaps, strict=True):
        slot = buffer[place : place + weight.numel()].view_as(weight)
        slot.copy_(weight.detach())
        weight.data = slot
        place += weight.numel() + gap
    return buffer


@pytest.mark.parametrize("gap", [0, 8])
def test_weights_in_a_trainers_buffer_stay_there(gap):
    """As optimisers of sharded training keep them: what they write into the buffer is what the model has. Parts that
    lie behind each other are merged as they are."""
    model = fresh("llama", 2)
    weights = list(model.parameters())
    buffer = in_buffer(weights, [gap] * len(weights))
    fusion = fuse(model)
    kinds = [swap for swap in fusion.report if swap.kind in (QKV, GATE_UP)]
    alone = ["pieces of a larger tensor, whose owner would lose them" in swap.reason for swap in kinds]
    assert alone == [gap > 0] * 2
    buffer.mul_(1.25)
    own, _ = packed_forwards(model)
    with fusion.active():
        assert relative_error(packed_forwards(model)[0], own) <= 1e-5
    assert all(weight.untyped_storage().data_ptr() == buffer.data_ptr() for weight in weights)


def test_biases_in_a_trainers_buffer_stay_there():
    """Optimisers keep what they do not let decay apart; here biases lie apart from each other, too."""
    model = fresh("qwen2", 1)
    weights = sorted(model.parameters(), key=lambda weight: weight.dim() == 1)
    buffer = in_buffer(weights, [8 * (weight.dim() == 1) for weight in weights])
    fuse(model)
    assert all(weight.untyped_storage().data_ptr() == buffer.data_ptr() for weight in weights)


def test_modules_the_kernels_do_not_know_are_left_alone():
    model = fresh("llama", 3)
    layers, argument = model.model.layers, cache_argument(model)

    class Reversed(type(layers[0].self_attn)):
        """Turns by the angles in the opposite order."""

        def forward(self, hidden_states, position_embeddings, **kwargs):
            flipped = tuple(table.flip(-1) for table in position_embeddings)
            return super().forward(hidden_states, flipped, **kwargs)

    class Curious(type(layers[0].self_attn)):
        """Asks the cache for more than the probe's can tell."""

        def forward(self, hidden_states, **kwargs):
            if (cache := kwargs.get(argument)) is not None:
                cache.get_seq_length()
            return super().forward(hidden_states, **kwargs)

    class Distant(type(layers[0].self_attn)):
        """Attends more sharply beyond position 300."""

        def forward(self, hidden_states, position_ids, position_embeddings, **kwargs):
            scale = 1 + 0.1 * (position_ids[..., None] > 300)
            turned = tuple(table * scale for table in position_embeddings)
            return super().forward(hidden_states, turned, position_ids=position_ids, **kwargs)

    layers[0].mlp.act_fn = torch.nn.ReLU()
    layers[0].self_attn.__class__ = Curious
    layers[2].self_attn.__class__ = Distant
    layers[1].input_layernorm.variance_epsilon = torch.tensor(1e-6)
    layers[1].self_attn.__class__ = Reversed
    own, _ = packed_forwards(model)
    fusion = fuse(model)
    assert kept(fusion) == {QKV: 2, GATE_UP: 3, NORM: 6, MLP: 2, ADDED: 2}
    reasons = {swap.reason for swap in fusion.report}
    assert {"no kernel for its activation", "no constant epsilon"} < reasons
    assert any("cannot be tried alone (AttributeError" in reason for reason in reasons)
    different = [swap.module_class for swap in fusion.report if "differs by more than rounding" in swap.reason]
    assert different == ["Reversed", "Distant"]
    with fusion.active():
        assert relative_error(packed_forwards(model)[0], own) <= 1e-5


def test_a_layer_without_positions():
    class Unturned(type(fresh("llama", 1).model.layers[0].self_attn)):
        """As every fourth layer of SmolLM 3."""

        def forward(self, hidden_states, position_embeddings, **kwargs):
            cos, sin = position_embeddings
            return super().forward(hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)), **kwargs)

    model = fresh("llama")
    model.model.layers[1].self_attn.__class__ = Unturned
    own, _ = packed_forwards(model)
    fusion = fuse(model)
    assert kept(fusion) == PLAIN
    with fusion.active():
        assert relative_error(packed_forwards(model)[0], own) <= 1e-5


def test_double_precision_is_refused():
    with pytest.raises(ValueError, match="float32, bfloat16 or float16, got torch.float64"):
        fuse(fresh("llama").double())


def test_reduced_precision_products_are_refused():
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="TF32"):
            fuse(fresh("llama"))
    finally:
        torch.set_float32_matmul_precision("highest")


class CountedLaunches(TorchDispatchMode):
    """Counts operators that would launch a kernel on a GPU, by name: those that make or change memory.

    devices: where their results are.
    """

    def __init__(self):
        super().__init__()
        self.calls = {}
        self.devices = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        is_view = all(any(torch._C._is_alias_of(output, given) for given in inputs) for output in outputs)
        name = func.name().split("::")[1].split(".")[0]
        if (not is_view or func._schema.is_mutable) and "empty" not in name:
            name = "linear" if name in {"mm", "addmm"} else name
            self.calls[name] = self.calls.get(name, 0) + 1
            self.devices |= {output.device.type for output in outputs}
        return result

    @property
    def total(self) -> int:
        return sum(self.calls.values())


def fake_forward(family: str, fusion, num_layers: int = NUM_LAYERS) -> CountedLaunches:
    """One fused forward of the family's model on fake CUDA tensors."""
    model = fresh(family, num_layers)
    with fake_cuda(), torch.inference_mode():
        model = onto_fake_device(model)
        cache = cache_for(model, "cuda")
        cache.begin(torch.empty(4, dtype=torch.int64, device="cuda"))
        tokens = torch.empty(1, 4, dtype=torch.int64, device="cuda")
        mask = torch.empty(4, NUM_SLOTS, dtype=torch.bool, device="cuda")
        with tree_attention(model, NAME), mirrored(fusion, model).active(), CountedLaunches() as counted:
            output = model(input_ids=tokens, position_ids=tokens, stand_mask=mask, **{cache_argument(model): cache})
        assert output.logits.shape == (1, 4, 61) and output.logits.device.type == "cuda"
    return counted


@pytest.mark.parametrize("family", DENSE)
def test_fused_forward_never_waits_for_the_device(family):
    counted = fake_forward(family, fuse(fresh(family)))
    assert counted.devices == {"cuda"}
    norms = counted.calls["rms_norm"] + counted.calls.get("add_rms_norm", 0)
    assert counted.calls["rope_and_store"] == NUM_LAYERS and norms >= 2 * NUM_LAYERS + 1


def test_the_fake_device_notices_a_wait():
    fusion = fuse(fresh("llama"))
    fusion.kernels = TRITON._replace(rms_norm=lambda x, *rest: TRITON.rms_norm(x, *rest) * x.sum().item())
    with pytest.raises(DataDependentOutputException):
        fake_forward("llama", fusion)


def test_a_norm_that_gets_other_states_than_expected_norms_them():
    model = fresh("llama")
    norm = FusedNorm(model.model.norm, 0, TRITON)
    states, change, other = torch.randn(3, 2, model.config.hidden_size)
    total = norm.expect(states, change)
    assert torch.equal(total, states + change)
    assert torch.equal(norm(other), FusedNorm(model.model.norm, 0, TRITON)(other))
    assert torch.equal(norm(total), FusedNorm(model.model.norm, 0, TRITON)(states + change))


def test_a_layer_that_adds_otherwise_is_left_alone(monkeypatch):
    """Control of the trial: an addition of something else is refused, and the other swaps stay."""
    after = FusedNorm.after_adding
    monkeypatch.setattr(FusedNorm, "after_adding", lambda norm, s, c: after(norm, s, 1.001 * c))
    found = kept(fuse(fresh("llama", 1)))
    assert ADDED not in found and found[NORM] == 3


def own_launches(family: str, num_layers: int) -> int:
    """Of one packed forward in bfloat16 without any swap."""
    model = fresh(family, num_layers, torch.bfloat16)
    with CountedLaunches() as counted:
        packed_forwards(model)
    return counted.total // len(SIZES)


@pytest.mark.parametrize("family, own", [("llama", 40), ("qwen2", 40), ("qwen3", 55)])
def test_launches_per_layer(family, own):
    """Two norms with the additions before them, four products, rotation, gate, and the attention."""
    fused = [fake_forward(family, fuse(fresh(family, layers)), layers).total for layers in (1, 2)]
    assert fused[1] - fused[0] == 9
    assert own_launches(family, 2) - own_launches(family, 1) >= own
