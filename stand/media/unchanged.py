"""A model stays as it is though a forward notes something on it, as where rotary positions of its last text go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from stand.forward.modules import modules_of


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Behind it tensors that are plain attributes of the model's parts, `rope_deltas` for one, are those of before."""
    parts = [part for part in modules_of(model) if isinstance(part, PreTrainedModel)]
    before = [(vars(part), dict(_noted(vars(part)))) for part in parts]
    try:
        yield
    finally:
        for attributes, noted in before:
            for name in [name for name, _ in _noted(attributes) if name not in noted]:
                del attributes[name]
            attributes.update(noted)


def _noted(attributes: dict[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in attributes.items():
        if value is None or isinstance(value, torch.Tensor):
            yield name, value
