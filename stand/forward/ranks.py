"""Processes that compute a model's forwards together (tensor parallelism): what one of them decides, all of them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import distributed
from transformers import PreTrainedModel

from stand.forward.devices import tensor_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

Answer = TypeVar("Answer")


class Ranks:
    """Of a model that one process computes alone."""

    def agreed(self, decide: Callable[..., Answer], *arguments: object) -> Answer:
        """What `decide` answers on the first rank. All ranks ask theirs, at the same place of the same calls."""
        return decide(*arguments)

    def are_alike(self, value: object) -> bool:
        """Whether all ranks have this value."""
        return True

    def check_alike(self, value: object, what: str) -> None:
        """Raise ValueError where another rank has another value; what: it is, for the message."""
        if not self.are_alike(value):
            raise ValueError(
                f"ranks that share a model must make the same calls, got other {what} than this rank's on another one; "
                "seed whatever draws prompts alike on all of them"
            )

    def room(self, free_bytes: float, device: torch.device) -> float:
        """Bytes that every rank may take, of as many as this one has free."""
        return free_bytes


class TensorRanks(Ranks):
    """Of one process group. A rank that ends in an error of its own leaves the others waiting, but what the first one
    ends in while it decides is raised on all of them."""

    def __init__(self, group: ProcessGroup):
        self._group = group

    def agreed(self, decide: Callable[..., Answer], *arguments: object) -> Answer:
        answer, failure = None, None
        try:
            answer = decide(*arguments)
        except Exception as error:
            failure = error
        told = [(answer, None if failure is None else f"{type(failure).__name__}: {failure}")]
        distributed.broadcast_object_list(told, group_src=0, group=self._group)
        answer, reason = told[0]
        if failure is not None:
            raise failure
        if reason is not None:
            raise RuntimeError(f"ranks must go on together, got {reason} on the first one; see what it has printed")
        return answer

    def are_alike(self, value: object) -> bool:
        return all(other == value for other in self._gathered(value))

    def room(self, free_bytes: float, device: torch.device) -> float:
        """A CPU's memory is one for all."""
        return min(self._gathered(free_bytes)) / (self._group.size() if device.type == "cpu" else 1)

    def _gathered(self, value: object) -> list:
        values = [None] * self._group.size()
        distributed.all_gather_object(values, value, group=self._group)
        return values


ALONE = Ranks()


def ranks_of(model: PreTrainedModel) -> Ranks:
    """Those that compute a model together."""
    group = tensor_group(model)
    return ALONE if group is None else TensorRanks(group)
