"""Experts in one operation against plain loops and against transformers' modules."""

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fake_cuda import fake_cuda
from mixtures import plain_experts, random_mixture
from no_host_copy import NoHostCopy
from ptx.ledger import PtxError
from specimens.registry import SPECIMENS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from stand.fusion.formulas import CLAMPED, GELU_ERF, GELU_TANH, MOST_EXPERT_TOKENS, RELU_SQUARED, SILU
from stand.fusion.forwards.experts import ExpertForm, FusedExperts
from stand.gpu.kernels import experts as experts_kernel
from stand.gpu.kernels import pairs as pairs_kernel
from stand.gpu.kernels.experts import mixed_experts
from stand.gpu.kernels.pairs import sort_pairs
from stand.gpu.tuning.expert_tiles import MOST_CHOSEN, NARROW, TILES, ExpertTile, expert_tile

HALF = [torch.bfloat16, torch.float16]
needs_compiled = pytest.mark.skipif("STAND_PTX" not in os.environ, reason="needs compiled kernels: STAND_PTX=90")
ALPHA, LIMIT = 1.702, 0.75


@dataclass(frozen=True)
class Layer:
    """Sizes and kind of a layer; 72 numbers, 40 in between: of no block a multiple."""

    num_experts: int = 4
    chosen: int = 2
    hidden: int = 72
    size: int = 40
    activation: int = SILU
    is_transposed: bool = False
    is_interleaved: bool = False
    has_bias: bool = False

    @property
    def form(self) -> ExpertForm:
        return ExpertForm(self.activation, self.is_transposed, self.is_interleaved, ALPHA, LIMIT)


OSS = {"activation": CLAMPED, "is_transposed": True, "is_interleaved": True, "has_bias": True}


def routes(num_tokens: int, layer: Layer) -> torch.Tensor:
    """Distinct experts of each token."""
    return torch.stack([torch.randperm(layer.num_experts)[: layer.chosen] for _ in range(num_tokens)])


def arguments(
    num_tokens: int, layer: Layer, dtype: torch.dtype = torch.float32, shares: torch.dtype | None = None
) -> list:
    """What `mixed_experts` takes."""
    mixture = random_mixture(
        layer.form, tokens=num_tokens, per_token=layer.chosen, num_experts=layer.num_experts, width=layer.hidden,
        size=layer.size, has_bias=layer.has_bias, dtype=dtype, seed=num_tokens,
    )  # fmt: skip
    return [*mixture._replace(shares=mixture.shares.to(shares or dtype)), *layer.form]


def error(got: torch.Tensor, given: list) -> float:
    """The largest, in parts of the largest value."""
    exact = plain_experts(*given)
    assert got.shape == exact.shape and got.dtype == given[0].dtype
    return ((got.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize(
    ("num_tokens", "layer"),
    [
        (1, Layer()),
        (1, Layer(**OSS)),
        (1, Layer(num_experts=3, chosen=3, activation=GELU_ERF)),
        (3, Layer(num_experts=50, chosen=4)),
        (3, Layer(hidden=33, size=17, **OSS)),
        (16, Layer(num_experts=3, chosen=3)),
        (16, Layer(num_experts=1, chosen=1)),
        (17, Layer(num_experts=2, chosen=1, activation=RELU_SQUARED)),
        (17, Layer(activation=CLAMPED, is_interleaved=True, hidden=1, size=3)),
        (17, Layer(activation=GELU_TANH, is_transposed=True)),
        (70, Layer(num_experts=2, chosen=1, has_bias=True)),
        (70, Layer(num_experts=8, **OSS)),
        (70, Layer(num_experts=8, activation=RELU_SQUARED, is_transposed=True, has_bias=True)),
    ],
)
def test_experts_are_a_loop(num_tokens, layer):
    given = arguments(num_tokens, layer)
    assert error(mixed_experts(*given), given) < 2e-6


@pytest.mark.parametrize(("num_tokens", "chosen"), [(1, 2), (40, 2), (40, 1)])
def test_tokens_may_all_take_the_same_experts(num_tokens, chosen):
    """The other experts have no tile, and theirs have several."""
    given = arguments(num_tokens, Layer(num_experts=9, chosen=chosen))
    given[1] = torch.tensor([7, 2])[:chosen].repeat(num_tokens, 1)
    assert error(mixed_experts(*given), given) < 2e-6


def test_a_wrong_expert_is_noticed():
    """Control: the comparison sees two experts of one token swapped, the gate for up, and alternating rows."""
    given = arguments(5, Layer())
    got = mixed_experts(*given)
    swapped = given[1].clone()
    swapped[3] = swapped[3].flip(0)
    for place, wrong in ((1, swapped), (3, given[3].roll(40, 1)), (9, True), (2, given[2].flip(0))):
        assert error(got, [*given[:place], wrong, *given[place + 1 :]]) > 1e-2


@needs_compiled
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shares", [None, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "layer"),
    [
        (1, Layer()),
        (1, Layer(hidden=64, size=64, **OSS)),
        (3, Layer(num_experts=20, chosen=4)),
        (17, Layer(hidden=64, size=48, **OSS)),
        (17, Layer(num_experts=2, chosen=1, activation=RELU_SQUARED, hidden=33)),
        (70, Layer(num_experts=2, chosen=1)),
        (70, Layer(num_experts=2, chosen=2, hidden=80, **OSS)),
    ],
)
def test_16_bits_are_rounded_where_transformers_rounds(num_tokens, layer, shares, dtype):
    """Most values agree to the bit with sums in float64."""
    given = arguments(num_tokens, layer, dtype, shares)
    got, exact = mixed_experts(*given), plain_experts(*given)
    errors = (got.double() - exact.to(dtype).double()).abs()
    assert errors.max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (errors > 0).float().mean() <= 0.02


@needs_compiled  # the interpreter's products depend on where in a matrix a row is
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [Layer(num_experts=9), Layer(num_experts=9, **OSS)])
def test_other_tokens_change_nothing(layer, dtype):
    """Not a bit of a token's result. On a GPU that holds where the tile is the same: this machine and a GPU may differ
    in how a matrix instruction adds up."""
    given = arguments(12, layer, dtype)
    whole = mixed_experts(*given)
    for some in ([2, 3, 4, 5, 6], [11, 8, 2, 5, 0, 1, 4, 7, 10]):
        few = [one[some] if place < 3 else one for place, one in enumerate(given)]
        assert torch.equal(mixed_experts(*few), whole[some])
    alone = [one[:1] if place < 3 else one for place, one in enumerate(given)]
    assert torch.equal(mixed_experts(*alone), whole[:1])


def without_barrier(ptx: str) -> str:
    """Right before the atomic operation, where Triton 3.9 puts one more."""
    head, atom, tail = ptx.partition("atom.")
    before, store, after = head.rpartition("st.global.")
    return before + store + after.replace("bar.sync \t0;", "") + atom + tail if atom else ptx


@needs_compiled
def test_parts_are_stored_before_they_are_counted(compiled):
    """Of one token. Control: without the barrier the last program may read too soon."""
    given = arguments(1, Layer())
    expected = mixed_experts(*given)
    with compiled.edited(str):
        assert torch.equal(mixed_experts(*given), expected)
    with compiled.edited(without_barrier), pytest.raises(PtxError, match="race"):
        mixed_experts(*given)


def module_of(kind: type, config: dict) -> torch.nn.Module:
    """One of transformers', with random weights, by the implementation that it takes by default."""
    module = kind(SimpleNamespace(_experts_implementation="grouped_mm", **config))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(False)


QWEN3 = {"num_experts": 6, "hidden_size": 48, "moe_intermediate_size": 20, "hidden_act": "silu"}
GPT_OSS = {
    "num_local_experts": 6, "hidden_size": 48, "intermediate_size": 20, "swiglu_alpha": ALPHA, "swiglu_limit": LIMIT
}  # fmt: skip
NEMOTRON = {
    "n_routed_experts": 6, "hidden_size": 48, "moe_intermediate_size": 20, "moe_latent_size": None,
    "mlp_hidden_act": "relu2",
}  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 21])
@pytest.mark.parametrize(
    ("kind", "config", "activation"),
    [(Qwen3MoeExperts, QWEN3, SILU), (GptOssExperts, GPT_OSS, CLAMPED), (NemotronHExperts, NEMOTRON, RELU_SQUARED)],
)
def test_transformers_modules_give_the_same(kind, config, activation, num_tokens):
    torch.manual_seed(num_tokens)
    module = module_of(kind, config)
    layer = Layer(num_experts=6, chosen=3)
    given = torch.randn(num_tokens, 48), routes(num_tokens, layer), torch.rand(num_tokens, 3)
    up = module.gate_up_proj if module.has_gate else module.up_proj
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    got = mixed_experts(
        *given, up, biases[0], module.down_proj, biases[1], activation, module.is_transposed,
        not module.is_concatenated, getattr(module, "alpha", ALPHA), getattr(module, "limit", LIMIT),
    )  # fmt: skip
    torch.testing.assert_close(got, module(*given), rtol=1e-5, atol=1e-5)


def test_values_that_are_no_numbers_stay_so():
    """In their tokens alone: neither a limit nor a cut at zero hides them."""
    for layer in (Layer(**OSS), Layer(activation=RELU_SQUARED), Layer()):
        given = arguments(4, layer)
        given[0][2, 5] = float("nan")
        got = mixed_experts(*given)
        assert got[2].isnan().all() and not got[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize(("num_tokens", "num_experts", "chosen"), [(1, 1, 1), (5, 7, 3), (300, 4, 4), (20, 300, 2)])
def test_pairs_are_sorted_as_a_stable_sort_does(num_tokens, num_experts, chosen):
    """Of 300 tokens in more than one block."""
    torch.manual_seed(0)
    experts = routes(num_tokens, Layer(num_experts=num_experts, chosen=chosen))
    order, starts = sort_pairs(experts, num_experts)
    assert torch.equal(order.long(), experts.flatten().sort(stable=True).indices)
    counts = experts.flatten().bincount(minlength=num_experts)
    assert torch.equal(starts.long(), torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]))


def test_no_spread_of_pairs_needs_more_tiles_than_there_are():
    """All spreads of up to nine pairs over four experts; the bound is reached for each number of pairs."""
    tile = ExpertTile(3, 16, 16, 4, 2)
    most = Counter()
    for code in range(10**4):
        counts = [code // 10**place % 10 for place in range(4)]
        most[sum(counts)] = max(most[sum(counts)], sum(-(-count // tile.tokens) for count in counts))
    assert all(most[num_pairs] == tile.num_tiles(num_pairs, 4) for num_pairs in range(10))


@pytest.mark.parametrize(
    ("num_tokens", "chosen", "num_experts", "is_transposed", "expected"),
    [
        (1, 8, 128, False, NARROW),
        (1, 4, 32, True, TILES[0]),
        (16, 8, 128, False, TILES[0]),
        (16, 4, 4, False, TILES[0]),  # no expert can have more than 16
        (256, 8, 128, False, TILES[1]),
        (512, 4, 32, True, TILES[2]),
        (512, 32, 32, False, TILES[2]),
    ],
)
def test_tiles_hold_the_pairs_of_most_experts(num_tokens, chosen, num_experts, is_transposed, expected):
    kind = {"is_transposed": is_transposed}
    assert expert_tile(num_tokens, chosen, num_experts, is_float32=False, **kind) == expected
    assert expert_tile(num_tokens, chosen, num_experts, is_float32=True, **kind).depth == expected.depth // 2


PLACES = {
    "states": 0, "experts": 1, "shares": 2, "up": 3, "up_bias": 4, "down": 5, "down_bias": 6, "activation": 7,
    "is_transposed": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activation", 9, "activation must be one of"),
        ("states", torch.randn(72, 2).T, "must be contiguous"),
        ("up", torch.randn(4, 80, 72).half(), "share a dtype"),
        ("experts", torch.zeros(2, 2, dtype=torch.int32), "experts must be int64"),
        ("shares", torch.rand(2, 2).half(), "or float32"),
        ("shares", torch.rand(2, 3), "1 to 32"),
        ("states", torch.randn(3, 72), "1 to 512"),
        ("up", torch.randn(4, 79, 72), "weights must be as"),
        ("down", torch.randn(3, 72, 40), "weights must be as"),
        ("up_bias", torch.randn(4, 40), "weights must be as"),
        ("down_bias", torch.randn(4, 40), "weights must be as"),
        ("is_transposed", True, "weights must be as"),
        ("activation", RELU_SQUARED, "weights must be as"),
    ],
)
def test_what_does_not_fit_is_refused(name, value, message):
    given = arguments(2, Layer(has_bias=True))
    given[PLACES[name]] = value
    with pytest.raises(ValueError, match=message):
        mixed_experts(*given)


def test_too_many_tokens_and_experts_of_a_token_are_refused():
    for num_tokens, chosen in ((MOST_EXPERT_TOKENS + 1, 2), (0, 2), (2, MOST_CHOSEN + 1)):
        given = arguments(2, Layer())
        routes_of = torch.zeros(num_tokens, chosen, dtype=torch.int64)
        given[:3] = torch.randn(num_tokens, 72), routes_of, torch.rand(num_tokens, chosen)
        with pytest.raises(ValueError, match="use the module's own forward"):
            mixed_experts(*given)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("layer", [Layer(), Layer(**OSS)])
def test_the_stand_in_agrees_with_the_operation(num_tokens, layer):
    torch.library.opcheck(mixed_experts, arguments(num_tokens, layer), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("num_tokens", "launches"), [(1, 2), (40, 4)])
def test_the_launcher_needs_no_value(num_tokens, launches, monkeypatch):
    """Run on fake CUDA tensors with its kernels cut out; one token needs two launches."""
    grids = []

    class NoKernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    for module in (experts_kernel, pairs_kernel):
        for specimen in SPECIMENS[module.__name__.rsplit(".", 1)[1]]():
            monkeypatch.setattr(module, specimen.kernel.__name__, NoKernel())
        monkeypatch.setattr(module, "launch_device", lambda kernel, tensor: nullcontext())
    given = arguments(num_tokens, Layer())
    with fake_cuda():
        given[:7] = [
            one if one is None else torch.empty(one.shape, dtype=one.dtype, device="cuda") for one in given[:7]
        ]
        with NoHostCopy():
            launched = mixed_experts._init_fn(*given)
        registered = mixed_experts(*given)
    assert len(grids) == launches and all(isinstance(size, int) for grid in grids for size in grid)
    assert launched.shape == registered.shape and launched.device.type == registered.device.type == "cuda"


@pytest.mark.parametrize(("num_tokens", "is_fused"), [(MOST_EXPERT_TOKENS, True), (MOST_EXPERT_TOKENS + 1, False)])
def test_no_size_of_a_captured_step_is_left_to_the_modules_own_products(num_tokens, is_fused):
    """Few experts, so that there are many tokens for each: torch's products make the host wait, but in bfloat16."""
    kind = type("Experts", (torch.nn.Module,), {"forward": lambda self, states, experts, shares: "own"})
    module = kind()
    for name, value in {
        "num_experts": 2,
        "has_gate": True,
        "has_bias": False,
        "gate_up_proj": 0,
        "down_proj": 0,
    }.items():
        setattr(module, name, value)
    fused = FusedExperts(module, ExpertForm(SILU, False, False), SimpleNamespace(mixed_experts=lambda *given: "ours"))
    with fake_cuda():
        states, experts = (torch.empty(num_tokens, 2, device="cuda") for _ in range(2))
        assert fused(states, experts, experts) == ("ours" if is_fused else "own")


def test_specimens_name_every_argument():
    for module in ("experts", "pairs"):
        for specimen in SPECIMENS[module]():
            assert {*specimen.signature, *specimen.constants} == set(specimen.kernel.arg_names), specimen.name


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_route_to_no_expert_adds_nothing(num_tokens, monkeypatch):
    """The number behind the last expert: neither another's result nor what nobody has written is added."""
    given = arguments(num_tokens, Layer())
    given[2][0, 1] = 0.0  # the share of another expert
    expected = plain_experts(*given)
    given[1][0, 1], given[2][0, 1] = 4, 0.5
    monkeypatch.setattr(experts_kernel.torch, "empty", filled_with_nan)
    torch.testing.assert_close(mixed_experts(*given).double(), expected, rtol=1e-5, atol=1e-5)


def filled_with_nan(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=device)
