"""Chats as the text that a tokenizer's template makes of them, or as the inputs that a processor makes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase, ProcessorMixin

WRITTEN = ("system", "developer", "user", "assistant")  # roles whose content is a text; a tool's may be anything
ANSWERS = ("assistant", "tool")  # roles whose content templates may change
BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


def chat_text(tokenizer: PreTrainedTokenizerBase, chat: list[Mapping]) -> str:
    """A chat by its template, with the beginning of an answer. Where its last message is an assistant's, the answer
    goes on with it, as in transformers' pipelines: the text ends where the message does. A content that is one part of
    text becomes that text where the template writes contents as they are.

    Raises ValueError for messages without role or content, for content that is no text, and where a template fails or
    does not show that answer as it is. Warns of messages that the template leaves out.
    """
    for message in chat:
        _check_message(message)
    chat = _without_parts(tokenizer, chat)
    goes_on = chat[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
    except Exception as error:  # a template may refuse a chat, or need options of its own
        if goes_on and isinstance(error, ValueError):
            raise ValueError(
                f"an answer that a chat ends with must be shown as it is by the template, got another text ({error}); "
                "render the chat without it, with add_generation_prompt=True and tokenize=False, and append the answer"
            ) from error
        raise ValueError(
            f"a chat must be one that the tokenizer's template takes, got {type(error).__name__}: {error}; change the "
            "chat, or give the template's options to tokenizer.apply_chat_template(chat, return_dict=True, ...) and "
            "pass what it returns"
        ) from error
    _warn_of_absent(chat, text)
    return text


def _check_message(message: Mapping, *, may_show: bool = False) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"every chat message must have a role, got {message!r:.120}; add role and content")
    is_left_out = content is None and any(message.get(name) for name in BESIDE_CONTENT)
    is_shown = may_show and content and len(_parts(message)) == len(content)
    if role in WRITTEN and not (isinstance(content, str) or _is_parts(content) or is_left_out or is_shown):
        raise ValueError(
            f"the content of a chat message must be a text or parts of text, got {message!r:.120}; write "
            '{"role": ..., "content": "..."}'
        )


def shown_kinds(chat: list[Mapping]) -> list[str]:
    """The types of its contents that are no text, such as "image"."""
    kinds = [part["type"] for message in chat for part in _parts(message) if part.get("type", "text") != "text"]
    return list(dict.fromkeys(kinds))


def _parts(message: Mapping) -> list[Mapping]:
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, (list, tuple)) else []


def processed_chat(processor: ProcessorMixin, chat: list[Mapping]) -> Mapping:
    """The processor's output of a chat, which may show something, with the beginning of an answer as in `chat_text`.

    Raises ValueError for messages without role or content, for what the template leaves out of what is shown, and where
    the processor does not take the chat. Warns of messages that the template leaves out.
    """
    for message in chat:
        _check_message(message, may_show=True)
    goes_on = chat[-1]["role"] == "assistant"
    asked = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    try:
        text = processor.apply_chat_template(chat, tokenize=False, **asked)
        for kind in shown_kinds(chat):
            if processor.apply_chat_template(_without(chat, kind), tokenize=False, **asked) == text:
                raise ValueError(f"the chat template leaves out contents of type {kind!r}")
        output = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt", **asked)
    except Exception as error:  # of its template, of a file, of a network
        raise ValueError(
            f"a chat must be one that {type(processor).__name__} takes, got {type(error).__name__}: {error}; change "
            "the chat, or pass what the processor returns"
        ) from error
    _warn_of_absent(chat, text)
    return output


def _without(chat: list[Mapping], kind: str) -> list[Mapping]:
    """The chat without contents of this type."""
    return [
        {**message, "content": [part for part in message["content"] if part.get("type", "text") != kind]}
        if _parts(message)
        else message
        for message in chat
    ]


def _is_parts(content: object) -> bool:
    if not (isinstance(content, (list, tuple)) and content):
        return False
    are_typed = all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
    return are_typed and all(isinstance(part.get("text"), str) for part in content)


def _without_parts(tokenizer: PreTrainedTokenizerBase, chat: list[Mapping]) -> list[Mapping]:
    """The chat as the template takes it: it may be one that joins a content to other texts, or writes a list as Python
    shows it."""
    listed = [message["content"] for message in chat if _is_parts(message.get("content"))]
    if not listed:
        return chat
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # it may fail with texts, too: `chat_text` says so
        text = None
    if text is not None and not any(str(content) in text for content in listed):
        return chat
    if any(len(content) > 1 for content in listed):
        raise ValueError(
            f"a content must be one text for this tokenizer's template, got {max(map(len, listed))} parts; join them "
            "as the model is meant to read them"
        )
    return [
        {**message, "content": message["content"][0]["text"]} if _is_parts(message.get("content")) else message
        for message in chat
    ]


def _warn_of_absent(chat: list[Mapping], text: str) -> None:
    """Templates leave out roles that they do not know. Of answers they leave out thoughts."""
    for place, message in enumerate(chat):
        content = message.get("content")
        if message["role"] not in ANSWERS and isinstance(content, str) and content.strip() not in text:
            warnings.warn(
                f"the chat template leaves out message {place}, of role {message['role']!r}; the model does not see it",
                stacklevel=2,
            )
