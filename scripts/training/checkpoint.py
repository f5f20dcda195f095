"""What training keeps on disk: the model's folder, and everything that a run needs to go on."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from measuring.output_file import check_replaceable, check_same_settings, replace_text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from workloads.problems import write_prompt

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
FACTS = "training.json"
SETTINGS = "settings.json"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", FACTS)


def check_output(folder: Path) -> None:
    """Raise ValueError unless the folder is new, empty, or a model's that was trained here: all of it is replaced."""
    check_replaceable(folder, "a trained model", lambda held: is_model_folder(held) and (held / FACTS).exists())


def is_model_folder(folder: Path) -> bool:
    """Whether it holds files of a saved model and nothing else."""
    return {path.name for path in folder.iterdir()} <= {*MODEL_FILES, *TOKENIZER_FILES}


def is_tokenizer_folder(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= set(TOKENIZER_FILES)


def save_folder(folder: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write model (bfloat16) and tokenizer into a new folder and swap it in for the old one.

    Raises ValueError where the old one holds something else than such a model.
    """
    check_replaceable(folder, "a trained model", is_model_folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        fresh = Path(work) / "fresh"
        half = AutoModelForCausalLM.from_config(model.config).to(torch.bfloat16)
        half.load_state_dict(model.state_dict())
        half.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        check_tokenizer(fresh, tokenizer)
        if folder.exists():
            folder.rename(Path(work) / "old")
        fresh.rename(folder)


def forget_checkpoints(
    folder: Path, files: Sequence[str], folders: Mapping[str, Callable[[Path], bool]] | None = None
) -> None:
    """Remove what a training writes into its folder for checkpoints, and nothing else that lies there.

    folders: by name, what knows such a folder. Raises ValueError where one of that name holds something else.
    """
    for name, is_own in (folders or {}).items():
        check_replaceable(folder / name, f"the checkpoints' {name}", is_own)
    for name in folders or {}:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in files:
        (folder / name).unlink(missing_ok=True)


ANEW = "keep them, name another --checkpoints, or begin anew with --fresh"


def claim(folder: Path, settings: Mapping[str, object], files: Sequence[str], *, remedy: str = ANEW) -> None:
    """Make the folder for checkpoints one of these settings, or raise ValueError where it is one of others.

    files: what lies there only where a run has begun; remedy: for the message. Settings that its folder does not name
    yet are added to it.
    """
    path = folder / SETTINGS
    begun = [name for name in files if name != SETTINGS and (folder / name).exists()]
    if begun and not path.exists():
        raise ValueError(f"checkpoints must have {SETTINGS} beside them, got {', '.join(begun)} in {folder}; {remedy}")
    earlier = json.loads(path.read_text(encoding="utf-8")) if begun else {}
    told = {name: value for name, value in settings.items() if name in earlier}
    check_same_settings(folder, earlier, told, remedy=remedy)
    folder.mkdir(parents=True, exist_ok=True)
    if not settings.items() <= earlier.items():
        replace_text(path, json.dumps({**earlier, **settings}, indent=1) + "\n")


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
