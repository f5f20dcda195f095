"""A smaller model as drafter: chains of gamma tokens, each drawn from its own law (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.blended import MOST_NODES
from stand.drafters.drafter import Drafter, DraftRequest
from stand.drafters.settings import check_count, check_temperature
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.devices import input_device
from stand.forward.model import max_positions, prefill, run_plan, text_config
from stand.forward.packed_plan import StepPlan
from stand.forward.ranks import ranks_of, refuse_going_apart
from stand.forward.recurrent.layers import recurrent_layers
from stand.forward.self_check import UnsupportedModelError, check_model
from stand.forward.tree_attention import tree_attention
from stand.trees import NO_PARENT, NO_TOKEN, DraftBatch, DraftTree
from stand.trees.noise import DRAFT, uniforms
from stand.verifiers import draw_tokens

LEAST_SHARE = 0.9  # of the larger vocabulary, that a padded smaller one has


class ModelDrafter(Drafter):
    """Any transformers model with the target's vocabulary that the engine could serve itself.

    Laws are the model's at `temperature` over its `num_candidates` best tokens, renormalised before the draw: what is
    recorded is what was drawn from. `temperature` is best the target's own; under greedy decoding the best token alone
    is drafted. A chain fits every lossless rule; `block` keeps most of it.

    It holds a key-value cache of its own and goes on from whatever prefix of a row's history is in it, so that rejected
    tokens cost nothing and rows may come and go. One drafter serves one engine at a time.

    Vocabularies may be padded to unlike sizes: no token is drafted that the target lacks, and one that the draft model
    lacks stands for its last. Sizes so unlike that they are hardly one vocabulary give a warning. A row that has
    outgrown the draft model's context gets no draft.

    Raises UnsupportedModelError for a model that cannot be served, ValueError for settings out of range.
    """

    remembers = False
    rows_apart = True

    def __init__(
        self, model: PreTrainedModel, *, gamma: int = 4, temperature: float = 1.0, num_candidates: int = 64
    ) -> None:
        check_count("gamma", gamma, 1, MOST_NODES, usual="4 is usual; generate(draft=False) drafts nothing")
        check_count("num_candidates", num_candidates, 1, usual="64 is usual")
        check_temperature(temperature)
        check_model(model)
        if recurrent_layers(model):
            raise UnsupportedModelError(
                f"a draft model must keep keys and values alone, got {type(model).__name__} with recurrent states, "
                "which do not go back to an earlier token; the default drafter needs no model"
            )
        context = max_positions(model)
        if context is not None and gamma > context:
            raise ValueError(
                f"gamma must be at most the draft model's context of {context} tokens, got {gamma}: no row would get a "
                "draft; 4 is usual"
            )
        self.model = model
        self.gamma = gamma
        self.temperature = temperature
        self.law_size = num_candidates
        self._last_token = text_config(model).vocab_size - 1
        self._target_size: int | None = None  # of the target's vocabulary; None: as large
        self._cache = TreeCache(num_rows=0, room=0)
        self._held: list[np.ndarray] = []  # per cache row: the tokens whose keys it holds
        self._rows: list[int] = []  # per cache row: the row of the call that it serves

    def attach(self, model: PreTrainedModel, fingerprint: bytes) -> None:
        refuse_going_apart(self.model)
        own, self._target_size = text_config(self.model).vocab_size, text_config(model).vocab_size
        if min(own, self._target_size) < LEAST_SHARE * max(own, self._target_size):
            warnings.warn(
                f"a draft model must have the target's vocabulary, got {own} tokens for {self._target_size}: few "
                "drafts will be kept, though the output's law stays; take a smaller model of the target's family",
                stacklevel=3,
            )

    def most_nodes(self, num_rows: int) -> int:
        return num_rows * self.gamma

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftBatch:
        """One chain per row, min(gamma, max_depths) deep; see `Drafter.draft`."""
        depths, ranks = self._depths(request), ranks_of(self.model)
        drafted = np.flatnonzero(depths)
        levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # of these rows: tokens, supports, laws
        if len(drafted):
            with tree_attention(self.model):
                rows = request.rows[drafted].tolist()
                logits = self._catch_up([request.histories[row] for row in drafted], rows)
                for depth in range(1, int(depths.max()) + 1):
                    if depth > 1:
                        logits = self._forward(list(levels[-1][0][:, None]))
                    layers = np.full(len(drafted), depth)
                    keys, steps = request.noise_keys[drafted], request.steps[drafted]
                    points = uniforms(request.seed, DRAFT, keys, steps, layers)
                    *level, is_law = ranks.agreed(partial(self._draw, logits, points, is_greedy=request.is_greedy))
                    levels.append(tuple(level))
                    ended = drafted[~is_law]  # their logits overflow
                    depths[ended] = np.minimum(depths[ended], depth - 1)
            self._rows = rows  # last: where an error ends this, none is known
        places = np.searchsorted(drafted, np.arange(len(depths)))
        chains = [
            _chain(int(history[-1]), [[part[place] for part in level] for level in levels[:depth]])
            for history, depth, place in zip(request.histories, depths.tolist(), places, strict=True)
        ]
        return DraftBatch.concatenate(chains)

    def _depths(self, request: DraftRequest) -> np.ndarray:
        """[B]: how deep each row's chain will be; 0 where gamma tokens could lie beyond the model's context."""
        depths = np.clip(request.max_depths, 0, self.gamma)
        context = max_positions(self.model)
        if context is not None:
            lengths = np.array([len(history) for history in request.histories])
            depths[lengths + self.gamma - 1 > context] = 0  # the last token of a chain is not run
        return depths

    def _draw(
        self, logits: torch.Tensor, points: np.ndarray, *, is_greedy: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(tokens [B] int32, token ids [B, S] int32, laws [B, S] float32, whether they are laws [B] bool) after logits
        [B, V]; points: uniforms [B]. What is no law, because logits overflowed, is a sure token in its place."""
        logits = logits[:, : self._target_size]
        size = min(1 if is_greedy else self.law_size, logits.shape[1])
        best = torch.topk(logits.float(), size, dim=1)
        law = torch.softmax(best.values / self.temperature, dim=1)
        is_law = law.isfinite().all(dim=1)
        law = torch.where(is_law[:, None], law, torch.eye(1, size, dtype=law.dtype, device=law.device))
        columns = draw_tokens(law, points)
        support_ids = best.indices.to(torch.int32).cpu().numpy()
        return support_ids[np.arange(len(columns)), columns], support_ids, law.cpu().numpy(), is_law.cpu().numpy()

    def _catch_up(self, histories: Sequence[np.ndarray], rows: list[int]) -> torch.Tensor:
        """Bring the cache to the end of every history; logits [B, V] after it."""
        places = {row: place for place, row in enumerate(self._rows)}
        self._rows = []
        sources = [places.get(row) for row in rows]
        if sources.count(None) < len(sources):
            self._keep(histories, sources)
        else:
            self._cache = TreeCache(num_rows=len(rows), room=max(map(len, histories)) + self.gamma)
            self._held = [history[:0] for history in histories]
        longest = self.gamma + 1  # new tokens of a step that kept all it could
        behind = [len(history) - len(held) > longest for history, held in zip(histories, self._held, strict=True)]
        self._fill(histories, [place for place, source in enumerate(sources) if source is None or behind[place]])
        return self._forward([history[len(held) :] for history, held in zip(histories, self._held, strict=True)])

    def _keep(self, histories: Sequence[np.ndarray], sources: list[int | None]) -> None:
        """Row i becomes the cache's row sources[i], and is empty where that is None; forget what its history does not
        begin with."""
        if sources != list(range(len(self._held))):
            known = next(source for source in sources if source is not None)
            self._cache.fan_out([known if source is None else source for source in sources])
        self._held = [
            history[:0] if source is None else history[: _common_length(self._held[source], history[:-1])]
            for source, history in zip(sources, histories, strict=True)
        ]

    def _fill(self, histories: Sequence[np.ndarray], places: Sequence[int]) -> None:
        """Fill these rows of the cache anew with all tokens but the last; equal ones are computed once."""
        prefixes: dict[bytes, int] = {}
        for place in places:
            prefix = histories[place][:-1]
            first = prefixes.setdefault(prefix.tobytes(), place)
            if first == place:
                prefill(self.model, self._cache, self._known(prefix), row=place)
            else:
                self._cache.move(first, place, len(prefix))
            self._held[place] = prefix.copy()

    def _forward(self, chunks: list[np.ndarray]) -> torch.Tensor:
        """Append `chunks`, one per row, to what the cache holds; logits [B, V] after the last token of each."""
        batch = DraftBatch.concatenate([DraftTree.chain(self._known(chunk)) for chunk in chunks])
        lengths = np.array([len(held) for held in self._held], dtype=np.int64)
        plan = StepPlan.for_drafts(batch, lengths, device=input_device(self.model))
        logits = run_plan(self.model, self._cache, plan)
        self._held = [np.concatenate([held, chunk]) for held, chunk in zip(self._held, chunks, strict=True)]
        ends = torch.from_numpy(batch.offsets[1:].astype(np.int64) - 1).to(logits.device)
        return logits[ends]

    def _known(self, token_ids: np.ndarray) -> np.ndarray:
        """The same length; a guess after a token that the model lacks may well be wrong."""
        return np.minimum(token_ids, self._last_token)


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """How many leading tokens are equal."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _chain(pending: int, levels: list[list]) -> DraftTree:
    """A chain below the pending token; levels: per depth its token, support [S] and law [S]."""
    width = len(levels[0][1]) if levels else 1
    support_ids = np.full((len(levels) + 1, width), NO_TOKEN, dtype=np.int32)
    law = np.zeros((len(levels) + 1, width), dtype=np.float32)
    for node, (_, support, drawn_from) in enumerate(levels):
        support_ids[node] = support
        law[node + 1] = drawn_from
    return DraftTree(
        token_ids=np.array([pending, *(level[0] for level in levels)], dtype=np.int32),
        parents=np.arange(NO_PARENT, len(levels), dtype=np.int32),
        support_ids=support_ids,
        law=law,
    )
