"""A model that another library runs, as transformers' settings and the engine's steps see one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from stand.forward.packed_plan import StepPlan, plain_forward_error


class RunningCache(Protocol):
    """A `TreeCache` that holds rows of such a model."""

    def run(self, plan: StepPlan, num_outputs: int) -> torch.Tensor:
        """Logits [num_outputs, V] of the last tokens of the plan that has begun."""


class ForeignModel(PreTrainedModel, GenerationMixin):
    """Without weights of its own: they are the library's. It runs plans of steps alone, over a `RunningCache`."""

    main_input_name = "input_ids"

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        num_bytes: int,
        begin_id: int | None = None,
        end_ids: Sequence[int] = (),
    ):
        """dtype: of keys and values. num_bytes: of the weights."""
        super().__init__(config)
        self.nothing = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)  # says device and dtype
        self.generation_config = GenerationConfig(bos_token_id=begin_id, eos_token_id=list(end_ids) or None)
        self._num_bytes = num_bytes
        self.eval()

    @property
    @abstractmethod
    def way(self) -> str:
        """How steps run, for files of what they cost."""

    @abstractmethod
    def new_cache(self, num_rows: int = 1, room: int = 1) -> RunningCache:
        """An empty one for so many rows, with room for so many tokens of each; a longer row gets what it needs."""

    def refuse_unready(self) -> None:
        """Raise UnsupportedModelError for what may have come over the library's model since it was wrapped."""

    def seen_weights(self) -> bytes:
        """A few numbers of weights that may change, which tell keys of others from these."""
        return b""

    def free_bytes(self) -> float:
        """That the library can still take for keys, where it knows of a limit beside the system's."""
        return math.inf

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the weights."""
        return self._num_bytes

    def set_attn_implementation(self, *arguments: object, **named: object) -> None:
        """The library's is not chosen here."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: RunningCache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        stand_plan: StepPlan | None = None,
    ) -> CausalLMOutputWithPast:
        if stand_plan is None:
            raise plain_forward_error(type(self).__name__)
        logits = past_key_values.run(stand_plan, logits_to_keep or stand_plan.num_tokens)
        return CausalLMOutputWithPast(logits=logits[None])
