"""What users pass to `wrap` and `generate`: tables of what must be taken and what must be refused, and random settings.

What the tables refuse must be refused with rule, what was got, and a remedy; of random settings, transformers' own code
refuses some in its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from measuring.setup import REASONER
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

import stand
from abuse_parts.core_calls import WRONG_VALUES
from abuse_parts.trial import EITHER, HONOURED_ONLY, REFUSED_ONLY, Trial, Unsound
from stand.trees import BlendedLookup, DraftTree

TEXT = "2+2="
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
NUM_TOKENS = 3
TRAINED = (
    *(stand.EagleDrafter, stand.StreamingDrafter, stand.DFlashDrafter),
    *(stand.EagleLaws, stand.StreamLaws, stand.DFlashLaws),
)
BUDGET = 8  # given, so that no step is timed

SETTINGS = (
    "prompts input_ids attention_mask generation_config num_return_sequences max_new_tokens temperature top_k top_p "
    "min_p repetition_penalty logits_processors stop stop_token_ids stopping_criteria seed streamer draft learn "
    "do_sample num_beams typical_p max_length min_new_tokens bad_words_ids eos_token_id pad_token_id"
).split()

HONOURED_SETTINGS: tuple[dict[str, object], ...] = (
    {"prompts": [TEXT, TEXT]},
    {"prompts": CHAT},
    {"prompts": [CHAT, CHAT]},
    {"prompts": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]},
    {"prompts": None, "input_ids": [5, 6, 7]},
    {"prompts": None, "input_ids": torch.tensor([[5, 6, 7]])},
    {"prompts": None, "input_ids": np.array([5, 6, 7], np.uint8)},
    {"prompts": None, "input_ids": [[5, 6, 7], [5]]},
    {"prompts": None, "input_ids": [[9, 5], [5, 6]], "attention_mask": [[0, 1], [1, 1]]},
    {"temperature": np.float32(0.7), "top_k": np.int64(5)},
    {"temperature": 0},
    {"temperature": 1, "top_p": 1},
    {"stop": None},
    {"stop": "="},
    {"stop": ["=", "\n"]},
    {"stop_token_ids": 3},
    {"generation_config": GenerationConfig(do_sample=True, top_k=4)},
    {"seed": np.int64(4)},
    {"num_return_sequences": 3, "do_sample": True},
    {"draft": False},
    {"learn": False},
)
REFUSED_SETTINGS: tuple[dict[str, object], ...] = (
    {"prompts": None},
    {"prompts": []},
    {"prompts": ""},
    {"prompts": TEXT, "input_ids": [1]},
    {"prompts": {"role": "user", "content": TEXT}},
    {"prompts": [TEXT, [5, 6]]},
    {"prompts": [{"role": "user", "contents": TEXT}]},
    {"prompts": "\ud800"},
    {"prompts": None, "input_ids": [True, 5]},
    {"prompts": None, "input_ids": [5.5, 6.0]},
    {"prompts": None, "input_ids": [-1]},
    {"prompts": None, "input_ids": [2**32 + 5]},
    {"prompts": None, "input_ids": [10**6]},
    {"prompts": None, "input_ids": [[1, 2], [3, [4]]]},
    {"prompts": None, "input_ids": torch.zeros((2, 2, 2), dtype=torch.int64)},
    {"prompts": None, "input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]},
    {"prompts": TEXT, "attention_mask": [1]},
    {"max_new_tokens": 0},
    {"max_new_tokens": -3},
    {"max_new_tokens": 2.5},
    {"max_new_tokens": "8"},
    {"max_new_tokens": 10**9},
    {"num_return_sequences": 0},
    {"num_return_sequences": 1.5},
    {"num_return_sequences": 10**9},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": "hot"},
    {"temperature": 0.7, "do_sample": False},
    {"temperature": 1.0, "top_p": 1.7},
    {"temperature": 1.0, "top_p": 0},
    {"temperature": 1.0, "top_k": -1},
    {"temperature": 1.0, "top_k": 2**63},
    {"temperature": 1.0, "min_p": 2},
    {"forced_eos_token_id": 10**6},
    {"watermarking_config": 3},
    {"encoder_no_repeat_ngram_size": 2**31},
    {"max_rows": torch.tensor(2.5)},
    {"stopping_criteria": [lambda input_ids, scores: torch.tensor([0.3])]},
    {"repetition_penalty": 0},
    {"num_beams": 4},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"guidance_scale": 2.0},
    {"no_such_setting": 1},
    {"generation_config": {"do_sample": True}},
    {"stop": [""]},
    {"stop": 3},
    {"stop_token_ids": "eos"},
    {"stopping_criteria": [3]},
    {"logits_processors": [3]},
    {"seed": -1},
    {"seed": 1.5},
    {"seed": 2**64},
    {"streamer": 3},
)


@dataclass(frozen=True, slots=True)
class Door:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def generate(self, settings: dict[str, object]) -> None:
        engine = stand.wrap(self.model, self.tokenizer, drafter=stand.BlendedDrafter(budget=BUDGET))
        self._must_answer(engine, {"prompts": TEXT, "max_new_tokens": NUM_TOKENS} | settings)
        self._must_answer(engine, {"prompts": TEXT, "max_new_tokens": NUM_TOKENS})

    def wrap(self, arguments: dict[str, object]) -> None:
        drafter = stand.BlendedDrafter(budget=BUDGET)
        given = {"model": self.model, "tokenizer": self.tokenizer, "drafter": drafter} | arguments
        engine = stand.wrap(given.pop("model"), given.pop("tokenizer"), **given)
        self._must_answer(engine, {"input_ids": [5, 6, 7], "max_new_tokens": NUM_TOKENS})

    def _must_answer(self, engine: stand.Engine, settings: dict[str, object]) -> None:
        output = engine.generate(**settings)
        sizes = [len(tokens) for tokens in output.token_ids]
        if not sizes or min(sizes) < 1 or self.model.config._attn_implementation != "sdpa":
            raise Unsound(f"rows of {sizes} tokens, attention {self.model.config._attn_implementation}")


def wraps(door: Door) -> Iterator[tuple[dict[str, object], frozenset[str]]]:
    """Arguments of `wrap`, and what may come of them."""
    other = BlendedLookup(fingerprint=b"another vocabulary")
    taken = ({}, {"drafter": BlendedLookup()}, {"verifier": "match"}, {"backend": "sdpa"}, {"tokenizer": None},
             {"drafter": stand.FixedShapeDrafter()}, {"drafter": stand.PromptLookupDrafter()})  # fmt: skip
    refused = ({"model": None}, {"model": "gpt2"}, {"model": REASONER}, {"tokenizer": "gpt2"}, {"verifier": "typical"},
               {"verifier": "no such rule"}, {"verifier": 3}, {"verifier": None}, {"backend": "cuda"}, {"backend": 3},
               {"backend": "triton"}, {"drafter": "file"}, {"drafter": 3}, {"drafter": other},
               {"drafter": DraftTree.chain([1, 2])}, {"drafter": stand.BlendedDrafter},
               {"fuse": "yes"})  # fmt: skip
    yield from ((arguments, HONOURED_ONLY) for arguments in taken)
    yield from ((arguments, REFUSED_ONLY) for arguments in refused)


def drafters() -> Iterator[tuple[str, Callable[[], object]]]:
    """Drafters with arguments that must be refused when they are made."""
    blended = stand.BlendedDrafter
    for arguments in ({"budget": "8"}, {"budget": -1}, {"budget": 1.5}, {"budget": 2**40}, {"kind": "paper"},
                      {"floor": 2}, {"costs": 3}):  # fmt: skip
        yield f"BlendedDrafter({arguments})", lambda arguments=arguments: blended(**arguments)
    for arguments in ({"shape": "paper"}, {"shape": 3}, {"kind": "paper"}):
        yield f"FixedShapeDrafter({arguments})", lambda arguments=arguments: stand.FixedShapeDrafter(**arguments)
    for arguments in ({"gamma": -1}, {"longest": 0}, {"gamma": 2.5}):
        yield f"PromptLookupDrafter({arguments})", lambda arguments=arguments: stand.PromptLookupDrafter(**arguments)
    for arguments in ({"shape": "paper"}, {"num_successors": 0}):
        yield (
            f"TokenRecyclingDrafter({arguments})",
            lambda arguments=arguments: stand.TokenRecyclingDrafter(**arguments),
        )
    of_trained = ({"temperature": "hot"}, {"temperature": 0}, {"temperature": float("inf")}, {"num_candidates": 2.5})
    for kind in TRAINED:
        is_drafter = issubclass(kind, stand.Drafter)
        for arguments in (*of_trained, *(({"budget": "8"}, {"budget": 2.5}) if is_drafter else ({"source": 4},))):
            yield f"{kind.__name__}({arguments})", lambda kind=kind, arguments=arguments: kind("no file", **arguments)


def door_calls(number: int, *, seed: int) -> Iterator[Trial]:
    """The tables, then so many calls of `generate` with one setting replaced at random."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    door = Door(AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32).eval(), tokenizer)
    for arguments, allowed in wraps(door):
        yield Trial("wrap", f"{arguments}", lambda arguments=arguments: door.wrap(arguments), allowed)
    for name, make in drafters():
        yield Trial("drafters", name, make, REFUSED_ONLY)
    for table, allowed in ((HONOURED_SETTINGS, HONOURED_ONLY), (REFUSED_SETTINGS, REFUSED_ONLY)):
        for settings in table:
            yield Trial("generate", f"{settings}", lambda settings=settings: door.generate(settings), allowed)
    rng = np.random.default_rng(seed)
    for _ in range(number):
        name, value = SETTINGS[rng.integers(len(SETTINGS))], WRONG_VALUES[rng.integers(len(WRONG_VALUES))]
        settings = {name: value} | ({"prompts": None} if name == "input_ids" else {})
        run = lambda settings=settings: door.generate(settings)  # noqa: E731
        yield Trial("generate, random settings", f"{name}={value!r}", run, EITHER)
