"""The routes of tokens against plain sorting and against transformers' routers."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fake_cuda import fake_cuda
from nearest_bfloat16 import nearest_bfloat16
from specimens.registry import SPECIMENS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from stand.gpu.kernels import route as route_kernel
from stand.gpu.kernels.route import MOST_EXPERTS, sigmoid_route, softmax_route
from stand.gpu.tuning.expert_tiles import MOST_CHOSEN

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def rounding():
    with nearest_bfloat16():
        yield


def reference(logits: torch.Tensor, chosen: int, renormalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, with a sort that keeps equal ones in their order."""
    values, experts = logits.double().sort(dim=1, descending=True, stable=True)
    laws = torch.softmax(values[:, :chosen] if renormalises else values, dim=1)
    return laws[:, :chosen], experts[:, :chosen]


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """To half a unit of the last place; in float32 the difference of two logits is rounded before its exponential."""
    assert got.shape == expected.shape
    errors = (got.double() - expected.double()).abs()
    bound = torch.finfo(got.dtype).eps * (16 if got.dtype == torch.float32 else 0.501)
    assert (errors <= bound * expected.double() + torch.finfo(got.dtype).tiny).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "chosen"), [(1, 128, 8), (3, 20, 1), (2, 1, 1), (2, 32, 32), (2, 1500, 5), (17, 7, 3)]
)
def test_a_route_is_a_sort_and_a_softmax(num_tokens, num_experts, chosen, renormalises, dtype):
    torch.manual_seed(num_tokens)
    logits = (3 * torch.randn(num_tokens, num_experts)).to(dtype)
    shares, experts = softmax_route(logits, chosen, renormalises)
    expected = reference(logits, chosen, renormalises)
    assert torch.equal(experts, expected[1]) and shares.dtype == dtype
    assert_near(shares, expected[0])


@pytest.mark.parametrize("renormalises", [False, True])
def test_shares_may_stay_in_float32(renormalises):
    logits = torch.randn(3, 20).bfloat16()
    shares, experts = softmax_route(logits, 4, renormalises, True)
    expected = reference(logits, 4, renormalises)
    assert torch.equal(experts, expected[1]) and shares.dtype == torch.float32
    assert_near(shares, expected[0])


def test_of_equal_logits_the_lowest_ids_come_first():
    """Zero and minus zero are equal."""
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, -1.0], [1.0] * 6])
    shares, experts = softmax_route(logits, 4, True)
    assert experts.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert_near(shares, reference(logits, 4, True)[0])


def test_rows_may_be_slices():
    wide = torch.randn(4, 30)
    for own, other in zip(
        softmax_route(wide[:, :20], 3, True), softmax_route(wide[:, :20].clone(), 3, True), strict=True
    ):
        assert torch.equal(own, other)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("renormalises", [False, True])
def test_experts_are_distinct_and_there_whatever_the_logits_are(renormalises):
    infinite, nan = float("inf"), float("nan")
    rows = [[nan] * 5, [-nan, 1, 2, 3, 4], [infinite, 1, infinite, 2, 3], [-infinite] * 5, [0, -infinite, 1, 2, 3]]
    shares, experts = softmax_route(torch.tensor(rows), 5, renormalises)
    assert torch.equal(experts.sort(dim=1).values, torch.arange(5).expand(5, 5))
    assert shares[:4].isnan().all() and shares[4, 4] == 0
    few = softmax_route(torch.tensor(rows), 2, renormalises)
    assert few[0][:4].isnan().all() and torch.equal(few[1], experts[:, :2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "config", "renormalises"),
    [
        (Qwen3MoeTopKRouter, {"num_experts": 40, "norm_topk_prob": True}, True),
        (Qwen3MoeTopKRouter, {"num_experts": 40, "norm_topk_prob": False}, False),
        (GptOssTopKRouter, {"num_local_experts": 40}, True),
    ],
)
def test_transformers_routers_give_the_same(kind, config, renormalises, dtype):
    """The logits have no equal ones, whose order torch leaves open."""
    torch.manual_seed(0)
    router = kind(SimpleNamespace(num_experts_per_tok=4, hidden_size=40, **config))
    router.weight.data = torch.eye(40)
    values = torch.stack([torch.randperm(40) for _ in range(9)]) / 8
    with torch.no_grad():
        logits, shares, experts = router.to(dtype)(values.to(dtype))
    got = softmax_route(logits, 4, renormalises)
    assert torch.equal(got[1], experts) and got[0].dtype == shares.dtype == dtype
    torch.testing.assert_close(got[0], shares, rtol=torch.finfo(dtype).eps * 4, atol=0)


def test_what_does_not_fit_is_refused():
    for bad in (torch.randn(5), torch.randn(2, 8).double(), torch.randn(8, 2).T, torch.randn(1, MOST_EXPERTS + 1)):
        with pytest.raises(ValueError, match="logits must be"):
            softmax_route(bad, 2, True)
    for logits, chosen in ((torch.randn(2, 8), 0), (torch.randn(2, 8), 9), (torch.randn(2, 90), MOST_CHOSEN + 1)):
        with pytest.raises(ValueError, match="experts of a token must be in"):
            softmax_route(logits, chosen, True)


def test_the_stand_in_agrees_with_the_operation():
    given = torch.randn(3, 9).half(), 2, True, True
    for number in (3, 4):
        torch.library.opcheck(softmax_route, given[:number], test_utils=("test_schema", "test_faketensor"))


def test_the_launcher_needs_no_value(monkeypatch):
    """Run on fake CUDA tensors with its kernels cut out."""
    grids = []

    class NoKernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    for name in ("_softmax_route", "_sigmoid_route"):
        monkeypatch.setattr(route_kernel, name, NoKernel())
    monkeypatch.setattr(route_kernel, "launch_device", lambda kernel, tensor: nullcontext())
    with fake_cuda():
        logits = torch.ones(5, 9, device="cuda")
        both = softmax_route._init_fn(logits, 2, True), softmax_route(logits, 2, True)
        given = logits, torch.ones(9, device="cuda"), 2, 3, 2, True, 1.5
        both_sigmoid = sigmoid_route._init_fn(*given), sigmoid_route(*given)
    assert grids == [(5,), (5,)]
    for launched, registered in (*zip(*both, strict=True), *zip(*both_sigmoid, strict=True)):
        assert launched.shape == registered.shape and launched.dtype == registered.dtype
        assert launched.device.type == registered.device.type == "cuda"


def test_specimens_name_every_argument():
    for specimen in SPECIMENS["route"]():
        assert {*specimen.signature, *specimen.constants} == set(specimen.kernel.arg_names), specimen.name
