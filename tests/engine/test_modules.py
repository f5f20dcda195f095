import pytest
from tiny_models import tiny_model
from torch import nn

from stand.forward.modules import modules_of


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])
def test_the_modules_of_a_model_in_their_order(name: str) -> None:
    model = tiny_model(name)
    assert modules_of(model) == list(model.modules())


def test_a_module_in_two_places_counts_once_and_a_place_may_be_empty() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.GELU()), nn.ModuleDict({"again": shared}), nn.ReLU())
    model.register_module("none", None)
    assert modules_of(model) == list(model.modules())
    assert len(modules_of(model)) == 6
