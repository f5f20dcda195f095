"""What training keeps on disk: the model's folder, and everything that a run needs to go on."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from workloads.problems import write_prompt


def save_folder(folder: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write model (bfloat16) and tokenizer into a new folder and swap it in for the old one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    fresh.chmod(0o755)
    half = AutoModelForCausalLM.from_config(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    check_tokenizer(fresh, tokenizer)
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ValueError if the folder's tokenizer splits texts in another way than the one trained with."""
    text = write_prompt("Find (12 + 34) * 56, then x, if 7x = 89.")
    loaded = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    if loaded != tokenizer(text)["input_ids"]:
        raise ValueError(
            f"a saved tokenizer must split texts as before, got {loaded} in {folder}; "
            "use a model type for which AutoTokenizer keeps tokenizer.json as it is"
        )


def save_state(path: Path, model, optimizers, progress: dict) -> None:
    """Write everything a run needs to go on, atomically."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": progress,
    }
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    os.replace(fresh, path)


def load_state(path: Path, model, optimizers) -> dict:
    """Restore a run; returns its progress: step, tokens, seconds."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["progress"]
