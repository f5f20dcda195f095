"""Prompts in every form that users of transformers hold, and what has no clear meaning refused."""

import numpy as np
import pytest
import torch
from letter_tokenizer import LETTERS, letter_tokenizer
from tiny_models import VOCABULARY_SIZE, tiny_model
from transformers import BatchEncoding

import stand
from stand.stats import Stats
from stand.texts.chats import chat_text
from stand.texts.prompts import PromptReader

TEMPLATE = "{% for message in messages %}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
LONG, SHORT = [5, 9, 11, 4], [8, 30]
TEXT = "".join(LETTERS[token] for token in LONG)
PAD = 0


def reader(**changed) -> PromptReader:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return PromptReader(**{"vocabulary_size": VOCABULARY_SIZE, "tokenizer": tokenizer, **changed})


def read(prompts=None, input_ids=None, *, attention_mask=None, **changed) -> list[list[int]]:
    read = reader(**changed).read(prompts, input_ids, attention_mask=attention_mask)
    assert all(prompt.token_ids.dtype == np.int32 and prompt.token_ids.ndim == 1 for prompt in read)
    return [prompt.token_ids.tolist() for prompt in read]


LEFT = torch.tensor([LONG, [PAD, PAD, *SHORT]])
RIGHT = torch.tensor([LONG, [*SHORT, PAD, PAD]])


@pytest.mark.parametrize(
    "ids",
    [
        LONG,
        tuple(LONG),
        [LONG],
        np.array(LONG),
        np.array([LONG], dtype=np.uint8),
        torch.tensor(LONG),
        torch.tensor([LONG], dtype=torch.int32),
        [np.int64(token) for token in LONG],
        [torch.tensor(token) for token in LONG],
        [torch.tensor(LONG)],
        [np.array(LONG)],
        {"input_ids": LONG, "attention_mask": [1, 1, 1, 1]},
        BatchEncoding({"input_ids": [LONG]}),
        BatchEncoding({"input_ids": torch.tensor([LONG]), "attention_mask": torch.ones(1, 4)}),
        {"input_ids": [LONG], "token_type_ids": torch.zeros(1, 4), "offset_mapping": [[(0, 1)]], "pixel_values": None},
    ],
)
def test_one_prompt_of_ids(ids):
    assert read(input_ids=ids) == read(ids) == [LONG]


def test_several_outputs_of_a_tokenizer():
    outputs = [{"input_ids": [LONG]}, BatchEncoding({"input_ids": LEFT, "attention_mask": LEFT != PAD})]
    assert read(outputs) == read(input_ids=tuple(outputs)) == [LONG, LONG, SHORT]


def test_texts_and_chats():
    chat = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}]
    start, end = LETTERS.index(">"), LETTERS.index("=")
    encoded = [start, *LONG, start, *LONG, end]
    assert read(TEXT) == [LONG]
    assert read([TEXT, TEXT[:2]]) == [LONG, LONG[:2]]
    assert read(chat) == [encoded]
    assert read([chat, chat[:1]]) == [encoded, [start, *LONG, end]]
    tokenizer = reader().tokenizer
    for settings in ({"return_tensors": "pt"}, {"return_dict": False}, {"return_dict": True}, {"tokenize": False}):
        prepared = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **settings)
        assert read(prepared) == [encoded]


def test_an_answer_that_a_chat_ends_with_goes_on():
    """As in transformers' pipelines; not behind a second header."""
    user, answer = {"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT[:2]}
    start = LETTERS.index(">")
    assert read([user, answer]) == [[start, *LONG, start, *LONG[:2]]]
    assert read([[user, answer], [user]]) == [[start, *LONG, start, *LONG[:2]], [start, *LONG, LETTERS.index("=")]]
    answered = [user, answer, user]  # an answer that is not last stays one
    assert read(answered) == [[start, *LONG, start, *LONG[:2], start, *LONG, LETTERS.index("=")]]
    tokenizer = reader().tokenizer
    tokenizer.chat_template = "{% for message in messages %}{% if message.role == 'user' %}>{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="must be shown as it is by the template, got another text .*; render"):
        read([user, answer], tokenizer=tokenizer)


def with_template(template):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


PART = {"type": "text", "text": TEXT}
OF_PARTS = "{% for part in messages[0].content %}>{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (TEMPLATE, [PART], f">{TEXT}="),  # it wrote the list as Python shows it
        ("{{ 'A' + messages[0].content }}", [PART], f"A{TEXT}"),  # it failed
        ("{{ messages[0].content | trim }}", (PART,), TEXT),
        (OF_PARTS, [PART, PART], f">{TEXT}>{TEXT}"),
    ],
)
def test_parts_of_text_are_read_as_the_template_takes_them(template, content, text):
    assert chat_text(with_template(template), [{"role": "user", "content": content}]) == text


def test_an_answer_in_parts_goes_on():
    chat = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": [PART]}]
    assert chat_text(with_template(TEMPLATE), chat) == f">{TEXT}>{TEXT}"


@pytest.mark.parametrize(
    ("template", "message", "rule"),
    [
        (TEMPLATE, {"content": [PART, PART]}, "must be one text for this tokenizer's template, got 2 parts; join"),
        (TEMPLATE, {"contents": TEXT}, "a chat message must be a text or parts of text, got .*'contents'.*;"),
        *(
            (TEMPLATE, {"content": content}, "must be a text or parts of text, got .*; write")
            for content in (None, 5, b"x", [], ["a"], [None], [{"text": "a"}], PART, [{"type": "text"}])
        ),
        (TEMPLATE, {"role": None, "content": TEXT}, "must have a role, got .*; add role"),
        ("{{ raise_exception('no') }}", {"content": TEXT}, "the tokenizer's template takes, got TemplateError: no; ch"),
        ("{{ 'a' + thinking }}", {"content": TEXT}, "got UndefinedError: 'thinking' is undefined; .*options"),
        ("{% for", {"content": TEXT}, "got TemplateSyntaxError: .*; change the chat"),
        ("{{ 1 / 0 }}", {"content": [PART]}, "got ZeroDivisionError: .*; change the chat"),
        ("{{ 'a'.index('b') }}", {"content": TEXT}, "got ValueError: substring not found; change the chat"),
    ],
)
def test_chats_that_a_template_does_not_take_are_refused(template, message, rule):
    with pytest.raises(ValueError, match=rule):
        chat_text(with_template(template), [{"role": "user", **message}])


def test_messages_that_a_template_leaves_out_are_told():
    ours = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXT}]
    with pytest.warns(UserWarning, match="leaves out message 0, of role 'system'"):
        assert chat_text(with_template(ours), chat) == TEXT


def test_calls_and_thoughts_need_no_content():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [{"role": "user", "content": TEXT}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool"}]
    assert chat_text(with_template("{{ messages[0].content }}"), chat) == TEXT


def test_half_of_a_character_is_refused():
    with pytest.raises(ValueError, match="the tokenizer takes, got TypeError .*; pass whole characters"):
        read("\ud800")


@pytest.mark.parametrize("padded", [LEFT, RIGHT, LEFT.tolist(), LEFT.numpy()])
def test_a_mask_takes_padding_off(padded):
    mask = (torch.as_tensor(padded) != PAD).long()
    assert read(input_ids=padded, attention_mask=mask) == [LONG, SHORT]
    assert read(input_ids=padded, attention_mask=mask.bool()) == [LONG, SHORT]
    assert read(input_ids=padded, attention_mask=mask.tolist(), pad_id=PAD) == [LONG, SHORT]
    assert read({"input_ids": padded, "attention_mask": mask}) == [LONG, SHORT]
    ones = torch.ones(2, 4)
    assert read(input_ids=padded, attention_mask=ones, pad_id=PAD) == torch.as_tensor(padded).tolist()


def test_a_padding_token_marks_padding_in_tensors_without_a_mask():
    assert read(input_ids=LEFT, pad_id=PAD) == read(input_ids=RIGHT.numpy(), pad_id=PAD) == [LONG, SHORT]
    assert read(input_ids=LEFT.tolist(), pad_id=PAD) == LEFT.tolist()  # a list means what it holds
    assert read(input_ids=LEFT) == LEFT.tolist()
    with pytest.raises(ValueError, match="padding must be told from text.*token 0.*pass attention_mask"):
        read(input_ids=LEFT, pad_id=PAD, end_ids=(2, PAD))
    assert read(input_ids=LEFT[1:], pad_id=PAD, end_ids=(PAD,)) == [[PAD, PAD, *SHORT]]  # one row: nothing to pad


def test_left_padded_batches_decode_as_generate_does():
    model = tiny_model("qwen2")
    mask = (LEFT != PAD).long()
    expected = model.generate(LEFT, attention_mask=mask, do_sample=False, max_new_tokens=20)[:, 4:]
    engine = stand.wrap(model)
    for settings in ({"input_ids": LEFT, "attention_mask": mask}, {"input_ids": LEFT}):
        output = engine.generate(**settings, max_new_tokens=20)
        assert torch.equal(output.padded(PAD), expected[:, : output.padded(PAD).shape[1]])


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, "exactly one of prompts and input_ids, got both or neither; leave one"),
        ({"prompts": TEXT, "input_ids": LONG}, "exactly one of prompts and input_ids"),
        ({"prompts": TEXT, "tokenizer": None}, "text prompts need a tokenizer, got none; pass tokenizer="),
        ({"prompts": []}, "at least one prompt is needed"),
        ({"prompts": ""}, "must hold at least one token"),
        ({"prompts": [TEXT, 3]}, "all texts and chats or all token ids, got int among texts"),
        ({"prompts": TEXT, "attention_mask": [1]}, "pass texts and chats as prompts, without a mask"),
        ({"input_ids": TEXT}, "hold numbers, got text in place of ids; pass texts and chats as prompts"),
        ({"prompts": {"role": "user", "content": TEXT}}, "got role, content; put a single chat message into a list"),
        ({"prompts": [{"content": TEXT}]}, "every chat message must have a role"),
        ({"prompts": [{"role": "user", "content": TEXT}], "tokenizer": letter_tokenizer()}, "need a chat template"),
        ({"input_ids": [1.0, 2.0]}, "must be integers, got float64; pass ids"),
        ({"input_ids": torch.tensor([1.5, 2.0], dtype=torch.bfloat16)}, "must be integers, got float32"),
        ({"input_ids": torch.tensor([True, False])}, "must be integers, got bool"),
        ({"input_ids": [True, 5]}, "must be integers, got True or False among them; pass ids"),
        ({"input_ids": [[1, 2], [3.5]]}, "must be integers, got float64"),
        ({"input_ids": [[[1, 2], [3]]]}, "one list of token ids, got nested lists"),
        ({"prompts": [{"input_ids": [1, 2]}, [3, 4]]}, "outputs of a tokenizer or processor or none, got list among"),
        ({"prompts": ["AB", {"input_ids": [1, 2]}]}, "outputs of a tokenizer or processor or none, got str among"),
        ({"input_ids": [[[1, 2]]]}, r"one list of token ids, got shape \(1, 2\).*; pass its rows one by one"),
        ({"input_ids": [[1, 2]], "attention_mask": [[None, None]]}, r"0 or 1 .* with values \[None\]"),
        ({"input_ids": np.zeros((1, 2, 3), dtype=int)}, r"must be \[L\] or \[B, L\], got \[1, 2, 3\]"),
        ({"input_ids": 7}, "input_ids must be a list, a tensor or an array, got int"),
        ({"prompts": iter(["ab"])}, "prompts must be a list.*; pass texts and chats in a list"),
        ({"prompts": np.array(["ab"])}, "must be integers.*, texts and chats in a list"),
        ({"input_ids": [[]]}, "must hold at least one token"),
        ({"input_ids": [3, 61]}, r"must be in \[0, 61\), got 3 .. 61; use the tokenizer"),
        ({"input_ids": [-1, 3]}, "got -1 .. 3"),
        ({"input_ids": [2**70]}, "must be integers, got object"),
        ({"input_ids": LEFT, "attention_mask": [[1, 1, 1, 1]]}, "must have a row per prompt, got 1 for 2"),
        ({"input_ids": LONG, "attention_mask": [1, 1, 1]}, r"0 or 1 for every token, got shape \(3,\) for \(4,\)"),
        ({"input_ids": LONG, "attention_mask": [1, 1, 1, 2]}, "values .1, 2.; pass it as the tokenizer gives it"),
        ({"input_ids": LONG, "attention_mask": [1, 0, 1, 1]}, "padding must lie before or after a prompt, got a gap"),
        ({"input_ids": LONG, "attention_mask": [0, 0, 0, 0]}, "must hold at least one token"),
        ({"input_ids": torch.tensor([[5, PAD, 7]]), "pad_id": PAD}, "got a gap among its 2 tokens.*mask of ones"),
        ({"prompts": {"input_ids": LONG}, "attention_mask": [1, 1, 1, 1]}, "attention_mask must be given once"),
        ({"prompts": [TEXT, "", TEXT]}, r"at least one token, got shape \(0,\) as prompt 1"),
        ({"prompts": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "got content of type 'image'"),
        *(
            ({"prompts": {"input_ids": LONG, name: value}}, f"text alone, got {name} in the tokenizer's output.*leave")
            for name, value in {
                "pixel_values": torch.zeros(1, 3, 2, 2),
                "inputs_embeds": torch.zeros(1, 4, 8),
                "position_ids": [7, 8, 9, 10],
                "token_type_ids": torch.tensor([[0, 1, 1, 0]]),  # images, to Gemma 3
                "past_key_values": object(),
                "cache": object(),
            }.items()
        ),
    ],
)
def test_what_has_no_clear_meaning_is_refused(given, rule):
    with pytest.raises(ValueError, match=rule):
        read(**given)


def test_rows_of_a_prompt():
    output = stand.GenerationOutput([[3], [4], [5], [6]], None, ["eos"] * 4, 2, 0, Stats())
    assert output.of_prompt(1) == [2, 3]
    for prompt in (-1, 2, 5):
        with pytest.raises(IndexError, match=rf"prompt must be in \[0, 2\), got {prompt}"):
            output.of_prompt(prompt)


def test_padded_output():
    output = stand.GenerationOutput([[3, 4, 5], [], [6]], None, ["eos"] * 3, 1, 0, Stats())
    assert output.padded(9).tolist() == [[3, 4, 5], [9, 9, 9], [6, 9, 9]]
    assert output.padded(9, side="left").tolist() == [[3, 4, 5], [9, 9, 9], [9, 9, 6]]
    assert output.padded(9).dtype == torch.int64
    with pytest.raises(ValueError, match="side must be 'left' or 'right', got 'top'"):
        output.padded(9, side="top")
    for wrong in (None, 2.7, "3", True):  # a tokenizer without a padding token has None
        with pytest.raises(ValueError, match="pad_token_id must be a token id, got .*; give the model's padding"):
            output.padded(wrong)
