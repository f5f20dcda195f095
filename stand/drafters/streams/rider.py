"""Streams on the engine's own steps: they see the keys that the model has just written, and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stand.drafters.drafter import DraftRequest
from stand.drafters.settings import check_count, check_temperature
from stand.drafters.streams.weights import Streams
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.devices import input_device, off_one_device
from stand.forward.packed_plan import StepPlan, ancestor_matrix, running
from stand.forward.rider import Guesses
from stand.forward.tree_attention import ATTENTION_NAME
from stand.row import LiveRows
from stand.trees import DraftBatch

PLACEMENTS = ("end", "nodes")
MOST_HELD = 1024  # laws of rows that have not drafted yet; the oldest go first

Law = tuple[np.ndarray, np.ndarray]  # of every stream: best tokens [gamma, K] int32, their probabilities [gamma, K]


class StreamRider:
    """Runs the streams of every row's last committed token, and keeps their laws until the row drafts again.

    placement: "nodes" runs them in the step's forward, at every node of the draft, because the end of the kept path is
    not known then (arXiv 2402.11131). "end" waits for the verdict and runs them at that end alone. States,
    keys and laws are the same.

    Streams have matrix products of their own also in "nodes": more rows in the model's would change the bits of its
    outputs. A row is known by its tokens, so that what is held is a function of a row's own text. A row that has made
    no step of this drafter yet has no laws.
    """

    def __init__(
        self, streams: Streams | str | PathLike, *, placement: str, temperature: float, num_candidates: int
    ) -> None:
        if placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}; end is usual")
        check_temperature(temperature)
        check_count("num_candidates", num_candidates, 1, 64, usual="10 to 32 are usual")
        self.streams = streams
        self.placement = placement
        self.temperature = temperature
        self.law_size = num_candidates
        self.hidden: torch.Tensor | None = None  # [M, D] at the input of the streams' first layer
        self._states: torch.Tensor | None = None  # [M, gamma, D] of every node's streams, in "nodes"
        self._laws: dict[bytes, Law] = {}  # by the tokens that streams have seen
        self.is_idle = False  # in "end": nothing is run at the end of the coming step
        self.last_seconds = 0.0  # that the run at a step's end took

    def attach(self, model: PreTrainedModel) -> None:
        """Raises ValueError where the streams do not belong to `model`, or its layers lie on several devices."""
        place = off_one_device(model)
        if place:
            raise ValueError(
                f"streams run through layers of their model, which must lie on one device, got a model {place}; "
                "draft by the lookup or an EAGLE head"
            )
        self.streams = Streams.of(model, self.streams)
        self.law_size = min(self.law_size, self.streams.num_guessed)
        self._model = model

    @property
    def is_capturable(self) -> bool:
        """See `Rider`: at every node they would run before the verdict."""
        return self.placement == "end"

    @property
    def tail_length(self) -> int:
        """See `Rider`: gamma."""
        return self.streams.num_streams

    def laws_of(self, request: DraftRequest) -> list[Law | None]:
        """Per row: stream j's law is that of the token j places after its pending one. None before its first step, also
        where a row of an earlier call ended with the same text."""
        known = [self._laws.get(history[:-1].tobytes()) for history in request.histories]
        return [law if steps else None for law, steps in zip(known, request.steps.tolist(), strict=True)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See `Rider.watching`."""

        def take(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            self.hidden = (args[0] if args else kwargs["hidden_states"])[0]

        layer = self._model.get_decoder().layers[self.streams.first_layer]
        hook = layer.register_forward_pre_hook(take, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def scored(self, cache: TreeCache, batch: DraftBatch, lengths: np.ndarray) -> None:
        if self.placement == "nodes":
            self._states = self._behind(cache, batch, lengths, np.arange(batch.num_nodes))

    def kept(
        self,
        batch: DraftBatch,
        live: LiveRows,
        accepted: Sequence[np.ndarray],
        guesses: Callable[[], Guesses],
    ) -> None:
        """See `Rider.kept`."""
        begun = time.perf_counter()
        for history in live.histories:
            self._laws.pop(history[:-1].tobytes(), None)
        if self.is_idle:
            return
        ids, probs = guesses()
        for row, (history, path) in enumerate(zip(live.histories, accepted, strict=True)):
            seen = np.append(history, batch.token_ids[batch.offsets[row] + path]).astype(np.int32).tobytes()
            self._laws.pop(seen, None)  # the newest goes last
            self._laws[seen] = ids[row], probs[row]
        while len(self._laws) > max(MOST_HELD, len(live.histories)):
            del self._laws[next(iter(self._laws))]
        self.last_seconds = time.perf_counter() - begun

    @torch.inference_mode()
    def guesses(self, cache: TreeCache, batch: DraftBatch, lengths: np.ndarray, ends: np.ndarray) -> Guesses:
        """See `Rider.guesses`."""
        if self.placement == "nodes":
            states = self._states[torch.from_numpy(ends).to(self._states.device)]
        else:
            states = self._behind(cache, batch, lengths, ends)
        ids, probs = self._best(states)
        return ids.cpu().numpy(), probs.cpu().numpy()

    def guess(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, *, attention: str, cache: Cache, plan: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Rider.guess`."""
        states = self.streams.begin(hidden).flatten(0, 1)[: position_ids.shape[1]]
        return self._best(self._through(states, position_ids, attention=attention, cache=cache, plan=plan))

    def num_slots(self, sizes: np.ndarray) -> np.ndarray:
        """See `Rider.num_slots`."""
        return self.streams.num_streams * (sizes if self.placement == "nodes" else np.ones_like(sizes))

    def _behind(self, cache: TreeCache, batch: DraftBatch, lengths: np.ndarray, nodes: np.ndarray) -> torch.Tensor:
        """States [P, gamma, D] of the streams of `nodes` [P], packed and ascending."""
        plan = stream_plan(batch, lengths, nodes, self.streams.num_streams, device=input_device(self._model))
        cache.begin(plan)
        hidden = self.hidden[torch.from_numpy(nodes).to(self.hidden.device)]
        states = self.streams.begin(hidden)
        packed, positions = states.flatten(0, 1), plan.position_ids
        return self._through(packed, positions, attention=ATTENTION_NAME, cache=cache, plan=plan).view(states.shape)

    def _through(
        self, states: torch.Tensor, position_ids: torch.Tensor, *, attention: str, cache: Cache, plan: object
    ) -> torch.Tensor:
        """[T, D] -> [T, D] through the streams' layers."""
        with running(plan):
            return self.streams(
                states[None], position_ids, attention=attention,
                attention_mask=None, cache=cache, use_cache=True, stand_plan=plan,
            )[0]  # fmt: skip

    def _best(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., D] -> [..., K] each."""
        return self.streams.best_tokens(states, temperature=self.temperature, count=self.law_size)


def stream_plan(
    batch: DraftBatch, lengths: np.ndarray, nodes: np.ndarray, gamma: int, *, device: torch.device | str = "cpu"
) -> StepPlan:
    """Streams 1 .. gamma of `nodes` [P], packed and ascending, in slots behind the nodes of their rows.

    Stream j of a node is j places behind it, and sees what the node sees and streams 1 .. j of the same node.
    """
    rows = np.searchsorted(batch.offsets, nodes, side="right") - 1
    sizes, counts = batch.sizes.astype(np.int64), gamma * np.bincount(rows, minlength=len(batch))
    behind = sizes[rows] + gamma * (np.arange(len(nodes)) - np.searchsorted(rows, rows))  # slot of a node's stream 1
    ancestors = ancestor_matrix(batch)[nodes]
    seen = np.zeros((len(nodes), gamma, int((sizes + counts).max())), dtype=bool)
    seen[:, :, : ancestors.shape[1]] = ancestors[:, None]
    later, earlier = np.tril_indices(gamma)
    seen[np.arange(len(nodes))[:, None], later, behind[:, None] + earlier] = True
    depths = batch.depths[nodes].astype(np.int64)[:, None] + np.arange(1, gamma + 1)
    return StepPlan(
        np.zeros(len(nodes) * gamma, dtype=np.int32), np.concatenate([[0], counts.cumsum()]), depths.ravel(),
        seen.reshape(len(nodes) * gamma, -1), lengths, starts=sizes, device=device,
    )  # fmt: skip
