"""Ways into serving engines, called as the engines call them: what each drafts for recorded streams."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import numpy as np
from measuring.cpu_time import timed

from replay_parts.drafters import suffix_decoding_cache
from stand.plugins.vllm import LookupProposer

SUFFIX_DEPTH = 24  # vLLM's default


@dataclass(slots=True)
class Stream:
    """A recording that is being decoded: `tokens[:end]` is committed, the last `num_new` of it since the last step."""

    name: int
    tokens: np.ndarray  # int32, the prompt first
    num_prompt: int
    end: int
    num_new: int = 1


@dataclass(slots=True)
class Outcome:
    """One step: tokens drafted and accepted per stream, and the CPU time of the engine's calls."""

    drafted: list[int]
    accepted: list[int]
    microseconds: float


class Door(Protocol):
    def step(self, live: Sequence[Stream]) -> Outcome: ...

    def drop(self, place: int, live: Sequence[Stream]) -> None:
        """The stream in this place ends; the last one will take its place."""


def common(guess: Sequence[int], truth: np.ndarray) -> int:
    """How many tokens two runs begin alike with."""
    num = 0
    while num < min(len(guess), len(truth)) and guess[num] == truth[num]:
        num += 1
    return num


def chain_outcome(chains: Sequence[Sequence[int]], live: Sequence[Stream], microseconds: float) -> Outcome:
    accepted = [
        common(chain, one.tokens[one.end : one.end + len(chain)]) for chain, one in zip(chains, live, strict=True)
    ]
    return Outcome([len(chain) for chain in chains], accepted, microseconds)


class VllmDoor:
    """`LookupProposer` with the arrays of vLLM's input batch: rows of ended requests are filled by the last one."""

    def __init__(self, num_tokens: int, *, num_rows: int, longest: int, options: dict):
        config = SimpleNamespace(
            additional_config={"stand": {"drafts": "all", **options}},  # no step is run that could be timed
            speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
            model_config=SimpleNamespace(max_model_len=longest + num_tokens + 1, get_vocab_size=lambda: 2**31),
            scheduler_config=SimpleNamespace(max_num_seqs=num_rows),
        )
        self.proposer = LookupProposer(config)
        self.tokens = np.zeros((num_rows, longest), dtype=np.int32)
        self.lengths = np.zeros(num_rows, dtype=np.int32)

    def step(self, live: Sequence[Stream]) -> Outcome:
        sampled = []
        for row, one in enumerate(live):
            first = 0 if self.lengths[row] == 0 else one.end - one.num_new
            self.tokens[row, first : one.end] = one.tokens[first : one.end]
            self.lengths[row] = one.end
            sampled.append(one.tokens[one.end - one.num_new : one.end].tolist())
        took, chains = timed(self.proposer.propose, sampled, self.lengths, self.tokens, slot_mappings=None)
        return chain_outcome(chains, live, took)

    def drop(self, place: int, live: Sequence[Stream]) -> None:
        last = len(live) - 1
        self.tokens[place], self.lengths[place] = self.tokens[last], self.lengths[last]
        self.lengths[last] = 0


class SuffixDoor:
    """Arctic's suffix decoding as vLLM's `suffix` method calls it; `factor` 1 and `floor` 0.1 are vLLM's defaults."""

    def __init__(self, num_tokens: int, *, factor: float, floor: float):
        self.cache = suffix_decoding_cache()(max_tree_depth=SUFFIX_DEPTH, max_cached_requests=10_000)
        self.bounds = {"max_spec_tokens": num_tokens, "max_spec_factor": factor, "min_token_prob": floor}
        if factor > 1:
            self.bounds["max_spec_offset"] = float(num_tokens)
        self.known: set[int] = set()

    def step(self, live: Sequence[Stream]) -> Outcome:
        took, chains = timed(self._propose, live)
        return chain_outcome(chains, live, took)

    def _propose(self, live: Sequence[Stream]) -> list[list[int]]:
        chains = []
        for one in live:
            if one.name not in self.known:
                self.known.add(one.name)
                self.cache.start_request(one.name, np.ascontiguousarray(one.tokens[: one.num_prompt]))
            self.cache.add_active_response(one.name, one.tokens[one.end - one.num_new : one.end].tolist())
            pattern = np.ascontiguousarray(one.tokens[max(0, one.end - SUFFIX_DEPTH) : one.end])
            chains.append(list(self.cache.speculate(one.name, pattern, **self.bounds).token_ids))
        return chains

    def drop(self, place: int, live: Sequence[Stream]) -> None:
        self.cache.stop_request(live[place].name)


class CorpusDoor:
    """A class like SGLang's NgramCorpus, called as its NGRAM worker does: `module:Class`, `d` nodes per request."""

    def __init__(self, path: str, num_nodes: int, *, depth: int):
        module, name = path.split(":")
        corpus = getattr(importlib.import_module(module), name)
        self.num_nodes, self.depth = num_nodes, depth
        self.corpus = corpus(
            max_trie_depth=depth,
            min_bfs_breadth=1,
            max_bfs_breadth=10,
            draft_token_num=num_nodes,
            match_type="BFS",
            capacity=10_000_000,
        )

    def step(self, live: Sequence[Stream]) -> Outcome:
        names = [str(one.name) for one in live]
        tails = [one.tokens[max(0, one.end - self.depth) : one.end].tolist() for one in live]
        totals = [one.end for one in live]
        waited, _ = timed(self.corpus.synchronize)
        took, (token_ids, masks) = timed(self.corpus.batch_get, names, tails, totals)
        put, _ = timed(self.corpus.batch_put, tails)
        size = self.num_nodes
        token_ids, masks = token_ids.reshape(-1, size), masks.reshape(-1, size, size)
        earlier = np.tril(masks, -1) * (np.arange(size) + 1)
        parents = earlier.max(axis=2) - 1
        accepted = [path_length(*row, one) for *row, one in zip(token_ids, parents, live, strict=True)]
        return Outcome([size - 1] * len(live), accepted, waited + took + put)

    def drop(self, place: int, live: Sequence[Stream]) -> None:
        self.corpus.erase_match_state([str(live[place].name)])


def path_length(tokens: np.ndarray, parents: np.ndarray, one: Stream) -> int:
    """Tokens of the longest path from the root that come next in the stream."""
    node, num = 0, 0
    if tokens[0] != one.tokens[one.end - 1]:
        raise ValueError(f"a draft's root must be the last token {one.tokens[one.end - 1]}, got {tokens[0]}")
    while one.end + num < len(one.tokens):
        found = np.flatnonzero((parents == node) & (tokens == one.tokens[one.end + num]))
        if len(found) == 0:
            break
        node, num = found[0], num + 1
    return num
