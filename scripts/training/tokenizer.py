"""The bundled model's tokenizer: a small BPE whose numbers are single digits."""

from __future__ import annotations

import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from workloads.problems import END_TOKEN, PAD_TOKEN, PROBLEM_TOKEN, THINK_END, THINK_TOKEN, draw_problem
from workloads.reasoning import write_reasoning

# One digit; a word; signs with the spaces around them; white space.
PIECES = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+ ?|\s+")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}" + PROBLEM_TOKEN + "{{ message.content }}"
    "{% elif message.role == 'assistant' %}" + THINK_TOKEN + "{{ message.content }}" + END_TOKEN + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + THINK_TOKEN + "{% endif %}"
)
LEAST_VOCABULARY = 256 + 5  # every byte and the special tokens


def train_tokenizer(vocabulary_size: int, *, seed: int, samples: int = 8000) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose numbers are single digits, trained on freshly drawn texts."""
    rng = random.Random(f"tokenizer {seed}")
    texts = []
    for _ in range(samples):
        problem = draw_problem(rng, held_out=False)
        texts.append(f"{problem.problem}\n{write_reasoning(problem, rng).replace(THINK_END, '')}")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    specials = [PAD_TOKEN, PROBLEM_TOKEN, THINK_TOKEN, END_TOKEN]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - 1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.add_tokens([AddedToken(THINK_END, special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[PROBLEM_TOKEN, THINK_TOKEN],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
