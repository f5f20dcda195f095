"""What one of two ranks that hold shards of a model decodes and learns in training.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python sharded_at_work.py fsdp2 FOLDER

The first argument says who shards: fsdp1, fsdp2, transformers (its own FSDP 2) or zero3 (which needs DeepSpeed).
Answers are written to the folder, one file per rank: `fsdp2-0.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from failures import failure_of
from tiny_models import tiny_model
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM, DistributedConfig, PreTrainedModel

from stand.plugins.generate import draft_always, engine_of, stand_generate

PROMPTS = [[[5, 9, 30, 7, 5, 9, 30, 7, 5, 9, 30, 4]], [[11, 12, 13, 14], [8, 6, 8, 6]]]  # of each rank
NEW_TOKENS = (12, 40)
TRAINED_ON = torch.tensor([[9, 4, 5, 9, 30, 7, 5, 9]])
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ZERO_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


Sharded = tuple[PreTrainedModel, nn.Module, Callable]  # what generates, what is trained, and what is around rollouts


def loaded(saved: Path, **settings: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, **settings).eval()


def with_fsdp1(saved: Path) -> Sharded:
    model = loaded(saved)
    wrapped = ModuleWrapPolicy({type(model.get_decoder().layers[0])})
    trained = FullyShardedDataParallel(
        model, auto_wrap_policy=wrapped, use_orig_params=True, device_id=torch.device("cpu")
    )
    return model, trained, lambda: FullyShardedDataParallel.summon_full_params(trained, recurse=False)  # as TRL does


def with_fsdp2(saved: Path) -> Sharded:
    model = loaded(saved)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    return model, fully_shard(model, mesh=mesh), nullcontext


def with_transformers(saved: Path) -> Sharded:
    model = loaded(saved, distributed_config=DistributedConfig(fsdp_size=2))
    return model, model, nullcontext


def with_zero3(saved: Path) -> Sharded:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    with_zero3.kept = HfDeepSpeedConfig(ZERO_3)  # transformers asks for a live one
    model = loaded(saved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, deepspeed.initialize(model=model, config=ZERO_3, optimizer=optimizer)[0], nullcontext


SHARDED = {"fsdp1": with_fsdp1, "fsdp2": with_fsdp2, "transformers": with_transformers, "zero3": with_zero3}


def train(model: nn.Module, steps: int) -> list[float]:
    """Losses of some steps, of which the first are those of the weights at hand."""
    model.train()
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        loss = model(input_ids=TRAINED_ON, labels=TRAINED_ON).loss
        if hasattr(model, "backward"):  # DeepSpeed's
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    model.eval()
    return losses


def answers_of(kind: str, rank: int, saved: Path) -> dict[str, object]:
    model, trained, whole = SHARDED[kind](saved)
    prompts = torch.tensor(PROMPTS[rank])
    asked = {**GREEDY, "max_new_tokens": NEW_TOKENS[rank]}
    with torch.no_grad(), whole():
        drafted = model.generate(prompts, **asked, custom_generate=stand_generate).tolist()
        refused = {
            "apart": failure_of(lambda: engine_of(model).generate(prompts.tolist(), max_new_tokens=4)),
            "unsynced": failure_of(
                lambda: model.generate(prompts, **asked, custom_generate=stand_generate, synced_gpus=False)
            ),
            "one rank": failure_of(
                lambda: model.generate(
                    prompts, **asked, custom_generate=stand_generate, stopping_criteria=[fails_late] * rank
                )
            ),
        }
    losses = train(trained, 2)
    draft_always(model)
    with torch.no_grad(), whole():
        always = model.generate(prompts, **asked).tolist()
        del model.generate
        plain = model.generate(prompts, **asked, synced_gpus=True).tolist()
    engine = engine_of(model)
    return {
        "drafted": drafted,
        "refused": refused,
        "always": always,
        "plain": plain,
        "losses": losses,
        "plain losses": plain_losses(kind, saved, prompts, asked),
        "engine": [engine.backend.name, engine.backend.reason, engine.backend.fusion is None],
    }


def fails_late(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
    if input_ids.shape[1] > 20:
        raise ArithmeticError("behind 20 tokens")
    return torch.zeros(len(input_ids), dtype=torch.bool)


def plain_losses(kind: str, saved: Path, prompts: torch.Tensor, asked: dict[str, object]) -> list[float]:
    """Of another model behind rollouts by transformers alone: FSDP 2 trains otherwise behind a forward without
    gradients than behind none."""
    model, trained, whole = SHARDED[kind](saved)
    with torch.no_grad(), whole():
        model.generate(prompts, **asked, synced_gpus=True)
    return train(trained, 2)


def main(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    saved = folder / f"whole-{rank}"
    tiny_model("llama").save_pretrained(saved)  # before there is a group, in which one rank alone would save
    distributed.init_process_group("gloo")
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(answers_of(kind, rank, saved)))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
