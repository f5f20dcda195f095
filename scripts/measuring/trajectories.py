"""The three ways of drawing trajectories that `throughput.py` compares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from workloads.answers import extract_answer, majority_answer

from stand import Engine, Request, Stats

ARMS = ("generate", "plain", "drafted")
REPEATING = ("match", "coupled")  # rules whose tokens follow from seed and row alone, whatever is drafted beside whom


@dataclass(frozen=True, slots=True)
class Sampling:
    """How trajectories are drawn, the same for every arm. At most `rows` are decoded together."""

    rows: int
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """Some trajectories of one problem: their texts and what they cost."""

    texts: tuple[str, ...]
    stats: Stats

    @property
    def answers(self) -> tuple[int | None, ...]:
        return tuple(extract_answer(text) for text in self.texts)

    def accuracy(self, answer: int) -> float:
        """Share of single samples that are right."""
        return sum(value == answer for value in self.answers) / len(self.answers)

    def vote_is_right(self, answer: int) -> bool:
        return majority_answer(self.answers) == answer


def chunk_sizes(count: int, rows: int) -> list[int]:
    """`count` trajectories in blocks of at most `rows` rows."""
    return [min(rows, count - start) for start in range(0, count, rows)]


def derived_seed(seed: int, problem: int, chunk: int) -> int:
    """A seed in [0, 2**63) for one call: the same in every arm and for every number of trajectories."""
    key = f"{seed} {problem} {chunk}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def draw_with_engine(
    engine: Engine, prompt: Sequence[int], count: int, sampling: Sampling, *, problem: int, draft: bool
) -> Drawn:
    """Trajectories of the engine, with drafts or without; a row that ends hands its place on."""
    run = engine.run(
        [Request(list(prompt), num_return_sequences=count)],
        max_rows=sampling.rows,
        max_new_tokens=sampling.max_new_tokens,
        **law_settings(sampling),
        seed=derived_seed(sampling.seed, problem, 0),
        draft=draft,
    )
    ended = sorted(run, key=lambda trajectory: trajectory.row)
    return Drawn(tuple(trajectory.text for trajectory in ended), run.stats)


@torch.inference_mode()
def draw_with_generate(engine: Engine, prompt: Sequence[int], count: int, sampling: Sampling, *, problem: int) -> Drawn:
    """Trajectories of transformers' own `model.generate`, on the engine's model."""
    model, tokenizer = engine.model, engine.tokenizer
    input_ids = torch.tensor([list(prompt)], device=model.device)
    stats, texts = Stats(num_prompt_tokens=len(prompt)), []
    for chunk, size in enumerate(chunk_sizes(count, sampling.rows)):
        torch.manual_seed(derived_seed(sampling.seed, problem, chunk))
        with stats.timed_wall():
            output = model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                num_return_sequences=size,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=_pad_id(tokenizer),
                **law_settings(sampling),
            )
        rows = [_until_end(row, model.generation_config.eos_token_id) for row in output[:, len(prompt) :].tolist()]
        stats.num_tokens += sum(map(len, rows))
        stats.num_steps += sum(map(len, rows))
        texts.extend(tokenizer.batch_decode(rows, skip_special_tokens=True))
    return Drawn(tuple(texts), stats)


def law_settings(sampling: Sampling) -> dict[str, object]:
    """Arguments that mean one law to both arms; what is left open is off, and not the model's or a default."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
    }


def _pad_id(tokenizer) -> int:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def _until_end(token_ids: list[int], end: int | list[int] | None) -> list[int]:
    """The tokens up to and including the first end token; the rest is padding."""
    ends = {end} if isinstance(end, int) else set(end or ())
    for place, token in enumerate(token_ids):
        if token in ends:
            return token_ids[: place + 1]
    return token_ids
