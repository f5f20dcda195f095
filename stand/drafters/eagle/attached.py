"""Whose head drafts: of EAGLE-1, EAGLE-3 or the target's own checkpoint, as an object or by its path."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from transformers import PreTrainedModel

from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.eagle.head import WEIGHT_FILES, EagleHead
from stand.drafters.eagle.mtp_head import MtpHead
from stand.drafters.heads.trained_part import tensor_names

MTP = "mtp"


def attached(target: PreTrainedModel, head: FeatureHead | str | PathLike) -> FeatureHead:
    """`head` as the target's own (`TrainedPart.of`); what a path leads to is told by the names of its tensors.

    MTP: the multi-token-prediction layer of the target's own checkpoint.
    """
    if isinstance(head, FeatureHead):
        return type(head).of(target, head)
    if head == MTP:
        return MtpHead.of(target, target.config.name_or_path)
    if isinstance(head, (str, PathLike)):
        names = tensor_names(Path(head), WEIGHT_FILES)
        return (Eagle3Head if any(".hidden_norm." in name for name in names) else EagleHead).of(target, head)
    return EagleHead.of(target, head)
