"""Linear layers inside an engine's forward on a CPU: which ones change, for how long, and that the engine's do."""

import copy
import pickle
from weakref import WeakKeyDictionary

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from torch.nn.utils import prune, weight_norm

import stand
from stand.forward.few_tokens import linear_layers
from stand.forward.few_tokens import product as few_token_product
from stand.forward.few_tokens.linear_layers import few_token_layers


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """The products that are taken, by name, in their order."""
    names = []

    class Watched(linear_layers.FewTokenProduct):
        def __call__(self, states):
            names.append("few tokens")
            return super().__call__(states)

    def watched_linear(*args):
        names.append("linear")
        return nn.functional.linear(*args)

    monkeypatch.setattr(linear_layers, "IS_FASTER", True)
    monkeypatch.setattr(linear_layers, "_KNOWN", WeakKeyDictionary())  # other tests' models, with products unwatched
    monkeypatch.setattr(linear_layers, "FewTokenProduct", Watched)
    monkeypatch.setattr(linear_layers, "linear", watched_linear)
    return names


class OwnLinear(nn.Linear):
    """A layer that may compute what it likes."""


class QuantisedWeight(torch.Tensor):
    """As torchao's: says float32 and has int8 inside, with nothing at the address that compiled code would read."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight):
        self.scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.integers = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        whole = [one.integers * one.scale if isinstance(one, cls) else one for one in args]
        return func(*whole, **(kwargs or {}))


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(8, 8)


class SomeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.own, self.replaced = nn.Linear(8, 8), OwnLinear(8, 8), nn.Linear(8, 8)
        self.double, self.transposed = nn.Linear(8, 8).double(), nn.Linear(8, 8)
        self.transposed.weight = nn.Parameter(torch.randn(8, 8).t())
        self.replaced.forward = lambda states: states
        self.quantised = nn.Linear(8, 8)
        self.quantised.weight = nn.Parameter(QuantisedWeight(self.transposed.weight.detach()), requires_grad=False)


@torch.inference_mode()
def test_only_plain_layers_change_and_only_inside(taken):
    model, states = SomeLayers(), torch.randn(1, 8)
    before = {name: layer(states.to(layer.weight.dtype)) for name, layer in model.named_children()}
    forwards = {name: vars(layer).get("forward") for name, layer in model.named_children()}
    with few_token_layers(model):
        for name, layer in model.named_children():
            taken.clear()
            found = layer(states.to(layer.weight.dtype))
            expected = {"plain": ["few tokens"]}
            assert taken == expected.get(name, []), name
            torch.testing.assert_close(found, before[name])
    assert {name: vars(layer).get("forward") for name, layer in model.named_children()} == forwards
    with torch.autocast("cpu", dtype=torch.bfloat16), few_token_layers(model):
        assert model.plain(states).dtype == torch.bfloat16
    with pytest.raises(ZeroDivisionError), few_token_layers(model):
        _ = 1 / 0
    assert "forward" not in vars(model.plain)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", linear_layers.MOST_TOKENS, ids=str)
def test_many_tokens_and_none_take_torchs_product(taken, dtype):
    if dtype not in few_token_product.DTYPES:
        pytest.skip("this build takes no bfloat16")
    model, most = OneLayer().to(dtype), linear_layers.MOST_TOKENS[dtype]
    with few_token_layers(model):
        for shape in ((most, 8), (2, most // 2, 8), (most + 1, 8), (0, 8)):
            assert model.plain(torch.zeros(shape, dtype=dtype)).shape == shape
    assert taken == ["few tokens"] * 2 + ["linear"] * 2


@torch.inference_mode()
@pytest.mark.parametrize(
    "copied", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))), ids=("copy", "pickle")
)
def test_a_copy_made_inside_has_weights_of_its_own(copied):
    states = torch.randn(1, 8)
    with few_token_layers(model := OneLayer()):
        twin = copied(model)
        assert torch.equal(twin.plain(states), nn.functional.linear(states, model.plain.weight, model.plain.bias))
        twin.plain.weight.zero_()
        assert torch.equal(twin.plain(states)[0], twin.plain.bias) and not torch.equal(
            model.plain(states)[0], twin.plain.bias
        )
    assert torch.equal(twin.plain(states)[0], twin.plain.bias)


@torch.inference_mode()
def test_other_weights_are_read_from_the_next_time_on(taken):
    model, states = OneLayer(), torch.randn(1, 8)
    with few_token_layers(model):
        model.plain(states)
    model.double()
    with few_token_layers(model):
        assert torch.equal(
            model.plain(states.double()), nn.functional.linear(states.double(), *model.plain.parameters())
        )
    model.float()
    model.plain.weight = nn.Parameter(torch.eye(8))
    with few_token_layers(model):
        torch.testing.assert_close(model.plain(states), states + model.plain.bias)
        model.double()
        assert model.plain(states.double()).dtype == torch.float64
    assert taken == ["few tokens", "few tokens", "linear"]


WAYS = {"pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5), "normed": weight_norm}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_a_hook_computes_are_never_stale(way, taken):
    """Before the layer's forward, from parameters that may have changed since the last one."""
    model, states = OneLayer(), torch.randn(1, 8)
    WAYS[way](model.plain)
    with torch.no_grad():
        for _ in range(2):
            with few_token_layers(model):
                found = model.plain(states)
            assert torch.equal(found, model.plain(states))
            for parameter in model.parameters():
                parameter.mul_(3.0)
    assert taken == []


@torch.inference_mode()
def test_a_hook_that_comes_later_is_waited_for(taken):
    """Until it goes: it may give the layer other weights than those that were known before it ran."""
    model, states, twice = OneLayer(), torch.ones(1, 8), nn.Parameter(2 * torch.eye(8))
    with few_token_layers(model):
        model.plain(states)

    def replace(module, args):
        module.weight = twice

    hook = model.plain.register_forward_pre_hook(replace)
    with few_token_layers(model):
        torch.testing.assert_close(model.plain(states), 2 * states + model.plain.bias)
    hook.remove()
    with few_token_layers(model):
        model.plain(states)
    assert taken == ["few tokens"] * 2


@torch.inference_mode()
def test_layers_take_their_input_by_name(taken):
    model, states = OneLayer(), torch.randn(1, 8)
    with few_token_layers(model):
        assert torch.equal(model.plain(input=states), model.plain(states))
    assert taken == ["few tokens"] * 2


def test_gradients_are_kept():
    model = SomeLayers()
    with few_token_layers(model):
        model.plain(torch.ones(1, 8)).sum().backward()
    assert model.plain.weight.grad is not None


def test_engines_steps_take_it_and_leave_the_model_alone(taken):
    output = stand.wrap(tiny_model("llama")).generate(input_ids=[[5, 9, 11, 4]], max_new_tokens=6, temperature=0.0)
    assert set(taken) == {"few tokens"}
    taken.clear()
    plain = tiny_model("llama").generate(torch.tensor([[5, 9, 11, 4]]), do_sample=False, max_new_tokens=6)
    assert output.token_ids[0] == plain[0, 4:].tolist() and taken == []


def test_a_processor_that_it_does_not_serve_keeps_torchs_product(taken, monkeypatch):
    monkeypatch.setattr(linear_layers, "IS_FASTER", False)
    stand.wrap(tiny_model("llama")).generate(input_ids=[[5, 9, 11, 4]], max_new_tokens=6, temperature=0.0)
    assert taken == []


def test_quantised_weights_keep_their_own_product(taken):
    """Tensors of another class are not read as what they say they are; the engine still writes the model's tokens."""
    model = copy.deepcopy(tiny_model("llama"))
    for layer in [module for module in model.model.modules() if type(module) is nn.Linear]:
        layer.weight = nn.Parameter(QuantisedWeight(layer.weight.detach()), requires_grad=False)
    output = stand.wrap(model).generate(input_ids=[[5, 9, 11, 4]], max_new_tokens=6, do_sample=False)
    plain = model.generate(torch.tensor([[5, 9, 11, 4]]), do_sample=False, max_new_tokens=6)
    assert output.token_ids[0] == plain[0, 4:].tolist()
