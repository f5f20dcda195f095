"""Streams of text: the pieces of a row, joined, are its text; between pieces the model is free."""

import random

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import stand
from stand import step
from stand.texts.pieces import TextPieces

PROMPTS = ["ab", "bcabc", "ca"]


@pytest.fixture
def engine() -> stand.Engine:
    return stand.wrap(tiny_model("qwen2"), byte_tokenizer())


def test_pieces_join_to_the_texts(engine):
    settings = {"num_return_sequences": 2, "max_new_tokens": 40, "temperature": 1.0, "seed": 3, "stop_token_ids": []}
    texts, num_pieces = [""] * 6, 0
    for row, piece in engine.stream(PROMPTS, **settings):
        texts[row] += piece
        num_pieces += 1
        assert piece
    expected = stand.wrap(tiny_model("qwen2"), byte_tokenizer()).generate(PROMPTS, **settings).texts
    assert texts == expected and all(texts)
    assert num_pieces > 12  # not all at the end


@torch.inference_mode()
def test_the_model_is_free_between_pieces(engine):
    before = engine.model.config._attn_implementation
    plain = engine.model(torch.tensor([[3, 4, 5]])).logits
    stream = engine.stream("ab", max_new_tokens=20, seed=1)
    next(stream)
    assert engine.model.config._attn_implementation == before
    assert torch.equal(engine.model(torch.tensor([[3, 4, 5]])).logits, plain)
    stream.close()  # a stream may be left
    assert len(engine.generate("ab", max_new_tokens=5, seed=1)) == 1


def test_a_run_swaps_forwards_where_rows_end_and_frees_the_model_for_its_consumer(engine, monkeypatch):
    """Not before every step, of which there are tens."""
    entered, own = [], step.tree_attention
    monkeypatch.setattr(step, "tree_attention", lambda model: entered.append(1) or own(model))
    before, steps = engine.model.config._attn_implementation, []
    settings = {"num_return_sequences": 2, "max_new_tokens": 40, "temperature": 1.0, "seed": 1, "draft": False}
    run = engine.run(["ab ab a", "ba"], max_rows=2, on_step=lambda run: steps.append(run.num_live), **settings)
    for _ in run:
        assert engine.model.config._attn_implementation == before
        assert not any("forward" in vars(module) for module in engine.model.modules())
    assert run.stats.wall_seconds > 0 and len(steps) == run.stats.num_forwards > 2 * len(entered) > 0


def test_what_generate_does_not_take_is_refused(engine):
    with pytest.raises(ValueError, match="got max_tokens"):
        engine.stream("ab", max_tokens=5)
    with pytest.raises(ValueError, match="max_new_tokens must be an integer"):
        engine.stream("ab", max_new_tokens=0)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        stand.wrap(tiny_model("qwen2")).stream("ab")


@pytest.mark.parametrize("start", ["stream", "run"])
def test_a_streamer_elsewhere_is_told_what_to_use(engine, start):
    with pytest.raises(ValueError, match=r"engine.generate alone.*engine.stream yields"):
        next(iter(getattr(engine, start)(PROMPTS, streamer=object(), max_new_tokens=2)))


def test_bytes_wait_until_they_make_a_character():
    tokenizer = byte_tokenizer()
    three_bytes = tokenizer("€", add_special_tokens=False)["input_ids"]
    assert len(three_bytes) == 3 and tokenizer.decode(three_bytes) == "€"
    pieces = TextPieces(tokenizer)
    tokens = [*tokenizer("ab")["input_ids"], *three_bytes, *tokenizer("c")["input_ids"]]
    shown = [pieces.add([token]) for token in tokens]
    assert shown == ["a", "b", "", "", "€", "c"]
    cut = TextPieces(tokenizer)
    assert cut.add(three_bytes[:2]) == "" and cut.add([], is_last=True) == tokenizer.decode(three_bytes[:2])


class Counted:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer, self.count = tokenizer, 0

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)

    def decode(self, token_ids, **settings):
        self.count += len(token_ids)
        return self.tokenizer.decode(token_ids, **settings)


@pytest.mark.parametrize("kind", ["bytes", "hidden", "mixed"])
def test_tokens_without_text_are_not_decoded_again_and_again(kind):
    """Bytes of no character, and special tokens: thousands of them, as a row that loops writes them."""
    tokenizer = Counted(byte_tokenizer())
    first, second, third = tokenizer.convert_tokens_to_ids(
        [piece for piece in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("€")[0][0]]
    )
    end, letter, generator = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a"), random.Random(2)
    kinds = {
        "bytes": [first] * 2000,
        "hidden": [letter, *[end] * 2000, letter],
        "mixed": generator.choices([first, second, third, letter, end], [9, 6, 6, 1, 3], k=2000),
    }
    tokens, pieces = kinds[kind], TextPieces(tokenizer)
    text = ""
    for place in range(0, len(tokens), 2):
        text += pieces.add(tokens[place : place + 2])
    text += pieces.add([], is_last=True)
    expected = tokenizer.tokenizer.decode(tokens, skip_special_tokens=True)
    assert text.replace("\ufffd", "") == expected.replace("\ufffd", "")
    assert ("€" in text) == (kind == "mixed")
    assert tokenizer.count < 300 * len(tokens)


@pytest.mark.parametrize("cleans", [True, False])
def test_words_wait_where_a_later_token_would_take_a_space_away(cleans):
    """Of a tokenizer that cleans its texts up: "it 's" is shown as "it's"."""
    words = ["it", "dogs", "'", "s", "n", "t", "ve", ".", "##ing", "##'"]
    core = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="it"))
    core.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=cleans)
    rng, num_early = random.Random(0), 0
    for _ in range(300):
        tokens = rng.choices(range(len(words)), k=12)
        pieces = TextPieces(tokenizer)
        shown = [pieces.add([token], is_last=place == 11) for place, token in enumerate(tokens)]
        assert "".join(shown) == tokenizer.decode(tokens)
        num_early += any(shown[:-1])
    assert num_early > 200
