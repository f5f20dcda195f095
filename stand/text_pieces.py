"""The text of a row while it grows: pieces that, joined, are the text of all its tokens, signs for bytes that make no
character apart."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that do not make a character yet


class TextPieces:
    """Decodes a row's tokens piece by piece.

    A piece is what the newest tokens add to the text of the tokens just before them, so that tokenizers which join
    words only within a sequence are right too. Tokens wait until their bytes make whole characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text was returned
        self._start = 0  # first token of the context that the next piece is decoded with

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that `token_ids` make certain; with `is_last` all that is left."""
        self._tokens += token_ids
        before = self._decode(self._tokens[self._start : self._shown])
        after = self._decode(self._tokens[self._start :])
        if len(after) <= len(before) or (after.endswith(UNFINISHED) and not is_last):
            return after[len(before) :] if is_last else ""
        self._start, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
