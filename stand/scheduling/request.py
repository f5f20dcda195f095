"""What a run is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stand.forward.ranks import Ranks
from stand.laws.logprobs import LogprobNotes, TokenLogprobs
from stand.media.media import Media
from stand.texts.stop import StopRule


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Samples of one prompt, for `Engine.run`. What is None here is the run's.

    Sampling (temperature, filters, penalties, processors), seed, `draft` and `learn` belong to the run: one batch has
    one law and one source of random numbers, in which the rows' numbers name their own.
    """

    prompt: object  # a text, a chat, token ids, or the output of a tokenizer or a processor
    num_return_sequences: int | None = None
    max_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None  # added to the run's
    stop_token_ids: int | Sequence[int] | None = None  # instead of the run's
    rows: Sequence[int] | None = None  # numbers of the rows, in [0, 2**32); None: the next ones of the run
    id: object = None  # the caller's, given back with every trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A row that has ended."""

    id: object  # of its request
    row: int  # its number in the run: with the seed and the prompt it names the row's random numbers
    token_ids: list[int]  # the new tokens, an end token included
    text: str | None  # special tokens dropped; None without a tokenizer
    finish_reason: str  # "eos", "stop", "criteria", "length" or "time"; see `StopRule.cut`
    seed: int  # of the run
    num_prompt_tokens: int
    num_steps: int  # verifications; tokens per step are len(token_ids) / num_steps
    num_draft_tokens: int  # nodes drafted for it
    started: float  # seconds of the run's own time, from its beginning, in which others' pauses do not count
    ended: float
    logprobs: TokenLogprobs | None = None  # of the new tokens, where they were asked for


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request as the engine has read it."""

    number: int  # of the request in the call
    prompt: np.ndarray  # [L] int32
    limit: int  # new tokens per row
    rows: Sequence[int]
    stop: StopRule
    problem: int  # number of the prompt in the engine
    id: object
    media: Media | None = None  # what the prompt shows
    refuse: Callable[[Job, Exception], None] | None = None  # told where it cannot be served; None: the run ends so

    @property
    def shown(self) -> bytes:
        """Names what the prompt shows; of text alone b""."""
        return b"" if self.media is None else self.media.digest


def which_request(number: int, id: object) -> str:
    """A note for the error of a request, by its number in the run and its id."""
    return f"request {number} of the run, counted from 0{'' if id is None else f', with the id {id!r}'}"


def same_on_all(ranks: Ranks, jobs: Iterable[Job], logprobs: LogprobNotes | None) -> Iterator[Job]:
    """The jobs, each once all ranks have read the same one."""
    ranks.check_alike(None if logprobs is None else (logprobs.count, logprobs.kind), "logprobs or logprobs_mode")
    for job in jobs:
        ranks.check_alike((job.rows, job.limit, job.prompt.tobytes(), job.shown), "prompts or limits")
        yield job
    ranks.check_alike(None, "prompts or limits")
