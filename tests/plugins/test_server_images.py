"""Images in chats of OpenAI's clients: a real server, a tiny model of Gemma 3 and its processor."""

import base64
import copy
import io

import pytest
from image_cases import chat_about, image_model, image_processor, picture

pytest.importorskip("fastapi", reason="fastapi is not installed")
import openai
from served import Served

import stand

ASKED = {"temperature": 0, "max_tokens": 24}


def parts_of(*images, text: str = "ABC") -> list[dict]:
    """A message's content as OpenAI's clients write it."""
    made = []
    for image in images:
        file = io.BytesIO()
        image.save(file, format="PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        made.append({"type": "image_url", "image_url": {"url": url}})
    return [*made, {"type": "text", "text": text}]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("seeing"), copy.deepcopy(image_model("gemma3"))
    served = Served(folder, image_processor(), model, chat_template=None, num_rows=4, seed=3)
    yield served
    served.end()


def alone(served, image) -> str:
    engine = stand.wrap(served.model, served.tokenizer, drafter=stand.BlendedDrafter(budget=16))
    return engine.generate(chat_about(image), max_new_tokens=24, temperature=0.0).texts[0]


def test_answers_are_the_engines(seeing):
    found = [seeing.chat(parts_of(picture(seed)), **ASKED).choices[0].message.content for seed in (3, 4)]
    assert found == [alone(seeing, picture(seed)) for seed in (3, 4)] and found[0] != found[1]


def test_streams_and_several_answers_too(seeing):
    pieces = seeing.chat(parts_of(picture()), **ASKED, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    answers = seeing.chat(parts_of(picture()), **ASKED, n=3).choices
    assert [text] * 3 == [one.message.content for one in answers] == [alone(seeing, picture())] * 3


def test_an_image_that_is_none_is_refused_and_others_are_served(seeing):
    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "text", "text": "A"}]
    with pytest.raises(openai.BadRequestError):
        seeing.chat(broken, **ASKED)
    assert seeing.chat("ABC", **ASKED).choices[0].message.content
