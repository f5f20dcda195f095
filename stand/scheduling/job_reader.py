"""Requests as users write them, read one by one: prompt, limit, stop rule, and the law's processors."""

from __future__ import annotations

import copy
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from stand.argument_checks import whole_number
from stand.forward.devices import input_device
from stand.forward.model import text_config
from stand.generation_settings import PREPARED, GenerationSettings
from stand.laws.grammars.allowed_tokens import AllowedInCall
from stand.laws.grammars.matchers import check_rows
from stand.laws.logprobs import logprob_notes
from stand.laws.processors import checked_processors
from stand.laws.sampling import TargetLaw
from stand.media.check import check_media
from stand.media.media import TYPES, Media, media_arguments
from stand.numbered_keys import NumberedKeys
from stand.row import Row
from stand.scheduling.request import Job, Request, which_request
from stand.texts.prompts import Prompt, PromptReader
from stand.texts.stop import StopRule, as_strings
from stand.trees import problem_key

MOST_NAMED = 1 << 20  # rows of one request, by their numbers
ROW_NUMBERS = 1 << 32  # row numbers lie below: random numbers are named by as many bits


class JobReader:
    """Reads the requests of one call. What does not fit raises ValueError, with nothing admitted."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        problems: NumberedKeys,
        /,
        *,
        processor: ProcessorMixin | None = None,
        follower: str | None = None,
        generation_config: GenerationConfig | None = None,
        stop: object = None,
        stop_token_ids: object = None,
        stopping_criteria: object = None,
        logits_processors: object = None,
        prefix_allowed_tokens_fn: object = None,
        logprobs: object = None,
        logprobs_mode: object = None,
        **settings: object,
    ):
        """problems: the engine's prompts by what names them.
        processor: of the model, where one was given. follower: name of a drafter that follows texts alone.
        settings: fields of `GenerationConfig`; the others are as in `Engine.generate`."""
        self._model, self._tokenizer, self._problems = model, tokenizer, problems
        self._processor, self._follower = processor, follower
        shown = [name for name in settings if name in media_arguments(model) or name in TYPES]
        if shown:
            raise ValueError(
                f"what a prompt shows must come with its tokens, got {', '.join(shown)} beside them; pass what the "
                "processor returns as a whole, as in engine.generate(inputs)"
            )
        self._processors = checked_processors(logits_processors)
        self._more = {}
        if prefix_allowed_tokens_fn is not None:
            if not callable(prefix_allowed_tokens_fn):
                raise ValueError(
                    "prefix_allowed_tokens_fn must be callable with a prompt's number and a row's tokens, got "
                    f"{prefix_allowed_tokens_fn!r:.80}; pass a function, as to transformers' generate"
                )
            self._more["prefix_allowed_tokens_fn"] = AllowedInCall(prefix_allowed_tokens_fn)
        default_end = None if tokenizer is None else tokenizer.eos_token_id
        self.settings = GenerationSettings.resolve(model, generation_config, stop_token_ids, default_end, **settings)
        self._strings = as_strings(stop)
        self._stop = StopRule(
            self.settings.end_ids,
            stop_strings=(*self.settings.stop_strings, *self._strings),
            tokenizer=tokenizer,
            criteria=stopping_criteria,
            device=input_device(model),
            max_time=self.settings.config.max_time,
        )
        self.logprobs = logprob_notes(logprobs, logprobs_mode, vocabulary_size=text_config(model).vocab_size)
        if self._stop.wants_logprobs and self.logprobs is None:
            raise ValueError(
                "a stopping criterion that wants log-probabilities needs logprobs, got None; give 20, say, to generate "
                "or run"
            )
        if self.logprobs is not None and self.logprobs.count < self._stop.least_logprobs:
            raise ValueError(
                f"a stopping criterion needs the {self._stop.least_logprobs} likeliest tokens or more, got "
                f"logprobs={self.logprobs.count}; give 20, say"
            )
        self._law: TargetLaw | None = None
        self._num_jobs = self._next_row = 0
        self._named: set[int] = set()  # numbers that requests gave their rows
        self._counted: list[range] = []  # the others

    @property
    def law(self) -> TargetLaw:
        """Of all requests read so far, of which there must be one."""
        return self._law

    @property
    def prompts(self) -> PromptReader:
        """How this call's prompts are read."""
        pad_id = self.settings.config.pad_token_id
        if pad_id is None and self._tokenizer is not None:
            pad_id = self._tokenizer.pad_token_id
        return PromptReader(
            text_config(self._model).vocab_size,
            tokenizer=self._tokenizer,
            pad_id=pad_id,
            end_ids=self.settings.end_ids,
            processor=self._processor,
            media_names=media_arguments(self._model),
        )

    def check_rows(self, num_rows: int) -> None:
        """Raises ValueError where processors are made for another number of rows than the call has."""
        for processor in self._processors:
            check_rows(processor, num_rows)

    def read(self, request: Request | object) -> Job:
        """A request, or a prompt alone. An error says in a note which one it was."""
        number = self._num_jobs  # of those before, all of which were read: none comes after an error
        try:
            return self._read(request if isinstance(request, Request) else Request(request))
        except Exception as error:  # a template or a tokenizer may raise anything
            error.add_note(which_request(number, getattr(request, "id", None)))
            raise

    def _read(self, request: Request) -> Job:
        read = self.prompts.read(request.prompt, None)
        if len(read) != 1:
            raise ValueError(f"a request has one prompt, got {len(read)}; make a request of each")
        settings, stop = self.settings, self._stop
        if any(own is not None for own in (request.max_new_tokens, request.stop, request.stop_token_ids)):
            settings = self._settings_of(request)
            strings = (*settings.stop_strings, *self._strings, *as_strings(request.stop))
            stop = stop.with_ends(settings.end_ids, strings)
        return self.job(read[0], self._row_numbers(request), settings=settings, stop=stop, id=request.id)

    def forget(self, job: Job) -> None:
        """It was read and has no row."""
        row = Row(job.rows[0], job.prompt, job.limit, request=job.number)
        self._law.forget(row, is_last=True)

    def job(
        self,
        prompt: Prompt,
        rows: Sequence[int],
        *,
        settings: GenerationSettings | None = None,
        stop: StopRule | None = None,
        id: object = None,
    ) -> Job:
        """settings and stop: default the call's."""
        settings, token_ids = self.settings if settings is None else settings, prompt.token_ids
        limit = settings.limit(self._model, len(token_ids))
        media = self._media(prompt)
        processors = settings.processors(self._model, token_ids, limit, own=self._processors, **self._more)
        number = self._num_jobs
        if self._law is None:
            self._law = settings.law(processors)
        else:
            self._law.admit(number, processors, end_ids=settings.end_ids)
        self._num_jobs += 1
        self._note(rows)
        stop = self._stop if stop is None else stop
        name = problem_key(token_ids) if media is None else (problem_key(token_ids), media.digest)
        return Job(number, token_ids, limit, rows, stop, self._problems.of(name), id, media)

    def _media(self, prompt: Prompt) -> Media | None:
        """What it shows, which the model is known to be served with then."""
        if not prompt.shown:
            return None
        if self._follower is not None:
            raise ValueError(
                f"a drafter that follows the model's hidden states needs prompts of text alone, got {self._follower} "
                f"and {', '.join(prompt.shown)}; wrap the model without drafter="
            )
        media = Media.of(self._model, prompt.token_ids, prompt.shown)
        check_media(self._model, prompt.token_ids, media)
        return media

    def _note(self, rows: Sequence[int]) -> None:
        """These numbers are taken."""
        self._next_row = max(self._next_row, (rows[-1] if isinstance(rows, range) else max(rows)) + 1)
        if not isinstance(rows, range):
            self._named.update(rows)
        elif self._counted and self._counted[-1].stop == rows.start:
            self._counted[-1] = range(self._counted[-1].start, rows.stop)
        else:
            self._counted.append(rows)

    def _settings_of(self, request: Request) -> GenerationSettings:
        """The call's, as they were when it was made, with the request's own."""
        config = copy.deepcopy(self.settings.config)
        setattr(config, PREPARED, True)
        resolved = GenerationSettings.resolve(
            self._model, config, request.stop_token_ids, max_new_tokens=request.max_new_tokens
        )
        return replace(resolved, has_max_length=self.settings.has_max_length)

    def _row_numbers(self, request: Request) -> Sequence[int]:
        count = self.settings.num_return_sequences
        if request.num_return_sequences is not None:
            count = request.num_return_sequences
        count = whole_number("num_return_sequences", count, "ask for at least one row")
        if request.rows is None:
            return self._next_rows(count)
        rows = _integers(request.rows)
        if request.num_return_sequences is not None and len(rows) != count:
            raise ValueError(f"rows must name {count} rows, got {len(rows)}; leave num_return_sequences out")
        taken = [row for row in rows if row in self._named or self._is_counted(row)]
        if not rows or min(rows) < 0 or max(rows) >= ROW_NUMBERS or len(set(rows)) < len(rows) or taken:
            raise ValueError(
                f"rows must be numbers in [0, 2**32) that no other row of the run has, got {rows[:8]}"
                f"{f', of which {taken[:8]} are taken' if taken else ''}; equal numbers would share random numbers"
            )
        return rows

    def _is_counted(self, row: int) -> bool:
        before = bisect_right(self._counted, row, key=lambda counted: counted.start)  # ascending
        return before > 0 and row in self._counted[before - 1]

    def _next_rows(self, count: int) -> range:
        rows = range(self._next_row, self._next_row + count)
        if rows.stop > ROW_NUMBERS:
            raise ValueError(
                f"row numbers must be in [0, 2**32), got {rows.stop - 1} after the run's largest; "
                "name the rows of this request, or begin another run"
            )
        return rows


def _integers(rows: object) -> list[int]:
    try:
        listed = list(islice(rows, MOST_NAMED + 1))
        named = [operator.index(None if isinstance(row, bool) else row) for row in listed]
    except TypeError:
        raise ValueError(f"rows must be a list of integers, got {rows!r:.80}; write rows=[7] for row 7") from None
    if len(named) > MOST_NAMED:
        raise ValueError(
            f"a request must name at most {MOST_NAMED} rows, got {rows!r:.80}; leave rows out, or make more requests"
        )
    return named
