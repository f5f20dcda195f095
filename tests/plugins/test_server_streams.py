"""Log-probabilities of streams: each token's comes once, in order, and is that of the whole answer."""

import copy

import pytest
from byte_tokenizer import byte_tokenizer
from tiny_models import tiny_model

pytest.importorskip("fastapi", reason="fastapi is not installed")
from served import CALLS, Served, written

ASKED = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def in_bytes(tmp_path_factory):
    """Of a tokenizer whose characters may take three tokens."""
    served = Served(tmp_path_factory.mktemp("bytes"), byte_tokenizer(), copy.deepcopy(tiny_model("llama")), num_rows=4)
    yield served
    served.end()


def pieces_of(chunks) -> list[tuple[str, list, str | None]]:
    """Of each event of a chat: text, places, reason to end."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return [
        (one.delta.content or "", (one.logprobs and one.logprobs.content) or [], one.finish_reason) for one in choices
    ]


def assert_same(found, wanted) -> None:
    assert [(place.token, place.bytes) for place in found] == [(place.token, place.bytes) for place in wanted]
    assert [place.logprob for place in found] == pytest.approx([place.logprob for place in wanted], abs=1e-4)
    for one, other in zip(found, wanted, strict=True):
        assert [each.token for each in one.top_logprobs] == [each.token for each in other.top_logprobs]


@pytest.mark.parametrize("stop", [None, 4])
def test_those_of_a_chat_are_the_whole_answers(letters, stop):
    """A stop string is held back until it is whole; its tokens are told with the end."""
    asked = {**ASKED, "logprobs": True, "top_logprobs": 2}
    if stop is not None:
        text = letters.chat("HIHI", **ASKED).choices[0].message.content
        asked["stop"] = text[stop : stop + 3]
    (whole,) = letters.chat("HIHI", **asked).choices
    pieces = pieces_of(letters.chat("HIHI", **asked, stream=True))
    assert_same([place for _, places, _ in pieces for place in places], whole.logprobs.content)
    assert "".join(text for text, _, _ in pieces) == whole.message.content
    shown = [(text, places) for text, places, reason in pieces if reason is None and text]
    assert len(shown) >= 4 and all(places for _, places in shown)
    if stop is None:
        assert all("".join(place.token for place in places) == text for text, places in shown)
    else:
        assert "".join(place.token for place in pieces[-1][1]).endswith(asked["stop"])


def test_those_of_a_text_are_the_whole_answers(letters):
    asked = {**ASKED, "logprobs": 2, "n": 2}
    whole = letters.text(["ABC", "HIHI"], **asked).choices
    for index, choice in enumerate(whole):
        chunks = letters.text(["ABC", "HIHI"], **asked, stream=True)
        found = [one.logprobs for chunk in chunks for one in chunk.choices if one.index == index and one.logprobs]
        assert [token for one in found for token in one.tokens] == choice.logprobs.tokens and len(found) > 4
        values = [value for one in found for value in one.token_logprobs]
        assert values == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert [offset for one in found for offset in one.text_offset] == choice.logprobs.text_offset
        assert [list(likely) for one in found for likely in one.top_logprobs] == [
            list(likely) for likely in choice.logprobs.top_logprobs
        ]


@pytest.mark.parametrize("limit", [11, 10])
def test_those_of_a_character_in_several_tokens_come_with_it(in_bytes, limit):
    """The last one may be cut off: then with the end."""
    asked = {"temperature": 0, "max_tokens": limit, "logprobs": True, **written(in_bytes.tokenizer, "a€b€")}
    (whole,) = in_bytes.chat("ba", **asked).choices
    pieces = pieces_of(in_bytes.chat("ba", **asked, stream=True))
    assert whole.message.content.startswith("€b€b") and len(whole.logprobs.content) == limit
    assert_same([place for _, places, _ in pieces for place in places], whole.logprobs.content)
    lengths = [(text, len(places)) for text, places, _ in pieces[1:]]
    assert lengths == [("€", 3), ("b", 1), ("€", 3), ("b", 1), *([("€", 3), ("", 0)] if limit == 11 else [("", 2)])]


def test_those_of_calls_come_once(letters, monkeypatch):
    """Also where the prompt's end is a part of the answer, whose events have no tokens."""
    template = {**CALLS, "start_anchor": "A"}
    monkeypatch.setattr(letters.tokenizer, "response_template", template, raising=False)
    asked = {"temperature": 0, "max_tokens": 20, "logprobs": True, **written(letters.tokenizer, "CDTAtrueU=")}
    (whole,) = letters.chat("ABC", **asked).choices
    pieces = pieces_of(letters.chat("ABC", **asked, stream=True))
    assert whole.finish_reason == pieces[-1][2] == "tool_calls" and whole.message.content == "BCD"
    assert_same([place for _, places, _ in pieces for place in places], whole.logprobs.content)
    assert "".join(text for text, _, _ in pieces) == "BCD" and not pieces[1][1]
