"""The fused softmax equals torch's, and makes broken rows visible in their first column."""

import pytest
import torch

pytest.importorskip("triton")

from stand.gpu.kernels.verification.softmax import softmax_rows

VOCABULARY_SIZE = 5000  # two chunks and a half
INFINITY = float("inf")


def random_logits(num_rows: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (6 * torch.randn(num_rows, VOCABULARY_SIZE, generator=generator)).to(dtype)


def softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    laws = torch.full(logits.shape, -1.0)
    softmax_rows(laws, logits, temperature)
    return laws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_equals_torch(dtype, temperature):
    logits = random_logits(3, dtype)
    expected = torch.softmax(logits.double() / temperature, dim=1)
    torch.testing.assert_close(softmax(logits, temperature).double(), expected, rtol=5e-6, atol=1e-12)


def test_large_logits_and_forbidden_tokens():
    logits = random_logits(4)
    logits[0] += 1e4
    logits[1, 100:4900] = -INFINITY  # a chunk without a token, and parts of others
    logits[2, 1:] = -INFINITY
    laws = softmax(logits, 0.7)
    torch.testing.assert_close(laws, torch.softmax(logits / 0.7, dim=1), rtol=1e-5, atol=1e-12)
    assert (laws[1, 100:4900] == 0).all() and laws[2, 0] == 1


@pytest.mark.parametrize("place", [0, 2500, 4999])
@pytest.mark.parametrize("value", [float("nan"), INFINITY])
def test_a_broken_row_is_nan_throughout(place, value):
    logits = random_logits(2)
    logits[1, 2048:4096] = -INFINITY
    logits[1, place] = value
    laws = softmax(logits, 1.0)
    assert torch.isnan(laws[1]).all()
    assert torch.isfinite(laws[0]).all()


def test_a_row_without_a_token_is_nan():
    assert torch.isnan(softmax(torch.full((1, VOCABULARY_SIZE), -INFINITY), 1.0)).all()


def test_writes_into_a_part_of_a_larger_buffer():
    logits, buffer = random_logits(6)[::2, 50:4050], torch.full((9, 4100), 7.0)
    softmax_rows(buffer[2:5, 30:4030], logits, 1.0)
    torch.testing.assert_close(buffer[2:5, 30:4030], torch.softmax(logits, dim=1), rtol=1e-5, atol=1e-12)
    assert buffer.eq(7.0).sum() == buffer.numel() - 3 * 4000


def test_refuses_what_it_cannot_normalise():
    logits = random_logits(2)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        softmax(logits, 0.0)
    for bad in (logits.double(), logits.t()):
        with pytest.raises(ValueError, match="rows contiguous"):
            softmax(bad, 1.0)
