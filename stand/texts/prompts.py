"""Prompts as users of transformers hold them (texts, chats, ids, a tokenizer's output) as arrays of token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from stand.media.media import TYPES
from stand.texts.chats import chat_text, processed_chat, shown_kinds

OF_TOKENIZERS = frozenset(  # what their outputs hold beside, which changes no forward
    "input_ids attention_mask special_tokens_mask offset_mapping length overflowing_tokens num_truncated_tokens "
    "overflow_to_sample_mapping assistant_masks".split()
)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as it was read."""

    token_ids: np.ndarray  # [L] int32
    shown: Mapping[str, object] = field(default_factory=dict)  # what its processor gave beside them: see `Media.of`


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns what `Engine.generate` is given into `Prompt`s."""

    vocabulary_size: int
    tokenizer: PreTrainedTokenizerBase | None = None
    pad_id: int | None = None  # in tensors without a mask it marks what belongs to no prompt
    end_ids: tuple[int, ...] = ()
    processor: ProcessorMixin | None = None  # by whose template chats are written, where it has one
    media_names: frozenset[str] = frozenset()  # by which the model takes that

    def read(self, prompts: object, input_ids: object, *, attention_mask: object = None) -> list[Prompt]:
        """From exactly one of `prompts` and `input_ids`.

        prompts: a text, a chat (a list of messages with role and content), a list of either, or what input_ids may be.
        input_ids: a list of ids or of such lists, a tensor or array [L] or [B, L], or the output of a tokenizer or, of
        one prompt, a processor. Several outputs may be in a list.
        attention_mask: of the shape of input_ids, 0 at padding before or after a prompt, 1 at its tokens.

        Raises ValueError where the meaning is not clear.
        """
        if (prompts is None) == (input_ids is None):
            raise ValueError("give exactly one of prompts and input_ids, got both or neither; leave one of them out")
        given = input_ids if prompts is None else prompts
        if _are_outputs(given):
            return [prompt for output in given for prompt in self.read(None, output, attention_mask=attention_mask)]
        if isinstance(given, Mapping):
            given, attention_mask, shown = self._unpacked(given, attention_mask)
            if shown:
                return [self._showing(given, attention_mask, shown)]
        texts = _as_texts(given)
        if texts is None:
            sequences = self._sequences(given, attention_mask, "input_ids" if prompts is None else "prompts")
        elif prompts is None or attention_mask is not None:
            raise ValueError(
                "input_ids and attention_mask hold numbers, got text in place of ids; pass texts and chats as prompts, "
                "without a mask"
            )
        else:
            sequences = [self._encoded(text) for text in texts]
        if not sequences:
            raise ValueError("at least one prompt is needed, got an empty list; pass a text or token ids")
        places = [f" as prompt {place}" for place in range(len(sequences))] if len(sequences) > 1 else [""]
        return [
            given if isinstance(given, Prompt) else Prompt(self._checked(given, place))
            for given, place in zip(sequences, places, strict=True)
        ]

    def _encoded(self, text: str | list[Mapping]) -> list[int] | Prompt:
        """A text as the tokenizer encodes it; a chat by the processor, or as `chat_text` where there is none."""
        if self.tokenizer is None:
            raise ValueError("text prompts need a tokenizer, got none; pass tokenizer= to stand.wrap or input_ids=")
        if isinstance(text, str):
            return self._ids_of(text)
        if self.processor is not None and self.processor.chat_template is not None:
            return self.read(None, processed_chat(self.processor, text))[0]
        if kinds := shown_kinds(text):
            raise ValueError(
                f"a chat that shows something needs the model's processor with its chat template, got content of type "
                f"{kinds[0]!r}; pass AutoProcessor.from_pretrained(...) to stand.wrap in the tokenizer's place"
            )
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"chats need a chat template, got none in {type(self.tokenizer).__name__}; set "
                "tokenizer.chat_template or pass a text"
            )
        return self._ids_of(chat_text(self.tokenizer, text), add_special_tokens=False)

    def _ids_of(self, text: str, **options: bool) -> list[int]:
        try:
            return self.tokenizer(text, **options)["input_ids"]
        except Exception as error:  # half of a surrogate pair is a TypeError of tokenizers
            raise ValueError(
                f"a text must be one that the tokenizer takes, got {type(error).__name__} ({error}) for {text!r:.80}; "
                "pass whole characters, or token ids"
            ) from error

    def _unpacked(self, given: Mapping, attention_mask: object) -> tuple[object, object, dict[str, object]]:
        """input_ids, mask, and what is shown beside them, of the output of a tokenizer or a processor, which may hold
        nothing else that a forward would take."""
        if "input_ids" not in given:
            raise ValueError(
                f"a tokenizer's output must hold input_ids, got {', '.join(map(str, given))}; put a single chat "
                "message into a list"
            )
        if attention_mask is not None:
            raise ValueError(
                "attention_mask must be given once, got it beside a tokenizer's output; put it into the output, or "
                "pass input_ids=output['input_ids']"
            )
        beside = {name: value for name, value in given.items() if value is not None and name not in OF_TOKENIZERS}
        is_showing = not self.media_names.isdisjoint(beside)
        for name, value in beside.items():
            says_nothing = name in TYPES and not any(np.any(row) for row in _rows(value, name))
            if not (says_nothing or is_showing and name in self.media_names.union(TYPES)):
                taken = " and ".join(["text", *sorted(self.media_names)])
                raise ValueError(
                    f"a prompt must be {taken} alone, got {name} in the tokenizer's output, which no forward is given "
                    "here; leave it out, or call model.generate"
                )
        return given["input_ids"], given.get("attention_mask"), beside if is_showing else {}

    def _showing(self, input_ids: object, attention_mask: object, shown: Mapping[str, object]) -> Prompt:
        """Of a processor's output, without padding."""
        rows = _rows(input_ids, "input_ids")
        if len(rows) != 1:
            raise ValueError(
                f"a processor's output must be of one prompt where it shows something, got {len(rows)}; call the "
                "processor once for each, and pass a list of what it returns"
            )
        mask = np.ones_like(rows[0]) if attention_mask is None else _rows(attention_mask, "attention_mask")[0]
        types = {name: _unpadded(_rows(shown[name], name)[0], mask)[None] for name in TYPES if name in shown}
        return Prompt(self._checked(_unpadded(rows[0], mask), ""), {**shown, **types})

    def _sequences(self, given: object, attention_mask: object, name: str) -> list[object]:
        """One sequence of ids per prompt, without padding."""
        rows = _rows(given, name)
        if attention_mask is not None:
            masks = _rows(attention_mask, "attention_mask")
            if len(masks) != len(rows):
                raise ValueError(
                    f"attention_mask must have a row per prompt, got {len(masks)} for {len(rows)}; pass both as the "
                    "tokenizer gives them"
                )
            return [_unpadded(row, mask) for row, mask in zip(rows, masks, strict=True)]
        if self.pad_id is None or not isinstance(given, (torch.Tensor, np.ndarray)):
            return rows
        if self.pad_id not in self.end_ids:
            return [_unpadded(row, row != self.pad_id) if (row == self.pad_id).any() else row for row in rows]
        if len(rows) > 1 and any(len(row) and self.pad_id in (row[0], row[-1]) for row in rows):
            raise ValueError(
                f"padding must be told from text, got rows that begin or end with token {self.pad_id}, which is the "
                "padding and an end token; pass attention_mask, or prompts as lists"
            )
        return rows

    def _checked(self, sequence: object, place: str) -> np.ndarray:
        try:
            prompt = np.asarray(sequence)
        except ValueError as error:
            raise ValueError(
                f"a prompt must be one list of token ids, got nested lists ({error}); flatten it"
            ) from error
        if prompt.ndim > 1:
            raise ValueError(
                f"a prompt must be one list of token ids, got shape {prompt.shape}{place}; pass its rows one by one"
            )
        if prompt.ndim != 1 or len(prompt) == 0:
            raise ValueError(
                f"a prompt must hold at least one token, got shape {prompt.shape}{place}; start with the "
                "model's bos token or text"
            )
        if isinstance(sequence, (list, tuple)) and bool in map(type, sequence):
            raise ValueError(
                f"prompt tokens must be integers, got True or False among them{place}; pass ids as the tokenizer gives "
                "them, a mask as attention_mask"
            )
        if prompt.dtype.kind not in "iu":
            raise ValueError(
                f"prompt tokens must be integers, got {prompt.dtype}; pass ids as the tokenizer gives them, texts and "
                "chats in a list"
            )
        if prompt.min() < 0 or prompt.max() >= self.vocabulary_size:
            raise ValueError(
                f"prompt tokens must be in [0, {self.vocabulary_size}), got {prompt.min()} .. {prompt.max()}; "
                "use the tokenizer that belongs to the model"
            )
        return prompt.astype(np.int32)


def is_one_prompt(given: object) -> bool:
    """Whether it is a text, a tokenizer's output or a chat, and not an iterable of prompts."""
    return isinstance(given, (str, Mapping)) or (_is_chat(given) and any("role" in message for message in given))


def _are_outputs(given: object) -> bool:
    """Whether it is a list of outputs of tokenizers and processors. Raises ValueError where it is in part."""
    if not isinstance(given, (list, tuple)) or not given or isinstance(given[0], int):  # many numbers, perhaps
        return False
    are_outputs = [isinstance(part, Mapping) and "input_ids" in part for part in given]
    if any(are_outputs) and not all(are_outputs):
        raise ValueError(
            "prompts must be all outputs of a tokenizer or processor or none, got "
            f"{type(given[are_outputs.index(False)]).__name__} among such; pass each to engine.run, which takes any mix"
        )
    return any(are_outputs)


def _as_texts(given: object) -> list[str | list[Mapping]] | None:
    """Texts and chats, or None where `given` is neither."""
    if isinstance(given, str) or _is_chat(given):
        return [given]
    if not isinstance(given, (list, tuple)):
        return None
    are_texts = [isinstance(part, str) or _is_chat(part) for part in given]
    if any(are_texts) and not all(are_texts):
        raise ValueError(
            f"prompts must be all texts and chats or all token ids, got {type(given[are_texts.index(False)]).__name__} "
            "among texts; encode the texts, or pass them in a call of their own"
        )
    return list(given) if any(are_texts) else None


def _is_chat(given: object) -> bool:
    return isinstance(given, (list, tuple)) and bool(given) and all(isinstance(part, Mapping) for part in given)


def _rows(given: object, name: str) -> list:
    """A tensor or array [L] or [B, L], a list of numbers or a list of rows, as a list of rows."""
    if isinstance(given, torch.Tensor):
        given = (given.float() if given.is_floating_point() else given).detach().cpu().numpy()
    if isinstance(given, np.ndarray):
        if given.ndim not in (1, 2):
            raise ValueError(f"{name} must be [L] or [B, L], got {list(given.shape)}; pass one row per prompt")
        return list(np.atleast_2d(given))
    if not isinstance(given, (list, tuple)):
        raise ValueError(
            f"{name} must be a list, a tensor or an array, got {type(given).__name__}; pass texts and chats in a list, "
            "ids as the tokenizer gives them"
        )
    rows = [row.cpu().numpy() if isinstance(row, torch.Tensor) else row for row in given]
    is_one = bool(rows) and not isinstance(rows[0], (list, tuple)) and np.ndim(rows[0]) == 0
    return [rows] if is_one else rows


def _unpadded(row: object, mask: object) -> np.ndarray:
    """The tokens of a row where the mask is 1; they must lie together."""
    ids, shown = np.asarray(row), np.asarray(mask)
    if ids.shape != shown.shape or not np.isin(shown, (0, 1)).all():
        raise ValueError(
            f"attention_mask must hold 0 or 1 for every token, got shape {shown.shape} for {ids.shape} with values "
            f"{list(dict.fromkeys(shown.ravel().tolist()))[:4]}; pass it as the tokenizer gives it"
        )
    places = np.flatnonzero(shown)
    if len(places) and places[-1] - places[0] + 1 != len(places):
        raise ValueError(
            f"padding must lie before or after a prompt, got a gap among its {len(places)} tokens; leave the tokens "
            "out, or pass an attention_mask of ones where they are text"
        )
    return ids[places]
