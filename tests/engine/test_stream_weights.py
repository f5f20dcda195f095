"""The weights of streams: nothing of the target is in them, sizes follow from the file, and what is refused."""

import copy

import pytest
import torch
from plain_streams import random_streams
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, tiny_model
from transformers import AutoModelForCausalLM

import stand
from stand.drafters.streams.weights import PROJECTIONS, LowRank, Streams

PROJECTED = [name for names in PROJECTIONS.values() for name in names]


def test_the_target_is_neither_changed_nor_held():
    """No parameter is shared with the optimizer or the file, no module of the target is replaced, no hook stays."""
    model = tiny_model("llama")
    before, modules = copy.deepcopy(model.state_dict()), [id(module) for module in model.modules()]
    streams, hooks = random_streams(model), num_hooks(model)
    stand.wrap(model, drafter=stand.StreamingDrafter(streams)).generate(input_ids=[[5, 9]], max_new_tokens=4)
    assert [id(module) for module in model.modules()] == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not {id(one) for one in model.parameters()} & {id(one) for one in streams.parameters()}
    assert num_hooks(model) == hooks  # transformers leaves some of its own after a call that asked for hidden states


def test_training_begins_near_the_target():
    """A stream starts as the target's own state, with a small mark of which stream it is."""
    torch.manual_seed(0)
    streams = Streams(tiny_model("llama"))
    hidden = torch.randn(64, 32)
    marks = (streams.begin(hidden) - hidden[:, None]).detach()
    assert marks.shape == (64, 3, 32) and 0.01 < float(marks.std()) < 0.03


def num_hooks(model) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_streams_share_the_targets_weights():
    """A weight of the target that moves moves under the adapter, too: layers are twins, not copies."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    streams = random_streams(model)
    states, positions = torch.randn(1, 1, 32), torch.tensor([[3]])

    def run(**settings) -> torch.Tensor:
        with torch.inference_mode():
            return streams(states, positions, attention_mask=None, **settings)

    first = run(attention="sdpa")  # from now on
    with torch.no_grad():
        model.model.layers[-1].mlp.up_proj.weight.mul_(2.0)
    assert not torch.allclose(first, run())


@pytest.mark.parametrize("target", ["llama", "qwen2"])
def test_saved_streams_are_read_again(target, tmp_path):
    model = tiny_model(target)
    streams = random_streams(model, num_streams=2, num_layers=1, rank=3).to(torch.bfloat16).to(torch.float32)
    streams.save(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        read = Streams.load(model, path)
        assert (read.num_streams, read.first_layer) == (2, model.config.num_hidden_layers - 1)
        assert all(torch.equal(value, read.state_dict()[name]) for name, value in streams.state_dict().items())
    sizes = [tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()]
    assert sum(sizes) == sum(parameter.numel() for parameter in streams.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lift.weight": (32, 16)}, r"lift.weight must be \[32, 32\] for this target, got \[32, 16\]"),
        ({"adapters.1.k_proj.up": (32, 4)}, r"adapters.1.k_proj.up must be \[16, 4\] for this target, got \[32, 4\]"),
        ({"embeddings": (3, 31)}, r"embeddings must be \[3, 32\] for this target, got \[3, 31\]"),
        ({"adapters.0.q_proj.up": None}, r"adapters.0.q_proj.up must be \[32, 4\] for this target, got absent"),
        ({"fc.weight": (32, 64)}, r"fc.weight must be absent for this target, got \[32, 64\]"),
        ({"embeddings": None}, r"streams must hold embeddings \[gamma, D\] and adapters of one rank"),
        ({"adapters.0.q_proj.down": (5, 32)}, "adapters of one rank"),
        ({"adapters.0.q_proj.down": ()}, "adapters of one rank"),
        ({"embeddings": (0, 32)}, r"streams must hold embeddings \[gamma, D\] and adapters of one rank"),
        ({f"adapters.{layer}.{name}.down": (4,) for layer in (0, 1) for name in PROJECTED}, "adapters of one rank"),
        ({f"adapters.{layer}.{name}.down": (0, 32) for layer in (0, 1) for name in PROJECTED}, "adapters of one rank"),
    ],
)
def test_streams_that_do_not_fit_are_refused(changes, message, tmp_path):
    tensors = {name: value.clone() for name, value in random_streams(tiny_model("llama")).state_dict().items()}
    tensors |= {name: torch.zeros(shape) for name, shape in changes.items() if shape is not None}
    tensors = {name: value for name, value in tensors.items() if changes.get(name, 0) is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Streams.load(tiny_model("llama"), tmp_path)


def test_targets_that_streams_cannot_ride_on_are_refused(tmp_path):
    with pytest.raises(ValueError, match="families llama, qwen2, got 'gemma2'; draft for it with"):
        Streams(tiny_model("gemma2"))
    config = copy.deepcopy(CONFIGS["llama"])
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="frequencies that never change, got kind 'dynamic'"):
        Streams(AutoModelForCausalLM.from_config(config))
    config = copy.deepcopy(CONFIGS["qwen2"])
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 8, 0
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    with pytest.raises(ValueError, match="attends to all tokens, got sliding windows"):
        Streams(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match=r"num_layers must be in \[1, 2\], got 4"):
        Streams(tiny_model("llama"), num_layers=4)
    with pytest.raises(ValueError, match="model.safetensors, got"):
        Streams.load(tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match="another model"):
        stand.wrap(tiny_model("llama"), drafter=stand.StreamingDrafter(random_streams(tiny_model("qwen2"))))


def test_new_adapters_change_nothing_and_keep_the_size_of_what_they_take():
    torch.manual_seed(0)
    adapter, states = LowRank(400, 30, 200), torch.randn(20, 400)
    assert (adapter(states) == 0).all()
    assert (states @ adapter.down.T).std().item() == pytest.approx(1, abs=0.1)


def test_logits_are_those_of_the_targets_lm_head_whatever_is_guessed():
    model, states = tiny_model("llama"), torch.randn(5, 32)
    streams = random_streams(model)
    streams.restrict([3, 9])
    assert torch.equal(streams.logits(states), model.lm_head(states))
