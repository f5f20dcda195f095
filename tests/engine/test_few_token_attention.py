"""Attention of a step's few tokens on a CPU: right to float32's rounding, and drafts change no bit of it."""

import numpy as np
import pytest
import torch

from stand.forward.few_tokens.attention import TokenPaths, few_token_attention, is_supported
from stand.forward.few_tokens.dot_products import attend
from stand.forward.few_tokens.product import DTYPES, IS_FASTER, WIDEST
from stand.forward.packed_plan import MOST_ROW_TOKENS, StepPlan
from stand.laws.filters import VECTORS
from stand.simd.threads import parallel_region

LEVELS, REGION = range(len(VECTORS)), parallel_region()
SHAPES = {"odd heads": (2, 3, 16), "usual": (3, 3, 64), "one head, many queries": (1, 30, 80), "no groups": (2, 1, 128)}
LENGTHS = ([5, 300, 0, 33], [7, 1, 20, 2])  # committed keys per row, new tokens per row


needs_narrow = pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="needs AVX2")


class Step:
    """Random trees behind random committed keys, in a cache with more rows and slots than they need."""

    def __init__(
        self, shape=(3, 3, 64), *, lengths=LENGTHS[0], counts=LENGTHS[1], seed=0, dtype=torch.float32
    ):  # fmt: skip
        generator = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.heads, self.groups, self.size = shape
        self.lengths, self.counts = np.array(lengths), np.array(counts)
        self.offsets = np.concatenate([[0], np.cumsum(self.counts)])
        self.parents = [[-1, *(int(generator.integers(0, n)) for n in range(1, count))] for count in counts]
        slots = int((self.lengths + self.counts).max()) + 3
        self.query = torch.randn(1, len(self.ancestors), self.heads * self.groups, self.size).transpose(1, 2)
        storages = [torch.randn(len(counts) + 2, self.heads, slots + 5, self.size).to(dtype) for _ in range(2)]
        self.query = self.query.to(dtype)
        self.key, self.value = (storage[1 : len(counts) + 1, :, :slots] for storage in storages)

    @property
    def ancestors(self) -> np.ndarray:
        seen = np.zeros((sum(self.counts), max(self.counts)), dtype=bool)
        for first, parents in zip(self.offsets[:-1], self.parents, strict=True):
            for node, parent in enumerate(parents):
                if parent >= 0:
                    seen[first + node] = seen[first + parent]
                seen[first + node, node] = True
        return seen

    @property
    def paths(self) -> TokenPaths:
        return TokenPaths(self.offsets, self.lengths, self.counts, self.ancestors)

    def attended(self, *, window=0, **settings) -> torch.Tensor:
        return few_token_attention(self.query, self.key, self.value, self.paths, scale=0.1, window=window, **settings)

    def slots_seen(self, token: int, window: int) -> tuple[int, np.ndarray]:
        """Row and slots, in the order of positions."""
        row = int(np.searchsorted(self.offsets, token, side="right")) - 1
        slots = np.concatenate(
            [np.arange(self.lengths[row]), self.lengths[row] + np.flatnonzero(self.ancestors[token])]
        )
        return row, slots[-window:] if window else slots


def exact(step: Step, *, window=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax in float64, and the sum of absolute terms that bounds its rounding, [1, M, H, D]."""
    mixed, terms = [], []
    for token in range(step.query.shape[2]):
        row, slots = step.slots_seen(token, window)
        keys, values = (part[row][:, slots].double() for part in (step.key, step.value))
        query = step.query[0, :, token].double().view(step.heads, step.groups, step.size)
        weights = torch.softmax(torch.einsum("hgd,hkd->hgk", query, keys) * 0.1, dim=-1)
        mixed.append(torch.einsum("hgk,hkd->hgd", weights, values).flatten(0, 1))
        terms.append(torch.einsum("hgk,hkd->hgd", weights, values.abs()).flatten(0, 1))
    return torch.stack(mixed)[None], torch.stack(terms)[None]


def assert_close(found: torch.Tensor, step: Step, *, window=0) -> None:
    expected, terms = exact(step, window=window)
    last = 1.01 * 2**-8 * expected.abs() if found.dtype is torch.bfloat16 else 0.0
    assert ((found.double() - expected).abs() <= 400 * 2**-24 * terms + last).all()


@pytest.mark.parametrize("window", (0, 1, 3, 40))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_exact_softmax(shape, window):
    step = Step(shape)
    assert_close(step.attended(window=window), step, window=window)


@needs_narrow
@pytest.mark.parametrize("window", (0, 3, 40))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_exact_softmax_in_bfloat16(shape, window):
    step = Step(shape, dtype=torch.bfloat16)
    found = step.attended(window=window)
    assert found.dtype is torch.bfloat16
    assert_close(found, step, window=window)
    with pytest.raises(AssertionError):
        assert_close(found, step, window=window + 1)


def test_a_key_too_many_is_seen():
    step = Step()
    with pytest.raises(AssertionError):
        assert_close(step.attended(window=40), step, window=41)
    step.parents[0][-1] = -1
    found = step.attended()
    step.parents[0][-1] = 0
    with pytest.raises(AssertionError):
        assert_close(found, step)


def compiled(step: Step, *, level=WIDEST, threads=1, region=REGION, window=0) -> torch.Tensor:
    count, dtype = step.query.shape[2] * step.query.shape[1] * step.size, step.query.dtype
    mixed = torch.full((count + 1,), float("nan"), dtype=dtype)
    paths = step.paths
    attend(
        *(tensor.data_ptr() for tensor in (step.query, step.key, step.value, mixed)),
        paths.addresses,
        (step.query.stride(2), step.query.stride(1), *step.key.stride()[:2]),
        (len(step.counts), step.heads, step.groups, step.size, window),
        0.1,
        dtype is torch.bfloat16,
        level,
        threads,
        region,
    )
    assert mixed[-1].isnan(), "written beyond the end"
    return mixed[:-1].view(1, step.query.shape[2], step.query.shape[1], step.size)


@pytest.mark.parametrize("level", LEVELS, ids=VECTORS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_instruction_set_computes_it(shape, level):
    step = Step(shape)
    assert_close(compiled(step, level=level), step)
    if VECTORS[level] != "portable":
        assert torch.equal(compiled(step, level=level), step.attended())


@needs_narrow
def test_every_instruction_set_computes_it_in_bfloat16():
    step = Step(dtype=torch.bfloat16)
    for level in LEVELS[1:]:
        assert torch.equal(compiled(step, level=level), step.attended())


@pytest.mark.parametrize("threads", (2, 3, 7))
def test_threads_change_no_bit(threads):
    step = Step(lengths=[900, 1100, 1000, 1200], seed=1)
    expected = compiled(step)
    for region in (REGION, 0):
        for _ in range(5):
            assert torch.equal(compiled(step, threads=threads, region=region), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", (0, 20))
def test_other_tokens_and_rows_change_no_bit(window, dtype):
    """Every token alone, behind its path as committed keys: the step without drafts that would come to it."""
    step = Step(seed=2, dtype=dtype)
    together = step.attended(window=window)
    for token in range(step.query.shape[2]):
        row, slots = step.slots_seen(token, 0)
        alone = Step(lengths=[len(slots) - 1], counts=[1], seed=3)
        alone.query = step.query[:, :, token : token + 1]
        alone.key, alone.value = (part[row : row + 1][:, :, slots].contiguous() for part in (step.key, step.value))
        assert torch.equal(alone.attended(window=window)[0, 0], together[0, token]), token


def test_what_is_not_a_number_stays_so():
    step = Step()
    step.key[1, 0, 17] = float("nan")
    found = step.attended()
    hidden = found.isnan().any(dim=-1)[0]
    of_row = slice(*step.offsets[1:3])
    assert hidden[of_row, : step.groups].all()
    hidden[of_row, : step.groups] = False
    assert not hidden.any()


def test_scores_far_apart_neither_overflow_nor_vanish():
    step = Step()
    step.query *= 3000.0
    found = step.attended()
    assert found.isfinite().all()
    row, slots = step.slots_seen(3, 0)
    best = slots[int((step.key[row, 0][slots].double() @ step.query[0, 0, 3].double()).argmax())]
    torch.testing.assert_close(found[0, 3, 0], step.value[row, 0, best])


def test_the_result_lies_where_the_operands_do():
    step = Step()
    with torch.device("meta"):
        found = step.attended()
    assert torch.equal(found, step.attended())


def test_tokens_that_grew_in_several_forwards():
    """The second half of the tokens alone, behind the first half's keys."""
    step = Step(lengths=[40], counts=[12])
    later = TokenPaths(np.array([0, 6]), np.array([40]), np.array([12]), step.ancestors[6:])
    found = few_token_attention(step.query[:, :, 6:], step.key, step.value, later, scale=0.1)
    assert torch.equal(found, step.attended()[:, 6:])


class Sharded(torch.Tensor):
    """A tensor whose bytes compiled code must not take for its numbers."""


def test_other_tensors_are_refused():
    step = Step()
    assert is_supported(step.query, step.key, step.value)
    wrong = {
        "double": [part.double() for part in (step.query, step.key, step.value)],
        "two dtypes": [step.query, step.key.bfloat16(), step.value.bfloat16()],
        "meta": [part.to("meta") for part in (step.query, step.key, step.value)],
        "size": [part[..., :60] for part in (step.query, step.key, step.value)],
        "order of slots": [step.query, *(part.mT.contiguous().mT for part in (step.key, step.value))],
        "strides that differ": [step.query, step.key, step.value.contiguous()],
        "sharded query": [step.query.as_subclass(Sharded), step.key, step.value],
        "sharded keys": [step.query, step.key.as_subclass(Sharded), step.value],
        "gradients": [step.query.clone().requires_grad_(), step.key, step.value],
        "heads": [step.query[:, :7], step.key, step.value],
        "no heads": [step.query[:, :0], step.key, step.value],
        "no key heads": [step.query, step.key[:, :0], step.value[:, :0]],
        "short": [step.query, step.key[:, :, :300], step.value[:, :, :300]],
        "rows": [step.query, step.key[:3], step.value[:3]],
        "tokens": [step.query[:, :, :5], step.key, step.value],
    }
    for name, (query, key, value) in wrong.items():
        with pytest.raises(ValueError, match="must be on a CPU, all of float32.* L at least 301"):
            few_token_attention(query, key, value, step.paths, scale=0.1)
        assert name in ("short", "rows", "tokens") or not is_supported(query, key, value), name


PLANS = [(MOST_ROW_TOKENS, "cpu", IS_FASTER), (MOST_ROW_TOKENS + 1, "cpu", False), (1, "meta", False)]


@pytest.mark.parametrize(("count", "device", "is_fit"), PLANS)
def test_steps_that_it_is_made_for(count, device, is_fit):
    assert StepPlan.for_prompt(np.zeros(count, int), 3, row=0, device=device).has_few_tokens == is_fit
