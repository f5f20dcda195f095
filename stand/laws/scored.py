"""What the verdicts of a step were made of, for whoever tells more of the new tokens than their ids."""

from __future__ import annotations

from typing import NamedTuple

import torch

from stand.laws.sampling import TargetLaw

LOGITS, SCORES = "logits", "scores"  # what a step is asked to hold beside its laws


class Scored(NamedTuple):
    """Of M nodes or more, those of the step's drafts first; views that the next forward overwrites."""

    law: TargetLaw
    laws: torch.Tensor  # [M, V] float32
    logits: torch.Tensor | None  # [M, V] of any float dtype: the model's, where they are held
    scores: torch.Tensor | None  # [M, V]: the same behind processors, before temperature and filters, where held

    def filtered(self, nodes: torch.Tensor) -> torch.Tensor:
        """[n, V] float32 of these nodes, a copy: scores behind the law's temperature and filters as well, -inf where
        those took a token out."""
        laws = self.laws.index_select(0, nodes.to(self.laws.device))
        return self.law.filtered(self.scores.index_select(0, nodes).float(), laws)
