"""The best tokens per node equal torch.topk up to ties, and ties go to the lowest ids."""

import pytest
import torch

pytest.importorskip("triton")

from stand.gpu.kernels.verification import top_tokens as top_tokens_kernel
from stand.gpu.kernels.verification.top_tokens import top_tokens

VOCABULARY_SIZE = 5000  # two chunks and a half


def random_scores(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed))


def expect(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids by a stable sort: descending, of equal values the lowest id first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


@pytest.mark.parametrize("count", [1, 10, 16])
def test_laws_equal_topk(count):
    laws = torch.softmax(4 * random_scores(6), dim=1)
    ids, values = top_tokens(laws, count)
    best = torch.topk(laws, count, dim=1)
    assert torch.equal(values, best.values)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), expect(laws, count))


def test_values_of_any_sign_and_infinities():
    scores = random_scores(4)
    scores[0, 3000] = float("inf")
    scores[1] = -scores[1].abs() - 1
    scores[2, 5:] = float("-inf")
    scores[3, ::2] = -0.0
    scores[3, 1::2] = 0.0
    ids, values = top_tokens(scores, 8)
    assert torch.equal(ids.long(), expect(scores, 8))
    assert torch.equal(values, scores.gather(1, ids.long()))
    assert ids[2].tolist()[5:] == [5, 6, 7] and ids[3].tolist() == list(range(8))


def test_ties_within_and_across_chunks_go_to_the_lowest_ids():
    scores = torch.zeros(3, VOCABULARY_SIZE)
    scores[0, [4999, 4100, 30, 2047, 2048]] = 0.125
    scores[1] = random_scores(1)[0].mul(2).round()
    ids, _ = top_tokens(scores, 16)
    assert torch.equal(ids.long(), expect(scores, 16))
    assert ids[0].tolist()[:6] == [30, 2047, 2048, 4100, 4999, 0]


@pytest.mark.parametrize("count", [1, 3, 10])
def test_more_chunks_than_are_searched(monkeypatch, count):
    """Best tokens of one chunk, one of each chunk, ties between chunks' largest, and chunks of nothing but -inf."""
    monkeypatch.setattr(top_tokens_kernel, "CHUNK", 256)
    scores = random_scores(5, seed=3)
    scores[1, 700:712] += 10
    scores[2, ::256] += 10
    scores[3] = scores[3].mul(2).round()
    scores[4, 512:] = float("-inf")
    ids, values = top_tokens(scores, count)
    assert torch.equal(ids.long(), expect(scores, count))
    assert torch.equal(values, scores.gather(1, ids.long()))


def test_rows_of_one_chunk_of_as_many_tokens_as_asked_for_and_strided_ones():
    scores = random_scores(6)
    few = scores[:, :16].contiguous()
    assert torch.equal(top_tokens(few, 16)[0].long(), expect(few, 16))
    part = scores[::2, 100:4300]
    assert torch.equal(top_tokens(part, 5)[0].long(), expect(part, 5))


@pytest.mark.parametrize("count", [0, 17])
def test_refuses_counts_out_of_range(count):
    with pytest.raises(ValueError, match="count must be in"):
        top_tokens(random_scores(1), count)


def test_refuses_other_types():
    for bad in (random_scores(2).double(), random_scores(2).t()):
        with pytest.raises(ValueError, match="float32 with contiguous rows"):
            top_tokens(bad, 2)
