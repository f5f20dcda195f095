"""The text of a row while it grows: pieces that, joined, are the text of all its tokens, signs for bytes that make no
character apart."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that do not make a character yet
MOST_WAITING = 32  # tokens: behind so many that end in no character it is known that most of them make none
LONGEST_CLEANED = 3  # characters of " n't" and the like before the last one, which makes the space go


class TextPieces:
    """Decodes a row's tokens piece by piece.

    A piece is what the newest tokens add to the text of the tokens just before them, so that tokenizers which join
    words only within a sequence are right too. Tokens wait until their bytes make whole characters, and where the
    tokenizer drops spaces before punctuation, until no later token makes a space go. What is decoded at once stays
    short, however long tokens show nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._drops_spaces = _drops_spaces(tokenizer)
        self._hidden = _hidden_tokens(tokenizer)
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text was returned
        self._start = 0  # first token of the context that the next piece is decoded with

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that `token_ids` make certain; with `is_last` all that is left."""
        self._tokens += [token for token in token_ids if token not in self._hidden]
        before = self._decode(self._tokens[self._start : self._shown])
        after = self._decode(self._tokens[self._start :])
        if is_last:
            return after[len(before) :]
        end = len(self._tokens)
        if after.endswith(UNFINISHED) and end - self._shown > MOST_WAITING and not self._drops_spaces:
            end, after = self._before_a_character(before, after)
        elif len(after) <= len(before) or after.endswith(UNFINISHED) or self._may_lose_a_space():
            return ""
        if end > self._shown:
            self._start, self._shown = self._shown, end
        return after[len(before) :]

    def _before_a_character(self, shown: str, text: str) -> tuple[int, str]:
        """A place near the end that lies in no character, and the text up to there; where none is found, what is shown.
        An unfinished character has three bytes at most, so it begins in one of the last three tokens."""
        for end in range(len(self._tokens) - 3, len(self._tokens)):
            before, after = self._decode(self._tokens[self._start : end]), self._decode(self._tokens[end:])
            if (before + after).replace(UNFINISHED, "") == text.replace(UNFINISHED, ""):
                return end, before
        return self._shown, shown

    def _may_lose_a_space(self) -> bool:
        if not self._drops_spaces:
            return False
        raw = self._tokenizer.decode(
            self._tokens[self._start :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return " " in raw[-LONGEST_CLEANED:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _hidden_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Those that `skip_special_tokens` takes out before anything is decoded."""
    if not getattr(tokenizer, "is_fast", False):
        return set(tokenizer.all_special_ids)
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _drops_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its texts are cleaned up, as `PreTrainedTokenizerBase.decode` decides: of BPE's only where forced."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    is_bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return not is_bpe or getattr(tokenizer, name, False)
