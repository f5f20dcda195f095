"""What is random in training, in any module of a model, is refused; what is not there is no obstacle."""

import copy

import pytest
import torch
from tiny_models import SHAPE, tiny_model
from transformers import AutoModelForCausalLM, MixtralConfig, OPTConfig, PreTrainedConfig, PreTrainedModel

import stand
from stand.drafters.blended import BlendedDrafter

OPT = {"vocab_size": 61, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
OPT |= {"num_attention_heads": 4, "max_position_embeddings": 64}


def new_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def assert_refused_in_training(model: PreTrainedModel, part: torch.nn.Module) -> None:
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=4))
    engine.generate([3, 4], max_new_tokens=2)
    part.train()
    for call in (lambda: engine.generate([3, 4], max_new_tokens=2), lambda: engine.run([[3, 4]])):
        with pytest.raises(stand.UnsupportedModelError, match=r"in evaluation mode, got .*; call model.eval\(\)"):
            call()
    model.eval()
    engine.generate([3, 4], max_new_tokens=2)


@pytest.mark.parametrize(
    "config",
    [
        OPTConfig(**OPT, dropout=0.1, attention_dropout=0.0),
        OPTConfig(**OPT, dropout=0.0, attention_dropout=0.0, layerdrop=0.1),
        MixtralConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.1),
    ],
    ids=["dropout that is no module", "layers left out", "jitter of routers"],
)
def test_noise_of_training_is_refused(config):
    model = new_model(config)
    assert_refused_in_training(model, model)


def test_noise_of_a_part_in_training_is_refused():
    """As of an adapter that was added to a model in evaluation mode."""
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1].self_attn.attention_dropout = 0.5
    assert_refused_in_training(model, model.model.layers[1])
    model = copy.deepcopy(tiny_model("llama"))
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout(0.5)).eval()
    assert_refused_in_training(model, model.model.norm)


class MultiplicativeDropout(torch.nn.Module):
    """As OFT of peft has it: no dropout of torch's."""

    def __init__(self):
        super().__init__()
        self.p = 0.5

    def forward(self, hidden):
        return hidden * (torch.rand(1) > self.p) if self.training else hidden


def test_noise_of_adapters_is_refused():
    """Rates of LoHa and LoKr of peft, by the adapter's name, and a dropout module of another class."""
    model = copy.deepcopy(tiny_model("llama"))
    part = model.model.layers[0].self_attn.q_proj
    part.module_dropout = {"default": 0.0}
    part.train()
    stand.wrap(model, drafter=BlendedDrafter(budget=4)).generate([3, 4], max_new_tokens=2)
    part.module_dropout["other"] = 0.5
    model.eval()
    assert_refused_in_training(model, part)
    for noise in (MultiplicativeDropout(), torch.nn.Dropout(1)):
        model = copy.deepcopy(tiny_model("llama"))
        model.model.norm = torch.nn.Sequential(model.model.norm, noise).eval()
        assert_refused_in_training(model, model.model.norm)


def test_training_without_noise_is_served():
    model = new_model(OPTConfig(**OPT, dropout=0.0, attention_dropout=0.0))
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=4))
    expected = engine.generate([3, 4], max_new_tokens=4, temperature=0).token_ids
    model.train()
    assert engine.generate([3, 4], max_new_tokens=4, temperature=0).token_ids == expected
