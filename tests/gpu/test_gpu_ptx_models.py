"""Compiled kernels in the shapes of real models, in 16 bits: matrix instructions, every choice of blocks, whole models.

Needs STAND_PTX: the interpreter multiplies the bits of bfloat16.
"""

import copy
import os

import pytest
import torch

pytest.importorskip("triton")

from attention_cases import difference, make_case, run
from ptx.ledger import PtxError
from recurrent_models import RECURRENT
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM
from unequal_models import unequal_model

import stand
from stand.drafters.blended import BlendedDrafter

pytestmark = pytest.mark.skipif("STAND_PTX" not in os.environ, reason="needs compiled kernels: STAND_PTX=90")
ATTENTION = {  # heads, key heads per query head, size, tokens and committed keys per row, options
    "7B, large tiles": (7, 7, 128, [80, 1], [300, 70], {}),
    "7B, small tiles": (7, 7, 128, [7, 3], [300, 6], {}),
    "8B, three words": (4, 4, 128, [170], [130], {}),
    "Phi-3": (2, 1, 96, [70, 5], [300, 20], {"window": 50}),
    "Gemma 2": (2, 2, 256, [70, 5], [200, 20], {"softcap": 50.0, "window": 40}),
    "gpt-oss": (8, 8, 64, [20, 5], [200, 20], {"sinks": torch.linspace(-1, 2, 8), "window": 100}),
    "Gemma 4": (8, 8, 512, [20, 5], [200, 20], {}),
    "DeepSeek, expanded": (2, 1, (192, 128), [140, 5], [200, 20], {}),
    "DeepSeek, latents": (16, 16, (512, 64), [20, 5], [200, 20], {}),
    "MiniCPM 3, latents": (40, 40, (256, 32), [6, 2], [200, 20], {}),
}


def case_of(name: str):
    """Its attention in bfloat16: a size of heads is that of keys and of values, or of latents and of turned parts."""
    heads, groups, size, counts, lengths, _ = ATTENTION[name]
    kind = {"heads": heads, "groups": groups, "dtype": torch.bfloat16, "is_latent": name.endswith("latents")}
    kind["size"], kind["value_size"] = (size, size) if isinstance(size, int) else size
    return make_case(counts, lengths, **kind)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_errs_by_rounding_alone(name):
    """Values are normal; splits of 64 keys, so that many programs hand their parts to the last one."""
    options = {key: value.bfloat16() if key == "sinks" else value for key, value in ATTENTION[name][-1].items()}
    assert difference(case_of(name), **options) <= 8e-3


def test_the_order_of_programs_changes_no_bit(compiled, monkeypatch):
    case = make_case([7, 3], [300, 6], heads=7, groups=7, size=128, dtype=torch.bfloat16)
    expected = run(case)
    monkeypatch.setattr(compiled, "order", lambda count: reversed(range(count)))
    assert torch.equal(run(case), expected)


WAIT, FENCE = "cp.async.wait_group", "fence.proxy.async.shared::cta;"


@pytest.mark.skipif(os.environ.get("STAND_PTX") != "90", reason="wgmma is sm_90's")
@pytest.mark.parametrize(
    "edit",
    [
        lambda ptx: ptx.replace(FENCE, ""),
        lambda ptx: ptx.replace(FENCE, "").replace(WAIT, f"{FENCE}\n\t{WAIT}"),  # copies have not arrived yet
    ],
)
def test_a_fence_that_is_missing_or_too_early_is_noticed(compiled, edit):
    case = make_case([7, 3], [300, 6], heads=7, groups=7, size=128, dtype=torch.bfloat16)
    with compiled.edited(edit), pytest.raises(PtxError, match="without a fence"):
        run(case)


def sixteen_bit_model(family: str):
    """Random, with a size of heads that the kernels take."""
    config = copy.deepcopy(CONFIGS[family])
    config.head_dim, config.hidden_size = 64, 256 if family == "phi3" else 64
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_whole_model_writes_the_tokens_of_the_eager_step(family):
    """Checked while it is wrapped; fused modules have the bits of the model's own, but for sums in another order."""
    settings = {"input_ids": [[3, 4, 5, 3, 4], [7, 8, 7, 8]], "max_new_tokens": 4, "temperature": 0.8, "top_p": 0.9}
    written = {}
    for name in ("sdpa", "triton"):
        engine = stand.wrap(sixteen_bit_model(family), backend=name, drafter=BlendedDrafter(budget=6))
        written[name] = engine.generate(**settings, seed=2, learn=False).token_ids
    assert written["triton"] == written["sdpa"] and str(engine.backend) == "triton"
    report = [swap for swap in engine.backend.fusion.report if swap.kind != "product of few tokens"]
    assert len(report) >= 6 and all(swap.is_kept and swap.max_error <= 2.0**-9 for swap in report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_of_experts_computes_what_its_own_modules_do(family, dtype):
    """Its steps are checked against eager ones while it is wrapped; tokens are compared in float32, since in 16 bits
    they part where two are nearly as likely."""
    settings = {"input_ids": [[3, 4, 5, 3, 4], [7, 8, 7, 8]], "max_new_tokens": 4, "temperature": 0.8, "seed": 2}
    written = {}
    for name in ("sdpa", "triton"):
        engine = stand.wrap(sixteen_bit_model(family).to(dtype), backend=name, drafter=BlendedDrafter(budget=6))
        written[name] = engine.generate(**settings, learn=False).token_ids
    assert str(engine.backend) == "triton" and (dtype != torch.float32 or written["triton"] == written["sdpa"])
    report = {swap.kind: swap for swap in engine.backend.fusion.report}
    assert report["mixture of experts"].is_kept and report["router of a mixture"].is_kept


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4", "deepseek_v3"])
def test_a_model_whose_layers_differ_writes_the_tokens_of_the_eager_step(family):
    """In float32: in 16 bits tokens part where two are nearly as likely."""
    settings = {"input_ids": [[3, 4, 5, 3, 4], [7, 8, 7, 8]], "max_new_tokens": 4, "temperature": 0.8, "seed": 2}
    written = {}
    for name in ("sdpa", "triton"):
        engine = stand.wrap(copy.deepcopy(unequal_model(family)), backend=name, drafter=BlendedDrafter(budget=6))
        written[name] = engine.generate(**settings, learn=False).token_ids
    assert written["triton"] == written["sdpa"] and str(engine.backend) == "triton"


@pytest.mark.slow  # half a minute each; test_gpu_recurrent_kernels runs the same kernels one by one
@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
def test_a_model_with_recurrent_states_writes_the_tokens_of_the_eager_step(family):
    """Two layers: the convolution, the rule and what follows kept paths, compiled. In float32: in 16 bits tokens part
    where two are nearly as likely."""
    config = copy.deepcopy(RECURRENT[family])
    config.head_dim, config.num_hidden_layers, config.layer_types = 64, 2, ["linear_attention", "full_attention"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    settings = {"input_ids": [[3, 4, 5, 3, 4], [7, 8, 7, 8]], "max_new_tokens": 4, "temperature": 0.8, "seed": 2}
    written = {}
    for name in ("sdpa", "triton"):
        engine = stand.wrap(model, backend=name, drafter=BlendedDrafter(budget=6), fuse=False)
        written[name] = engine.generate(**settings, learn=False).token_ids
    assert written["triton"] == written["sdpa"] and str(engine.backend) == "triton"
