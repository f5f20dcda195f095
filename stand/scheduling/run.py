"""A run as its user sees it: an iterator over trajectories, in the order in which they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedTokenizerBase

from stand.call import Call
from stand.row import Row
from stand.scheduling.request import Job, Trajectory
from stand.stats import Stats


class Run(Iterator[Trajectory]):
    """Made by `Engine.run`. `close` ends it; rows that are live then are lost. While a step runs, as in `on_step` or in
    another thread, it ends behind that step, and what has ended by then is still given."""

    def __init__(
        self,
        call: Call,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        on_step: Callable[[Run], None] | None = None,
    ):
        if on_step is not None and not callable(on_step):
            raise ValueError(f"on_step must be callable with the run, got {on_step!r}; leave it out for none")
        self._call = call
        self._tokenizer = tokenizer
        self._on_step = on_step
        self._is_closed = False
        self._trajectories = self._decode()

    def __next__(self) -> Trajectory:
        if self._trajectories.gi_running:
            raise ValueError(
                "a run must be asked by one caller at a time, got another one while it decodes; iterate in one thread"
            )
        return next(self._trajectories)

    def close(self) -> None:
        self._is_closed = True
        if not self._trajectories.gi_running:
            self._trajectories.close()

    def cancel(self, id: object) -> None:
        """End the rows of the requests with this id that were read so far: behind the step that runs, and without
        trajectories of rows that have not ended by then. A vote is decided, or a branch is given up. Warns where none
        of them ever had this id."""
        self._call.scheduler.cancel(id)

    @property
    def stats(self) -> Stats:
        """Of all steps so far."""
        return self._call.stats

    @property
    def seed(self) -> int:
        return self._call.seed

    @property
    def num_live(self) -> int:
        """Rows that were decoded in the last step and go on."""
        return sum(row.finish_reason is None for row in self._call.scheduler.live)

    @property
    def num_decoded(self) -> int:
        """Rows that were decoded in the last step."""
        return len(self._call.scheduler.live)

    @property
    def num_cached(self) -> int:
        """Tokens of live rows whose keys are in the cache. A prompt counts once for all its rows, also where a row that
        was put back has a copy of its own."""
        rows = [row for row in self._call.scheduler.live if row.finish_reason is None]
        prompts = {row.problem: len(row.prompt) - 1 for row in rows}
        return sum(row.num_cached - prompts[row.problem] for row in rows) + sum(prompts.values())

    @property
    def num_slots(self) -> int | None:
        """Tokens that the memory now taken for keys would hold, prompts that wait included; None where the cache has
        no pages."""
        return self._call.scheduler.admission.num_slots

    @torch.inference_mode()
    def _decode(self) -> Iterator[Trajectory]:
        """What ends in a step comes before the next one, and before an error that a later one ends in."""
        steps = self._call.steps(until_ended=True)
        try:
            for _ in steps:
                if self._on_step is not None:
                    self._on_step(self)
                yield from self._ended()
                if self._is_closed:
                    break
            yield from self._ended()  # of the last step, where all that waited was cancelled
        except Exception:
            yield from self._ended()
            raise
        finally:
            steps.close()

    def _ended(self) -> Iterator[Trajectory]:
        ended = self._call.scheduler.ended
        while ended:
            one = trajectory_of(self._call, self._tokenizer, *ended.popleft())
            if one.finish_reason != "cancelled":
                yield one


def trajectory_of(call: Call, tokenizer: PreTrainedTokenizerBase | None, job: Job, row: Row) -> Trajectory:
    """Of a row that has ended; to be called once."""
    token_ids = row.new_token_ids.tolist()
    return Trajectory(
        id=job.id,
        row=row.index,
        token_ids=token_ids,
        text=None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True),
        finish_reason=row.finish_reason,
        seed=call.seed,
        num_prompt_tokens=len(row.prompt),
        num_steps=row.num_steps,
        num_draft_tokens=row.num_drafted,
        started=row.started,
        ended=row.ended,
        logprobs=None if call.logprobs is None or not row.num_steps else call.logprobs.take(row),
    )
