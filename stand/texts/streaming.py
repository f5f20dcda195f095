"""What is committed, shown at once: pieces of all rows' texts, and one row's tokens to a streamer of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from stand.row import Row
from stand.scheduling.request import Job
from stand.texts.pieces import TextPieces


def into(streamer: BaseStreamer) -> Callable[[Row, list[int]], None]:
    """What a call is to do with the tokens of its row. Raises ValueError for what is no streamer."""
    if not isinstance(streamer, BaseStreamer):
        raise ValueError(
            f"streamer must be a BaseStreamer, got {type(streamer).__name__}; make a TextStreamer, or use engine.stream"
        )
    return lambda row, token_ids: streamer.put(torch.tensor(token_ids))


def begin_streaming(streamer: BaseStreamer, jobs: list[Job]) -> None:
    """Show the prompt, as `generate` does. Raises ValueError where more than one row is asked for."""
    num_rows = sum(len(job.rows) for job in jobs)
    if num_rows != 1:
        raise ValueError(f"a streamer shows one row, got {num_rows}; use engine.stream, which shows all rows")
    streamer.put(torch.from_numpy(jobs[0].prompt.astype(np.int64))[None])


class PiecesOfRows:
    """Texts of a call's rows, a piece with every commit."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.committed: list[tuple[int, str]] = []  # since they were shown: row and piece
        self._tokenizer = tokenizer
        self._texts: dict[int, TextPieces] = {}

    def add(self, row: Row, token_ids: list[int]) -> None:
        pieces = self._texts.setdefault(row.index, TextPieces(self._tokenizer))
        self.committed.append((row.index, pieces.add(token_ids, is_last=row.finish_reason is not None)))


@torch.inference_mode()
def shown(steps: Iterable[None], committed: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """What `committed` holds after every step of a call, each once."""
    for _ in steps:
        pieces = [(row, text) for row, text in committed if text]
        committed.clear()
        yield from pieces
