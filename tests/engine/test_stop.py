"""Stop strings: found token by token, also across token borders and inside an accepted run."""

import threading

import numpy as np
import pytest
import torch
from letter_tokenizer import LETTERS, letter_tokenizer
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

import stand
from stand.row import Row
from stand.texts.stop import StopRule
from stand.trees import TreeShape


def engine() -> stand.Engine:
    return stand.wrap(
        tiny_model("qwen2"),
        letter_tokenizer(),
        drafter=stand.FixedShapeDrafter(shape=TreeShape.from_branching([2, 1, 1, 1])),
    )


def test_a_stop_string_cuts_where_it_is_complete():
    prompt = "".join(LETTERS[5:12])
    decoder = engine()
    free = decoder.generate(prompt, max_new_tokens=40, temperature=0.0, stop_token_ids=[])
    text = free.texts[0]
    assert len(text) == 40 and free.finish_reasons == ["length"]
    for first in (3, 10, 21):
        stop = text[first : first + 3]
        end = text.index(stop) + 3
        output = decoder.generate(prompt, max_new_tokens=40, temperature=0.0, stop_token_ids=[], stop=["@@@@", stop])
        assert output.texts == [text[:end]]
        assert output.finish_reasons == ["stop"]
        assert output.token_ids[0] == free.token_ids[0][:end]


def test_the_prompt_does_not_count():
    prompt = "".join(LETTERS[5:12])
    output = engine().generate(prompt, max_new_tokens=5, temperature=0.0, stop_token_ids=[], stop=LETTERS[11])
    plain = engine().generate(prompt, max_new_tokens=5, temperature=0.0, stop_token_ids=[])
    expected = plain.texts[0].find(LETTERS[11])
    assert len(output.texts[0]) == (5 if expected < 0 else expected + 1)


def test_the_rule_by_hand():
    row = Row(0, np.array([5, 6], dtype=np.int32), 6)
    rule = StopRule([9], stop_strings=(LETTERS[20] + LETTERS[21],), tokenizer=letter_tokenizer())
    assert rule.cut(row, [20, 7]) == (2, None)
    row.extend([20])
    assert rule.cut(row, [21, 9]) == (1, "stop")
    assert rule.cut(row, [7, 9, 8]) == (2, "eos")
    assert rule.cut(row, [7, 7, 7, 7, 7, 7]) == (5, "length")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        engine().generate("abc", max_new_tokens=3, stop="")


class Sum(StoppingCriteria):
    """Ends a row when its tokens, prompt included, add up to a multiple; remembers every question."""

    def __init__(self, divisor: int):
        self.divisor, self.questions = divisor, []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 1 and scores is None
        self.questions.append(input_ids.shape[1])
        assert self.questions == list(range(self.questions[0], input_ids.shape[1] + 1))  # no token twice, none left out
        return torch.tensor([int(input_ids.sum()) % self.divisor == 0])


@pytest.mark.parametrize("divisor", [3, 7, 10**6])
def test_criteria_are_asked_token_by_token_one_row_at_a_time(divisor):
    """As `generate` of transformers asks them about each row alone, also inside an accepted run."""
    prompts, criterion = [[5, 9, 11, 4, 5, 9], [7]], Sum(divisor)
    output = engine().generate(
        input_ids=prompts, max_new_tokens=40, stop_token_ids=[], stopping_criteria=StoppingCriteriaList([criterion])
    )
    assert output.stats.num_accepted_draft_tokens > 5 or divisor < 10
    assert criterion.questions == []  # every row asks a copy
    for prompt, tokens, reason in zip(prompts, output.token_ids, output.finish_reasons, strict=True):
        expected = tiny_model("qwen2").generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=40, do_sample=False,
            eos_token_id=None, pad_token_id=0, stopping_criteria=[Sum(divisor)],
        )  # fmt: skip
        assert tokens == expected[0, len(prompt) :].tolist()
        assert reason == ("length" if len(tokens) == 40 else "criteria")


@pytest.mark.parametrize(
    ("criteria", "rule"),
    [
        (3, "must be callable with .input_ids, scores., got 3"),
        ([Sum], "must be callable"),
        (lambda input_ids, scores: torch.ones(2, dtype=torch.bool), r"for its one row, got torch.bool \[2\]"),
        (lambda input_ids, scores: torch.tensor([0.3]), r"for its one row, got torch.float32 \[1\]"),
        (lambda input_ids, scores: None, "got None from function; return a tensor"),
    ],
)
def test_criteria_that_cannot_be_asked_are_refused(criteria, rule):
    with pytest.raises(ValueError, match=rule):
        engine().generate(input_ids=[3, 4], max_new_tokens=3, stopping_criteria=criteria)
    assert len(engine().generate(input_ids=[3, 4], max_new_tokens=3, stopping_criteria=None)) == 1


def test_time_ends_a_row_with_its_step():
    rule = StopRule([9], max_time=1.0).with_ends([9], ())
    row = Row(0, np.array([5], dtype=np.int32), 8)
    assert rule.cut(row, [7, 7], elapsed=0.9) == rule.cut(row, [7, 7], elapsed=1.0) == (2, None)
    assert rule.cut(row, [7, 7, 7], elapsed=1.1) == (3, "time")
    assert rule.cut(row, [7, 9, 7], elapsed=1.1) == (2, "eos")


class Cancelled(StoppingCriteria):
    def __init__(self, *held):
        self.event, self.held = threading.Event(), held

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([self.event.is_set()])


class Slotted(Cancelled):
    __slots__ = ("event",)


@pytest.mark.parametrize("kind", [Cancelled, Slotted])
def test_a_flag_that_copies_share_ends_rows_from_outside(kind):
    criterion, pieces = kind(letter_tokenizer(), [tiny_model("llama")]), []
    for piece in engine().stream("abc", max_new_tokens=200, stop_token_ids=[], stopping_criteria=criterion):
        pieces.append(piece)
        criterion.event.set()
    assert len(pieces) == 2


def test_a_criterion_that_cannot_be_copied_is_refused_before_the_call_begins():
    with pytest.raises(ValueError, match="must be copyable.*got Cancelled with TypeError.*flag in a threading.Event"):
        engine().stream("abc", stopping_criteria=Cancelled(threading.Lock()))


class Calling(StoppingCriteria):
    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, scores, **kwargs):
        return self.model(input_ids).logits.sum() > 0


def test_a_criterion_that_calls_the_decoding_model_is_told():
    decoder = engine()
    with pytest.raises(RuntimeError, match="must not call the model that decodes; give them one"):
        decoder.generate("abc", max_new_tokens=3, stopping_criteria=Calling(decoder.model))


class Spaces:
    """As tokenizers that write the space of a word only where another token comes before it."""

    WORDS = ("the", " the", " end")

    def decode(self, token_ids):
        return "".join(self.WORDS[token] for token in token_ids).removeprefix(" ")


def test_the_space_of_a_rows_first_word_counts():
    row = Row(0, np.array([0], dtype=np.int32), 9)
    for stop, ends in ((" the", True), (" the end", False), ("the the", False)):  # the last begins in the prompt
        found = StopRule((), stop_strings=(stop,), tokenizer=Spaces()).cut(row, [1])
        assert found == (1, "stop" if ends else None)
    row.extend([1])
    assert StopRule((), stop_strings=(" the end",), tokenizer=Spaces()).cut(row, [2]) == (1, "stop")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's and Phi 3's: characters that have no token, a line's end among them, are tokens of their bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    core = Tokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("prompt", ["a", "\n", "한"])
@pytest.mark.parametrize("stop", ["\n", "\na", "국\n", "a\n한"])
def test_a_stop_string_among_characters_of_several_tokens_is_seen_at_once(prompt, stop):
    tokenizer = byte_fallback_tokenizer()
    encoded = {text: tokenizer.encode(text, add_special_tokens=False) for text in (prompt, "한국")}
    assert [len(tokens) for tokens in encoded.values()] == [len(prompt.encode()), 6]
    for text in ("\na한국", "한국\na국", "국국\n한", "국\na\n한국", "a\n한\n국국", "한국a\n한국한국\n"):
        row = Row(0, np.array(encoded[prompt], dtype=np.int32), 99)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ends = [count for count in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:count])]
        found = StopRule((), stop_strings=(stop,), tokenizer=tokenizer).cut(row, tokens)
        assert found == ((ends[0], "stop") if ends else (len(tokens), None))
