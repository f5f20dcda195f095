"""Log-probabilities of the tokens that rows gain, and of the likeliest tokens in the same places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from stand.argument_checks import whole_number
from stand.forward.devices import uploaded
from stand.laws.sampling import TargetLaw
from stand.laws.scored import LOGITS, SCORES, Scored
from stand.row import Row
from stand.trees import DraftBatch

Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # those of `TokenLogprobs`
RAW, PROCESSED = MODES = "raw_logprobs", "processed_logprobs"  # vLLM's names


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Of n new tokens of a row; natural logarithms, -inf where a token has no probability."""

    of_tokens: np.ndarray  # [n] float32
    top_ids: np.ndarray  # [n, k] int32: the likeliest tokens of each place, best first
    top: np.ndarray  # [n, k] float32: their log-probabilities

    def __len__(self) -> int:
        return len(self.of_tokens)

    def between(self, start: int, stop: int) -> TokenLogprobs:
        """Of some of the tokens, views."""
        return TokenLogprobs(self.of_tokens[start:stop], self.top_ids[start:stop], self.top[start:stop])

    def confidence(self) -> np.ndarray:
        """[n] float64: minus the mean log-probability of the k likeliest tokens, large where the model is sure
        (arXiv 2508.15260, section 3.1). Raises ValueError where k is 0."""
        if not self.top.shape[1]:
            raise ValueError("confidence needs the likeliest tokens, got logprobs=0; ask for 20, say")
        return -self.top.mean(axis=1, dtype=np.float64)


class Drawn(NamedTuple):
    """What is asked of n nodes of a step: their places among its nodes, and the token that came behind each."""

    nodes: np.ndarray  # [n] int64
    tokens: np.ndarray  # [n] int64
    count: int  # likeliest tokens that are asked for beside

    def of_scores(self, scores: torch.Tensor, law: TargetLaw | None = None) -> Fields:
        """Under the softmax of scores [M, V], behind the temperature and the filters of `law` where one is given."""
        scores = scores[uploaded(self.nodes, scores.device)].float()
        scores = scores if law is None else law.warp(scores)
        own, ids, top = self._picked(scores)
        total = torch.logsumexp(scores, dim=-1)
        return own - total, ids, top - total[:, None]

    def of_laws(self, laws: torch.Tensor) -> Fields:
        """Under probabilities [M, V]. Those below 1e-38 are no good: it is for laws that have none of them."""
        own, ids, top = self._picked(laws[uploaded(self.nodes, laws.device)])
        return own.log(), ids, top.log()

    def _picked(self, values: torch.Tensor) -> Fields:
        top = torch.topk(values, self.count, dim=-1)
        own = values.gather(1, uploaded(self.tokens, values.device)[:, None])[:, 0]
        return own, top.indices.to(torch.int32), top.values


def are_of_laws(law: TargetLaw) -> bool:
    """Whether processed ones are made of the laws themselves, and else of scores: top_p leaves no tiny probability, and
    to take it anew would sort the vocabulary."""
    return law.params.top_p < 1.0


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Of the tokens that a step's rows may gain, one row's after another's."""

    starts: list[int]  # the first token of each row
    fields: tuple[np.ndarray, np.ndarray, np.ndarray]  # of `TokenLogprobs`

    def of(self, place: int, count: int) -> TokenLogprobs:
        """Of the first `count` tokens of the row in this place, views that cannot be written to."""
        return TokenLogprobs(*self.fields).between(self.starts[place], self.starts[place] + count)


class _Growing:
    """The fields of one row's tokens, in arrays that double."""

    def __init__(self, fields: Sequence[np.ndarray]):
        self._fields = [np.empty((32, *field.shape[1:]), dtype=field.dtype) for field in fields]
        self._length = 0

    def extend(self, fields: Sequence[np.ndarray], start: int, count: int) -> None:
        end = self._length + count
        for number, (own, field) in enumerate(zip(self._fields, fields, strict=True)):
            if end > len(own):
                own = self._fields[number] = np.concatenate(
                    [own, np.empty((max(len(own), count), *own.shape[1:]), own.dtype)]
                )
            own[self._length : end] = field[start : start + count]
        self._length = end

    def newest(self, count: int) -> TokenLogprobs:
        return TokenLogprobs(*(field[self._length - count : self._length].copy() for field in self._fields))

    def whole(self) -> TokenLogprobs:
        return self.newest(self._length)


class LogprobNotes:
    """What a call writes down of its rows while it decodes them."""

    def __init__(self, count: int, kind: str):
        """count: likeliest tokens per place.

        kind: RAW for the model's law, before processors, temperature and filters; PROCESSED for the one that is drawn
        from, under greedy decoding before the best token is taken."""
        self.count, self.kind = count, kind
        self._noted: dict[int, _Growing] = {}  # by row index

    def held(self, law: TargetLaw) -> frozenset[str]:
        """What `read` asks of a step with this law, as in `StepStart.held`."""
        if self.kind == RAW:
            return frozenset({LOGITS})
        return frozenset() if are_of_laws(law) else frozenset({SCORES})

    def read(
        self, scored: Scored, batch: DraftBatch, accepted: Sequence[np.ndarray], gained: Sequence[list[int]]
    ) -> StepLogprobs:
        """Of a step's tokens gained[i], by row: those of the path accepted[i] and the one behind it."""
        nodes: list[int] = []
        tokens: list[int] = []
        starts: list[int] = []
        for first, path, own in zip(batch.offsets.tolist(), accepted, gained, strict=False):
            starts.append(len(tokens))
            nodes += [first, *(first + path).tolist()]
            tokens += own
        drawn = Drawn(np.array(nodes, dtype=np.int64), np.array(tokens, dtype=np.int64), self.count)
        fields = tuple(field.cpu().numpy() for field in self._found(drawn, scored))
        for field in fields:
            field.setflags(write=False)  # criteria are shown them before they are kept
        return StepLogprobs(starts, fields)

    def _found(self, drawn: Drawn, scored: Scored) -> Fields:
        if self.kind == RAW:
            return drawn.of_scores(scored.logits)
        if are_of_laws(scored.law):
            return drawn.of_laws(scored.laws)
        return drawn.of_scores(scored.scores, scored.law)

    def keep(self, rows: Sequence[Row], read: StepLogprobs, counts: Iterable[int]) -> None:
        """Of each row's tokens so many, which it gains."""
        for row, start, count in zip(rows, read.starts, counts, strict=True):
            noted = self._noted.get(row.index)
            if noted is None:
                noted = self._noted[row.index] = _Growing(read.fields)
            noted.extend(read.fields, start, count)

    def newest(self, row: Row, count: int) -> TokenLogprobs:
        """Of so many tokens that a row has gained last."""
        return self._noted[row.index].newest(count)

    def take(self, row: Row) -> TokenLogprobs:
        """Of a row that has ended, once."""
        return self._noted.pop(row.index).whole()


def logprob_notes(count: object, mode: object, *, vocabulary_size: int) -> LogprobNotes | None:
    """As a call asks for them, mode None: RAW. Raises ValueError for what does not fit, a mode without a count among
    it."""
    if count is None and mode is None:
        return None
    if count is None:
        raise ValueError(f"logprobs_mode needs logprobs, got {mode!r} alone; give logprobs=0, or leave it out")
    if mode is not None and not (isinstance(mode, str) and mode in MODES):
        raise ValueError(f"logprobs_mode must be one of {', '.join(MODES)}, got {mode!r}; leave it out for {RAW}")
    count = whole_number("logprobs", count, "0 asks for those of the new tokens alone", least=0)
    if count > vocabulary_size:
        raise ValueError(
            f"logprobs must be at most the vocabulary's {vocabulary_size} tokens, got {count}; ask for fewer"
        )
    return LogprobNotes(count, RAW if mode is None else mode)
