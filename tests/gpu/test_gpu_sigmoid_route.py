"""Routes by sigmoids, a bias and groups, against a plain choice in float64 and against transformers' routers."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from nearest_bfloat16 import nearest_bfloat16
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter

from stand.gpu.kernels.route import MOST_EXPERTS, sigmoid_route
from stand.gpu.tuning.expert_tiles import MOST_CHOSEN

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Routes = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def rounding():
    with nearest_bfloat16():
        yield


def reference(
    logits: torch.Tensor, bias: torch.Tensor, chosen: int, groups: int, chosen_groups: int, renormalises: bool,
    scale: float,
) -> Routes:  # fmt: skip
    """Token by token in float64, with sorts that keep equal ones in their order."""
    shares, experts = [], []
    for row in logits.double():
        scores = row.sigmoid().tolist()
        choices = [score + more for score, more in zip(scores, bias.double().tolist(), strict=True)]
        size = len(choices) // groups
        ids = [range(group * size, (group + 1) * size) for group in range(groups)]
        if groups > 1:
            ids.sort(key=lambda members: -sum(sorted([choices[one] for one in members])[-2:]))
        allowed = sorted(one for members in ids[:chosen_groups] for one in members)
        best = sorted(allowed, key=lambda one: -choices[one])[:chosen]
        total = sum(scores[one] for one in best) + 1e-20 if renormalises else 1
        shares.append([scores[one] / total * scale for one in best])
        experts.append(best)
    return torch.tensor(shares, dtype=torch.float64), torch.tensor(experts)


def assert_near(got: Routes, expected: Routes) -> None:
    """The same experts, and shares to half a unit of the last place; float32 has some operations before it."""
    assert torch.equal(got[1], expected[1]) and got[1].dtype == torch.int64
    errors = (got[0].double() - expected[0]).abs()
    bound = torch.finfo(got[0].dtype).eps * (8 if got[0].dtype == torch.float32 else 0.501)
    assert (errors <= bound * expected[0] + torch.finfo(got[0].dtype).tiny).all()


def random_case(num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32) -> Routes:
    """Logits [M, E] and a bias [E]."""
    torch.manual_seed(num_tokens + num_experts)
    return (2 * torch.randn(num_tokens, num_experts)).to(dtype), torch.randn(num_experts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "groups", "chosen_groups", "chosen"),
    [
        *[(1, 64, 1, 1, 4), (5, 256, 8, 4, 8), (17, 12, 2, 1, 3), (9, 24, 8, 3, 6), (3, 24, 8, 8, 6), (2, 7, 1, 1, 7)],
        *[(4, 45, 3, 2, 5), (3, 18, 3, 1, 6), (2, 1, 1, 1, 1), (2, 512, 8, 2, 22), (1, 2000, 8, 3, 5)],
    ],
)
def test_a_route_is_a_plain_choice(num_tokens, num_experts, groups, chosen_groups, chosen, renormalises, dtype):
    logits, bias = random_case(num_tokens, num_experts, dtype)
    form = chosen, groups, chosen_groups, renormalises, 2.5
    shares, experts = sigmoid_route(logits, bias, *form)
    assert shares.dtype == dtype
    assert_near((shares, experts), reference(logits, bias, *form))


def test_the_bias_chooses_and_is_in_no_share():
    """Controls for what compares: each part of the rule makes a difference here."""
    logits, bias = random_case(20, 16)
    form = 4, 4, 2, True, 1.0
    own = sigmoid_route(logits, bias, *form)
    assert_near(own, reference(logits, bias, *form))
    others = [(torch.zeros(16), *form), (bias, 4, 1, 1, True, 1.0), (bias, 4, 4, 3, True, 1.0)]
    for other in [*others, (bias, 4, 4, 2, False, 1.0), (bias, 4, 4, 2, True, 1.1)]:
        with pytest.raises(AssertionError):
            assert_near(own, reference(logits, *other))
    for dtype in DTYPES[1:]:
        rounded = bias.to(dtype)
        assert_near(sigmoid_route(logits, rounded, *form), reference(logits, rounded, *form))


def test_of_equal_ones_the_lowest_ids_come_first():
    """Groups too; zero and minus zero are equal, and so are sums of scores that are one."""
    logits = torch.tensor([[0.0, -0.0] * 4, [90.0, 80.0] * 4, [-1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    shares, experts = sigmoid_route(logits, torch.zeros(8), 3, 4, 2, True, 1.0)
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2], [2, 3, 4]]
    assert torch.allclose(shares, torch.full((3, 3), 1 / 3))


def test_rows_may_be_slices():
    wide, bias = random_case(4, 30)
    form = bias[:20], 3, 4, 2, True, 1.0
    for own, other in zip(sigmoid_route(wide[:, :20], *form), sigmoid_route(wide[:, :20].clone(), *form), strict=True):
        assert torch.equal(own, other)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (3, 2), (3, 1)])
def test_experts_are_distinct_and_there_whatever_the_logits_are(groups, chosen_groups):
    infinite, nan = float("inf"), float("nan")
    rows = [[nan] * 6, [1, 2, -nan, 3, 4, 5], [infinite, 1, infinite, 2, 3, 4], [-infinite] * 6, [-infinite, nan] * 3]
    for bias in (torch.zeros(6), torch.tensor([0, nan, infinite, -infinite, -infinite, 1])):
        shares, experts = sigmoid_route(torch.tensor(rows), bias, 2, groups, chosen_groups, False, 1.0)
        assert (experts[:, 0] != experts[:, 1]).all() and ((0 <= experts) & (experts < 6)).all()
        assert shares[0].isnan().all()
    shares, experts = sigmoid_route(torch.tensor(rows), torch.zeros(6), 2, groups, chosen_groups, True, 1.0)
    assert experts[1, 0] == 2 and shares[[0, 1, 4]].isnan().all()
    assert shares[3].tolist() == [0, 0]  # what is added to their sum keeps it from zero


@pytest.mark.parametrize("kind", [DeepseekV3TopkRouter, Glm4MoeLiteTopkRouter, NemotronHTopkRouter])
@pytest.mark.parametrize(("groups", "chosen_groups", "renormalises"), [(1, 1, True), (8, 3, True), (4, 2, False)])
def test_transformers_routers_give_the_same(kind, groups, chosen_groups, renormalises):
    torch.manual_seed(groups)
    config = SimpleNamespace(
        num_experts_per_tok=4, num_local_experts=40, hidden_size=16, routed_scaling_factor=1.7,
        n_group=groups, topk_group=chosen_groups, norm_topk_prob=renormalises,
    )  # fmt: skip
    router = kind(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_()
    with torch.no_grad():
        logits, shares, experts = router(torch.randn(1, 9, 16) / 2)
    got = sigmoid_route(logits, router.e_score_correction_bias, 4, groups, chosen_groups, renormalises, 1.7)
    order = shares.new_zeros(9, 40).scatter(1, experts, shares), shares.new_zeros(9, 40).scatter(1, got[1], got[0])
    torch.testing.assert_close(*order, rtol=1e-6, atol=0)


def test_what_does_not_fit_is_refused():
    logits, bias = torch.randn(2, 12), torch.randn(12)
    for bad in (torch.randn(5), logits.double(), torch.randn(12, 2).T, torch.randn(1, MOST_EXPERTS + 1)):
        with pytest.raises(ValueError, match="logits must be .* use the module's own forward"):
            sigmoid_route(bad, bias, 2, 1, 1, True, 1.0)
    for chosen in (0, 13, MOST_CHOSEN + 1):
        with pytest.raises(ValueError, match="experts of a token must be in .* use the module's own forward"):
            sigmoid_route(logits, bias, chosen, 1, 1, True, 1.0)
    for bad in (bias[:11], bias.double(), bias[None], torch.randn(24)[::2]):
        with pytest.raises(ValueError, match="bias must be .* use the module's own forward"):
            sigmoid_route(logits, bad, 2, 1, 1, True, 1.0)
    for groups in (0, 5, 12, 24):
        with pytest.raises(ValueError, match="groups must divide 12 experts .* use the module's own forward"):
            sigmoid_route(logits, bias, 2, groups, 1, True, 1.0)
    for chosen, chosen_groups in ((2, 0), (2, 5), (4, 1)):
        with pytest.raises(ValueError, match="chosen groups must be in .* use the module's own forward"):
            sigmoid_route(logits, bias, chosen, 4, chosen_groups, True, 1.0)


def test_the_stand_in_agrees_with_the_operation():
    given = torch.randn(3, 12), torch.randn(12), 2, 3, 2, True, 2.5
    torch.library.opcheck(sigmoid_route, given, test_utils=("test_schema", "test_faketensor"))
