"""Models whose layers lie on several devices, or on none between forwards.

Accelerate's own hooks place them. The devices are imitated (tests/oracles/placed.py), except the disk.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from placed import devices
from plain_streams import random_streams
from recurrent_models import RECURRENT, recurrent_model
from tiny_models import tiny_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedModel

import stand
from stand.forward import model as model_module
from stand.forward import self_check
from stand.forward.cache import key_shape as key_shape_module
from stand.forward.cache.key_shape import key_shape
from stand.forward.devices import input_device, is_split, off_one_device, tensor_group
from stand.forward.model import size_name
from stand.forward.packed_plan import StepPlan
from stand.scheduling import free_memory, prefilled, prompt_keys

FIRST, LAST = "xla:0", "xla:1"
PROMPT = [[3, 4, 5, 6, 7, 3, 4, 5]]


def whole_model(family: str) -> PreTrainedModel:
    return recurrent_model(family) if family in RECURRENT else tiny_model(family)


def on_two_devices(model: PreTrainedModel, *, num_first: int | None = None) -> PreTrainedModel:
    """A copy whose first layers, by default half of them, lie on one device; the rest, norm and LM head on another.

    Made for inference: a view of another tensor could not be imitated in inference mode."""
    with torch.inference_mode():
        model = copy.deepcopy(model)
        head = model.lm_head.weight.detach().clone()  # tied weights lie together
        model.lm_head.weight, model._tied_weights_keys = torch.nn.Parameter(head, requires_grad=False), None
        prefix, base = model.base_model_prefix, model.base_model
        places = {f"{prefix}.{name}": LAST if "norm" in name else FIRST for name, _ in base.named_children()}
        del places[f"{prefix}.layers"]
        num_first = len(base.layers) // 2 if num_first is None else num_first
        places |= {
            f"{prefix}.layers.{place}": FIRST if place < num_first else LAST for place in range(len(base.layers))
        }
        return dispatch_model(model, device_map={**places, "lm_head": LAST}, main_device=FIRST)


def off_device(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose weights come for every forward."""
    model = copy.deepcopy(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def greedy(engine: stand.Engine, **settings) -> list[int]:
    return engine.generate(
        input_ids=PROMPT, max_new_tokens=24, temperature=0, stop_token_ids=[], **settings
    ).token_ids[0]  # fmt: skip


def transformers_greedy(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor(PROMPT)
    return model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=None)[0, ids.shape[1] :].tolist()


def sampled(engine: stand.Engine) -> list[list[int]]:
    settings = {"num_return_sequences": 3, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 3}
    return engine.generate(input_ids=PROMPT, max_new_tokens=24, stop_token_ids=[], **settings).token_ids


FAMILIES = ["llama", "gemma2", "gemma3", "phi3", "qwen3_5", "bamba", "lfm2"]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_two_devices_write_what_one_writes(family):
    model = whole_model(family)
    expected = transformers_greedy(model)
    drawn = sampled(stand.wrap(model, verifier="match", backend="sdpa", fuse=False))
    with devices():
        engine = stand.wrap(on_two_devices(model), verifier="match")
        assert {str(weight.device) for weight in engine.model.parameters()} == {FIRST, LAST}
        assert greedy(engine) == expected
        assert greedy(engine) == expected  # drafts are accepted
        assert sampled(engine) == drawn


def test_the_imitation_refuses_operations_over_two_devices():
    with devices():
        here, there = torch.arange(3, device=FIRST), torch.arange(3, device=LAST)
        assert (here + here).tolist() == [0, 2, 4]
        assert (here + there.to(FIRST)).tolist() == [0, 2, 4]
        for other in (there, torch.arange(3)):
            with pytest.raises(RuntimeError, match="same device"):
                here + other


def test_a_plan_on_one_device_is_noticed(monkeypatch):
    """Control."""
    monkeypatch.setattr(StepPlan, "on", lambda plan, device: plan)
    with devices(), pytest.raises(stand.UnsupportedModelError, match="same device"):
        stand.wrap(on_two_devices(tiny_model("llama")))


def test_a_plan_is_itself_where_it_lies():
    plan = StepPlan.for_prompt(torch.arange(3, dtype=torch.int32).numpy(), 0, row=0)
    assert plan.on(torch.device("cpu")) is plan
    with devices():
        there = plan.on(torch.device(LAST))
        assert str(there.cache_rows.device) == LAST
        assert plan.on(torch.device(LAST)) is there


@pytest.mark.long
def test_sources_of_laws_and_a_draft_model_serve_two_devices():
    model = tiny_model("llama")
    expected = transformers_greedy(model)
    with devices():
        two = on_two_devices(model)
        for drafter in (stand.BlendedDrafter(source=stand.NeighbourLaws()), stand.ModelDrafter(model)):
            assert greedy(stand.wrap(two, drafter=drafter)) == expected


def test_streams_are_refused_on_two_devices():
    model = tiny_model("llama")
    with devices():
        two = on_two_devices(model)
        with pytest.raises(ValueError, match="must lie on one device, got a model on 2 devices"):
            stand.wrap(two, drafter=stand.StreamingDrafter(random_streams(two)))


def test_memory_ends_where_one_of_the_devices_is_full(monkeypatch):
    free = {FIRST: 3000.0, LAST: 1000.0}
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: free[str(device)])
    with devices():
        two = on_two_devices(tiny_model("llama"))
        self_check.check_model(two)
        assert [(str(device), share) for device, share in key_shape(two).shares] == [(FIRST, 0.5), (LAST, 0.5)]
        assert free_memory.most_bytes(two, 0) == 0.8 * 1000.0 / 0.5
        free[FIRST] = 500.0
        assert free_memory.most_bytes(two, 0) == 0.8 * 500.0 / 0.5


def test_memory_is_counted_where_the_keys_lie(monkeypatch):
    """Not where the ids go, if no layer is there."""
    free = {FIRST: 3000.0, LAST: 1000.0, "cpu": 500.0}
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: free[str(device)])
    with devices():
        two = on_two_devices(tiny_model("llama"), num_first=0)
        self_check.check_model(two)
        assert free_memory.most_bytes(two, 0) == 0.8 * 1000.0
        model = copy.deepcopy(tiny_model("llama"))
        key_shape_module._STORED[model] = key_shape_module._STORED[two]  # as if it had been moved since
        assert free_memory.most_bytes(model, 0) == 0.8 * 500.0


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "bamba"])
def test_offloaded_weights_write_the_same(family):
    model = whole_model(family)
    away = off_device(model)
    assert away.device.type == "meta" and input_device(away) == torch.device("cpu")
    engine = stand.wrap(away, verifier="match")
    assert greedy(engine) == transformers_greedy(model)
    with engine.keep_prompts(1e6):
        assert sampled(engine) == sampled(stand.wrap(model, verifier="match", fuse=False))


def test_keys_do_not_outlive_offloaded_weights(monkeypatch):
    """Which can change where no tensor of the model tells."""
    for module in (model_module, prompt_keys, prefilled):
        monkeypatch.setattr(module, "PROMPT_CHUNK", 4)
    away = off_device(tiny_model("llama"))
    engine = stand.wrap(away)
    with engine.keep_prompts(1e6):
        greedy(engine)
        for layer in away.model.layers:
            layer.self_attn.v_proj._hf_hook.weights_map["weight"].data.mul_(-2.0)
        assert greedy(engine) == transformers_greedy(away)


def test_weights_on_disk_write_the_same(tmp_path):
    model = copy.deepcopy(tiny_model("llama"))
    expected = transformers_greedy(model)
    disk_offload(model, offload_dir=str(tmp_path), execution_device=torch.device("cpu"))
    assert greedy(stand.wrap(model)) == expected


def test_forwards_behind_hooks_are_given_back():
    model = off_device(recurrent_model("qwen3_5"))
    before = [{name: vars(layer).get(name) for name in ("forward", "_old_forward")} for layer in model.modules()]
    greedy(stand.wrap(model))
    after = [{name: vars(layer).get(name) for name in ("forward", "_old_forward")} for layer in model.modules()]
    assert after == before


def test_weights_that_were_never_loaded_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    with pytest.raises(stand.UnsupportedModelError, match="weights must be loaded"):
        stand.wrap(model)


@pytest.fixture
def four_processes():
    """Of which this one is the first, and the others do not exist."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    distributed.destroy_process_group()


def test_weights_that_processes_share_are_refused(four_processes):
    model = copy.deepcopy(tiny_model("llama"))
    layer, mesh = model.model.layers[0].mlp.up_proj, init_device_mesh("cpu", (4,))
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(stand.UnsupportedModelError, match="by tensor parallelism alone"):
        stand.wrap(model)


@pytest.mark.parametrize(
    ("sizes", "names", "is_served"),
    [
        ((4,), None, True),  # as transformers 5.16 has it
        ((1, 1, 4), ("pp", "fsdp", "tp"), True),
        ((1, 2, 2), ("pp", "fsdp", "tp"), False),
        ((4, 1, 1), ("pp", "fsdp", "tp"), False),
    ],
)
def test_tensors_alone_may_be_split(four_processes, sizes, names, is_served):
    model = copy.deepcopy(tiny_model("llama"))
    assert tensor_group(model) is None and not is_split(model)
    model._device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model.config.distributed_config = SimpleNamespace(tp_size=sizes[-1])
    assert is_split(model) is not is_served
    assert (tensor_group(model) is not None) is is_served
    if is_served:
        assert tensor_group(model).size() == 4 and off_one_device(model) == "in 4 processes"
        assert size_name(model).endswith("-in-4-processes")


def test_a_split_without_its_processes_is_refused():
    """transformers shares some weights as plain tensors, and notes how many processes there are."""
    model = copy.deepcopy(tiny_model("llama"))
    model._tp_size = 2
    with pytest.raises(stand.UnsupportedModelError, match="by tensor parallelism alone"):
        stand.wrap(model)
    model._tp_size = 1
    stand.wrap(model)


def test_a_trained_part_needs_the_weights():
    away = off_device(tiny_model("llama"))
    with pytest.raises(ValueError, match="weights at hand"):
        random_streams(away)


def test_costs_are_those_of_where_a_model_lies():
    model = tiny_model("llama")
    away = off_device(model)
    assert (off_one_device(model), off_one_device(away)) == ("", "offloaded")
    assert size_name(away).endswith("-offloaded") and not size_name(model).endswith("-offloaded")
    with devices():
        two = on_two_devices(model)
        assert off_one_device(two) == "on 2 devices" and size_name(two).endswith("-on-2-devices")
