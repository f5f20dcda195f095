"""Two ranks that hold shards of a model draw rollouts of other lengths: tokens are transformers' own, nobody waits for
ever, and training goes on as behind transformers' own rollouts. FSDP 1 and 2, ZeRO-3 where DeepSpeed is installed;
gloo, on a CPU."""

from __future__ import annotations

import copy
import importlib.util
import json
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import sharded_at_work
import torch
from sharded_at_work import GREEDY, NEW_TOKENS, PROMPTS
from shared_results import found_once
from started_ranks import run_two_ranks
from tiny_models import tiny_model
from torch import distributed
from transformers import DistributedConfig

import stand
from stand.backend import way_of_steps
from stand.forward import ranks as ranks_of_forwards
from stand.forward.devices import is_sharded, off_one_device
from stand.forward.ranks import synced

pytestmark = pytest.mark.long

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("needs a torch with torch.distributed and gloo", allow_module_level=True)


@pytest.fixture(scope="module", params=["fsdp1", "fsdp2", "transformers", "zero3"])
def ranks(request, tmp_path_factory) -> list[dict]:
    """The answers of both ranks."""
    if request.param == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    if request.param == "transformers" and "fsdp_size" not in signature(DistributedConfig).parameters:
        pytest.skip("needs a transformers that shards by itself")
    find = partial(answers_of_ranks, request.param, tmp_path_factory.mktemp("answers"))
    return found_once(tmp_path_factory, f"shards-{request.param}", find)


def answers_of_ranks(kind: str, folder: Path) -> list[dict]:
    run_two_ranks(sharded_at_work.__file__, kind, str(folder))
    return [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(2)]


def test_tokens_are_those_of_a_whole_model(ranks):
    for answers, prompts, new_tokens in zip(ranks, PROMPTS, NEW_TOKENS, strict=True):
        expected = tiny_model("llama").generate(torch.tensor(prompts), **GREEDY, max_new_tokens=new_tokens)
        assert answers["drafted"] == expected.tolist()


def test_tokens_follow_a_training_step(ranks):
    for answers in ranks:
        assert answers["always"] == answers["plain"] != answers["drafted"]


def test_training_goes_on_as_behind_plain_rollouts(ranks):
    for answers in ranks:
        assert answers["losses"] == answers["plain losses"]
        assert answers["losses"][1] != answers["losses"][0]


@pytest.mark.parametrize("what", ["apart", "unsynced"])
def test_ranks_that_would_go_apart_are_refused(ranks, what):
    for answers in ranks:
        assert answers["refused"][what].startswith(
            "ValueError: ranks that hold shards of a model must run all forwards"
        )


def test_what_ends_one_rank_leaves_the_others_at_work(ranks):
    first, second = (answers["refused"]["one rank"] for answers in ranks)
    assert (first, second) == ("", "ArithmeticError: behind 20 tokens")


def test_steps_are_eager_and_nothing_is_fused(ranks):
    for answers in ranks:
        assert answers["engine"] == ["sdpa", "the model is on cpu, kernels are for CUDA", True]


def sharded() -> torch.nn.Module:
    """As DeepSpeed marks weights, in one process."""
    model = copy.deepcopy(tiny_model("llama"))
    for number, weight in enumerate(model.parameters()):
        weight.ds_id = number
    return model


def test_shards_in_one_process_are_served_without_fusion():
    model = sharded()
    assert not is_sharded(tiny_model("llama")) and is_sharded(model)
    assert off_one_device(model) == "sharded over 1"
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=8))
    assert engine.backend.fusion is None
    asked = {"max_new_tokens": 12, "temperature": 0.0}
    own = stand.wrap(tiny_model("llama"), drafter=stand.BlendedDrafter(budget=8))
    assert engine.generate(PROMPTS[1], **asked).token_ids == own.generate(PROMPTS[1], **asked).token_ids


def test_steps_of_shards_are_timed_by_themselves():
    """Also where the engine was made before."""
    model = copy.deepcopy(tiny_model("llama"))
    backend = stand.wrap(model, drafter=stand.BlendedDrafter(budget=8)).backend
    before = way_of_steps(model, backend)
    for number, weight in enumerate(model.parameters()):
        weight.ds_id = number
    assert before in ("", "unfused") and way_of_steps(model, backend) == "sharded over 1"


def test_drafters_that_read_weights_or_states_are_refused():
    needy = stand.BlendedDrafter(budget=8)
    needy.requires_features = True
    with pytest.raises(ValueError, match="drafters of a model of several processes must do without its hidden states"):
        stand.wrap(sharded(), drafter=needy)


def test_ranks_are_told_before_weights_are_brought(monkeypatch):
    """Collectives come in one order on all ranks. Who is done goes on for as long as another rank is at work, and what
    brings weights first comes to it outside of inference mode."""
    seen, left = [], [True, True, False]

    def told(model: torch.nn.Module, is_own: bool) -> bool:
        seen.append("at work" if is_own else "done")
        return is_own or left.pop(0)

    monkeypatch.setattr(ranks_of_forwards, "_is_any_at_work", told)
    model = copy.deepcopy(tiny_model("llama"))
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_inference_mode_enabled()))
    with torch.inference_mode(), ranks_of_forwards.forwards_together(model):
        model(input_ids=torch.tensor([[5]]))
    assert seen == ["at work", False, "at work", True, "done", False, "done", False, "done"]
    with pytest.raises(KeyError), ranks_of_forwards.forwards_together(model):
        left.append(False)
        raise KeyError
    assert seen[-3:] == ["at work", False, "done"] and len(model._forward_pre_hooks) == 1


def test_synced_gpus_needs_ranks():
    model = SimpleNamespace(parameters=list, modules=list)
    with pytest.raises(ValueError, match="synced_gpus needs ranks in a group of torch.distributed, got one process"):
        synced(model, True)
    with synced(model, None), synced(model, False):
        pass
