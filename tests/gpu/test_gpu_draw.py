"""The draws and the verdict in Triton's interpreter, against the host's draws and walks over parents."""

import pytest
import torch

pytest.importorskip("triton")

import plain_kernels
from verdicts import blank_verdict

from stand.gpu.kernels.verification import draw as draw_kernel
from stand.gpu.kernels.verification.draw import CHUNK, draw_nodes
from stand.gpu.kernels.verification.follow import follow

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


def draw_residuals(laws, stops, *rest, draw=draw_kernel.draw_residuals) -> torch.Tensor:
    """Tokens of rows without drafts below their stops."""
    verdict, nodes = blank_verdict(len(stops), 4), torch.arange(len(laws))
    offsets = torch.zeros(len(stops) + 1, dtype=torch.int32)
    outputs = (verdict.stops, verdict.next_tokens, verdict.is_broken, verdict.path)
    draw(laws, stops, *rest, nodes, torch.zeros_like(nodes), offsets, *outputs)
    assert torch.equal(verdict.stops, stops) and (verdict.path == -1).all()
    return verdict.next_tokens


def by_host(*arguments) -> list[int]:
    return draw_residuals(*arguments, draw=plain_kernels.draw_residuals).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_tokens_equal_the_hosts(seed):
    arguments = case(seed)
    assert draw_residuals(*arguments).tolist() == by_host(*arguments)


@pytest.mark.parametrize("width", [1, 16, 33, 64])
def test_supports_of_every_width(width):
    arguments = case(4, width=width)
    assert draw_residuals(*arguments).tolist() == by_host(*arguments)


def test_float64_laws_and_one_chunk():
    laws, *rest = case(7, vocabulary=40)
    assert draw_residuals(laws.double(), *rest).tolist() == by_host(laws.double(), *rest)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_support_alone_and_rest_alone(factor):
    laws, stops, ids, mass, scale, uniforms = case(3)
    mass, scale = mass * (1 - factor), torch.full_like(scale, factor)
    tokens = draw_residuals(laws, stops, ids, mass, scale, uniforms)
    assert tokens.tolist() == by_host(laws, stops, ids, mass, scale, uniforms)
    is_on_support = (ids[stops] == tokens[:, None]).any(1)
    assert is_on_support.all() if factor == 0 else not is_on_support.any()


def test_rows_without_any_weight_draw_from_their_law():
    laws, stops, ids, mass, scale, uniforms = case(4)
    tokens = draw_residuals(laws, stops, ids, 0 * mass, 0 * scale, uniforms)
    assert tokens.tolist() == by_host(laws, stops, ids, 0 * mass, 0 * scale, uniforms)
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


# Two rows, a row without nodes, and padding.
PARENTS = torch.tensor([0, 0, 1, 2, 1, 5, 5, 6, 8])
DEPTHS = torch.tensor([0, 1, 2, 3, 2, 0, 1, 2, 0])
OFFSETS = torch.tensor([0, 5, 8, 8], dtype=torch.int32)


def verdicts(write, *, with_broken: int | None = None):
    """By the kernel and by walks: what `write(module, laws, outputs)` leaves in the verdict."""
    laws = torch.full((9, 12), 1.0 / 12)
    if with_broken is not None:
        laws[with_broken] = float("nan")
    found = []
    for module in (draw_kernel, plain_kernels):
        verdict = blank_verdict(3, 6)
        write(module, laws, (verdict.stops, verdict.next_tokens, verdict.is_broken, verdict.path))
        found.append([one.tolist() for one in (verdict.stops, verdict.next_tokens, verdict.is_broken, verdict.path)])
    return found


@pytest.mark.parametrize("stops", [[3, 7, 0], [0, 5, 0], [4, 7, 0]])
def test_residual_draws_write_paths_up_to_the_root(stops):
    def write(module, laws, outputs):
        ids, mass = torch.full((9, 2), -1, dtype=torch.int32), torch.zeros(9, 2, dtype=torch.float64)
        rest = (torch.ones(9, dtype=torch.float64), torch.tensor([0.1, 0.5, 0.9]).double(), PARENTS, DEPTHS, OFFSETS)
        module.draw_residuals(laws, torch.tensor(stops), ids, mass, *rest, *outputs)

    kernel, plain = verdicts(write, with_broken=6)
    assert kernel == plain
    assert kernel[2] == [0, 1, 0] and kernel[3][2] == [-1] * 6
    if stops[0] == 3:
        assert kernel[3][0] == [1, 2, 3, -1, -1, -1] and kernel[1][0] == 1


@pytest.mark.parametrize("drawn", [[4, 5, 6, 9, 9, 4, 4, 1, 1], [4, 7, 8, 2, 3, 5, 9, 9, 1], [1] * 9])
def test_rows_follow_what_was_drawn(drawn):
    tokens, follows = torch.tensor([9, 4, 5, 6, 7, 9, 4, 4, 0]), torch.tensor([0, 1, 1, 1, 1, 0, 1, 1, 0])

    def write(module, laws, outputs):
        walk = follow if module is draw_kernel else plain_kernels.follow
        walk(torch.tensor(drawn), laws, tokens, PARENTS, follows, OFFSETS, *outputs)

    kernel, plain = verdicts(write, with_broken=8)  # padding breaks nothing
    assert kernel == plain and kernel[2] == [0, 0, 0]
    expected = {6: [3, 7, 0], 8: [4, 5, 0], 1: [0, 5, 0]}
    assert kernel[0] == expected[drawn[2]]


def test_a_second_child_of_one_token_is_not_followed():
    """Control: the walk sees what may be followed."""
    laws, parents, offsets = torch.full((3, 4), 0.25), torch.tensor([0, 0, 0]), torch.tensor([0, 3], dtype=torch.int32)
    for follows, stop in (([0, 1, 0], 1), ([0, 0, 1], 2), ([0, 0, 0], 0)):
        verdict = blank_verdict(1, 4)
        outputs = (verdict.stops, verdict.next_tokens, verdict.is_broken, verdict.path)
        drawn, tokens = torch.tensor([2, 0, 1]), torch.tensor([3, 2, 2])
        follow(drawn, laws, tokens, parents, torch.tensor(follows), offsets, *outputs)
        assert verdict.stops.tolist() == [stop] and verdict.next_tokens.tolist() == [drawn[stop]]


@pytest.mark.parametrize("vocabulary", [40, CHUNK, 2 * CHUNK + 77])
def test_node_draws_equal_the_hosts(vocabulary):
    laws, *_ = case(2, vocabulary=vocabulary, nodes=len(UNIFORMS))
    laws[2, vocabulary // 2 :] = 0.0
    for uniforms in (torch.tensor(UNIFORMS).double(), torch.tensor(UNIFORMS[::-1]).double()):
        drawn = draw_nodes(laws, uniforms)
        assert drawn.tolist() == plain_kernels.draw_nodes(laws, uniforms).tolist()
        assert (laws[torch.arange(len(laws)), drawn] > 0).all()
    assert draw_nodes(laws, (uniforms + 0.3) % 1).tolist() != drawn.tolist()  # control


def test_wrong_arguments_are_refused():
    laws, stops, ids, mass, scale, uniforms = case(0)
    with pytest.raises(ValueError, match="pass what traverse returns"):
        draw_residuals(laws, stops, ids, mass.float(), scale, uniforms)
    with pytest.raises(ValueError, match="one uniform per node"):
        draw_nodes(laws, uniforms.float())
    verdict = blank_verdict(3, 6)
    outputs = (verdict.next_tokens, verdict.is_broken, verdict.path)
    with pytest.raises(ValueError, match="pass the packet's own"):
        follow(DEPTHS.int(), laws, DEPTHS, PARENTS, DEPTHS, OFFSETS, verdict.stops, *outputs)
    with pytest.raises(ValueError, match="take those of a StepOutput"):
        follow(DEPTHS, laws, DEPTHS, PARENTS, DEPTHS, OFFSETS, verdict.stops[:2], *outputs)
