"""The experts of a mixture on a CPU: right, whatever else is in the step; swapped only where they are understood."""

import copy

import pytest
import torch
from mixtures import plain_experts, random_mixture
from tiny_models import SHAPE
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import stand
from stand.forward.few_tokens.product import DTYPES
from stand.fusion.cpu.experts import mixed_experts
from stand.fusion.formulas import CLAMPED, GELU_ERF, GELU_TANH, RELU_SQUARED, SILU
from stand.fusion.forwards.experts import ExpertForm, FusedExperts, expert_forms, is_experts
from stand.fusion.kernels import cpu_kernels
from stand.fusion.probe import MODULE_TOLERANCES
from stand.simd.threads import parallel_region

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
    "a single expert": {"tokens": 3, "per_token": 1, "num_experts": 1},
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
    expected = plain_experts(*mixture, *form)
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


def test_many_tokens_of_many_experts_take_the_modules_own_products(monkeypatch):
    config = copy.deepcopy(CONFIGS["mixtral"])
    config.num_local_experts = 32
    fused = FusedExperts(next(filter(is_experts, made(config).modules())), PLAIN, cpu_kernels())
    calls = []
    monkeypatch.setattr(type(fused.module), "forward", lambda self, *given: calls.append(len(given[0])))
    with torch.inference_mode():
        for tokens in (512, 513):
            fused(*random_mixture(PLAIN, tokens=tokens, num_experts=32, width=SHAPE["hidden_size"])[:3])
    assert calls == [513]


def halved(inner: torch.Tensor) -> torch.Tensor:
    return inner.chunk(2, dim=-1)[1]


def of_ones_own(module, states, experts, shares):
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, states, experts, shares) * 0.5


INSIDE = {
    "another activation": lambda module, patch: setattr(module, "act_fn", nn.Tanh()),
    "a hook on it": lambda module, patch: module.act_fn.register_forward_hook(lambda *parts: parts[-1] * 0.5),
    "its forward": lambda module, patch: setattr(module.act_fn, "forward", torch.tanh),
    "a gate of the instance": lambda module, patch: setattr(module, "_apply_gate", halved),
    "another way": lambda module, patch: patch.setattr(module.config, "_experts_implementation", "of_ones_own"),
    "a way's function": lambda module, patch: patch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", batched_and_halved
    ),
}


def batched_and_halved(module, states, experts, shares):
    return ALL_EXPERTS_FUNCTIONS["batched_mm"](module, states, experts, shares) * 0.5


@pytest.mark.parametrize("change", INSIDE)
def test_what_experts_run_inside_themselves_is_seen(monkeypatch, change):
    """By the fusion that there is, and by a model that is wrapped again."""
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "of_ones_own", of_ones_own)
    model = made(CONFIGS["mixtral"])
    engine = stand.wrap(model)
    modules = list(filter(is_experts, model.modules()))
    for module in modules:
        INSIDE[change](module, monkeypatch)
    with engine.backend.fusion.active():
        assert not any("forward" in vars(module) for module in modules)
    assert not any(swap.is_kept for swap in verdicts(model))


@pytest.mark.parametrize("name", ["down_proj", "gate_up_proj"])
def test_weights_that_the_kernels_refuse_are_the_modules_own(name):
    model = made(CONFIGS["mixtral"])
    engine = stand.wrap(model)
    for module in filter(is_experts, model.modules()):
        weight = getattr(module, name)
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    settings = {"max_new_tokens": 12, "temperature": 0.0}
    expected = stand.wrap(model, fuse=False).generate([[5, 9, 11, 4]], **settings).token_ids
    assert engine.generate([[5, 9, 11, 4]], **settings).token_ids == expected


def test_another_default_device_changes_nothing():
    mixture = random_mixture(PLAIN, **CASES["several"])
    expected = mixed_experts(*mixture, *PLAIN)
    with torch.device("meta"):
        assert torch.equal(mixed_experts(*mixture, *PLAIN), expected)


def test_a_route_to_no_expert_is_the_modules_own():
    """The number behind the last expert, which transformers' own loop passes over, since 5.24 or earlier."""
    model = made(CONFIGS["mixtral"])
    model.set_experts_implementation("eager")
    fused = FusedExperts(next(filter(is_experts, model.modules())), PLAIN, cpu_kernels())
    given = random_mixture(PLAIN, tokens=3, num_experts=4, width=SHAPE["hidden_size"])[:3]
    given[1][1, 0] = 4
    with torch.inference_mode():
        try:
            expected = type(fused.module).forward(fused.module, *given)
        except RuntimeError:
            pytest.skip("this version refuses such a route")
        assert torch.equal(fused(*given), expected)


def test_a_gate_that_cuts_off_on_both_sides_is_no_clamped_one(monkeypatch):
    """Told by its values: a trial on small weights reaches no limit."""
    module = next(filter(is_experts, made(CONFIGS["mixtral"]).modules()))
    module.alpha, module.limit = 1.702, 7.0

    def gate(low: float):
        def apply_gate(self, inner):
            gate, up = inner.chunk(2, dim=-1)
            gate, up = gate.clamp(low, self.limit), up.clamp(-self.limit, self.limit)
            return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

        return apply_gate

    monkeypatch.setattr(type(module), "_apply_gate", gate(-float("inf")))
    assert expert_forms(module) == [ExpertForm(CLAMPED, False, False, 1.702, 7.0)]
    monkeypatch.setattr(type(module), "_apply_gate", gate(-3.0))
    assert expert_forms(module) == []


@pytest.mark.parametrize("name", ["alpha", "limit"])
def test_one_setting_of_the_clamped_gate_alone_is_another_gate(name):
    """Classes cut a gate off at a limit without an alpha; this one is not cut off at all."""
    module = next(filter(is_experts, made(CONFIGS["mixtral"]).modules()))
    setattr(module, f"swiglu_{name}", 7.0)
    assert expert_forms(module) == [PLAIN]


def test_biases_that_the_class_does_not_have_are_passed_over():
    module = next(filter(is_experts, made(CONFIGS["mixtral"]).modules()))
    fused = FusedExperts(module, PLAIN, cpu_kernels())
    given = random_mixture(PLAIN, tokens=3, num_experts=4, width=SHAPE["hidden_size"])[:3]
    with torch.inference_mode():
        expected = fused(*given)
        module.down_proj_bias = torch.ones(4, SHAPE["hidden_size"])
        assert torch.equal(fused(*given), expected)
