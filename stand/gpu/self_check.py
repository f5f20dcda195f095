"""Does the captured step do on this device what the host does? Asked once, on the loaded weights, before it is used.

One recorded and replayed step per law, and one in two parts with a penalty between them, over drafts of more than a
tile after more keys than a split holds, against the eager forward, the direct body, and the host's law, rule and
bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.features import FeatureLayers, taken_features
from stand.forward.model import max_positions, run_plan, text_config
from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent.states import RecurrentStates
from stand.forward.rider import Guesses, Rider, path_ends
from stand.forward.self_check import LOGIT_TOLERANCES, relative_difference
from stand.forward.tree_attention import tree_attention
from stand.gpu.captured_step import CapturedStep
from stand.gpu.device_cache import has_one_type
from stand.gpu.kernels.launch import interpreter_obstacle
from stand.laws.processors import ProcessorChain
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.row import LiveRows, Row
from stand.step import StepStart
from stand.trees import ROOT, DraftBatch, DraftTree
from stand.verifiers import TargetRows, Verdicts, Verifier, VerifierNoise, get_verifier

BRANCHES = 3  # children per node of the check's drafts
BEST = 4  # of a node's best tokens
TINY = 1e-30  # below any state that says something
GREEDY = SamplingParams(temperature=0.0)
FILTERED = SamplingParams(temperature=0.6, top_p=0.95)
PENALTY = 1.3


@dataclass(frozen=True, slots=True)
class CheckSize:
    """Per row its committed tokens and its nodes; the laws that are tried, by themselves and behind a penalty."""

    lengths: tuple[int, ...]
    nodes: tuple[int, ...]
    laws: tuple[SamplingParams, ...]
    penalised: tuple[SamplingParams, ...] = ()

    def within(self, context: int | None) -> CheckSize:
        """Shorter rows where the model's context ends earlier."""
        most = max((context or 2**31) - max(self.nodes), 1)
        return replace(self, lengths=tuple(min(length, most) for length in self.lengths))


# 70 nodes: several tiles of every size, a second word of ancestors. 600 keys: several splits.
FULL = CheckSize((600, 6), (70, 7), (GREEDY, FILTERED), (FILTERED,))
INTERPRETED = CheckSize((6,), (7,), (GREEDY,))  # the interpreter takes minutes for the full one


def kernel_failure(
    model: PreTrainedModel,
    verifier: Verifier,
    *,
    feature_layers: FeatureLayers | None = None,
    rider: Rider | None = None,
    size: CheckSize | None = None,
) -> str | None:
    """Why the captured step cannot serve the model with this rule, or None where it does what the host does.

    feature_layers: the features that it must deliver, if any; rider: which it must carry; size: default `FULL` on a
    GPU, `INTERPRETED` elsewhere, cut to the model's context. Raises what a step raises, of whatever class.
    """
    if model.device.type != "cuda" and (obstacle := interpreter_obstacle()):
        return obstacle
    size = (FULL if model.device.type == "cuda" else INTERPRETED) if size is None else size
    asked = {"feature_layers": feature_layers, "rider": rider}
    check = StepCheck(model, verifier, size.within(max_positions(model)), **asked)
    failures = chain(map(check.failure, size.laws), map(partial(check.failure, penalty=PENALTY), size.penalised))
    return next(filter(None, failures), None)


class StepCheck:
    """Prompts, drafts that the model's greedy choice accepts in part, and what the eager forward makes of them."""

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        verifier: Verifier,
        size: CheckSize,
        *,
        feature_layers: FeatureLayers | None,
        rider: Rider | None,
    ):
        """Raises ValueError where layers keep keys of different types, and what the model raises."""
        self._model, self._verifier, self._tolerance = model, verifier, LOGIT_TOLERANCES[model.dtype]
        self._feature_layers, self._rider = feature_layers, rider
        generator, vocabulary = np.random.default_rng(0), text_config(model).vocab_size
        prompts = [generator.integers(0, vocabulary, length + 1).astype(np.int32) for length in size.lengths]
        self._rows = [Row(index, prompt, max(size.nodes)) for index, prompt in enumerate(prompts)]
        self._lengths = np.array(size.lengths, dtype=np.int64)
        indices = np.arange(len(prompts), dtype=np.int64)
        self._noise = VerifierNoise(seed=0, rows=indices, steps=indices, positions=self._lengths + 1)
        self._keys = TreeCache(num_rows=len(prompts), room=int(self._lengths.max()) + max(size.nodes))
        with tree_attention(model):
            for row, prompt in enumerate(prompts):
                plan = StepPlan.for_prompt(prompt[:-1], 0, row=row, device=model.device)
                run_plan(model, self._keys, plan, logits_to_keep=1)
            if not has_one_type(self._keys):
                raise ValueError("keys and values of all layers must have one type and lie on one device, got others")
            self._batch, self._eager, self._features = self._drafted(
                [int(prompt[-1]) for prompt in prompts], size.nodes
            )
            self._guesses = None if rider is None else self._guesses_at_nodes(rider)

    @torch.inference_mode()
    def failure(self, params: SamplingParams, penalty: float = 1.0) -> str | None:
        """What a step under this law, behind a repetition penalty if that is not 1, gets wrong, or None."""
        batch, processors = self._batch, [] if penalty == 1.0 else [RepetitionPenaltyLogitsProcessor(penalty)]
        law = TargetLaw(params, processors=ProcessorChain(processors) if processors else None)
        asked = {"feature_layers": self._feature_layers, "rider": self._rider}
        step = CapturedStep(self._model, law, self._verifier, num_rows=len(batch) + 1, fusion=None, **asked)
        step.begin(StepStart(len(batch) + 1, self._rows, self._keys, law, self._verifier, num_top=BEST, **asked))
        for place, row in enumerate(self._rows):
            step.enter(row, place, self._keys, source=place)
        with step.attention():
            step.prepare(batch, self._rows, self._noise)
            logits, written = step.direct(batch.num_nodes)
            step.launch()
            verdicts = step.verdicts()
            laws = step.laws(batch.num_nodes)
            best = step.top_entries(min(BEST, laws.shape[1]))
            guesses = None if self._rider is None else step.guesses(LiveRows.of(self._rows), verdicts.accepted)
        differences = {
            "logits must equal those of eager attention": relative_difference(logits.float(), self._eager),
            "laws of a replayed step must be those of its logits": _law_difference(
                laws, law.process(logits, batch, self._rows), law
            ),
            "the keys kept must be those of the kept path": _moved_difference(
                step.written(batch.num_nodes), written, batch, verdicts
            ),
        }
        if self._keys.recurrent.layers:
            rule = "recurrent states must be those behind the kept path"
            differences[rule] = self._state_difference(step.states(), verdicts)
        if self._features is not None:
            rule = "hidden states must equal those of eager attention"
            differences[rule] = self._feature_difference(step.features().float())
        if guesses is not None:
            rule = "a rider's guesses must be those that it makes in eager steps"
            differences[rule] = self._guess_difference(guesses, verdicts)
        for rule, difference in differences.items():
            if not difference <= self._tolerance:
                return f"{rule} up to {self._tolerance:g} of their spread, got {difference:.3g}"
        judged = (get_verifier("match"), _one_hot(laws)) if params.is_greedy else (self._verifier, laws)
        return _verdict_failure(verdicts, judged[1], batch, self._noise, judged[0]) or _best_failure(best, laws)

    def _feature_difference(self, found: torch.Tensor) -> float:
        """The largest of those of the layers, each by its own spread: later ones have far larger numbers. NaN where one
        is."""
        parts = (each.chunk(max(len(self._feature_layers), 1), dim=-1) for each in (found, self._features))
        return float(np.max([relative_difference(own, other) for own, other in zip(*parts, strict=True)]))

    def _state_difference(self, found: RecurrentStates, verdicts: Verdicts) -> float:
        """Largest difference to those of eager steps, of each kind over its largest number."""
        expected = self._keys.recurrent.copied()
        plan = StepPlan.for_drafts(self._batch, self._lengths, device=self._model.device)
        expected.keep(plan, [path[-1] if len(path) else ROOT for path in verdicts.accepted])
        return max(
            float((own[: len(other)].float() - other.float()).abs().max() / other.float().abs().max().clamp_min(TINY))
            for index, layer in expected.layers.items()
            for own, other in zip(found.layers[index].stored, layer.stored, strict=True)
        )

    def _guesses_at_nodes(self, rider: Rider) -> Guesses:
        """Behind every node of the draft, of eager steps."""
        plan = StepPlan.for_drafts(self._batch, self._lengths, device=self._model.device)
        with rider.watching():
            run_plan(self._model, self._keys, plan)
        return rider.guesses(self._keys, self._batch, self._lengths, np.arange(self._batch.num_nodes))

    def _guess_difference(self, found: Guesses, verdicts: Verdicts) -> float:
        """Largest distance in probability of the guesses in descending order: equally likely ones may change places."""
        expected = self._guesses[1][path_ends(self._batch, verdicts.accepted)]
        return float(np.abs(found[1] - expected).max())

    def _drafted(
        self, pending: Sequence[int], nodes: Sequence[int]
    ) -> tuple[DraftBatch, torch.Tensor, torch.Tensor | None]:
        """Trees of `BRANCHES` children per node, the eager forward's best tokens, level by level; its logits [M, V] and
        features [M, D], where they are wanted."""
        tokens = [np.full(count, token, dtype=np.int32) for token, count in zip(pending, nodes, strict=True)]
        known = 1
        while True:
            batch = DraftBatch.concatenate([DraftTree.branching(one, BRANCHES) for one in tokens])
            plan = StepPlan.for_drafts(batch, self._lengths, device=self._model.device)
            with taken_features(self._model, self._feature_layers) as features:
                logits = run_plan(self._model, self._keys, plan).float()
            if known >= max(nodes):
                return batch, logits, features[0].float() if features else None
            best = torch.topk(logits, BRANCHES, dim=1).indices.cpu().numpy()
            for first, own in zip(batch.offsets, tokens, strict=False):
                children = np.arange(1, len(own))
                own[1:] = best[first + (children - 1) // BRANCHES, (children - 1) % BRANCHES]
            known = BRANCHES * known + 1


def _law_difference(laws: torch.Tensor, scores: torch.Tensor, law: TargetLaw) -> float:
    """Largest distance in total variation of `laws` [M, V] to the host's, probabilities sorted: of equally probable
    tokens a filter may keep others."""
    scores = scores if law.params.is_greedy else law.warp(scores)
    own, expected = laws.sort(dim=1).values, torch.softmax(scores, dim=1).sort(dim=1).values
    return float((own - expected).abs().sum(dim=1).max()) / 2


def _moved_difference(found: torch.Tensor, written: torch.Tensor, batch: DraftBatch, verdicts: Verdicts) -> float:
    """Largest difference of the keys [M, ...] at the kept places to those that the path's nodes had, over the largest
    of these."""
    largest = 0.0
    for first, path in zip(batch.offsets, verdicts.accepted, strict=False):
        kept = found[first + 1 : first + 1 + len(path)].float() - written[int(first) + path.astype(np.int64)].float()
        largest = max(largest, float(kept.abs().max()) if len(path) else 0.0)
    return largest / float(written.float().abs().max())


def _one_hot(laws: torch.Tensor) -> torch.Tensor:
    """All mass on the best token."""
    return torch.zeros_like(laws).scatter_(1, laws.argmax(dim=1, keepdim=True), 1.0)


def _verdict_failure(
    verdicts: Verdicts, laws: torch.Tensor, batch: DraftBatch, noise: VerifierNoise, verifier: Verifier
) -> str | None:
    """Whether the host's rule decides otherwise on the device's laws."""
    expected = verifier.verify(batch, TargetRows(laws.cpu()), noise)
    paths, expected_paths = ([path.tolist() for path in one.accepted] for one in (verdicts, expected))
    tokens, expected_tokens = verdicts.next_tokens.tolist(), expected.next_tokens.tolist()
    if (paths, tokens) == (expected_paths, expected_tokens):
        return None
    return (
        f"verdicts of a replayed step must be those of the host's rule, got paths {paths} and tokens {tokens} instead "
        f"of {expected_paths} and {expected_tokens}"
    )


def _best_failure(best: tuple[np.ndarray, np.ndarray], laws: torch.Tensor) -> str | None:
    """Whether the best tokens are other than the laws'."""
    ids, probabilities = (torch.from_numpy(part).to(laws.device) for part in best)
    expected = torch.topk(laws, ids.shape[1], dim=1).values
    if torch.equal(probabilities, expected) and torch.equal(laws.gather(1, ids.long()), expected):
        return None
    return "the best tokens of a replayed step must be those of its laws, got others"
