"""The residual draw and the kept path in Triton's interpreter, against the host's draw and a walk over parents."""

import pytest
import torch

pytest.importorskip("triton")

import plain_kernels  # noqa: E402

from stand.gpu.kernels.path import path_to  # noqa: E402
from stand.gpu.kernels.residual import CHUNK, draw_residuals  # noqa: E402

UNIFORMS = [0.0, 0.1, 0.37, 0.5, 0.83, 0.999, 1 - 2**-53]


def case(seed: int, *, vocabulary=2 * CHUNK + 77, nodes=5, width=6, zeros=0.7):
    """Laws with many zeros, supports with padding, and what is owed; a stop and a uniform per row."""
    generator = torch.Generator().manual_seed(seed)
    laws = torch.rand(nodes, vocabulary, generator=generator)
    laws = torch.where(torch.rand(laws.shape, generator=generator) < zeros, 0.0, laws)
    laws /= laws.sum(1, keepdim=True)
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:width] for _ in range(nodes)]).int()
    mass = torch.rand(nodes, width, generator=generator, dtype=torch.float64)
    ids[1, width // 2 :] = -1
    mass[1, width // 2 :] = 0.0
    scale = torch.rand(nodes, generator=generator, dtype=torch.float64)
    stops = torch.randint(0, nodes, (len(UNIFORMS),), generator=generator)
    return laws, stops, ids, mass, scale, torch.tensor(UNIFORMS, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_equal_the_hosts(seed):
    arguments = case(seed)
    assert draw_residuals(*arguments).tolist() == plain_kernels.draw_residuals(*arguments).tolist()


def test_float64_laws_and_one_chunk():
    laws, *rest = case(7, vocabulary=40)
    assert draw_residuals(laws.double(), *rest).tolist() == plain_kernels.draw_residuals(laws.double(), *rest).tolist()


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_support_alone_and_rest_alone(factor):
    laws, stops, ids, mass, scale, uniforms = case(3)
    mass, scale = mass * (1 - factor), torch.full_like(scale, factor)
    tokens = draw_residuals(laws, stops, ids, mass, scale, uniforms)
    assert tokens.tolist() == plain_kernels.draw_residuals(laws, stops, ids, mass, scale, uniforms).tolist()
    is_on_support = (ids[stops] == tokens[:, None]).any(1)
    assert is_on_support.all() if factor == 0 else not is_on_support.any()


def test_rows_without_any_weight_draw_from_their_law():
    laws, stops, ids, mass, scale, uniforms = case(4)
    tokens = draw_residuals(laws, stops, ids, 0 * mass, 0 * scale, uniforms)
    assert tokens.tolist() == plain_kernels.draw_residuals(laws, stops, ids, 0 * mass, 0 * scale, uniforms).tolist()
    assert (laws[stops, tokens] > 0).all()


def test_no_token_without_weight_is_drawn():
    """All mass on the last token of a chunk, or on the first, and uniforms at both ends."""
    for place in (0, CHUNK - 1, CHUNK, 2 * CHUNK + 76):
        laws, stops, ids, mass, scale, uniforms = case(5)
        laws.zero_()
        laws[:, place] = 1.0
        ids[ids == place] = -1
        tokens = draw_residuals(laws, stops, ids, 0 * mass, torch.ones_like(scale), uniforms)
        assert tokens.tolist() == [place] * len(UNIFORMS)


def test_a_shifted_uniform_is_noticed():
    laws, stops, ids, mass, scale, uniforms = case(1)
    shifted = draw_residuals(laws, stops, ids, mass, scale, (uniforms + 0.3) % 1)
    assert shifted.tolist() != draw_residuals(laws, stops, ids, mass, scale, uniforms).tolist()


def test_paths_climb_to_the_root():
    parents = torch.tensor([0, 0, 1, 2, 1, 5, 5, 6, 8])  # two rows and padding
    firsts = torch.tensor([0, 0, 0, 0, 0, 5, 5, 5, 8])
    depths = torch.tensor([0, 1, 2, 3, 2, 0, 1, 2, 0])
    stops = torch.tensor([3, 7, 0, 4, 8])
    path = path_to(stops, parents, firsts, depths, 6)
    assert path.tolist() == plain_kernels.path_to(stops, parents, firsts, depths, 6).tolist()
    assert path[0].tolist() == [1, 2, 3, -1, -1, -1] and path[1].tolist() == [1, 2, -1, -1, -1, -1]
    assert (path[[2, 4]] == -1).all()


def test_wrong_arguments_are_refused():
    laws, stops, ids, mass, scale, uniforms = case(0)
    with pytest.raises(ValueError, match="pass what traverse returns"):
        draw_residuals(laws, stops, ids, mass.float(), scale, uniforms)
    with pytest.raises(ValueError, match="contiguous int64"):
        path_to(stops, ids[:, 0], ids[:, 0], ids[:, 0], 4)
