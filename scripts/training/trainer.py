"""Training of a small model in processes that average their gradients.

Every process runs one thread, and gloo joins them: on a CPU that beats one process with two threads. bfloat16 autocast
is faster where the processor has such instructions, and twelve times slower where not. Matrices learn with Muon,
the rest with AdamW. The learning rate is a function of the share of the budget that is used up (minutes or steps):
warm-up, constant, then linearly to zero.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from training.batches import IGNORED, draw_batches
from training.checkpoint import (
    FACTS,
    SETTINGS,
    check_output,
    claim,
    forget_checkpoints,
    is_model_folder,
    is_tokenizer_folder,
    load_state,
    save_folder,
    save_state,
)  # fmt: skip
from training.tokenizer import train_tokenizer

# Keep freed memory in the process: returning and faulting it in again can cost more than the arithmetic.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
STATE = "state.pt"
FILES = (STATE, "state.new", SETTINGS)  # of checkpoints
FIXED = ("layout", "hidden", "intermediate", "layers", "vocabulary", "rows", "processes", "learning_rate", "seed")
HEAD_SIZE = 64
FOLDERS = {"tokenizer": is_tokenizer_folder, "latest": is_model_folder}


def train(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Prepare tokenizer (default: a new one) and folders, then run all training processes."""
    check_output(arguments.output)
    if arguments.fresh:
        forget_checkpoints(arguments.checkpoints, FILES, FOLDERS)
    claim(arguments.checkpoints, {name: getattr(arguments, name, None) for name in FIXED}, (*FILES, "tokenizer"))
    if not (arguments.checkpoints / "tokenizer").exists():
        tokenizer = tokenizer or train_tokenizer(arguments.vocabulary, seed=arguments.seed)
        tokenizer.save_pretrained(arguments.checkpoints / "tokenizer")
    os.environ.update(ALLOCATOR)  # read by the allocator of the spawned processes
    with tempfile.TemporaryDirectory() as folder:
        meeting_file = str(Path(folder) / "meeting")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # a clean exit ends the daemons below, too
        mp.spawn(train_process, args=(arguments, meeting_file), nprocs=arguments.processes, daemon=True)


def train_process(rank: int, arguments: argparse.Namespace, meeting_file: str) -> None:
    """One of the training processes; the first one writes checkpoints and progress."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=arguments.processes)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoints / "tokenizer")
    model = build_model(arguments, tokenizer).train()
    optimizers = build_optimizers(model, arguments.learning_rate)
    progress = {"step": 0, "tokens": 0, "seconds": 0.0}
    state_path = arguments.checkpoints / STATE
    if state_path.exists():
        progress = load_state(state_path, model, optimizers)
    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count} parameters, {len(tokenizer)} tokens, from step {progress['step']}", flush=True)
    dist.barrier()
    run_steps(rank, arguments, model, optimizers, tokenizer, progress)
    if rank == 0:
        save_state(state_path, model, optimizers, progress)
        save_folder(arguments.output, model, tokenizer)
        describe_training(arguments, model, progress)
        print(f"wrote {arguments.output}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def describe_training(arguments: argparse.Namespace, model: torch.nn.Module, progress: dict) -> None:
    """Write `training.json` next to the weights: how they were made."""
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": progress["step"],
        "reasoning_tokens": progress["tokens"],
        "minutes": round(progress["seconds"] / 60, 1),
        "processes": arguments.processes,
        "texts_per_process_and_step": arguments.rows,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
    }
    (arguments.output / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def run_steps(rank: int, arguments, model, optimizers, tokenizer, progress: dict) -> None:
    """Train until the budget is used up; `progress` is updated in place."""
    first_step = progress["step"]
    batches = draw_batches(
        tokenizer,
        rows=arguments.rows,
        seed=f"{arguments.seed} {rank} {first_step}",
        order_seed=f"{arguments.seed} {first_step}",
    )
    begin, earlier = time.monotonic(), progress["seconds"]
    last_save, recent = begin, []
    budget = {"minutes": arguments.minutes, "steps": arguments.steps}
    used = budget_share(progress, **budget)
    while used < 1.0:
        input_ids, labels = next(batches)
        recent.append(learn_batch(model, input_ids, labels, precision=arguments.precision))
        progress["seconds"] = earlier + time.monotonic() - begin
        progress["step"] += 1
        used = average_gradients(model, budget_share(progress, **budget))
        apply_step(model, optimizers, arguments.learning_rate * rate_at(used, progress["step"] - 1))
        progress["tokens"] += int((labels != IGNORED).sum()) * arguments.processes
        if rank == 0 and progress["step"] % 20 == 0:
            report = {"loss": round(sum(recent) / len(recent), 4), "used": round(used, 3), **progress}
            print(json.dumps(report), flush=True)
            recent.clear()
        if rank == 0 and time.monotonic() - last_save > 60 * arguments.save_minutes:
            save_state(arguments.checkpoints / STATE, model, optimizers, progress)
            save_folder(arguments.checkpoints / "latest", model, tokenizer)
            last_save = time.monotonic()


def budget_share(progress: dict, *, minutes: float, steps: int | None) -> float:
    """How much of `steps`, or of `minutes` where they are not given, is used up; 1 or more where the run has ended."""
    return progress["step"] / steps if steps else progress["seconds"] / (60 * minutes)


def apply_step(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], learning_rate: float) -> None:
    """Clip, step all optimizers at the given rate, clear the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()


def build_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> torch.nn.Module:
    """A small model of a layout of `LAYOUTS`, with tied embeddings and random weights."""
    torch.manual_seed(arguments.seed)
    config = LAYOUTS[arguments.layout](
        vocab_size=(len(tokenizer) + 7) // 8 * 8,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // HEAD_SIZE,
        num_key_value_heads=max(1, arguments.hidden // 128),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=arguments.attention)


def llama_config(**sizes: object) -> PreTrainedConfig:
    """Not a Qwen2: for that model type AutoTokenizer replaces the folder's own splitting rule by Qwen2's."""
    return LlamaConfig(**sizes, attention_bias=True)


def hybrid_config(**sizes: object) -> PreTrainedConfig:
    """As Qwen3.5: every fourth layer, from the fourth on, has attention; the others keep states by the gated delta
    rule."""
    heads = sizes["num_attention_heads"]
    return Qwen3_5TextConfig(
        **sizes, head_dim=HEAD_SIZE, linear_num_key_heads=heads, linear_num_value_heads=heads,
        linear_key_head_dim=HEAD_SIZE // 2, linear_value_head_dim=HEAD_SIZE,
    )  # fmt: skip


LAYOUTS = {"llama": llama_config, "qwen3_5": hybrid_config}


def learn_batch(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, *, precision: str) -> float:
    """Add the gradient of the labelled tokens' mean cross-entropy, in two halves to save memory; returns the mean.

    Padding is on the right, so causality hides it.
    """
    total, count = 0.0, int((labels[:, 1:] != IGNORED).sum())
    for part_ids, part_labels in zip(input_ids.chunk(2), labels.chunk(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(input_ids=part_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1),
            part_labels[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        (loss / count).backward()
        total += loss.item() / count
    return total


def build_optimizers(model: torch.nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, biases and norms."""
    named = list(model.named_parameters())
    matrices = [value for name, value in named if value.ndim == 2 and "embed" not in name]
    others = [value for name, value in named if value.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_at(used: float, step: int, *, warmup_steps: int = 60, decay_share: float = 0.5) -> float:
    """Learning-rate factor after a share `used` of the budget: warm-up, constant, linear to zero."""
    warm = min(1.0, (step + 1) / warmup_steps)
    return warm * min(1.0, max(0.0, (1.0 - used) / decay_share))


def average_gradients(model: torch.nn.Module, used: float) -> float:
    """Average the gradients over all processes; returns the first process's `used`, the same for all."""
    gradients = [parameter.grad for parameter in model.parameters()]
    own = used if dist.get_rank() == 0 else 0.0
    flat = torch.cat([gradient.flatten() for gradient in gradients] + [torch.tensor([own])])
    dist.all_reduce(flat)
    begin = 0
    for gradient in gradients:
        count = gradient.numel()
        gradient.copy_(flat[begin : begin + count].view_as(gradient) / dist.get_world_size())
        begin += count
    return float(flat[-1])
