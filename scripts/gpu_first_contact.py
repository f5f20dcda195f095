"""Does every piece of a captured step run on this GPU? Small models, a line per piece, within two minutes.

    python scripts/gpu_first_contact.py                    # on a GPU
    python scripts/gpu_first_contact.py --only growth,bf16
    python scripts/gpu_first_contact.py --device cpu       # tiny sizes in Triton's interpreter: does the script run?

Every piece decodes the same prompts by captured steps and by eager ones, twice, the second time with drafts from what
was learned. In float32 all tokens must be equal, in bfloat16 they may part where two tokens are nearly as likely. A
piece that fails prints its traceback and does not stop the others. On a GPU the pieces run in a process of their own:
after an illegal access torch may end it in the middle of anything, and the others go on in another one. After
`--seconds` the process ends with the stacks of what hangs. Exit status: 0, or 1 where a piece failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
import torch
from gpu_parts.device_option import cpu_or_gpu
from gpu_parts.part_process import end_with_parent
from gpu_parts.plain_float32 import use_plain_float32
from measuring.option_types import positive_number

if TYPE_CHECKING:  # transformers imports Triton, which then has chosen between its interpreter and its compiler
    from transformers import PreTrainedModel

    from stand.drafters.law_source import LawSource
    from stand.engine import Engine
    from stand.trees import BlendedLookup

LOGPROB_TOLERANCE = 1e-3
SHARPER = 20  # times larger logits: of nearly equal ones nothing would be drafted


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model, and of what is decoded with it: two prompts of `prompt` tokens, `tokens` more."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    large_head: int
    turned: int
    prompt: int
    tokens: int
    budget: int | None  # draft nodes per step; None: as many as an engine takes by itself


GPU = Sizes(8192, 896, 2048, 4, 14, 2, 128, 512, 64, prompt=700, tokens=96, budget=None)
INTERPRETED = Sizes(60, 32, 48, 1, 2, 1, 16, 32, 16, prompt=62, tokens=3, budget=2)


class Contact:
    """The pieces, one method each; a piece returns what its line says and raises where something is wrong."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sizes = INTERPRETED if device.type == "cpu" else GPU
        generator = np.random.default_rng(0)
        self.num_drafted = 0  # tokens, by all engines so far
        self.prompts = generator.integers(0, self.sizes.vocabulary, (2, self.sizes.prompt)).tolist()

    @cached_property
    def model(self) -> PreTrainedModel:
        return self._new_model("qwen2", torch.float32)

    def unfused(self) -> str:
        return self._compared(self.model, temperature=0.0, fuse=False)

    def fused(self) -> str:
        return self._compared(self.model, temperature=0.0)

    def bf16(self) -> str:
        if self.device.type == "cpu":
            return "left out: Triton's interpreter multiplies the bits of bfloat16"
        return self._compared(self._new_model("qwen3", torch.bfloat16), temperature=0.0)

    def match(self) -> str:
        return self._compared(self.model, temperature=0.6)

    def traversal(self) -> str:
        """From one lookup that learns no more, so that drafts, and with them all tokens, are those of eager steps."""
        from stand.trees import BlendedLookup

        lookup = BlendedLookup()
        plain = self._engine(self.model, "sdpa", fuse=False)
        for prompt, tokens in zip(self.prompts, self._decoded(plain, temperature=0.6), strict=True):
            lookup.learn(prompt, tokens)
        rule = {"verifier": "traversal", "lookup": lookup, "learn": False}
        self.num_drafted = 0
        compared = self._compared(self.model, temperature=0.6, **rule)
        if not self.num_drafted:
            raise AssertionError("steps must have drafts, got none; decode more tokens")
        return f"{compared}; {self.num_drafted} drafted"

    def coupled(self) -> str:
        return self._compared(self.model, temperature=0.6, verifier="coupled")

    def top_p(self) -> str:
        return self._compared(self.model, temperature=0.6, top_p=0.95)

    def penalty(self) -> str:
        """Steps in two graphs: of whole texts, then of new tokens, with a budget of thoughts."""
        from stand import OutputPenalties, ThinkingBudget

        of_texts = self._compared(self.model, temperature=0.6, repetition_penalty=1.1)
        budget = ThinkingBudget(self.sizes.tokens // 2, begin=None, end=3, forced=[5, 4, 3])
        processors = [OutputPenalties(presence=0.5, frequency=0.2), budget]
        return f"{of_texts}; {self._compared(self.model, temperature=0.6, logits_processors=processors)}"

    def logprobs(self) -> str:
        """Of the model and of the law, drawn between two graphs' steps, against those of eager steps."""
        from stand.laws.logprobs import MODES

        asked = {"max_new_tokens": self.sizes.tokens, "stop_token_ids": [], "temperature": 0.6, "seed": 0}
        worst, kinds = 0.0, [({}, mode) for mode in MODES] + [({"repetition_penalty": 1.1}, mode) for mode in MODES]
        ours, theirs = (self._engine(self.model, backend, fuse=False) for backend in ("triton", "sdpa"))
        for law, mode in kinds:
            captured, eager = (
                engine.generate(input_ids=self.prompts, **asked, **law, logprobs=3, logprobs_mode=mode)
                for engine in (ours, theirs)
            )
            if captured.token_ids != eager.token_ids or str(ours.backend) != "triton":
                raise AssertionError(f"tokens must be those of eager steps, got others; back end {ours.backend}")
            for one, other in zip(captured.logprobs, eager.logprobs, strict=True):
                for first, second in ((one.of_tokens, other.of_tokens), (one.top, other.top)):
                    error = float(np.abs(first - second).max())
                    if not error < LOGPROB_TOLERANCE:
                        raise AssertionError(f"log-probabilities must be within {LOGPROB_TOLERANCE}, got {error:.2g}")
                    worst = max(worst, error)
        return f"within {worst:.1g} of eager ones, {len(kinds)} kinds"

    def arrivals(self) -> str:
        """Requests that come to an open run, whose thread records and replays while this one computes."""
        settings = {"max_new_tokens": self.sizes.tokens, "stop_token_ids": [], "temperature": 0.6, "seed": 0}
        eager = self._engine(self.model, "sdpa", fuse=False).run(self.prompts * 2, **settings)
        wanted = {one.row: one.token_ids for one in eager}
        ours, products = self._engine(self.model, "triton", fuse=False), 0
        square = torch.ones(64, 64, device=self.device)
        with ours.open_run(max_rows=3, **settings) as run:
            futures = []
            for prompt in self.prompts * 2:
                futures.append(run.submit(prompt))
                while products < 20 * len(futures) and not futures[-1].done():
                    square = (square @ square).clamp(max=1.0)
                    products += 1
            found = {one.row: one.token_ids for future in futures for one in future.result()}
        if found != wanted or str(ours.backend) != "triton":
            raise AssertionError(f"tokens must be those of eager steps, got others; back end {ours.backend}")
        return f"{sum(map(len, found.values()))} tokens as eager, {products} products beside them"

    def grammar(self) -> str:
        """Steps in two graphs. Drafts are planned by masks; those that no plan had are made while the first graph
        runs."""
        from workloads.near_tokens import NearTokens

        with NearTokens().known():
            return self._compared(self.model, temperature=0.6, logits_processors=NearTokens())

    def image(self) -> str:
        """Behind an image rotary positions are not places in the text: a first forward, then steps at the row's own."""
        from transformers import AutoModelForImageTextToText, Qwen3VLConfig

        shown, height, width = self.sizes.vocabulary - 1, 4, 6
        half, third = self.sizes.head_size // 2, self.sizes.head_size // 6
        sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * third, third, third]}
        tower = dict(
            depth=2, hidden_size=64, intermediate_size=128, num_heads=4, patch_size=8, num_position_embeddings=64,
            deepstack_visual_indexes=[0], out_hidden_size=self.sizes.hidden,
        )  # fmt: skip
        config = Qwen3VLConfig(
            text_config={**self._settings(), "rope_parameters": sections}, vision_config=tower,
            image_token_id=shown, video_token_id=shown - 1, vision_start_token_id=shown - 2,
            vision_end_token_id=shown - 3, tie_word_embeddings=False,
        )  # fmt: skip
        model = self._on_device(lambda: AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
        prompts = []
        for text in self.prompts:
            text = [token % (shown - 3) for token in text]
            ids = torch.tensor([[*text[:8], *[shown] * (height * width // 4), *text[8:]]])
            grid, pixels = torch.tensor([[1, height, width]]), torch.randn(height * width, 3 * 2 * 8 * 8)
            types = (ids == shown).long()
            prompts.append(
                {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
            )
        with patch.object(self, "prompts", prompts):
            return self._compared(model, temperature=0.6)

    def growth(self) -> str:
        """Rows outgrow the page table and the pool, and all graphs are made anew."""
        from stand.gpu.device_cache import DeviceCache
        from stand.gpu.packets import page_table

        grow, pools = DeviceCache.grow, []

        def watched(cache: DeviceCache, num_pages: int) -> None:
            pools.append(num_pages)
            grow(cache, num_pages)

        with (
            patch.object(page_table, "FIRST_ROOM", 1),
            patch.object(page_table, "DRAFT_ROOM", 2),
            patch.object(page_table, "PROMPTS_AHEAD", 0),
            patch.object(DeviceCache, "grow", watched),
        ):
            compared = self._compared(self.model, temperature=0.0, fuse=False)
        if not pools:
            raise AssertionError("the pool must have grown, got none; decode more tokens")
        return f"{compared}; pages {pools}"

    def head(self) -> str:
        """An untrained EAGLE-1 head drafts from the hidden states that captured steps deliver."""
        return self._headed(self._random_head)

    def eagle3(self) -> str:
        """An untrained EAGLE-3 head drafts from the inputs of several layers that captured steps deliver."""
        return self._headed(self._random_eagle3)

    def blocks(self) -> str:
        """An untrained DFlash 2 head drafts in levels from the inputs of several layers."""
        return self._headed(self._random_dflash)

    def streams(self) -> str:
        """Untrained streams run behind the verdicts of captured steps."""
        return self._compared(self.model, temperature=0.6, source=self._random_streams)

    def products(self) -> str:
        """Every tile of the few-token product against torch's, and on a GPU which is faster."""
        from stand.gpu.tuning.device_timer import DeviceTimer
        from stand.gpu.tuning.product_tiles import MOST_TOKENS, TILES
        from stand.gpu.tuning.products import TOKENS, Products, choose, is_equal

        is_gpu = self.device.type == "cuda"
        size, dtype = (4096, torch.bfloat16) if is_gpu else (64, torch.float32)
        weights = [torch.randn(size, size, device=self.device).to(dtype) for _ in range(8 if is_gpu else 1)]
        states = torch.randn(MOST_TOKENS, size, device=self.device).to(dtype)
        for number, tile in enumerate(TILES):
            products = Products({(size, size): (number,) * len(TOKENS)}, self.device)
            for num_tokens in (1, MOST_TOKENS):
                if not is_equal(products, states[:num_tokens], weights[0]):
                    raise AssertionError(f"{tile} must multiply as torch does, got others with {num_tokens} tokens")
        timer = DeviceTimer(self.device, repeats=5 if is_gpu else 1)
        return f"{len(TILES)} tiles equal torch's product; for {TOKENS} tokens chosen: {choose(weights, timer.seconds)}"

    def delta_rule(self) -> str:
        """The family of Qwen3.5."""
        sizes = self.sizes
        layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
        heads = {"linear_num_value_heads": sizes.heads, "linear_num_key_heads": sizes.heads // 2}
        states = {"linear_key_head_dim": sizes.head_size, "linear_value_head_dim": sizes.head_size}
        return self._compared(
            self._new_model("qwen3_5_text", torch.float32, **layers, **heads, **states), temperature=0.6
        )

    def state_space(self) -> str:
        """A layer of Mamba-2, and one of attention."""
        sizes = self.sizes
        layers = {"attn_layer_indices": [1], "num_hidden_layers": 2}
        inner = {"mamba_n_heads": 2 * sizes.hidden // sizes.head_size, "mamba_d_head": sizes.head_size}
        model = self._new_model("bamba", torch.float32, **layers, **inner, mamba_d_state=sizes.head_size)
        return self._compared(model, temperature=0.6)

    def two_sizes(self) -> str:
        """The family of Gemma 4: layers with a window, and layers without one whose heads are larger and fewer."""
        sizes = self.sizes
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
        heads = {"global_head_dim": sizes.large_head, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        window = {"sliding_window": sizes.prompt // 4, "hidden_size_per_layer_input": 0}
        model = self._new_model("gemma4_text", torch.float32, **kinds, **heads, **window)
        return self._compared(model, temperature=0.6)

    def latents(self) -> str:
        """Latent attention of DeepSeek's, with ordinary feed-forward blocks."""
        sizes = self.sizes
        heads = {"num_attention_heads": 2 * sizes.key_heads, "num_key_value_heads": 2 * sizes.key_heads}
        latents = {"kv_lora_rank": sizes.large_head, "q_lora_rank": None, "qk_nope_head_dim": sizes.head_size}
        turned = {"qk_rope_head_dim": sizes.turned, "head_dim": sizes.turned, "v_head_dim": sizes.head_size}
        dense = {"first_k_dense_replace": sizes.layers}
        model = self._new_model("deepseek_v3", torch.float32, **heads, **latents, **turned, **dense)
        return self._compared(model, temperature=0.6)

    def experts(self) -> str:
        """A mixture of experts, two of eight for each token."""
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": self.sizes.intermediate // 4}
        model = self._new_model("qwen3_moe", torch.float32, head_dim=self.sizes.head_size, **sizes)
        return self._compared(model, temperature=0.6)

    def two_engines(self) -> str:
        """Graphs live on when another engine and its graphs end."""
        first, second = (self._engine(self.model, "triton", fuse=False) for _ in range(2))
        before = self._decoded(first, temperature=0.0)
        self._decoded(second, temperature=0.0)
        del second
        gc.collect()  # an engine is a cycle
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        scratch = torch.randn(2**26 if self.device.type == "cuda" else 16, device=self.device)
        after = self._decoded(first, temperature=0.0)
        if after != before or str(first.backend) != "triton":
            raise AssertionError(f"tokens must be the same before and after, got others; back end {first.backend}")
        return f"same tokens after {scratch.nbytes >> 20} MiB were written elsewhere"

    def trained(self) -> str:
        """Weights that an optimiser moves between calls, and then, without fusion, weights in other memory."""
        return "; ".join([self._trained(fuse=True), self._trained(fuse=False)])

    def _trained(self, *, fuse: bool) -> str:
        model = self._new_model("qwen2", torch.float32)
        ours, theirs = self._engine(model, "triton", fuse=fuse), self._engine(model, "sdpa", fuse=False)
        changes = {"as made": None, "trained": self._train, **({} if fuse else {"moved": _move})}
        seen = {}
        for state, change in changes.items():
            if change is not None:
                change(model)
            seen[state] = self._decoded(ours, temperature=0.0)
            if seen[state] != self._decoded(theirs, temperature=0.0) or str(ours.backend) != "triton":
                reason = f"back end {ours.backend}, {ours.backend.reason}"
                raise AssertionError(f"tokens must be those of eager steps, got others {state}; {reason}")
        if seen["trained"] == seen["as made"]:
            raise AssertionError("training must have changed tokens, got the same; take a larger step")
        return f"as eager, {'fused' if fuse else 'unfused'}: {', '.join(changes)}"

    def _train(self, model: PreTrainedModel) -> None:
        texts = torch.tensor(self.prompts, device=self.device)
        model(input_ids=texts, labels=texts).loss.backward()
        torch.optim.AdamW(model.parameters(), lr=0.01).step()
        model.zero_grad()

    def sharded(self) -> str:
        """Weights that FSDP 2 brings for each forward, of one rank alone, behind captured steps of the whole model."""
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from stand.forward.ranks import forwards_together
        from stand.plugins.generate import engine_of, stand_generate, use_engine

        model = self._new_model("qwen2", torch.float32)
        prompts = torch.tensor(self.prompts, device=self.device)
        asked = {"do_sample": False, "max_new_tokens": self.sizes.tokens, "pad_token_id": 0, "eos_token_id": None}
        asked["attention_mask"] = torch.ones_like(prompts)
        use_engine(self._engine(model, "triton", fuse=True))
        expected = model.generate(prompts, **asked)
        made = model.generate(prompts, **asked, custom_generate=stand_generate)
        kind = "nccl" if self.device.type == "cuda" else "gloo"
        distributed.init_process_group(kind, store=distributed.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh(self.device.type, (1,))
            for layer in model.get_decoder().layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            with torch.no_grad(), forwards_together(model):
                shards = model.generate(prompts, **asked, custom_generate=stand_generate)
        finally:
            distributed.destroy_process_group()
        if not (torch.equal(made, expected) and torch.equal(shards, expected)):
            raise AssertionError(f"tokens must be transformers' own, got others; back end {engine_of(model).backend}")
        return f"transformers' own tokens; steps afterwards: {engine_of(model).backend}"

    def _random_head(self) -> LawSource:
        import stand
        from stand.drafters.eagle.head import EagleHead

        torch.manual_seed(0)
        return stand.EagleLaws(EagleHead(self.model).eval(), runs=3)

    def _random_eagle3(self) -> LawSource:
        import stand
        from stand.drafters.eagle.eagle3_head import Eagle3Head
        from stand.drafters.eagle.eagle3_settings import Eagle3Settings

        torch.manual_seed(0)
        return stand.EagleLaws(Eagle3Head(self.model, Eagle3Settings.for_target(self.model)).eval(), runs=3)

    def _random_dflash(self) -> LawSource:
        import stand
        from stand.drafters.dflash.head import DFlashHead
        from stand.drafters.dflash.settings import DFlashSettings

        torch.manual_seed(0)
        extras = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 16}
        settings = DFlashSettings.for_target(self.model, **extras)
        return stand.DFlashLaws(DFlashHead(self.model, settings).eval(), always=True)

    def _random_streams(self) -> LawSource:
        import stand
        from stand.drafters.streams.weights import Streams

        torch.manual_seed(0)
        return stand.StreamLaws(Streams(self.model, num_layers=1).eval(), always=True)

    def _compared(
        self,
        model: PreTrainedModel,
        *,
        verifier: str = "match",
        fuse: bool = True,
        source: Callable[[], LawSource] | None = None,
        lookup: BlendedLookup | None = None,
        learn: bool = True,
        **law: object,
    ) -> str:
        """Captured against eager steps. Raises AssertionError where tokens differ in float32, or steps fell back."""
        outputs = []
        for backend in ("triton", "sdpa"):
            engine = self._engine(model, backend, verifier=verifier, fuse=fuse, source=source, lookup=lookup)
            outputs.append([self._decoded(engine, learn=learn, **law) for _ in range(2)])
            if backend == "triton":
                chosen, fusion = engine.backend, getattr(engine.backend, "fusion", None)
                kept = "" if fusion is None else f", {sum(swap.is_kept for swap in fusion.report)} parts fused"
        if str(chosen) != "triton":
            raise AssertionError(f"steps must be captured to the end, got {chosen}: {chosen.reason}")
        pairs = [(a, b) for ours, theirs in zip(*outputs, strict=True) for a, b in zip(ours, theirs, strict=True)]
        same = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
        total = sum(len(ours) for ours, _ in pairs)
        if model.dtype == torch.float32 and same != total:
            raise AssertionError(f"all tokens must be those of eager steps, got {same} of {total}")
        return f"{same}/{total} tokens as eager{kept}; {chosen.reason}"

    def _headed(self, source: Callable[[], LawSource]) -> str:
        """The same with a head, whose runs are recorded in one engine and single operations in the other, each timed
        until its laws have arrived. Raises AssertionError where none was recorded."""
        from stand.drafters.heads.followed_features import FollowedFeatures
        from stand.gpu.head_runs.recorder import RecordedRun

        seconds: dict[bool, list[float]] = {False: [], True: []}
        results, run = FollowedFeatures._results, RecordedRun.run

        def timed(kind: bool, work: Callable) -> Callable:
            def call(*given: object, **more: object) -> object:
                begun = time.perf_counter()
                found = work(*given, **more)
                seconds[kind].append(time.perf_counter() - begun)
                return found

            return call

        with (
            patch.object(FollowedFeatures, "_results", timed(False, results)),
            patch.object(RecordedRun, "run", timed(True, run)),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("error", message="a recorded run of the trained head")
            compared = self._compared(self.model, temperature=0.6, source=source)
        if not seconds[True]:
            raise AssertionError("runs of the head must be recorded, got none; decode more tokens")
        single, recorded = (1000 * float(np.median(seconds[kind][-20:])) for kind in (False, True))
        return f"{compared}; a run of the head {recorded:.2f} ms, as single operations {single:.2f} ms"

    def _engine(
        self,
        model: PreTrainedModel,
        backend: str,
        *,
        verifier: str = "match",
        fuse: bool,
        source: Callable[[], LawSource] | None = None,
        lookup: BlendedLookup | None = None,
    ) -> Engine:
        import stand

        source = None if source is None else source()
        drafter = stand.BlendedDrafter(lookup, budget=self.sizes.budget, source=source)
        return stand.wrap(model, drafter=drafter, backend=backend, verifier=verifier, fuse=fuse)

    def _decoded(self, engine: Engine, *, learn: bool = True, **law: float) -> list[list[int]]:
        settings = {"max_new_tokens": self.sizes.tokens, "stop_token_ids": [], "seed": 0, "learn": learn}
        output = engine.generate(input_ids=self.prompts, **settings, **law)
        self.num_drafted += output.stats.num_draft_tokens
        return output.token_ids

    def _new_model(self, kind: str, dtype: torch.dtype, **more: object) -> PreTrainedModel:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(kind, **{**self._settings(), **more})
        return self._on_device(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))

    def _settings(self) -> dict[str, object]:
        """Of a text model's configuration."""
        sizes = self.sizes
        return dict(
            vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.key_heads,
            head_dim=sizes.head_size, max_position_embeddings=8192, tie_word_embeddings=False,
        )  # fmt: skip

    def _on_device(self, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = make().eval()
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(SHARPER)
        return model


def _move(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data = weight.data * 1.02


PIECES = (
    "unfused", "fused", "bf16", "match", "traversal", "coupled", "top_p", "penalty", "logprobs", "arrivals", "grammar",
    "image", "growth", "head", "eagle3", "blocks", "streams", "products", "delta_rule", "state_space", "two_sizes",
    "latents", "experts", "two_engines", "trained", "sharded",
)  # fmt: skip


def run_piece(name: str, work: Callable[[], str]) -> bool:
    """One line; whether the piece is well."""
    start = time.monotonic()
    try:
        line = work()
    except Exception:
        print(f"FAIL {name} [{time.monotonic() - start:.1f} s]\n{traceback.format_exc()}", flush=True)
        return False
    print(f"ok   {name}: {line} [{time.monotonic() - start:.1f} s]", flush=True)
    return True


def run_pieces(contact: Contact, names: Sequence[str]) -> bool:
    """Whether all are well. Ends the process where one leaves the GPU of no use to it: see `in_processes`."""
    is_well = True
    for name in names:
        is_well = run_piece(name, getattr(contact, name)) and is_well
        if not is_well and not is_usable(contact.device):
            print(f"the GPU is of no use to this process after {name}", flush=True)
            os._exit(1)  # no destructor runs, of which torch's may not end well
    return is_well


def in_processes(names: Sequence[str], command: Callable[[Sequence[str], float], list[str]], seconds: float) -> bool:
    """Whether all pieces are well, which run by command(pieces, seconds left) until a process has come to its end.

    One that ends earlier has died of the piece after those that it told of, or of the last one, where that failed.
    """
    started, is_well = time.monotonic(), True
    while names:
        left = seconds - (time.monotonic() - started)
        if left < 1:
            print(f"left out, because {seconds:.0f} seconds were over: {', '.join(names)}", flush=True)
            return False
        process = subprocess.Popen(
            command(names, left), stdout=subprocess.PIPE, text=True, errors="replace", preexec_fn=end_with_parent
        )
        told, verdict = 0, "ok"
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(("ok   ", "FAIL ")):
                told, verdict = told + 1, line.split()[0]
        status = process.wait()
        is_well, names = is_well and status == 0, names[told:]
        if names and verdict == "ok":
            print(f"FAIL {names[0]}: its process ended with status {status}", flush=True)
            is_well, names = False, names[1:]
    return is_well


def piece_command(device: str, names: Sequence[str], seconds: float) -> list[str]:
    options = ["--device", device, "--only", ",".join(names), "--seconds", f"{max(seconds, 1.0):.0f}"]
    options += ["--started", str(time.time())]
    return [sys.executable, __file__, "--in-process", *options]


def is_usable(device: torch.device) -> bool:
    """Whether this process can still work on the GPU: an illegal access is told by every later call."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def describe(device: torch.device) -> str:
    """Versions, the device, and how products in float32 are rounded."""
    import transformers
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, interpreted"
    packages = {"torch": torch, "triton": triton, "transformers": transformers, "numpy": np}
    rounding = f"float32 products {torch.backends.cuda.matmul.fp32_precision}"
    return ", ".join([*(f"{name} {package.__version__}" for name, package in packages.items()), name, rounding])


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=cpu_or_gpu, default="cuda", help="of torch (%(default)s)")
    parser.add_argument("--only", default=",".join(PIECES), metavar="PIECE,...", help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=positive_number, default=220, help="after these the process ends (%(default)s)"
    )
    parser.add_argument("--started", type=float, help="seconds since 1970 from which --seconds count (default: now)")
    parser.add_argument("--in-process", action="store_true", help="all in this one, as always on a CPU")
    arguments = parser.parse_args(command_line)
    spent = 0.0 if arguments.started is None else time.time() - arguments.started
    seconds = max(arguments.seconds - spent, 1.0)
    device, names = torch.device(arguments.device), arguments.only.split(",")
    if not set(names) <= set(PIECES):
        parser.error(f"--only must be some of {', '.join(PIECES)} with commas between, got {arguments.only}")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is visible to torch; use --device cpu to see that the script runs")
    if device.type != "cpu" and not arguments.in_process:
        return 0 if in_processes(names, partial(piece_command, arguments.device), seconds) else 1
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    logging.basicConfig(stream=sys.stdout)  # tracebacks of steps that went on as eager ones
    undone = use_plain_float32()
    print(describe(device) + (f", undone: {undone}" if undone else ""), flush=True)
    is_well = run_pieces(Contact(device), names)
    faulthandler.cancel_dump_traceback_later()
    if device.type == "cuda":
        print(f"most memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
