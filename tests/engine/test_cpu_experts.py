"""The experts of a mixture on a CPU: right, whatever else is in the step; swapped only where they are understood."""

import pytest
import torch
from mixtures import plain_experts, random_mixture
from tiny_models import SHAPE
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, NemotronHConfig, Qwen3MoeConfig

import stand
from stand.forward.few_token_product import DTYPES
from stand.fusion.cpu_experts import mixed_experts
from stand.fusion.experts import ExpertForm, FusedExperts, expert_forms, is_experts
from stand.fusion.formulas import CLAMPED, GELU_ERF, GELU_TANH, RELU_SQUARED, SILU
from stand.fusion.kernels import cpu_kernels
from stand.fusion.probe import MODULE_TOLERANCES
from stand.threads import parallel_region

KIND = "mixture of experts"
PLAIN = ExpertForm(SILU, False, False)
FORMS = {
    "silu": PLAIN,
    "tanh": ExpertForm(GELU_TANH, False, False),
    "erf": ExpertForm(GELU_ERF, False, False),
    "no gate": ExpertForm(RELU_SQUARED, False, False),
}
CASES = {
    "one token": {"tokens": 1},
    "several": {"tokens": 9, "per_token": 3},
    "one expert each": {"tokens": 5, "per_token": 1},
    "all experts each": {"tokens": 4, "per_token": 6},
    "biases": {"tokens": 7, "has_bias": True},
    "odd sizes": {"tokens": 6, "width": 37, "size": 11},
    "shared among threads": {"tokens": 40, "per_token": 4, "num_experts": 16, "width": 160, "size": 80},
    "nobody": {"tokens": 0},
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, head_dim=16
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}


def error(mixture, form) -> float:
    """As a share of the largest value of a token."""
    expected = plain_experts(mixture, form)
    got = mixed_experts(*mixture, *form)
    assert got.dtype is mixture.states.dtype and got.shape == expected.shape
    return float(((got.double() - expected).abs().amax(-1) / expected.abs().amax(-1)).max()) if len(got) else 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_results_are_those_of_plain_sums(form, case, dtype):
    mixture = random_mixture(FORMS[form], **CASES[case], dtype=dtype)
    assert error(mixture, FORMS[form]) <= MODULE_TOLERANCES[dtype]


def test_a_wrong_expert_or_share_would_be_seen():
    mixture = random_mixture(PLAIN, **CASES["several"])
    expected = mixed_experts(*mixture, *PLAIN)
    other = mixture.experts.clone()
    other[4] = other[4].roll(1)
    for changed in (mixture._replace(experts=other), mixture._replace(shares=mixture.shares.flip(1))):
        assert not torch.allclose(mixed_experts(*changed, *PLAIN), expected, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_may_be_float32(dtype):
    mixture = random_mixture(PLAIN, **CASES["several"], dtype=dtype)
    assert error(mixture._replace(shares=mixture.shares.float() / 3), PLAIN) <= MODULE_TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_whatever_is_beside_it(dtype):
    mixture = random_mixture(PLAIN, **CASES["shared among threads"], dtype=dtype)
    whole = mixed_experts(*mixture, *PLAIN)
    for token in (0, 17, 39):
        one = mixture._replace(
            **{name: getattr(mixture, name)[token : token + 1] for name in ("states", "experts", "shares")}
        )
        assert torch.equal(mixed_experts(*one, *PLAIN)[0], whole[token])


@pytest.mark.skipif(not parallel_region(), reason="torch has threads that compiled code cannot use")
def test_threads_change_no_bit():
    mixture = random_mixture(PLAIN, **CASES["shared among threads"])
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(mixed_experts(*mixture, *PLAIN))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_what_it_cannot_read_is_refused():
    mixture = random_mixture(PLAIN, **CASES["biases"])
    changes = {
        "down": mixture.down[:, :, :-1].contiguous(),
        "up": mixture.up.double(),
        "up_bias": mixture.up_bias[:, :-1].contiguous(),
        "down_bias": mixture.down_bias[:-1],
        "experts": mixture.experts.int(),
        "shares": mixture.shares[:, :1],
        "states": mixture.states.T.contiguous().T,
    }
    for name, change in changes.items():
        with pytest.raises(ValueError, match="must be contiguous.*use the module's own forward"):
            mixed_experts(*mixture._replace(**{name: change}), *PLAIN)
    with pytest.raises(ValueError, match="must be contiguous"):  # twice as many outputs as without a gate
        mixed_experts(*mixture, *FORMS["no gate"])
    for form in (ExpertForm(SILU, True, False), ExpertForm(SILU, False, True), ExpertForm(CLAMPED, False, False)):
        with pytest.raises(ValueError, match="on a CPU, weights must be rows of outputs"):
            mixed_experts(*mixture, *form)
    for number in (-1, 6):
        experts = mixture.experts.clone()
        experts[3, 1] = number
        with pytest.raises(IndexError, match="experts must be numbers from 0 below 6"):
            mixed_experts(*mixture._replace(experts=experts), *PLAIN)


def made(config, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **changes).eval()


def verdicts(model) -> list:
    return [swap for swap in stand.wrap(model).backend.fusion.report if swap.kind == KIND]


@pytest.mark.parametrize("family", CONFIGS)
def test_models_write_the_same_with_them(family):
    model = made(CONFIGS[family])
    (swap,) = verdicts(model)
    assert swap.is_kept and swap.count == 2 and swap.max_error <= 1e-6
    answers = [
        stand.wrap(model, fuse=fuse).generate([[5, 9, 11, 4]], max_new_tokens=30, temperature=0.0).token_ids
        for fuse in (True, False)
    ]
    assert answers[0] == answers[1]


def test_a_mixture_without_a_gate_is_swapped():
    config = NemotronHConfig(
        vocab_size=97, hidden_size=32, layers_block_type=["attention", "moe", "mamba"], num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2,
        n_group=1, topk_group=1, chunk_size=16,
    )  # fmt: skip
    model = made(config)
    assert [expert_forms(module) for module in filter(is_experts, model.modules())] == [[FORMS["no gate"]]]
    (swap,) = verdicts(model)
    assert swap.is_kept and swap.max_error <= 1e-5


def test_an_activation_without_a_kernel_is_left_alone():
    model = made(CONFIGS["mixtral"])
    for module in filter(is_experts, model.modules()):
        module.act_fn = nn.Tanh()
    (swap,) = verdicts(model)
    assert not swap.is_kept and "no kernel for what its experts compute" in swap.reason


def test_a_gate_of_its_own_ends_the_swap(monkeypatch):
    model = made(CONFIGS["mixtral"])
    engine = stand.wrap(model)
    experts = next(filter(is_experts, model.modules()))
    with engine.backend.fusion.active():
        assert "forward" in vars(experts)
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, inner: inner.chunk(2, dim=-1)[1])
    with engine.backend.fusion.active():
        assert "forward" not in vars(experts)
    (swap,) = verdicts(model)
    assert not swap.is_kept


def test_long_prompts_take_the_modules_own_products(monkeypatch):
    model = made(CONFIGS["mixtral"])
    fused = FusedExperts(next(filter(is_experts, model.modules())), PLAIN, cpu_kernels())
    calls = []
    own = type(fused.module).forward
    monkeypatch.setattr(
        type(fused.module), "forward", lambda self, *given: calls.append(len(given[0])) or own(self, *given)
    )
    with torch.inference_mode():
        for tokens in (128, 129):  # 64 and more for each of four experts, two a token
            mixture = random_mixture(PLAIN, tokens=tokens, num_experts=4, width=SHAPE["hidden_size"])
            fused(*mixture[:3])
    assert calls == [129]


def test_routes_may_come_by_name():
    model = made(CONFIGS["mixtral"])
    fused = FusedExperts(next(filter(is_experts, model.modules())), PLAIN, cpu_kernels())
    states, experts, shares = random_mixture(PLAIN, tokens=3, num_experts=4, width=SHAPE["hidden_size"])[:3]
    with torch.inference_mode():
        expected = fused(states, experts, shares)
        assert torch.equal(fused(states, top_k_weights=shares, top_k_index=experts), expected)
