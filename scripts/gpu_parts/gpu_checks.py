"""Is it right on this device? Greedy tokens against generate, logits against the plain forward, kernels against hosts.

Run before anything is timed: times of wrong results are worth nothing. What may differ is said for each check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel
from workloads.model_shapes import ModelShape
from workloads.random_draft import random_draft

from gpu_parts.bench_model import BenchModel, step_noise
from gpu_parts.bench_record import Measurement
from gpu_parts.kernel_bench import heap_parents, walk_order
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.model import run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.tree_attention import tree_attention
from stand.gpu.captured_step import CapturedStep
from stand.gpu.kernels.verification.race import race
from stand.gpu.kernels.verification.traverse import traverse
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.row import Row
from stand.step import StepStart
from stand.trees import DraftBatch, DraftTree, compiled
from stand.verifiers import TargetRows, VerifierNoise, get_verifier
from stand.verifiers.rules.match import follow_drawn
from stand.verifiers.schedule import packed_parents
from stand.verifiers.walk import first_in_post_order

BEST = 10  # tokens per node whose probabilities are compared
SHARPER = 20  # times larger logits of the small model: what is nearly equally likely is never drafted
LEAN = 0.8  # of a law's mass lies on the drafted children, so that paths are long


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """How much is compared."""

    greedy_shape: ModelShape  # of the small float32 model
    greedy_rows: int
    greedy_prompt: int
    greedy_tokens: int
    prefixes: int
    prefix: int
    chain: int  # tokens behind each prefix
    rows: int  # of a random step
    nodes: int  # per row of it
    vocabulary: int  # of it
    steps: int


FULL = CheckSizes(
    greedy_shape=ModelShape("check", "qwen2", 4, 512, 8, 2, 64, 1024, 8192, 1e4),
    greedy_rows=4, greedy_prompt=64, greedy_tokens=128, prefixes=4, prefix=512, chain=96,
    rows=4, nodes=32, vocabulary=152064, steps=8,
)  # fmt: skip
SMOKE = CheckSizes(
    greedy_shape=ModelShape("check", "qwen2", 1, 64, 2, 1, 64, 96, 60, 1e4),
    greedy_rows=1, greedy_prompt=5, greedy_tokens=3, prefixes=1, prefix=5, chain=3, rows=2, nodes=5, vocabulary=40,
    steps=1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """`agreeing` of `compared` things are the same; `is_exact`: all of them must be."""

    HEADER: ClassVar = ("check", "compared", "agreeing", "must all", "largest difference", "detail")

    name: str
    compared: int
    agreeing: int
    is_exact: bool
    largest_difference: float | None
    detail: str
    quantiles: dict[str, tuple[float, ...]] | None = None  # 0, 10, 50, 90, 100 %

    @property
    def holds(self) -> bool:
        return self.agreeing == self.compared or not self.is_exact

    def cells(self) -> tuple[object, ...]:
        difference = None if self.largest_difference is None else f"{self.largest_difference:.1e}"
        must = "yes" if self.is_exact else "no"
        return (self.name, self.compared, self.agreeing, must, difference, self.detail)


class ChecksBench:
    """Checks on the benchmark's model and device."""

    def __init__(self, bench: BenchModel, sizes: CheckSizes):
        self.bench, self.sizes = bench, sizes

    def measurements(self) -> Iterator[Measurement]:
        yield Measurement("check, greedy tokens in float32", self.greedy)
        yield Measurement(f"check, logits in {self.bench.model.dtype}", self.logits)
        yield Measurement("check, traversal kernel", partial(self.kernels, "traverse"))
        yield Measurement("check, race kernel", partial(self.kernels, "race"))

    def greedy(self) -> list[Check]:
        """A small random float32 model: greedy tokens must be those of generate, all of them, the first time and, with
        drafts from what was learned then, the second time."""
        sizes, device = self.sizes, self.bench.device
        limit = sizes.greedy_prompt + sizes.greedy_tokens
        small = BenchModel(sizes.greedy_shape, device=device, dtype=torch.float32, max_positions=limit)
        with torch.no_grad():
            small.model.get_output_embeddings().weight.mul_(SHARPER)
        prompts = np.stack([small.tokens(sizes.greedy_prompt) for _ in range(sizes.greedy_rows)])
        settings = {"max_new_tokens": sizes.greedy_tokens, "temperature": 0.0, "stop_token_ids": [], "seed": 0}
        outputs = [small.engine.generate(input_ids=prompts.tolist(), **settings) for _ in range(2)]
        expected = generated(small.model, prompts, sizes.greedy_tokens)
        agreeing = sum(sum(map(common_prefix, output.token_ids, expected)) for output in outputs)
        detail = ", then ".join(f"{output.stats.mean_acceptance_length:.2f}" for output in outputs) + " tokens per step"
        compared = len(outputs) * sizes.greedy_rows * sizes.greedy_tokens
        return [Check("greedy tokens until the first difference, float32", compared, agreeing, True, None, detail)]

    @torch.inference_mode()
    def logits(self) -> list[Check]:
        """Best tokens of the captured step and of the model's own forward on the same prefixes; in 16-bit types they
        differ where the two best lie close, which the margins tell."""
        prefixes = [self._compared_prefix() for _ in range(self.sizes.prefixes)]
        differs, margins, errors = (torch.cat(parts) for parts in zip(*prefixes, strict=True))
        quantiles = {"margin of the two best, nats": quantiles_of(margins)}
        if differs.any():
            quantiles["margin where they differ"] = quantiles_of(margins[differs])
        detail = "; ".join(
            f"{name}: " + ", ".join(f"{value:.1e}" for value in values) for name, values in quantiles.items()
        )
        is_exact = self.bench.model.dtype == torch.float32
        name = f"best tokens, {str(self.bench.model.dtype).removeprefix('torch.')}"
        return [Check(name, len(differs), int((~differs).sum()), is_exact, float(errors.max()), detail, quantiles)]

    def _compared_prefix(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Per token of a chain: whether the best tokens differ, the forward's margin between its two best, and the
        largest difference of log-probabilities among our best ones."""
        bench, sizes = self.bench, self.sizes
        tokens = bench.tokens(sizes.prefix + sizes.chain)
        probabilities, ids = self._captured(tokens)
        input_ids = torch.from_numpy(tokens.astype(np.int64))[None].to(bench.device)
        plain = bench.model(input_ids, use_cache=False, logits_to_keep=sizes.chain).logits[0].float().log_softmax(-1)
        plain = plain.cpu()
        errors = (plain.gather(1, ids) - probabilities.log()).abs().amax(dim=1)
        best = torch.topk(plain, 2)
        return ids[:, 0] != best.indices[:, 0], (best.values[:, 0] - best.values[:, 1]).double(), errors

    def _captured(self, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and ids [N, 10] of the best tokens after each of the last N ones, drafted as a chain."""
        bench, count = self.bench, self.sizes.chain
        prefix, chain = tokens[:-count], tokens[-count:]
        row, cache = Row(0, tokens[: len(prefix) + 1], 1), TreeCache(num_rows=1, room=len(tokens))
        with tree_attention(bench.model):
            plan = StepPlan.for_prompt(prefix, 0, row=0, device=bench.device)
            run_plan(bench.model, cache, plan, logits_to_keep=1)
        law, rule = TargetLaw(SamplingParams(temperature=1.0)), get_verifier("match")
        step = CapturedStep(bench.model, law, rule, num_rows=1, fusion=bench.engine.backend.fusion)
        step.begin(StepStart(1, [row], cache, law, rule, num_top=BEST))
        step.enter(row, 0, cache)
        nothing = np.zeros((count, 1), dtype=np.int32)
        draft = DraftTree(chain, np.arange(-1, count - 1, dtype=np.int32), nothing, nothing.astype(np.float32))
        with step.attention():
            step.prepare(DraftBatch.concatenate([draft]), [row], step_noise([row]))
            step.launch()
            step.verdicts()
            ids, probabilities = step.top_entries(min(BEST, bench.shape.vocabulary))
        return torch.from_numpy(probabilities), torch.from_numpy(ids).long()

    def kernels(self, name: str) -> list[Check]:
        """Verdicts of random steps by a kernel and by the host's rule: the same rows must stop at the same nodes."""
        judge = {"traverse": judged_by_traversal, "race": judged_by_race}[name]
        agreeing = accepted = 0
        differences = []
        for seed in range(self.sizes.steps):
            batch, laws = leaning_step(self.sizes, seed)
            same, kept, difference = judge(batch, laws, self.bench.device, seed)
            agreeing, accepted = agreeing + same, accepted + kept
            differences.append(difference)
        rows = self.sizes.steps * self.sizes.rows
        largest = None if differences[0] is None else max(differences)
        return [Check(f"{name} kernel, rows", rows, agreeing, True, largest, f"{accepted / rows:.2f} nodes accepted")]


def generated(model: PreTrainedModel, prompts: np.ndarray, count: int) -> list[list[int]]:
    """`count` greedy tokens behind every prompt, by transformers' generate."""
    input_ids = torch.from_numpy(prompts.astype(np.int64)).to(model.device)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[:, input_ids.shape[1] :].tolist()


def leaning_step(sizes: CheckSizes, seed: int) -> tuple[DraftBatch, torch.Tensor]:
    """Random drafts, and laws [M, V] float32 that lean towards the drafted tokens."""
    generator = np.random.default_rng(seed)
    parents = heap_parents(sizes.nodes)
    batch = DraftBatch.concatenate([random_draft(parents, sizes.vocabulary, generator) for _ in range(sizes.rows)])
    noise = torch.Generator().manual_seed(seed)
    laws = torch.softmax(3 * torch.randn(batch.num_nodes, sizes.vocabulary, generator=noise), dim=1)
    above = packed_parents(batch)
    children = np.flatnonzero(batch.parents >= 0)
    families = np.bincount(above[children], minlength=batch.num_nodes)
    laws[families > 0] *= 1 - LEAN
    shares = torch.from_numpy((LEAN / families[above[children]]).astype(np.float32))
    cells = (torch.from_numpy(above[children]).long(), torch.from_numpy(batch.token_ids[children]).long())
    return batch, laws.index_put_(cells, shares, accumulate=True)


def judged_by_traversal(
    batch: DraftBatch, laws: torch.Tensor, device: torch.device, seed: int
) -> tuple[int, int, float]:
    """(rows that agree, nodes accepted, largest difference of thresholds)."""
    uniforms = np.random.default_rng(seed).random(batch.num_nodes)
    arrays = (batch.token_ids, batch.parents, batch.offsets, batch.support_ids, batch.law)
    order = walk_order(batch.parents[: batch.offsets[1]], len(batch))  # rows are alike
    on_device = [torch.from_numpy(array).to(device) for array in (*arrays, uniforms, *order)]
    stops, *_, thresholds = traverse(laws.to(device), *on_device)
    expected, _, _ = compiled.traversal_thresholds(*arrays, laws.numpy())
    expected_stops = first_in_post_order(
        uniforms < expected,
        parents=packed_parents(batch),
        roots=batch.offsets[:-1],
        order=np.arange(batch.num_nodes),
    )
    difference = np.abs(thresholds.cpu().numpy() - expected).max()
    same = stops.cpu().numpy() == expected_stops
    return int(same.sum()), int(batch.depths[expected_stops].sum()), float(difference)


def judged_by_race(batch: DraftBatch, laws: torch.Tensor, device: torch.device, seed: int) -> tuple[int, int, None]:
    """(rows that agree in path and next token, nodes accepted, nothing)."""
    rows = np.arange(len(batch))
    noise = VerifierNoise(seed=seed, rows=rows, steps=rows, positions=5 * rows + 40)
    drawn = race(laws.to(device), torch.from_numpy(np.asarray(noise.keys_at_nodes(batch))).to(device)).cpu().numpy()
    target = TargetRows(laws)
    ours = follow_drawn(batch, target, lambda _, nodes, depth: drawn[nodes])
    theirs = get_verifier("coupled").verify(batch, target, noise)
    same = [
        np.array_equal(first, second) and ours.next_tokens[row] == theirs.next_tokens[row]
        for row, (first, second) in enumerate(zip(ours.accepted, theirs.accepted, strict=True))
    ]
    return int(sum(same)), int(theirs.num_accepted.sum()), None


def common_prefix(first: list[int], second: list[int]) -> int:
    """Tokens until the first difference."""
    same = (place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return next(same, len(first))


def quantiles_of(values: torch.Tensor) -> tuple[float, ...]:
    """At 0, 10, 50, 90 and 100 %."""
    return tuple(torch.quantile(values, torch.tensor([0, 0.1, 0.5, 0.9, 1], dtype=values.dtype)).tolist())
