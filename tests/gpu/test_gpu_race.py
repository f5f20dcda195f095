"""The coupled draw's kernel equals the rule it stands for: same noise bits, same winners, ties to the lowest id."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from stand.gpu.kernels.verification import race as race_kernel  # noqa: E402
from stand.trees import DraftBatch, DraftTree  # noqa: E402
from stand.verifiers import TargetRows, VerifierNoise, get_verifier  # noqa: E402
from stand.verifiers.noise import uniforms_on_device  # noqa: E402

VOCABULARY_SIZE = 2500  # two chunks and a half


@triton.jit
def _write_uniforms(keys, out, BLOCK: tl.constexpr):
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + tokens, race_kernel.token_uniforms(tl.load(keys + row), tokens))


def noise_of(num_rows: int, seed: int = 2**63 - 5) -> VerifierNoise:
    rows = np.arange(num_rows)
    return VerifierNoise(seed=seed, rows=rows * 7, steps=rows, positions=3 * rows + 40)


def keys_of(noise: VerifierNoise, depth: int = 0) -> torch.Tensor:
    """[B] int64: the bits of the step keys."""
    keys = noise.step_keys(np.arange(len(noise.rows)), depth)
    return torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))


def random_laws(num_rows: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    logits = 3 * torch.randn(num_rows, VOCABULARY_SIZE, generator=generator)
    if kind == "filtered":  # whole chunks of zeros, and a few tokens elsewhere
        logits[:, 300:2300] = float("-inf")
        logits[:, ::3] = float("-inf")
    return torch.softmax(logits, dim=-1)


def test_uniforms_are_the_verifiers_bit_for_bit():
    noise = noise_of(6)
    out = torch.empty(6, 1024, dtype=torch.float64)
    _write_uniforms[(6,)](keys_of(noise), out, BLOCK=1024)
    expected = uniforms_on_device(noise.step_keys(np.arange(6), 0), 1024, device=torch.device("cpu"))
    assert torch.equal(out.view(torch.int64), expected.view(torch.int64))
    assert keys_of(noise).min() < 0 < keys_of(noise).max()  # both signs were tried


@pytest.mark.parametrize("kind", ["full", "filtered"])
def test_winners_are_those_of_the_coupled_rule(kind):
    batch = DraftBatch.concatenate([DraftTree.pending(1)] * 24)
    noise, laws = noise_of(24), random_laws(24, kind)
    drawn = get_verifier("coupled").verify(batch, TargetRows(laws), noise).next_tokens
    assert race_kernel.race(laws, keys_of(noise)).tolist() == drawn.tolist()
    assert len(set(drawn.tolist())) > 12


def test_another_depth_draws_otherwise():
    """Control: equality above is not that of peaked laws."""
    noise, laws = noise_of(24), random_laws(24, "full")
    here, below = (race_kernel.race(laws, keys_of(noise, depth)) for depth in (0, 1))
    assert (here != below).sum() > 12


def test_a_strided_law_in_float64():
    noise, laws = noise_of(5), random_laws(10, "full").double()
    drawn = race_kernel.race(laws[::2], keys_of(noise))
    assert torch.equal(drawn, race_kernel.race(laws[::2].contiguous(), keys_of(noise)))


def test_zeros_never_win_and_a_row_of_zeros_gives_the_first_token():
    laws = torch.zeros(4, VOCABULARY_SIZE)
    laws[0, 2400] = 1e-44  # a denormal
    laws[1, VOCABULARY_SIZE - 1] = 1.0
    laws[2, 0] = 1.0
    assert race_kernel.race(laws, keys_of(noise_of(4))).tolist() == [2400, VOCABULARY_SIZE - 1, 0, 0]


def test_ties_go_to_the_lowest_id():
    """Equal races cannot be had through a key, so weights cancel the noise: every p / E is exactly 1."""
    noise = noise_of(1)
    exponentials = noise.exponentials(np.arange(1), 0, vocabulary_size=VOCABULARY_SIZE, device=torch.device("cpu"))
    for first, second in ((3, 900), (3, 1500), (1030, 2400)):
        laws = torch.zeros(1, VOCABULARY_SIZE, dtype=torch.float64)
        laws[0, [first, second]] = exponentials[0, [first, second]]
        assert race_kernel.race(laws, keys_of(noise)).tolist() == [first]


def test_refuses_what_it_cannot_race():
    laws, keys = random_laws(3, "full"), keys_of(noise_of(3))
    for bad in ((laws.t(), keys), (laws, keys[:2]), (laws, keys.int())):
        with pytest.raises(ValueError, match="one key per node"):
            race_kernel.race(*bad)
