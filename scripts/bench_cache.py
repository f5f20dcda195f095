"""What a step costs by the way its keys lie in memory, and what memory they take.

    python scripts/bench_cache.py                       # bundled model, 8 rows of 100 to 1,500 tokens
    python scripts/bench_cache.py --model smollm2 --lengths 100,700

`rooms`: a room per row, all as long as the longest may become. `pages`: the same addresses, with memory where
something was written, and prompts shared (`PagedCache`, what the engine takes on Linux). `gathered`: pages of 16 slots
in one pool, copied together before every attention call. `by row`: one attention call per row and layer, over keys as
long as the row. The ways take turns, step by step, in one process. Columns: the median of a step's processor time; the
median, and the middle half (`low` to `high`), of that time over the one of `rooms` in the same round; the memory taken,
and that over what the keys of all tokens need, the prompt counted once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
import torch
from long_runs.resident_memory import resident_bytes
from measuring.interruption import run_command
from measuring.option_types import count_list, positive_integer, whole_number
from measuring.setup import REASONER, from_model
from measuring.text_table import format_table
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from stand.forward.cache.mapped_memory import SharedFile
from stand.forward.cache.paged_cache import PagedCache, PromptRoom
from stand.forward.cache.tree_cache import DRAFT_ROOM, TreeCache
from stand.forward.model import prefill, run_plan, text_config
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import LOGIT_TOLERANCES, relative_difference
from stand.forward.tree_attention import ATTENTION_NAME, tree_attention
from stand.trees import DraftBatch, DraftTree

WAYS = {"rooms": ATTENTION_NAME, "pages": ATTENTION_NAME, "gathered": ATTENTION_NAME, "by row": "stand_by_row"}
HEADER = ("way", "ms", "over rooms", "low", "high", "MB taken", "over the tokens' own")
PAGE = 16


class GatheredCache(TreeCache):
    """A pool of pages [P, PAGE, Hkv, D] per layer; attention gets copies of the live rows' pages."""

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        self._last = -(-plan.kv_length // PAGE)
        pages = np.arange(plan.num_rows)[:, None] * (self.room // PAGE) + np.arange(self._last)
        self._pages = torch.from_numpy(pages.flatten())
        self._places = plan.cache_rows * self.room + plan.cache_slots

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        views = []
        for storages, states in ((self.keys, key_states), (self.values, value_states)):
            if layer_idx == len(storages):
                pages = self.num_rows * self.room // PAGE
                storages.append(states.new_zeros(pages, PAGE, states.shape[1], states.shape[3]))
            pool = storages[layer_idx]
            pool.view(-1, *pool.shape[2:])[self._places] = states[0].transpose(0, 1)
            own = pool.index_select(0, self._pages).view(-1, self._last * PAGE, *pool.shape[2:])
            views.append(own[:, : self._plan.kv_length].transpose(1, 2))
        return views[0], views[1]


class RowCache(TreeCache):
    """Attention gets one [1, Hkv, L, D] per row, as long as the row."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx)
        ends = self._plan.ends.tolist()
        return tuple([part[row : row + 1, :, :end] for row, end in enumerate(ends)] for part in (keys, values))


def attend_by_row(module, query, key, value, attention_mask, *, scaling=None, stand_plan=None, **kwargs):
    """As `stand.forward.tree_attention.attend`, with lists of keys and values."""
    groups, counts = query.shape[1] // key[0].shape[1], np.bincount(stand_plan.cache_rows.numpy()).tolist()
    if not hasattr(stand_plan, "row_masks"):
        masks = stand_plan.mask(window=None, groups=1, dtype=query.dtype)
        stand_plan.row_masks = [
            torch.cat([masks[row : row + 1, :, :count, : key[row].shape[2]]] * groups, dim=2)
            for row, count in enumerate(counts)
        ]
    parts, first = [], 0
    for row, count in enumerate(counts):
        own = query[:, :, first : first + count]
        folded = own.reshape(1, key[row].shape[1], groups * count, own.shape[3])
        mixed = scaled_dot_product_attention(
            folded, key[row], value[row], attn_mask=stand_plan.row_masks[row], scale=scaling
        )
        parts.append(mixed.reshape(1, query.shape[1], count, -1).transpose(1, 2))
        first += count
    return torch.cat(parts, dim=1), None


AttentionInterface.register("stand_by_row", attend_by_row)


def caches(model: PreTrainedModel, lengths: Sequence[int], prompt: int, shared: PromptRoom) -> dict[str, TreeCache]:
    """One of each way, filled with the same tokens: a prompt of so many tokens that all rows begin with, put into
    `shared`, too, and what each wrote."""
    longest, tokens = max(lengths) + DRAFT_ROOM, np.arange(max(lengths)) * 7 % text_config(model).vocab_size
    tokens = tokens.astype(np.int32)
    made = {
        "rooms": TreeCache(len(lengths), longest),
        "pages": PagedCache(len(lengths), longest, page_size=PAGE),
        "gathered": GatheredCache(len(lengths), longest),
        "by row": RowCache(len(lengths), longest),
    }
    with tree_attention(model):
        prefill(model, shared, tokens[:prompt], row=0)
        for row, length in enumerate(lengths):
            whole = TreeCache(1, length)
            prefill(model, whole, tokens[:length], row=0)
            for way in ("rooms", "by row", "pages"):
                made[way].enter(row, *((shared, prompt) if way == "pages" else (whole, length)))
            for mine, others in ((made["pages"].keys, whole.keys), (made["pages"].values, whole.values)):
                for layer, states in enumerate(others):
                    mine[layer][row, :, prompt:length] = states[0, :, prompt:length]
            _fill_pool(made["gathered"], whole, row, length)
    return made


def _fill_pool(cache: GatheredCache, whole: TreeCache, row: int, length: int) -> None:
    for mine, others in ((cache.keys, whole.keys), (cache.values, whole.values)):
        for layer, states in enumerate(others):
            if layer == len(mine):
                pages = cache.num_rows * cache.room // PAGE
                mine.append(states.new_zeros(pages, PAGE, states.shape[1], states.shape[3]))
            flat = mine[layer].view(cache.num_rows, cache.room, *mine[layer].shape[2:])
            flat[row, :length] = states[0, :, :length].transpose(0, 1)


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    model = from_model(options.model, AutoModelForCausalLM, dtype=torch.float32).eval()
    lengths = np.linspace(*options.lengths, options.rows).astype(np.int64)
    shared = PromptRoom(SharedFile(), options.prompt)
    made = caches(model, lengths.tolist(), options.prompt, shared)
    batch = DraftBatch.concatenate([DraftTree.chain(range(5, 6 + options.nodes))] * options.rows)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    logits: dict[str, torch.Tensor] = {}
    for step in range(options.steps + 1):
        ways = list(WAYS)[step % len(WAYS) :] + list(WAYS)[: step % len(WAYS)]
        for way in ways:
            with tree_attention(model, WAYS[way]):
                plan = StepPlan.for_drafts(batch, lengths + step // 2)
                begin = time.thread_time()
                logits[way] = run_plan(model, made[way], plan)
                times[way].append(time.thread_time() - begin)
        for way in WAYS:
            _check_equal(way, logits[way], logits["rooms"])
    tokens = int((lengths + options.steps // 2).sum()) - (options.rows - 1) * options.prompt  # committed in the end
    tokens_take = tokens * made["rooms"].nbytes / (options.rows * made["rooms"].room)
    found = {}
    for way, cache in made.items():
        taken = _taken(cache, shared) if isinstance(cache, PagedCache) else cache.nbytes
        memory = {"megabytes": taken / 1e6, "over_tokens": taken / tokens_take}
        found[way] = _times(times[way][1:], times["rooms"][1:]) | memory
    return found


def _check_equal(way: str, logits: torch.Tensor, expected: torch.Tensor) -> None:
    difference, tolerance = relative_difference(logits, expected), LOGIT_TOLERANCES[logits.dtype]
    if not difference <= tolerance:
        raise AssertionError(
            f"logits of {way!r} must be those of 'rooms' up to {tolerance:g} of their spread, got {difference:.3g}"
        )


def _taken(cache: PagedCache, shared: PromptRoom) -> int:
    """Bytes in memory of what the rows wrote and of the prompt that they show."""
    blocks = [shared.block(storage) for storage in (*shared.keys, *shared.values)]
    return resident_bytes([(space.start, space.nbytes) for space in (*cache.spaces, *blocks)])


def _times(times: list[float], rooms: list[float]) -> dict[str, float]:
    ratios = sorted(own / room for own, room in zip(times, rooms, strict=True))
    quarter = len(ratios) // 4
    return {
        "ms": 1e3 * statistics.median(times),
        "ratio": statistics.median(ratios),
        "low": ratios[quarter],
        "high": ratios[-quarter - 1],
    }


def read_options(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(REASONER), help="folder, hub id or short name (default: bundled model)")
    parser.add_argument("--rows", type=positive_integer, default=8, help="rows decoded together (%(default)s)")
    parser.add_argument(
        "--lengths",
        type=count_list,
        default=[100, 1500],
        metavar="SHORTEST,LONGEST",
        help="committed tokens of the shortest and the longest row (default: 100,1500)",
    )
    parser.add_argument("--prompt", type=positive_integer, default=60, help="tokens that all rows share (%(default)s)")
    parser.add_argument("--nodes", type=whole_number, default=4, help="draft nodes per row (%(default)s)")
    parser.add_argument("--steps", type=positive_integer, default=60, help="steps of every way, in turn (%(default)s)")
    options = parser.parse_args(command_line)
    if len(options.lengths) != 2 or options.lengths[0] > options.lengths[1]:
        given = ",".join(map(str, options.lengths))
        parser.error(f"--lengths must be SHORTEST,LONGEST, in this order, got {given}")
    if options.rows == 1 and options.lengths[0] < options.lengths[1]:
        parser.error(f"--rows 1 has one length, got {options.lengths[0]},{options.lengths[1]}; give --lengths N,N")
    if options.prompt >= options.lengths[0]:
        parser.error(f"--prompt must be less than the shortest row's {options.lengths[0]}, got {options.prompt}")
    return options


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    found = measure(options)
    print(format_table(HEADER, [(way, *figures.values()) for way, figures in found.items()]), end="\n\n")
    print(json.dumps(found))


def main(command_line: Sequence[str] | None = None) -> int:
    options = read_options(command_line)
    return run_command("bench_cache", lambda interruption: run(options))


if __name__ == "__main__":
    sys.exit(main())
