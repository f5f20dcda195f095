"""A proposer for vLLM, made as vLLM makes it, from a config of what the proposer reads."""

from __future__ import annotations

from types import SimpleNamespace

from stand.plugins.vllm import LookupProposer

MOST_ROWS, LONGEST, K = 6, 512, 4
VOCABULARY_SIZE = 1 << 17


def proposer(
    *, num_tokens: int = K, longest: int = LONGEST, rank: int = 0, place: int = 0, clock=None, parallel=None, **options
) -> LookupProposer:
    places = {"data_parallel_index": rank, "rank": place, "tensor_parallel_size": 2, **(parallel or {})}
    config = SimpleNamespace(
        additional_config={"stand": {"drafts": "all", **options}},
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: VOCABULARY_SIZE),
        scheduler_config=SimpleNamespace(max_num_seqs=MOST_ROWS),
        parallel_config=SimpleNamespace(**places),
    )
    return LookupProposer(config, clock=clock)
