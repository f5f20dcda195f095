"""A tokenizer of one token per character for the tiny models."""

from tiny_models import VOCABULARY_SIZE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = [chr(60 + index) for index in range(VOCABULARY_SIZE)]  # with a to f, which StopStringCriteria encodes


def letter_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per character. special: characters by names of special tokens, such as `image_token`."""
    core = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(LETTERS)}, unk_token=LETTERS[0]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=special)
