"""The target's laws at the positions that a serving engine has verified, on their way from its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stand.sharing.exchange import Exchange
from stand.sharing.news import StepNews
from stand.trees import BlendedLookup, DraftBatch
from stand.trees.layouts.text_rows import TextRows

if TYPE_CHECKING:
    import torch


class ArrivingLaws:
    """The best entries of laws, and other arrays, which are copied while the host goes on."""

    def __init__(
        self, logits: torch.Tensor, temperatures: torch.Tensor | None, num_entries: int, *others: torch.Tensor
    ):
        """logits: [N, V] as they are sampled from, before top_k and top_p. temperatures: [N, 1]; None, and 0 in a row,
        for the law at temperature 1. The copies wait for the logits in the device's own order, the host for neither.
        """
        import torch

        if temperatures is not None:
            logits = logits / torch.where(temperatures > 0, temperatures, 1.0)
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
        best, ids = probs.topk(min(num_entries, probs.shape[-1]), dim=-1)
        arrays = ids.to(torch.int32), best, *others
        self._arrays = [array.to("cpu", non_blocking=True) for array in arrays]
        self._copied = None
        if logits.device.type != "cpu":
            self._copied = torch.get_device_module(logits.device).Event()
            self._copied.record()

    def arrays(self) -> list[np.ndarray]:
        """(top_ids int32 [N, K], top_probs float32 [N, K], likeliest first, and the others); waits until they are
        here."""
        if self._copied is not None:
            self._copied.synchronize()
        return [array.numpy() for array in self._arrays]


def learn_laws(
    lookup: BlendedLookup,
    exchange: Exchange | None,
    batch: DraftBatch,
    befores: TextRows,
    top_ids: np.ndarray,
    top_probs: np.ndarray,
    scopes: list[int],
) -> None:
    """Teach the laws [M, K] at all nodes of drafts, behind the texts before them, and tell peers. Laws that are not
    finite teach nothing."""
    is_sound = np.isfinite(top_probs).all(axis=1)
    top_probs = np.where(is_sound[:, None], top_probs, 0)
    lookup.learn_batch(batch, befores, top_ids, top_probs, is_sound.nonzero()[0], scopes=scopes)
    if exchange is not None and is_sound.all():
        exchange.send(StepNews(batch, befores, top_ids, top_probs))
