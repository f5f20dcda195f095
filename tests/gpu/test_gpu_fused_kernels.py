"""Norm, gate and rotary kernels in Triton's interpreter against the transformers modules they stand for."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import gelu, silu

pytest.importorskip("triton")

import triton
import triton.language as tl
from fake_cuda import fake_cuda
from nearest_bfloat16 import nearest_bfloat16
from specimens.registry import SPECIMENS
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from triton.runtime import interpreter

from stand.fusion.formulas import (
    GATE_FIRST,
    GELU_ERF,
    GELU_TANH,
    NO_NORM,
    NORM_FIRST,
    ONE_PLUS,
    PAIRED_COLUMNS,
    PAIRS,
    ROUND_FIRST,
    SCALE_FIRST,
    SILU,
)
from stand.gpu.kernels import norm as norm_kernel
from stand.gpu.kernels import rope as rope_kernel
from stand.gpu.kernels import rotate as rotate_kernel
from stand.gpu.kernels import swiglu as swiglu_kernel
from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.norm import add_rms_norm, rms_norm
from stand.gpu.kernels.recurrent import gated_norm as gated_norm_kernel
from stand.gpu.kernels.recurrent.gated_norm import gated_rms_norm
from stand.gpu.kernels.rope import rope_and_store
from stand.gpu.kernels.rotate import rotate_pair
from stand.gpu.kernels.swiglu import gated_product

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = {ROUND_FIRST: LlamaRMSNorm, SCALE_FIRST: Olmo2RMSNorm, ONE_PLUS: Gemma3RMSNorm}
HAS_GROUPS = "group_size" in inspect.signature(BambaRMSNormGated).parameters  # not up to transformers 5.17
GATED_NORMS = {  # and the size of a group
    NORM_FIRST: (lambda size: Qwen3_5RMSNormGated(size, eps=1e-6), 48),
    GATE_FIRST: (
        lambda size: BambaRMSNormGated(size, *([16] if HAS_GROUPS else []), eps=1e-6),
        16 if HAS_GROUPS else 48,
    ),
}
ACTIVATIONS = {SILU: silu, GELU_TANH: lambda x: gelu(x, approximate="tanh"), GELU_ERF: gelu}
ROOM = 6  # cache slots per row
SLOTS = torch.tensor([7, 0, -1, 17, 3])  # the third token pads


@pytest.fixture(autouse=True)
def rounding():
    with nearest_bfloat16():
        yield


def test_interpreted_kernels_round_to_nearest():
    states = torch.tensor([[1 + 2**-8 + 2**-20, 1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-20, -1.3]])
    converted = interpreter._convert_float(states.numpy(), tl.float32, tl.bfloat16, None)
    assert torch.equal(torch.from_numpy(converted.view("int16")).view(torch.bfloat16), states.bfloat16())


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Float32: 1e-6 of the largest value. 16 bits: roundings at the same places, so most values agree bit for bit."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    largest = expected.float().abs().max()
    errors = (got.float() - expected.float()).abs()
    if got.dtype == torch.float32:
        assert errors.max() <= 1e-6 * largest
    else:
        assert errors.max() <= 2 * torch.finfo(got.dtype).eps * largest
        assert (errors > 0).float().mean() <= 0.05


def norm_module(rule: int, size: int, dtype: torch.dtype) -> torch.nn.Module:
    module = NORMS[rule](size, eps=1e-6)
    with torch.no_grad():
        module.weight.copy_(torch.randn(size))
    return module.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", NORMS)
def test_rms_norm(rule, dtype):
    torch.manual_seed(rule)
    module = norm_module(rule, 40, dtype)
    states = (torch.randn(2, 9, 40) * torch.tensor([1.0, 1e-3, 30.0]).repeat(3)[:, None]).to(dtype)
    with torch.no_grad():
        assert_near(rms_norm(states, module.weight, 1e-6, rule), module(states))
        turned = states.view(2, 9, 8, 5).transpose(1, 3)  # last dimension not adjacent
        narrow = norm_module(rule, 9, dtype)
        assert_near(rms_norm(turned, narrow.weight, 1e-6, rule), narrow(turned))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", NORMS)
def test_rms_norm_behind_an_addition(rule, dtype):
    """To the bit what addition and norm give one after the other; the sum is rounded in between."""
    torch.manual_seed(rule)
    weight = norm_module(rule, 40, dtype).weight
    states = (torch.randn(2, 9, 40) * torch.tensor([1.0, 1e-3, 30.0]).repeat(3)[:, None]).to(dtype)
    change = torch.randn(2, 40, 9).to(dtype).transpose(1, 2)  # last dimension not adjacent
    with torch.no_grad():
        total, normed = add_rms_norm(states, change, weight, 1e-6, rule)
        assert torch.equal(total, states + change)
        assert torch.equal(normed, rms_norm(states + change, weight, 1e-6, rule))
        assert not torch.equal(normed, rms_norm(states, weight, 1e-6, rule))
    with pytest.raises(ValueError, match="must be as the states"):
        add_rms_norm(states, change[:1], weight, 1e-6, rule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", GATED_NORMS)
def test_gated_norm(order, dtype):
    """Groups of a row, rows that lie apart, gates that overflow an exponential; states of Mamba-2 are in float32."""
    torch.manual_seed(order)
    make, group = GATED_NORMS[order]
    module = make(48)
    with torch.no_grad():
        module.weight.copy_(torch.randn(48))
    states, gate = torch.randn(2, 5, 100)[..., :48] * 3, torch.randn(2, 5, 70)[..., :48] * 4
    gate[0, 0, :3] = torch.tensor([200.0, -200.0, 0.0])
    states, gate, module = states.to(torch.float32 if order == GATE_FIRST else dtype), gate.to(dtype), module.to(dtype)
    expected = module(states, gate)
    assert_near(gated_rms_norm(states, gate, module.weight, 1e-6, group, order), expected)


@pytest.mark.parametrize("order", GATED_NORMS)
def test_heads_with_one_weight_are_normed_each_by_itself(order):
    """To the bit what the heads alone give."""
    torch.manual_seed(order)
    states, gate, weight = torch.randn(5, 48), torch.randn(5, 60)[:, 7:55], torch.randn(16)
    apart = gated_rms_norm(states.view(-1, 16), gate.reshape(-1, 16), weight, 1e-6, 16, order)
    together = gated_rms_norm(states, gate, weight, 1e-6, 16, order)
    assert torch.equal(together, apart.view(5, 48))
    assert torch.equal(together, gated_rms_norm(states, gate, weight.repeat(3), 1e-6, 16, order))


def test_the_orders_of_a_gate_are_told_apart():
    """Control: what `test_gated_norm` compares with differs by more than it allows."""
    states, gate, weight = torch.randn(3, 4, 48).unbind(0)[:2] + (torch.ones(48),)
    first, last = (gated_rms_norm(states, gate, weight, 1e-6, 48, order) for order in GATED_NORMS)
    assert (first - last).abs().max() > 0.1 * first.abs().max()


def test_the_rules_are_told_apart():
    torch.manual_seed(0)
    states, weight = torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16)
    outputs = [rms_norm(states, weight, 1e-6, rule) for rule in NORMS]
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_product(activation, dtype):
    torch.manual_seed(activation)
    size = swiglu_kernel.BLOCK + 3  # a second, nearly empty block
    merged = torch.randn(1, 3, 2 * size).to(dtype)
    gate, up = merged.split(size, dim=-1)
    assert_near(gated_product(gate, up, activation), ACTIVATIONS[activation](gate) * up)


def test_gated_product_does_not_overflow():
    gate = torch.tensor([[-1000.0, 1000.0, 0.0]])
    assert torch.equal(gated_product(gate, torch.ones(1, 3), SILU), torch.tensor([[0.0, 1000.0, 0.0]]))


def angles(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [M, width] of both halves, as transformers makes them."""
    half = torch.rand(len(SLOTS), width // 2) * 6.3
    both = torch.cat([half, half], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def packed_heads(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """query, key, value as slices of one merged output."""
    merged = torch.randn(len(SLOTS), (heads + 2 * kv_heads) * size).to(dtype)
    parts = merged.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    return [part.unflatten(-1, (-1, size)) for part in parts]


def normed_heads(rule: int, query: torch.Tensor, key: torch.Tensor) -> tuple[tuple, tuple]:
    """Weights of norms of query and key, and what these modules make of them; Nones and the same without a rule."""
    if rule == NO_NORM:
        return (None, None), (query, key)
    modules = [norm_module(rule, query.shape[-1], query.dtype) for _ in range(2)]
    with torch.no_grad():
        normed = tuple(module(states) for module, states in zip(modules, (query, key), strict=True))
    return tuple(module.weight.detach() for module in modules), normed


def stored(states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """[R, Hkv, S, D] with states [M, Hkv, D] at the slots that are not negative."""
    after = before.clone()
    for slot, state in zip(SLOTS.tolist(), states, strict=True):
        if slot >= 0:
            after[slot // ROOM, :, slot % ROOM] = state
    return after


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size, rotary, rule",
    [(8, 8, NO_NORM), (12, 8, NO_NORM), (8, 0, NO_NORM), (6, 6, ROUND_FIRST), (8, 8, ONE_PLUS), (8, 4, SCALE_FIRST)],
)
def test_rope_and_store(size, rotary, rule, dtype):
    torch.manual_seed(size + rotary)
    query, key, value = packed_heads(3, 2, size, dtype)
    cos, sin = angles(rotary, dtype)
    # One layer of a larger block, as the step's cache hands it out.
    block = torch.randn(2, 2, 3, 2, ROOM, size).to(dtype)
    keys, values = block[1, 0], block[1, 1]
    before = block.clone()
    weights, normed = normed_heads(rule, query, key)
    turned = [
        torch.cat([rotated, states[..., rotary:]], dim=-1)
        for rotated, states in zip(
            apply_rotary_pos_emb(*(states[..., :rotary] for states in normed), cos, sin), normed, strict=True
        )
    ]
    got = rope_and_store(query, key, value, cos, sin, keys, values, SLOTS, rotary, *weights, 1e-6, rule)
    assert_near(got, turned[0])
    assert_near(keys, stored(turned[1], before[1, 0]))
    assert torch.equal(values, stored(value, before[1, 1]))
    assert torch.equal(block[0], before[0])  # the other layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size, rotary, rule", [(8, 8, SCALE_FIRST), (6, 4, ONE_PLUS)])
def test_values_may_be_normed_too(size, rotary, rule, dtype):
    """Gemma 4's, by a norm without a weight; values do not turn."""
    torch.manual_seed(size)
    query, key, value = packed_heads(3, 2, size, dtype)
    cos, sin = angles(rotary, dtype)
    module = norm_module(rule, size, dtype)
    weight = module.weight.detach()
    stored_keys, stored_values = torch.randn(2, 3, 2, ROOM, size).to(dtype)
    plain, before = (stored_keys.clone(), stored_values.clone()), stored_values.clone()
    given = (query, key, value, cos, sin)
    got = rope_and_store(*given, stored_keys, stored_values, SLOTS, rotary, weight, weight, 1e-6, rule, weight)
    assert torch.equal(got, rope_and_store(*given, *plain, SLOTS, rotary, weight, weight, 1e-6, rule))
    assert torch.equal(stored_keys, plain[0])
    with torch.no_grad():
        assert_near(stored_values, stored(module(value), before))


def test_rope_tables_of_half_width():
    torch.manual_seed(0)
    query, key, value = packed_heads(2, 1, 8, torch.float32)
    cos, sin = (table[:, :4].contiguous() for table in angles(8, torch.float32))
    keys, values = torch.zeros(3, 1, ROOM, 8), torch.zeros(3, 1, ROOM, 8)
    turned = modeling_gpt_oss.apply_rotary_pos_emb(query, key, cos, sin)
    got = rope_and_store(query, key, value, cos, sin, keys, values, SLOTS, 8, None, None, 0.0, NO_NORM)
    assert_near(got, turned[0])
    assert_near(keys, stored(turned[1], torch.zeros_like(keys)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotary", "rule"), [(8, 8, NO_NORM), (12, 8, NO_NORM), (8, 4, SCALE_FIRST)])
@pytest.mark.parametrize("pairing", [PAIRS, PAIRED_COLUMNS])
def test_components_side_by_side(pairing, size, rotary, rule, dtype):
    """GLM-4's own function, and Cohere's on the part that turns."""
    torch.manual_seed(size + rotary)
    query, key, value = packed_heads(3, 2, size, dtype)
    cos, sin = angles(rotary, dtype)
    weights, normed = normed_heads(rule, query, key)
    if pairing == PAIRS:
        turned = modeling_glm4.apply_rotary_pos_emb(*normed, cos, sin)
    else:
        cos, sin = (table[:, : rotary // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
        parts = modeling_cohere.apply_rotary_pos_emb(*(states[..., :rotary] for states in normed), cos, sin)
        turned = [torch.cat([part, whole[..., rotary:]], dim=-1) for part, whole in zip(parts, normed, strict=True)]
    keys, values = torch.zeros(2, 3, 2, ROOM, size, dtype=dtype).unbind(0)
    given = query, key, value, cos, sin, keys, values, SLOTS, rotary, *weights, 1e-6, rule
    got = rope_and_store(*given, None, pairing)
    if pairing == PAIRED_COLUMNS and dtype != torch.float32:  # Cohere rounds once
        assert torch.allclose(got.float(), turned[0].float(), atol=0.03)
    else:
        assert_near(got, turned[0])
        assert_near(keys, stored(turned[1], torch.zeros_like(keys)))
    assert torch.equal(values, stored(value, torch.zeros_like(values)))
    assert not torch.allclose(rope_and_store(*given).float(), turned[0].float(), atol=0.1)  # control: halves


def test_cache_rows_of_their_own_stride():
    """A cache laid out [R, S, Hkv, D] underneath: only the strides say so."""
    torch.manual_seed(0)
    query, key, value = packed_heads(2, 2, 4, torch.float32)
    cos, sin = angles(4, torch.float32)
    keys, values = torch.zeros(3, ROOM, 2, 4).transpose(1, 2), torch.zeros(3, ROOM, 2, 4).transpose(1, 2)
    rope_and_store(query, key, value, cos, sin, keys, values, SLOTS, 4, None, None, 0.0, NO_NORM)
    assert torch.equal(values, stored(value, torch.zeros(3, 2, ROOM, 4)))


def test_inputs_that_do_not_fit_are_refused():
    states = torch.randn(2, 8)
    with pytest.raises(ValueError, match="share one dtype"):
        rms_norm(states, torch.ones(8, dtype=torch.bfloat16), 1e-6, ROUND_FIRST)
    with pytest.raises(ValueError, match="rule must be"):
        rms_norm(states, torch.ones(8), 1e-6, 9)
    ones = torch.ones(8)
    for bad in (
        (states, states[:, :4], ones, 1e-6, 8),
        (states, states, ones, 1e-6, 3),
        (states, states, ones[:2], 1e-6, 4),
    ):
        with pytest.raises(ValueError, match="gate and weight must be as the states"):
            gated_rms_norm(*bad, GATE_FIRST)
    with pytest.raises(ValueError, match="order must be"):
        gated_rms_norm(states, states, torch.ones(8), 1e-6, 8, 2)
    with pytest.raises(ValueError, match="share shape"):
        gated_product(states, states[:, :4], SILU)
    query, key, value = packed_heads(2, 1, 8, torch.float32)
    cos, sin = angles(8, torch.float32)
    cache = torch.zeros(3, 1, ROOM, 8)
    with pytest.raises(ValueError, match="slots int64"):
        rope_and_store(query, key, value, cos, sin, cache, cache.clone(), SLOTS.int(), 8, None, None, 0.0, NO_NORM)
    with pytest.raises(ValueError, match="cos and sin must be"):
        rope_and_store(query, key, value, cos[:, :3], sin[:, :3], cache, cache, SLOTS, 8, None, None, 0.0, NO_NORM)
    with pytest.raises(ValueError, match="share a dtype"):
        rope_and_store(query, key, value, cos, sin, cache.half(), cache, SLOTS, 8, None, None, 0.0, NO_NORM)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("size", [8, 12, 64])
def test_rotate_pair(size, is_interleaved, dtype):
    """Slices of larger tensors, as layers of latent attention have them; in 16 bits transformers' roundings."""
    torch.manual_seed(size)
    whole, key = torch.randn(1, 5, 3, size + 4).to(dtype).transpose(1, 2), torch.randn(1, 5, size + 8).to(dtype)
    query, key = whole[..., 4:], key[:, None, :, 8:]
    halves = torch.rand(2, 1, 5, size // 2).to(dtype)
    cos, sin = torch.cat([halves, halves], dim=-1)
    rotation = modeling_deepseek_v3.apply_rotary_pos_emb_interleave if is_interleaved else apply_rotary_pos_emb
    expected = rotation(query, key, cos, sin)
    found = rotate_pair(query[0], key[0], cos[0], sin[0], is_interleaved)
    for own, other in zip(found, expected, strict=True):
        assert own.is_contiguous() and torch.equal(own, other[0])
    assert not torch.equal(found[0], rotate_pair(query[0], key[0], cos[0], sin[0], not is_interleaved)[0])


def test_rotations_of_other_shapes_are_refused():
    query, key, table = torch.zeros(3, 5, 8), torch.zeros(1, 5, 8), torch.zeros(5, 8)
    for changed in (
        (query, key.half(), table, table), (query, key, table[:, :4], table[:, :4]), (query, key[:, :4], table, table),
        (query[..., :7], key[..., :7], table[:, :7], table[:, :7]), (query.transpose(1, 2), key, table, table),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="use the module's own forward"):
            rotate_pair(*changed, False)


def test_cpu_tensors_need_the_interpreter():
    compiled = triton.JITFunction(norm_kernel._rms_norm.fn)
    with pytest.raises(ValueError, match="needs CUDA tensors, got rms_norm"):
        launch_device(compiled, torch.zeros(1))
    with launch_device(norm_kernel._rms_norm, torch.zeros(1)):
        pass


def norm_arguments(device: str) -> tuple:
    return torch.ones(1, 5, 16, device=device), torch.ones(16, device=device), 1e-6, ROUND_FIRST


def gate_arguments(device: str) -> tuple:
    return *torch.ones(1, 5, 24, device=device).split(12, dim=-1), SILU


def gated_norm_arguments(device: str) -> tuple:
    return *torch.ones(1, 5, 24, device=device).split(12, dim=-1), torch.ones(12, device=device), 1e-6, 4, GATE_FIRST


def rope_arguments(device: str) -> tuple:
    merged = torch.ones(5, 48, device=device)
    parts = [part.unflatten(-1, (-1, 8)) for part in merged.split([32, 8, 8], dim=-1)]
    cos, sin = torch.ones(2, 5, 8, device=device).unbind(0)
    keys, values = torch.zeros(2, 3, 1, ROOM, 8, device=device).unbind(0)
    weight = torch.ones(8, device=device)
    slots = torch.arange(5, device=device)
    return *parts, cos, sin, keys, values, slots, 8, weight, weight.clone(), 1e-6, ROUND_FIRST


def rotate_arguments(device: str) -> tuple:
    query, key = torch.ones(3, 5, 8, device=device), torch.ones(1, 5, 8, device=device)
    return query, key, *torch.ones(2, 5, 8, device=device).unbind(0), True


OPERATIONS = [
    (rotate_kernel, rotate_pair, rotate_arguments),
    (norm_kernel, rms_norm, norm_arguments),
    (swiglu_kernel, gated_product, gate_arguments),
    (gated_norm_kernel, gated_rms_norm, gated_norm_arguments),
    (rope_kernel, rope_and_store, rope_arguments),
]


@pytest.mark.parametrize("module, operation, arguments", OPERATIONS)
def test_the_stand_in_agrees_with_the_operation(module, operation, arguments):
    """Shapes, dtypes and what is written to are as registered."""
    torch.library.opcheck(operation, arguments("cpu"), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("module, operation, arguments", OPERATIONS)
def test_the_launcher_needs_no_value(module, operation, arguments, monkeypatch):
    """Run on fake CUDA tensors with its kernel cut out, a launcher reads nothing and gives what its stand-in gives."""
    grids = []

    class NoKernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    for specimen in SPECIMENS[module.__name__.rsplit(".", 1)[1]]():
        monkeypatch.setattr(module, specimen.kernel.__name__, NoKernel())
    monkeypatch.setattr(module, "launch_device", lambda kernel, tensor: nullcontext())
    with fake_cuda():
        given = arguments("cuda")
        both = operation._init_fn(*given), operation(*given)
    assert len(grids) == 1 and all(isinstance(size, int) for size in grids[0])
    for launched, registered in zip(*(one if isinstance(one, tuple) else (one,) for one in both), strict=True):
        assert launched.shape == registered.shape and launched.stride() == registered.stride()
        assert launched.device.type == registered.device.type == "cuda"


@pytest.mark.parametrize("module", [norm_kernel, swiglu_kernel, rope_kernel, rotate_kernel, gated_norm_kernel])
def test_specimens_name_every_argument(module):
    for specimen in SPECIMENS[module.__name__.rsplit(".", 1)[1]]():
        assert {*specimen.signature, *specimen.constants} == set(specimen.kernel.arg_names), specimen.name
