"""Processes that compute a model's forwards together: by tensor parallelism, where all do what the first one decides,
or with sharded weights, where each decodes texts of its own and only the number of forwards is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import distributed
from torch.nn import Module
from transformers import PreTrainedModel

from stand.forward.devices import input_device, is_sharded, number_of_processes, tensor_group

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


def synced(model: Module, is_asked: bool | None) -> AbstractContextManager[None]:
    """For a call on every rank, as transformers' `synced_gpus`; None: where ranks hold shards of the model.

    Raises ValueError where there are no ranks."""
    if is_asked and number_of_processes() == 1:
        raise ValueError("synced_gpus needs ranks in a group of torch.distributed, got one process; leave it out")
    is_synced = is_sharded(model) and number_of_processes() > 1 if is_asked is None else is_asked
    return forwards_together(model) if is_synced else nullcontext()


@contextmanager
def forwards_together(model: Module) -> Iterator[None]:
    """Within it as many forwards run on this rank as on every other one, which enters it too: who is done with its own
    goes on with one token (transformers' `synced_gpus`). Sharded weights ask for that: all ranks bring them together.

    Collectives must come in one order everywhere, so ranks are told before hooks that bring weights. The first forward
    makes what those hooks keep, outside of inference mode, whose tensors a training step could not use.
    """
    told = model.register_forward_pre_hook(_tell_others, prepend=True)
    try:
        _run_one_token(model)
        yield
    finally:
        told.remove()
        while _is_any_at_work(model, False):
            _run_one_token(model)


def refuse_going_apart(model: Module) -> None:
    """Raise ValueError where other ranks would wait for this one, or it for them, for ever."""
    if _tell_others in model._forward_pre_hooks.values() or number_of_processes() == 1 or not is_sharded(model):
        return
    raise ValueError(
        "ranks that hold shards of a model must run all forwards together, got a call that lets them go apart; decode "
        "by model.generate(..., custom_generate=stand_generate) or draft_always (stand.plugins.generate), without "
        "synced_gpus=False"
    )


def _tell_others(model: Module, _: tuple) -> None:
    _is_any_at_work(model, True)


def _is_any_at_work(model: Module, is_own: bool) -> bool:
    at_work = torch.tensor(float(is_own), device=input_device(model))
    distributed.all_reduce(at_work)
    return at_work.item() > 0


def _run_one_token(model: Module) -> None:
    with torch.inference_mode(False), torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)), use_cache=False)
