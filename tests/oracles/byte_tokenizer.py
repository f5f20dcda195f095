"""A tokenizer of one token per byte for the tiny models."""

from tiny_models import VOCABULARY_SIZE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(others: str = "") -> PreTrainedTokenizerFast:
    """One token per byte: letters, and the bytes of a character that takes three. others: characters of one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isascii() and letter.isalpha()]
    beside = "".join(
        byte for byte, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(f"€{others}")
    )
    letters = letters[: VOCABULARY_SIZE - 1 - len(beside)]
    vocabulary = {letter: place for place, letter in enumerate([*letters, *beside, "<end>"])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
