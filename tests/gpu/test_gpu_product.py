"""The few-token product against torch's, which of the two is chosen, and that a choice is kept."""

import copy
import json
import logging

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("triton")

from nearest_bfloat16 import nearest_bfloat16
from plain_kernels import use_plain_kernels
from tiny_models import kernel_model, tiny_model
from widened_bfloat16 import widened_bfloat16

import stand
from stand.fusion import fusion as fusion_module
from stand.fusion.fusion import fuse
from stand.gpu.kernels.product import few_token_product
from stand.gpu.tuning import products as products_module
from stand.gpu.tuning.known_products import known_products
from stand.gpu.tuning.product_tiles import MOST_TOKENS, TILES, ProductTile
from stand.gpu.tuning.products import TOKENS, Products, choose, is_equal

CPU = torch.device("cpu")
ROWS, DEPTH = 72, 1100  # of no tile a multiple
ALL = range(len(TILES))


@pytest.fixture(autouse=True)
def rounding():
    with nearest_bfloat16(), widened_bfloat16():
        yield


def tensors(num_tokens: int, dtype: torch.dtype = torch.float32, rows: int = ROWS, depth: int = DEPTH):
    """States, weight and bias."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((num_tokens, depth), (rows, depth), (rows,))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def product(states, weight, bias, tile: int, num_splits: int):
    """The result, after a look at the counters."""
    partials = torch.full((num_splits * len(states) * len(weight),), float("nan"))
    arrivals = torch.zeros(-(-len(weight) // TILES[tile].rows), dtype=torch.int32)
    result = few_token_product(states, weight, bias, partials, arrivals, tile, num_splits)
    assert not arrivals.any()
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", ALL)
@pytest.mark.parametrize(("num_tokens", "num_splits"), [(1, 1), (5, 2), (16, 4), (3, 16)])
def test_it_is_a_linear_layer(dtype, tile, num_tokens, num_splits):
    """Also where the last splits have no part of the depth left."""
    states, weight, bias = tensors(num_tokens, dtype)
    for offset in (None, bias):
        got = product(states, weight, offset, tile, num_splits)
        exact = linear(states.double(), weight.double(), None if offset is None else offset.double())
        error = (got.double() - exact).abs().max() / exact.abs().max()
        assert got.dtype == dtype and error < (2e-6 if dtype is torch.float32 else torch.finfo(dtype).eps)


def test_states_may_be_slices_and_have_any_leading_dimensions():
    states, weight, _ = tensors(6)
    wide = torch.cat([states, states], dim=1)[:, :DEPTH]
    expected = product(states, weight, None, 0, 2)
    assert torch.equal(product(wide, weight, None, 0, 2), expected)
    scratch = torch.empty(2 * 6 * ROWS), torch.zeros(ROWS, dtype=torch.int32)
    assert torch.equal(few_token_product(wide.view(2, 3, DEPTH), weight, None, *scratch, 0, 2).view(6, ROWS), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": torch.randn(MOST_TOKENS + 1, DEPTH)}, "1 to 16, K"),
        ({"states": torch.randn(1, DEPTH + 1)}, "1 to 16, K"),
        ({"weight": torch.randn(DEPTH, ROWS).t()}, "contiguous weight"),
        ({"weight": torch.randn(ROWS, DEPTH).half()}, "of one dtype"),
        ({"bias": torch.randn(ROWS - 1)}, "bias"),
        ({"partials": torch.empty(2 * ROWS - 1)}, "partials for 144 numbers"),
        ({"arrivals": torch.zeros(4, dtype=torch.int32)}, "as many arrivals as"),
        ({"num_splits": 0}, "0 splits"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    states, weight, bias = tensors(1)
    arguments = {"states": states, "weight": weight, "bias": bias, "partials": torch.empty(2 * ROWS)}
    arguments |= {"arrivals": torch.zeros(5, dtype=torch.int32), "tile": 0, "num_splits": 2} | change
    with pytest.raises(ValueError, match=message):
        few_token_product(*arguments.values())


@pytest.mark.parametrize(
    ("num_rows", "depth", "num_processors", "expected"),
    [(4096, 4096, 132, 2), (4096, 4096, 16, 1), (64, 65536, 132, 16), (64, 512, 132, 1), (1, 1024, 132, 2)],
)
def test_depth_is_split_until_the_processors_are_busy(num_rows, depth, num_processors, expected):
    """But into no more than 16 parts, each of two blocks at least."""
    assert ProductTile(16, 256, 4, 4).num_splits(num_rows, depth, num_processors) == expected


def timer_of(*seconds: float):
    """One that runs what it times and says what it is told to, in turn."""
    times = iter(seconds)

    def timer(run) -> float:
        run()
        return next(times)

    return timer


def test_a_tile_is_chosen_by_tokens_where_it_is_clearly_faster():
    weights = [tensors(1)[1], tensors(2)[1]]
    by_tokens = [(1.0, 0.9, 0.8, 0.7), (1.0, 0.96, 0.97, 1.5), (1.0, 0.5, 2.0, 2.0)]  # torch's, then the tiles'
    assert choose(weights, timer_of(*sum(by_tokens, ()))) == (2, None, 0)
    products = Products({(ROWS, DEPTH): (2, None, 0)}, CPU)
    chosen = [products.tile((ROWS, DEPTH), num_tokens) for num_tokens in (0, 1, 2, 4, 5, 16, 17)]
    assert chosen == [None, 2, None, None, 0, 0, None]
    assert products.tile((DEPTH, ROWS), 1) is None


def test_wrong_and_failing_tiles_are_never_chosen(monkeypatch):
    """Not even where they are fast. The last tile is sound."""

    def spoiled(states, weight, bias, partials, arrivals, tile, num_splits):
        if tile == 0:
            raise ArithmeticError("out of resources")
        result = few_token_product(states, weight, bias, partials, arrivals, tile, num_splits)
        return result * (1.01 if tile == 1 else 1)

    monkeypatch.setattr(products_module, "few_token_product", spoiled)
    weight = tensors(1)[1]
    assert choose([weight], timer_of(*[1.0, 0.5] * len(TOKENS))) == (2,) * len(TOKENS)
    assert not is_equal(Products({(ROWS, DEPTH): (1,) * 3}, CPU), tensors(1)[0], weight)


def test_no_memory_for_a_trial_chooses_nothing(monkeypatch):
    """A choice is filed for good, and another day the tile may be the fastest."""

    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(products_module, "is_equal", full)
    with pytest.raises(torch.OutOfMemoryError):
        choose([tensors(1)[1]], timer_of(*[1.0] * len(TOKENS)))


def test_products_take_torch_beyond_their_tokens_and_for_other_types():
    products = Products(dict.fromkeys([(ROWS, DEPTH)], (0, 0, 0)), CPU)
    for num_tokens in (1, 16, 17):
        states, weight, bias = tensors(num_tokens)
        expected = linear(states, weight, bias)
        torch.testing.assert_close(products(states, weight, bias), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(products(states, weight, bias), expected) == (num_tokens == 17)
    with pytest.raises(RuntimeError):  # torch's own refusal
        products(states.double(), weight, None)


class Model:
    """As much of one as a file's name asks for."""

    device, dtype, config = CPU, torch.bfloat16, None

    def __init__(self) -> None:
        self.config = tiny_model("llama").config
        self.get_memory_footprint = tiny_model("llama").get_memory_footprint
        self.parameters, self.modules = tiny_model("llama").parameters, tiny_model("llama").modules


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_COSTS", str(tmp_path / "new"))
    return tmp_path / "new"


SMALL = (16, 64)


def measured(*seconds: float):
    return known_products(Model(), {SMALL: [torch.randn(SMALL)]}, timer=timer_of(*seconds))


FIRST_TILE = (1.0, 0.5, 1.0, 1.0) * len(TOKENS)


def test_a_choice_is_made_once(folder, caplog):
    with caplog.at_level(logging.WARNING, logger="stand"):
        first = measured(*FIRST_TILE)
    (path,) = folder.iterdir()
    assert first.choices == {SMALL: (0, 0, 0)} and str(path) in caplog.text
    assert measured().choices == first.choices  # a timer that knows no times


@pytest.mark.parametrize("damage", ["text", "format", "tokens", "tile", "list", "length", "shape"])
def test_a_damaged_file_is_measured_anew(folder, damage):
    measured(*FIRST_TILE)
    (path,) = folder.iterdir()
    document = json.loads(path.read_text())
    entry = document["choices"][0]
    changed = {
        "format": {"format": "stand product choices 0"},
        "tokens": {"tokens": [1, 2, 16]},
        "tile": {"choices": [entry | {"tiles": [0, 0, len(TILES)]}]},
        "list": {"choices": [entry | {"tiles": [[0], [0], [0]]}]},
        "length": {"choices": [entry | {"tiles": [0, 0]}]},
        "shape": {"choices": [entry | {"shape": [1, 2]}]},
    }
    path.write_text(json.dumps(document | changed[damage]) if damage in changed else "{")
    assert measured(*(1.0, 1.0, 1.0, 0.5) * len(TOKENS)).choices == {SMALL: (2, 2, 2)}
    assert measured().choices == {SMALL: (2, 2, 2)}


def test_nothing_is_chosen_where_nothing_may_be_measured_or_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("STAND_COSTS", "off")
    assert measured() is None
    monkeypatch.setenv("STAND_COSTS", str(tmp_path / "file" / "folder"))
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="stand"):
        assert measured(*FIRST_TILE) is None
    assert "cannot be written" in caplog.text
    monkeypatch.setenv("STAND_COSTS", str(tmp_path))
    assert known_products(Model(), {SMALL: [torch.randn(SMALL)]}) is None  # not on a GPU
    assert known_products(Model(), {}, timer=timer_of()) is None


@pytest.fixture
def chosen(monkeypatch):
    """Every linear layer of a fused model takes the first tile; the shapes of the calls."""
    calls = []

    class Watched(Products):
        def __call__(self, states, weight, bias):
            calls.append(tuple(weight.shape))
            return super().__call__(states, weight, bias)

    def known(model, weights):
        return Watched(dict.fromkeys(weights, (0, 0, 0)), model.device)

    monkeypatch.setattr(fusion_module, "_known_products", known)
    return calls


def test_a_fused_models_layers_take_it(chosen):
    """Four per layer; the report names every shape; outside everything is as before."""
    model = tiny_model.__wrapped__("llama")
    tokens = torch.tensor([[5, 9, 11, 4]])
    with torch.inference_mode():
        expected = model(tokens).logits
        fusion = fuse(model)
        with fusion.active():
            got = model(tokens).logits
        assert torch.equal(model(tokens).logits, expected)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    size, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    assert len(chosen) == 4 * num_layers and chosen.count((size, size)) == num_layers  # o_proj
    kept = [swap for swap in fusion.report if swap.kind == "product of few tokens"]
    assert {swap.count for swap in kept} == {num_layers} and all(swap.is_kept for swap in kept) and len(kept) == 4
    fusion.undo()


def test_a_failing_choice_leaves_torchs_products_and_says_why(monkeypatch):
    def failing(model, weights):
        raise ArithmeticError("no such device")

    monkeypatch.setattr(fusion_module, "_known_products", failing)
    fusion = fuse(tiny_model.__wrapped__("llama"))
    left = [swap for swap in fusion.report if swap.kind == "product of few tokens"]
    assert left and all("ArithmeticError: no such device" in str(swap) for swap in left)
    assert not fusion.recipe.singles
    fusion.undo()


def test_captured_steps_take_it(chosen, monkeypatch):
    """Much in plain PyTorch, and one layer: the interpreter would take half a minute."""
    use_plain_kernels(monkeypatch)
    monkeypatch.setattr(
        products_module, "few_token_product", lambda states, weight, bias, *_: linear(states, weight, bias)
    )
    model = copy.deepcopy(kernel_model("llama"))
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    settings = {"input_ids": [[5, 9, 11, 4, 7, 8]], "max_new_tokens": 3, "temperature": 0.0}
    expected = stand.wrap(model, backend="sdpa").generate(**settings).token_ids
    engine = stand.wrap(model, backend="triton")
    del chosen[:]
    assert engine.generate(**settings).token_ids == expected and len(chosen) >= 4
    engine.backend.fusion.undo()
