"""The text of a row while it grows: pieces that, joined, are the text of all its tokens, signs for bytes that make no
character apart."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that do not make a character yet
LONGEST_CLEANED = 3  # characters of " n't" and the like before the last one, which makes the space go


class TextPieces:
    """Decodes a row's tokens piece by piece.

    A piece is what the newest tokens add to the text of the tokens just before them, so that tokenizers which join
    words only within a sequence are right too. Tokens wait until their bytes make whole characters, and where the
    tokenizer drops spaces before punctuation, until no later token makes a space go.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._drops_spaces = _drops_spaces(tokenizer)
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text was returned
        self._start = 0  # first token of the context that the next piece is decoded with

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that `token_ids` make certain; with `is_last` all that is left."""
        self._tokens += token_ids
        before = self._decode(self._tokens[self._start : self._shown])
        after = self._decode(self._tokens[self._start :])
        if is_last:
            return after[len(before) :]
        if len(after) <= len(before) or after.endswith(UNFINISHED) or self._may_lose_a_space():
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def _may_lose_a_space(self) -> bool:
        if not self._drops_spaces:
            return False
        raw = self._tokenizer.decode(
            self._tokens[self._start :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return " " in raw[-LONGEST_CLEANED:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _drops_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its texts are cleaned up, as `PreTrainedTokenizerBase.decode` decides: of BPE's only where forced."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    is_bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return not is_bpe or getattr(tokenizer, name, False)
