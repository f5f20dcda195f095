"""AdamW for weights of few bits: it moves copies in float32, and the weights are these copies, rounded.

A step of a training changes a weight by about the learning rate. In bfloat16 neighbouring numbers differ by 0.4 to
0.8 %, so most steps would round back to where they began (Micikevicius et al., 2018, arXiv 1710.03740, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class MasterAdamW(torch.optim.AdamW):
    """AdamW itself for float32 weights. A saved state has the copies, too."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **settings: object) -> None:
        masters: list[torch.nn.Parameter] = []
        self._rounded: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []  # weights and their copies
        for weight in parameters:
            if weight.dtype == torch.float32:
                masters.append(weight)
            else:
                masters.append(torch.nn.Parameter(weight.detach().float()))
                self._rounded.append((weight, masters[-1]))
        super().__init__(masters, **settings)

    def step(self) -> None:
        for weight, master in self._rounded:
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        with torch.no_grad():
            for weight, master in self._rounded:
                weight.copy_(master)

    def zero_grad(self) -> None:
        super().zero_grad()
        for weight, _ in self._rounded:
            weight.grad = None

    def state_dict(self) -> dict:
        return super().state_dict() | {"masters": [master.detach() for _, master in self._rounded]}

    def load_state_dict(self, state: dict) -> None:
        """The weights are there already. Where they were saved without copies, they become these."""
        super().load_state_dict({name: value for name, value in state.items() if name != "masters"})
        sources = state.get("masters", [weight for weight, _ in self._rounded])
        with torch.no_grad():
            for (_, master), source in zip(self._rounded, sources, strict=True):
                master.copy_(source)
