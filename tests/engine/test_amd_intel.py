"""On GPUs of AMD ("cuda" of a torch for ROCm) and Intel ("xpu"), as far as that is known without them: eager steps."""

import copy
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_eagle import random_head
from pretended_calls import PROMPTS, tokens_of
from pretended_device import Elsewhere, OnArc, OnRocm, OnXpu, move_to, pretended
from tiny_models import tiny_model

import stand
from stand import backend
from stand.backend import choose_backend
from stand.drafters.blended import default_budget
from stand.drafters.costs import known as known_costs
from stand.drafters.costs.assumed import AssumedCosts
from stand.drafters.costs.known import KnownCosts
from stand.drafters.costs.step_cost import CostTable, StepCost, table_path
from stand.forward.cache import tree_cache
from stand.forward.cache.tree_cache import CacheMemoryError, available_bytes, check_fits
from stand.forward.devices import is_nvidia
from stand.trees import DraftBatch, DraftTree
from stand.verifiers import TargetRows, VerifierNoise, get_verifier

CALL = {"max_new_tokens": 10, "max_rows": 3}
GREEDY = {**CALL, "temperature": 0.0, "repetition_penalty": 1.2, "min_new_tokens": 6}
SAMPLED = {**CALL, "temperature": 0.8, "top_p": 0.9}
ROOMY = 1 << 40
OBSTACLES = {
    OnRocm: "the kernels are for NVIDIA GPUs, got a torch that is built for ROCm",
    OnXpu: "the kernels are for NVIDIA GPUs, got a model on xpu",
}


def use_rocm(monkeypatch) -> None:
    """An MI300X: shared memory that a kernel may ask for is told by NVIDIA's GPUs alone."""
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    monkeypatch.setattr(torch.version, "cuda", None)
    tell(monkeypatch, torch.cuda, gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304, major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Radeon Graphics")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))


def use_intel(monkeypatch, *, has_doubles: bool = True) -> None:
    tell(monkeypatch, torch.xpu, has_fp64=has_doubles)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: "Intel(R) Arc(TM) B580 Graphics")


def tell(monkeypatch, module, *, total: int = ROOMY, reserved: int = 0, allocated: int = 0, **properties) -> None:
    """What a device says of itself and its memory."""
    told = SimpleNamespace(total_memory=total, **properties)
    monkeypatch.setattr(module, "get_device_properties", lambda device: told)
    monkeypatch.setattr(module, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(module, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(module, "mem_get_info", lambda device: (total, total))


@pytest.fixture(params=[OnRocm, OnXpu, OnArc], ids=["amd", "intel", "intel-without-doubles"])
def kind(request, monkeypatch) -> type[Elsewhere]:
    if request.param is OnRocm:
        use_rocm(monkeypatch)
    else:
        use_intel(monkeypatch, has_doubles=request.param.has_doubles)
        for name in ("get_device_properties", "get_device_name", "mem_get_info", "memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asked CUDA"))
    return request.param


@pytest.fixture
def untried(monkeypatch) -> None:
    """No kernel may be tried."""
    for name in ("_kernel_failure", "_fused"):
        monkeypatch.setattr(backend, name, lambda *_, **__: pytest.fail("kernels were tried"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_cpu(kind, untried, family, settings):
    """Whatever rounding does to a law, a seed draws the same tokens but in one of very many calls."""
    expected = tokens_of(tiny_model(family), stand.BlendedDrafter(budget=12), **settings)
    model = copy.deepcopy(tiny_model(family))
    with pretended(kind) as mode:
        move_to(kind, model)
        assert tokens_of(model, stand.BlendedDrafter(budget=12), **settings) == expected
    assert len(mode.operations) > 30


def test_a_head_serves_there(kind):
    drafted = []
    for on in (torch.no_grad, lambda: pretended(kind)):
        model = copy.deepcopy(tiny_model("llama"))
        head = random_head(model)
        with on():
            if on is not torch.no_grad:
                move_to(kind, model, head)
            drafted.append(tokens_of(model, stand.EagleDrafter(head, budget=6), **SAMPLED))
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("place", [OnRocm, OnXpu], ids=["amd", "intel"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_kernels_are_refused_untried(monkeypatch, untried, place, family):
    use_rocm(monkeypatch) if place is OnRocm else use_intel(monkeypatch)
    model, rule = copy.deepcopy(tiny_model(family)), get_verifier("match")
    with pretended(place):
        move_to(place, model)
        chosen = choose_backend(model, rule, "auto", fuse=True)
        assert str(chosen) == "sdpa" and chosen.computes_elsewhere
        assert chosen.reason == (OBSTACLES[place] if place is OnRocm else "the model is on xpu, kernels are for CUDA")
        with pytest.raises(ValueError) as refused:
            choose_backend(model, rule, "triton", fuse=True)
    assert str(refused.value) == (
        f"backend 'triton' cannot serve here: {OBSTACLES[place]}; use backend='sdpa' or 'auto'"
    )


@pytest.mark.long
def test_steps_are_timed_first_and_few_are_drafted_where_nothing_may_be_timed(kind, monkeypatch, tmp_path):
    """Costs of captured steps on NVIDIA's GPUs say nothing of these."""
    for costs, budget in (("off", 32), (str(tmp_path), None)):
        monkeypatch.setenv("STAND_COSTS", costs)
        model = copy.deepcopy(tiny_model("llama"))
        with pretended(kind):
            move_to(kind, model)
            engine = stand.wrap(model)
            engine.generate(input_ids=PROMPTS, max_new_tokens=4, seed=3, temperature=0.8)
            assert engine.drafter.budget == budget and engine.drafter.costs is None
    names = [path.name for path in tmp_path.iterdir()]
    named = "amd-radeon-graphics-gfx942" if kind is OnRocm else "intel-r-arc-tm-b580-graphics-sdpa-unfused-"
    assert names and all(named in name and "threads" not in name for name in names)


def test_a_mixture_without_costs_drafts_as_little_as_on_a_cpu(kind):
    model = copy.deepcopy(tiny_model("qwen3_moe"))
    with pretended(kind):
        move_to(kind, model)
        assert default_budget(model) == 32


def test_gpus_of_one_name_have_files_of_their_own(monkeypatch, tmp_path):
    """Some drivers call all of AMD's "AMD Radeon Graphics"."""
    use_rocm(monkeypatch)
    monkeypatch.setattr(known_costs, "input_device", lambda model: OnRocm.place)
    paths = set()
    for arch, count in (("gfx942", 304), ("gfx942", 228), ("gfx1100", 96)):
        tell(monkeypatch, torch.cuda, gcnArchName=arch, multi_processor_count=count)
        paths.add(KnownCosts(tiny_model("qwen2"), tmp_path).path(1, "sdpa"))
    monkeypatch.setattr(known_costs, "input_device", lambda model: OnXpu.place)
    for name in ("Intel(R) Arc(TM) B580 Graphics", "Intel(R) Graphics [0x64a0]"):
        monkeypatch.setattr(torch.xpu, "get_device_name", lambda device, name=name: name)
        paths.add(KnownCosts(tiny_model("qwen2"), tmp_path).path(1, "sdpa"))
    assert len(paths) == 5


def test_a_table_of_captured_steps_is_not_read_there(monkeypatch, tmp_path):
    """Control: on an NVIDIA GPU of that name it is."""
    model = SimpleNamespace(device=OnRocm.place, dtype=torch.bfloat16)
    monkeypatch.setattr(known_costs, "size_name", lambda model: "small")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Radeon Graphics")
    path = table_path(tmp_path, model="small", device="AMD Radeon Graphics", dtype="torch.bfloat16")
    CostTable((StepCost(1, 32, (1, 8), (1.0, 1.0)),)).save(path)
    assert known_costs.saved_costs(model, tmp_path) is not None
    use_rocm(monkeypatch)
    assert known_costs.saved_costs(model, tmp_path) is None


def test_a_rule_computes_where_64_bit_floats_are(kind):
    batch = DraftBatch.concatenate([DraftTree.chain([4, 2, 3])])
    laws = torch.softmax(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    noise = VerifierNoise(seed=1, rows=np.array([0]), steps=np.array([0]), positions=np.array([1]))
    for name in ("traversal", "match", "coupled", "block"):
        expected = get_verifier(name).verify(batch, TargetRows(laws), noise)
        with pretended(kind):
            rows = TargetRows(kind(laws))
            assert rows.device.type == (kind.place.type if kind.has_doubles else "cpu")
            got = get_verifier(name).verify(batch, rows, noise)
        assert got.next_tokens.tolist() == expected.next_tokens.tolist()
        assert [path.tolist() for path in got.accepted] == [path.tolist() for path in expected.accepted]


def test_memory_of_an_intel_gpu(monkeypatch):
    """What torch holds unused is free, and no more is than it does not hold, whatever the driver says."""
    tell(monkeypatch, torch.xpu, total=1000, reserved=300, allocated=200)
    for told, free in ((400, 400 + 100), (1000, 700 + 100), (0, 100)):
        monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device, told=told: (told, 1000))
        assert available_bytes(OnXpu.place) == free
    check_fits(1000, OnXpu.place)
    with pytest.raises(CacheMemoryError):
        check_fits(1001, OnXpu.place)


def test_memory_of_a_gpu_within_intels_processors(monkeypatch):
    """Its driver does not tell, and it has the system's."""
    tell(monkeypatch, torch.xpu, total=1000, reserved=300, allocated=200)

    def refuse(device):
        raise RuntimeError("The device (Intel(R) Graphics) doesn't support querying the available free memory.")

    monkeypatch.setattr(torch.xpu, "mem_get_info", refuse)
    for available, free in ((5000, 700 + 100), (50, 50 + 100)):
        monkeypatch.setattr(tree_cache, "available_memory", lambda available=available: available)
        assert available_bytes(OnXpu.place) == free
    tell(monkeypatch, torch.xpu, total=1000, reserved=1200, allocated=1200)  # no less than nothing
    assert available_bytes(OnXpu.place) == 0


def test_which_gpus_are_nvidias(monkeypatch):
    assert is_nvidia(torch.device("cuda")) and not is_nvidia(torch.device("xpu")) and not is_nvidia(torch.device("cpu"))
    use_rocm(monkeypatch)
    assert not is_nvidia(torch.device("cuda"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_old_gpu_of_nvidia_tries_no_kernel_and_times_its_steps(monkeypatch, untried, tmp_path, family):
    """Triton may end the process there. Control: of a newer one costs are assumed."""
    monkeypatch.setenv("STAND_COSTS", str(tmp_path))
    tell(monkeypatch, torch.cuda, shared_memory_per_block_optin=64 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    model = copy.deepcopy(tiny_model(family))
    with pretended(OnRocm):  # "cuda", and here of NVIDIA
        move_to(OnRocm, model)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        chosen = choose_backend(model, get_verifier("match"), "auto", fuse=True)
        assert str(chosen) == "sdpa" and "8.0 or higher, got 7.5" in chosen.reason
        drafter = stand.BlendedDrafter()
        drafter.attach(model, b"")
        assert drafter.budget is None and drafter.costs is None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        drafter = stand.BlendedDrafter()
        drafter.attach(model, b"")
        assert isinstance(drafter.costs, AssumedCosts) == (family == "qwen2")
