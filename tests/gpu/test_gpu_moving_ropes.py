"""Rotary positions whose frequencies depend on the longest position: captured where the device chooses them."""

from functools import cache

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

pytest.importorskip("triton")

from longrope_models import FACTORS_OF_64, ONE_HEAD_OF_64, longrope_phi3
from plain_kernels import use_plain_kernels
from tiny_models import SHAPE

import stand
from stand.forward import model as forward_model
from stand.gpu.captured_step import CapturedStep
from stand.step import EagerStep

BORDER = 128
PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]
SETTINGS = {"num_return_sequences": 2, "max_new_tokens": 30, "temperature": 0.6, "top_k": 0, "seed": 4}
CHOOSES_ON_THE_DEVICE = tuple(map(int, transformers.__version__.split(".")[:2])) >= forward_model.CHOOSING_ON_DEVICE


@cache
def model_of(kind: str):
    shape = SHAPE | ONE_HEAD_OF_64
    torch.manual_seed(0)
    if kind == "dynamic":
        config = LlamaConfig(
            **shape, head_dim=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        )
    else:
        config = longrope_phi3(BORDER, shape["max_position_embeddings"], factors=FACTORS_OF_64, **shape)
    return AutoModelForCausalLM.from_config(config).eval()


def longrope_engine(backend: str) -> stand.Engine:
    drafter = stand.BlendedDrafter(budget=16)
    return stand.wrap(model_of("longrope"), drafter=drafter, verifier="match", backend=backend, fuse=False)


@pytest.mark.skipif(not CHOOSES_ON_THE_DEVICE, reason="this transformers asks the host for LongRoPE's factors")
def test_longrope_has_the_tokens_of_eager_steps(monkeypatch):
    """Also after the model was asked beyond the border, which leaves the long factors behind; recorded once."""
    use_plain_kernels(monkeypatch)
    records, record = [], CapturedStep._record
    monkeypatch.setattr(CapturedStep, "_record", lambda step, size: records.append(size) or record(step, size))
    eager, captured = longrope_engine("sdpa"), longrope_engine("triton")
    found = []
    for _ in range(2):
        records.clear()
        assert captured.generate(input_ids=PROMPTS, **SETTINGS).token_ids == (
            eager.generate(input_ids=PROMPTS, **SETTINGS).token_ids
        )
        found.append(len(records))
        model_of("longrope")(torch.arange(BORDER + 9)[None] % 50)
        long = model_of("longrope").model.rotary_emb.long_inv_freq
        assert torch.equal(model_of("longrope").model.rotary_emb.inv_freq, long)
    assert str(captured.backend) == "triton" and found[0] > 0


@pytest.mark.skipif(not CHOOSES_ON_THE_DEVICE, reason="this transformers asks the host for LongRoPE's factors")
@pytest.mark.parametrize("settings", [{}, {"max_rows": 2}, {"temperature": 0.0, "repetition_penalty": 1.2}])
def test_longrope_crosses_its_border_as_in_eager_steps(monkeypatch, settings):
    """Steps of longer texts choose the long factors by themselves, also in graphs that were recorded before."""
    use_plain_kernels(monkeypatch)
    prompts = [*PROMPTS, [*range(3, 53)] * 3]  # the last one begins beyond the border
    asked = {**SETTINGS, "max_new_tokens": BORDER + 20, "stop_token_ids": [], **settings}
    expected = longrope_engine("sdpa").generate(input_ids=prompts, **asked)
    monkeypatch.setattr(EagerStep, "forward", None)
    found = longrope_engine("triton").generate(input_ids=prompts, **asked)
    assert found.token_ids == expected.token_ids
    assert found.stats.num_put_back == expected.stats.num_put_back >= 4


@pytest.mark.parametrize(
    ("kind", "release", "expected"),
    [("longrope", "5.22.0", None), ("longrope", "5.21.3", "longrope"), ("dynamic", "5.24.0", "dynamic")],
)
def test_kinds_that_ask_the_host_are_refused_by_name(monkeypatch, kind, release, expected):
    monkeypatch.setattr(forward_model.transformers, "__version__", release)
    assert forward_model.waiting_ropes(model_of(kind)) == ([] if expected is None else [expected])
    if expected is not None:
        with pytest.raises(ValueError, match=f"rotary positions of kind {expected} make the host wait"):
            stand.wrap(model_of(kind), backend="triton", fuse=False)
