"""The choice of products for a model on this GPU: measured on first use, kept in a file, the same ever after."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import torch
import triton
from transformers import PreTrainedModel

import stand
from stand.forward.model import size_name
from stand.fusion.forwards.chosen_products import Weights
from stand.gpu.tuning.device_timer import DeviceTimer, device_name
from stand.gpu.tuning.product_tiles import TILES
from stand.gpu.tuning.products import DTYPES, TOKENS, Choices, Products, Timer, choose
from stand.measured_files import VARIABLE, keep_first, measured_folder, measured_path

REPEATS = 7
FORMAT = "stand product choices 1"


def known_products(model: PreTrainedModel, weights: Weights, *, timer: Timer | None = None) -> Products | None:
    """The products for a model with these weights, by shape; measured where no file says them.

    None: torch's products, for a model that is not in 16 bits on a GPU, where nothing may be measured (STAND_COSTS=off)
    or nothing can be kept. timer: instead of the device's; also measures elsewhere.
    """
    folder = measured_folder()
    is_served = timer is not None or (model.device.type == "cuda" and model.dtype in DTYPES)
    if folder is None or not is_served or not weights:
        return None
    path = _path(folder, model)
    timer = timer or DeviceTimer(model.device, repeats=REPEATS).seconds
    choices = _read(path, weights) or _measured(path, weights, timer)
    return None if choices is None else Products(choices, model.device)


def _measured(path: Path, weights: Weights, timer: Timer) -> Choices | None:
    """What is measured now is kept and said; None where it cannot be kept."""
    with torch.inference_mode():
        choices = {shape: choose(tensors, timer) for shape, tensors in weights.items()}
    try:
        keep_first(path, partial(_write, choices=choices), is_sound=lambda known: _read(known, weights) is not None)
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})"
        logging.getLogger("stand").warning("products are torch's: a choice that is not kept would vary; %s", reason)
        return None
    logging.getLogger("stand").warning(
        "timed products of few tokens; the choice is kept in %s (%s=off does without)", path, VARIABLE
    )
    return _read(path, weights)


def _path(folder: Path, model: PreTrainedModel) -> Path:
    builds = f"torch {torch.__version__} triton {triton.__version__} stand {stand.__version__}"
    return measured_path(
        folder, "products", size_name(model), f"{device_name(model.device)} {builds}", str(model.dtype)
    )


def _write(path: Path, choices: Choices) -> None:
    entries = [{"shape": shape, "tiles": tiles} for shape, tiles in choices.items()]
    document = {"format": FORMAT, "tokens": TOKENS, "choices": entries}
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def _read(path: Path, weights: Weights) -> Choices | None:
    """What a file says of these shapes; None where there is none, a damaged one, or one that lacks a shape."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        choices = {tuple(entry["shape"]): tuple(entry["tiles"]) for entry in document["choices"]}
        tiles = {tile for entry in choices.values() for tile in entry}
        is_sound = document["format"] == FORMAT and document["tokens"] == list(TOKENS)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_sound = is_sound and tiles <= {None, *range(len(TILES))}
    is_sound = is_sound and all(len(entry) == len(TOKENS) for entry in choices.values())
    return {shape: choices[shape] for shape in weights} if is_sound and weights.keys() <= choices.keys() else None
