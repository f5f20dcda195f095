"""Whose head drafts: of EAGLE-1 or EAGLE-3, as an object or as a checkpoint."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from transformers import PreTrainedModel

from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.drafters.eagle.head import WEIGHT_FILES, EagleHead
from stand.drafters.trained_part import tensor_names

Head = EagleHead | Eagle3Head


def attached(target: PreTrainedModel, head: Head | str | PathLike) -> Head:
    """`head` as the target's own (`TrainedPart.of`); what a path leads to is told by the names of its tensors."""
    if isinstance(head, (str, PathLike)):
        is_third = any(".hidden_norm." in name for name in tensor_names(Path(head), WEIGHT_FILES))
    else:
        is_third = isinstance(head, Eagle3Head)
    return (Eagle3Head if is_third else EagleHead).of(target, head)
