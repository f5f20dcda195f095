"""The keys of one prompt, and what another prompt that begins alike can take of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from stand.forward.model import PROMPT_CHUNK
from stand.forward.tree_cache import TreeCache


@dataclass(slots=True, eq=False)
class Prefilled:
    """A prompt's keys, and where they were asked for the features of its tokens but the last."""

    keys: TreeCache
    token_ids: np.ndarray  # int32: whose keys they are, or will be
    done: int = -1  # tokens; -1: not begun
    copied: int = 0  # of them, from another prompt
    features: list[torch.Tensor] = field(default_factory=list)  # by chunk, of all that is done or of none


def common_chunks(source: Prefilled, target: Prefilled) -> int:
    """Whole chunks that `source` has keys of and `target` begins with."""
    most = max(min(source.done, len(target.token_ids)), 0)
    differs = source.token_ids[:most] != target.token_ids[:most]
    return int(differs.argmax() if differs.any() else most) // PROMPT_CHUNK
