"""What trained parts beside a frozen target have in common: whose they are, and the file they are saved in."""

from __future__ import annotations

from abc import abstractmethod
from os import PathLike
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

FAMILIES = ("llama", "qwen2")  # of targets
WEIGHT_FILE = "model.safetensors"


class TrainedPart(nn.Module):
    """A module that uses the target's own parts and has parameters of its own."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self._model = (target,)  # in a tuple, so that the target's parameters are not this part's

    @classmethod
    @abstractmethod
    def load(cls, target: PreTrainedModel, path: str | PathLike) -> Self:
        """Read what `save` has written. Raises ValueError where it does not belong to this target."""

    @classmethod
    def of(cls, target: PreTrainedModel, part: Self | str | PathLike) -> Self:
        """`part`, read where it is a path. Raises ValueError where it was made for another model."""
        if not isinstance(part, cls):
            part = cls.load(target, part)
        if not part.is_of(target):
            name = cls.__name__
            raise ValueError(
                f"{name} must be the wrapped model's own, got one that was made for another model; make it with "
                f"{name}.load(model, path), or pass the path"
            )
        return part

    def save(self, folder: str | PathLike) -> None:
        """Write model.safetensors in bfloat16: nothing of the target is in it."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, Path(folder) / WEIGHT_FILE, metadata={"format": "pt"})

    def is_of(self, target: PreTrainedModel) -> bool:
        """Whether this part was made for this very model."""
        return self._model[0] is target
