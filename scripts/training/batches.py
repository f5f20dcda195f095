"""Endless training batches of freshly drawn problems and reasonings."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerFast
from workloads.problems import END_TOKEN, THINK_TOKEN, draw_problem, write_prompt
from workloads.reasoning import write_reasoning

LENGTH_STEP = 32  # batches have lengths of this grid, so that the allocator can use its blocks again
WINDOW = 4  # batches drawn at once and sorted by length, so that little is padded
IGNORED = -100


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, *, rows: int, seed: str, order_seed: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input_ids [rows, L], labels [rows, L]); texts of similar length share a batch.

    Labels cover the reasoning and the answer, not the problem. `order_seed` is shared by all processes, so that
    their batches of one step have similar lengths and none waits for the other.
    """
    rng, order_rng = random.Random(seed), random.Random(order_seed)
    think, pad = tokenizer.convert_tokens_to_ids(THINK_TOKEN), tokenizer.pad_token_id
    while True:
        texts = []
        for _ in range(rows * WINDOW):
            problem = draw_problem(rng, held_out=False)
            texts.append(f"{write_prompt(problem.problem)}{write_reasoning(problem, rng)}{END_TOKEN}")
        encoded = sorted(tokenizer(texts)["input_ids"], key=len)
        order = list(range(WINDOW))
        order_rng.shuffle(order)
        for place in order:
            batch = encoded[place * rows : (place + 1) * rows]
            length = -(-len(batch[-1]) // LENGTH_STEP) * LENGTH_STEP
            input_ids = torch.full((rows, length), pad)
            labels = torch.full_like(input_ids, IGNORED)
            for row, token_ids in enumerate(batch):
                begin = token_ids.index(think) + 1
                input_ids[row, : len(token_ids)] = torch.tensor(token_ids)
                labels[row, begin : len(token_ids)] = input_ids[row, begin : len(token_ids)]
            yield input_ids, labels
