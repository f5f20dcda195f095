"""What a captured step computes: the same operations on the same memory every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.forward.cache.cache_argument import cache_argument
from stand.forward.cache.key_shape import key_shape
from stand.forward.features import FeatureLayers, feature_width, taken_features
from stand.forward.model import text_config
from stand.forward.packed_plan import running
from stand.forward.rider import Rider
from stand.gpu.attention_room import AttentionRoom
from stand.gpu.device_cache import DeviceCache
from stand.gpu.device_rule import DeviceRule, DeviceVerdict
from stand.gpu.kernel_attention import KernelPlan
from stand.gpu.kernel_scan import KernelScan
from stand.gpu.kernels.compact import compact
from stand.gpu.kernels.verification.filter import filter_rows
from stand.gpu.kernels.verification.softmax import softmax_rows
from stand.gpu.kernels.verification.top_tokens import top_tokens
from stand.gpu.packets.packet import Packet
from stand.gpu.packets.step_packet import StepPacket
from stand.gpu.packets.step_size import MAX_ROW_NODES, NUM_TOKENS, WORD_BITS
from stand.gpu.packets.work_list import Tiling
from stand.laws.sampling import TargetLaw
from stand.laws.scored import LOGITS, SCORES, Scored
from stand.step import StepStart

LEARNED_ROWS = 10  # best tokens per node that come back


class StepOutput:
    """What steps of every size share: room for attention, laws and hidden states on the device, verdict and
    best tokens on the host. No two steps run at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_rows: int,
        *,
        feature_layers: FeatureLayers | None = None,
        rider: Rider | None = None,
        keeps_logits: bool = False,
        has_processors: bool = False,
    ):
        config = text_config(model)
        self._dtype, self._device = model.dtype, model.device
        self._room = AttentionRoom(key_shape(model).attentions, num_rows, dtype=model.dtype, device=model.device)
        self.laws = torch.zeros(NUM_TOKENS[-1], config.vocab_size, dtype=torch.float32, device=model.device)
        self.scores = torch.zeros_like(self.laws) if has_processors else None  # theirs, before and after
        self.logits = torch.zeros_like(self.laws) if keeps_logits else None  # of the forward
        self.rider = rider
        self._feature_layers = feature_layers
        self.features: torch.Tensor | None = None  # [most, D]: of the forward, where they are wanted
        self.watched: torch.Tensor | None = None  # [most, D]: what the rider sees of the forward
        size = (NUM_TOKENS[-1], config.hidden_size)
        if feature_layers is not None:
            wide = NUM_TOKENS[-1], feature_width(model, feature_layers)
            self.features = torch.zeros(wide, dtype=model.dtype, device=model.device)
        if rider is not None:
            self.watched = torch.zeros(size, dtype=model.dtype, device=model.device)
        count = min(LEARNED_ROWS, config.vocab_size)
        per_row, per_node = (np.int64, (num_rows,)), (NUM_TOKENS[-1], count)
        fields = {"stops": per_row, "next_tokens": per_row, "is_broken": (np.int32, (num_rows,))}
        self._verdict = Packet(fields, model.device)
        path = torch.full((num_rows, MAX_ROW_NODES), -1, dtype=torch.int64, device=model.device)
        self.device_verdict = DeviceVerdict(**self._verdict.device, path=path)
        self._best = Packet({"ids": (np.int32, per_node), "probabilities": (np.float32, per_node)}, model.device)

    def has_splits_of(self, num_rows: int) -> bool:
        """Whether rows are split as in a call of so many."""
        return self._room.splits_as(num_rows)

    def holds(self, start: StepStart) -> bool:
        """Whether it has a place for all that a call which begins so asks for."""
        return (
            self.has_splits_of(start.num_places)
            and (self.scores is not None or not start.law.has_processors)
            and start.feature_layers in (None, self._feature_layers)
            and (self.logits is not None or not needs_logits(start.held, start.law))
            and (start.rider is None or start.rider is self.rider)
        )

    def tilings(self, tokens_per_row: int) -> tuple[Tiling, ...]:
        """See `AttentionRoom`."""
        return self._room.tilings(tokens_per_row)

    def suits(self, model: PreTrainedModel) -> bool:
        """Whether the model has not been cast or moved since, and has as many tokens in its vocabulary."""
        is_as_large = self.laws.shape[1] == text_config(model).vocab_size
        return is_as_large and (self._dtype, self._device) == (model.dtype, model.device)

    @contextmanager
    def features_of(self, model: PreTrainedModel) -> Iterator[None]:
        """Within it the forward leaves the features that are wanted in `features`."""
        with taken_features(model, self._feature_layers) as taken:
            yield
        if taken:
            self.features[: len(taken[0])].copy_(taken[0])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the forward leaves in `watched` what the rider sees, where there is one."""
        if self.rider is None:
            yield
            return
        with self.rider.watching():
            yield
        hidden = self.rider.hidden
        self.watched[: len(hidden)].copy_(hidden)
        self.rider.hidden = None  # which lies in the graphs' memory

    def plan(self, packet: StepPacket) -> KernelPlan:
        """What attention needs of a packet of this step."""
        return self._room.plan(packet.device, packet.size.tilings)

    def send_verdict(self) -> None:
        """What the rule wrote, down to the host."""
        self._verdict.download()

    def send_best(self, num_tokens: int) -> None:
        count = self._best.device["ids"].shape[1]
        ids, probabilities = top_tokens(self.laws[:num_tokens], count)
        self._best.device["ids"][:num_tokens].copy_(ids)
        self._best.device["probabilities"][:num_tokens].copy_(probabilities)
        self._best.download()

    def verdict(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(stops, next tokens) [num_rows] int64 of the last step, the former until the next step is launched. Raises
        ValueError when a law was not finite."""
        host = self._verdict.host
        if 1 in host["is_broken"][:num_rows].tolist():
            raise ValueError(
                "every position needs a finite best logit, got NaN, infinity or only -inf; "
                "check the model's weights and dtype (float16 overflows), and processors that forbid every token"
            )
        return host["stops"][:num_rows], host["next_tokens"][:num_rows].copy()

    def scored(self, law: TargetLaw) -> Scored:
        """As in `Step`, of a call with this law. Without processors scores are the logits themselves."""
        return Scored(law, self.laws, self.logits, self.scores if law.has_processors else self.logits)

    def best(self, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, probabilities float32) [num_nodes, count], copies."""
        return self._best.host["ids"][:num_nodes].copy(), self._best.host["probabilities"][:num_nodes].copy()


def needs_logits(held: frozenset[str], law: TargetLaw) -> bool:
    """Whether a step keeps the model's logits for a call that asks for so much."""
    return LOGITS in held or SCORES in held and not law.has_processors


class StepBody:
    """The bodies of one step size; `packet` is to be filled before each run."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: DeviceCache,
        law: TargetLaw,
        rule: DeviceRule,
        packet: StepPacket,
        output: StepOutput,
        *,
        swap: Callable[[], None] = lambda: None,
    ):
        """swap: called before the model runs, to make its modules' forwards those of this step."""
        self.packet, self._swap = packet, swap
        self._model, self._cache, self._law, self._rule, self._output = model, cache, law, rule, output
        self._plan = output.plan(packet)
        self._scan: KernelScan | None = None  # between a forward and its verdict, where layers keep states

    def run(self) -> None:
        """All of the step, where nothing runs between its two parts."""
        self.packet.upload()
        self._decide(self._kept(self.forward()))

    def score(self) -> None:
        """The first part: packet up, forward; the logits lie in the output's `scores` then."""
        self.packet.upload()
        self._scores.copy_(self._kept(self.forward()))

    def decide(self) -> None:
        """The second part, of what lies in the output's `scores`."""
        self._decide(self._scores)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """The same, left in the output too, where they are asked for behind the step."""
        if self._output.logits is not None:
            self._output.logits[: self.packet.size.num_tokens].copy_(logits)
        return logits

    @property
    def _scores(self) -> torch.Tensor:
        return self._output.scores[: self.packet.size.num_tokens]

    def _decide(self, logits: torch.Tensor) -> None:
        """Laws, verification, compaction, recurrent states, verdict down."""
        step = self.packet.device
        laws = self._output.laws[: self.packet.size.num_tokens]
        self._fill_laws(laws, logits)
        verdict = self._output.device_verdict.of_width(self.packet.size.num_words * WORD_BITS)
        self._rule.decide(logits, laws, step, verdict)
        for block in self._cache.blocks:
            compact(block, step["pages"], step["cache_rows"], step["lengths"], verdict.path)
        if self._scan is not None:
            self._scan.keep(verdict.path)
            self._scan = None
        self._cache.begin(step["slots"])  # what the forward has left lies in the graphs' memory
        self._output.send_verdict()

    def _fill_laws(self, laws: torch.Tensor, logits: torch.Tensor) -> None:
        """The laws that are sampled from; under greedy decoding, where nothing is, the softmax at temperature 1."""
        params = self._law.params
        softmax_rows(laws, logits, 1.0 if params.is_greedy else params.temperature)
        if self._law.has_filters:
            filter_rows(laws, params.top_k, params.top_p, params.min_p)

    def find_best(self) -> None:
        """The best tokens of every node, down to the host."""
        self._output.send_best(self.packet.size.num_tokens)

    def forward(self) -> torch.Tensor:
        """[M, V] logits of the packet's tokens; their keys are in the cache then, and wanted states in the output."""
        self._swap()
        step = self.packet.device
        self._scan = KernelScan(step, self._cache.recurrent) if self._cache.recurrent.layers else None
        self._cache.begin(step["slots"], self._scan)
        with self._output.features_of(self._model), self._output.watching(), running(self._plan):
            output = self._model(
                input_ids=step["token_ids"][None],
                position_ids=step["rotary_positions"][None],
                use_cache=True,
                stand_plan=self._plan,
                **{cache_argument(self._model): self._cache},
            )
        return output.logits[0]
