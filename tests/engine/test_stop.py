"""Stop strings: found token by token, also across token borders and inside an accepted run."""

import numpy as np
import pytest
from letter_tokenizer import LETTERS, letter_tokenizer
from tiny_models import tiny_model

import stand
from stand.row import Row
from stand.stop import StopRule
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
