"""Features drawn together: a model, drafter, rule and steps, and calls with settings, by one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from plain_eagle3 import random_eagle3
from random_dflash import SELECTOR, random_dflash
from recurrent_models import RECURRENT, recurrent_kernel_model, recurrent_model
from tiny_models import CONFIGS, VOCABULARY_SIZE, kernel_model, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import stand
from stand.trees import TreeShape

CAPTURED = ("qwen2", "llama", "gemma3", "gpt_oss", "qwen3_next")  # families that kernels serve, with larger heads
MOST_NEW = 24
OWN_NAMES = ("temperature", "logits_processors", "stop_token_ids")  # of settings: transformers has others


class Raising(LogitsProcessor):
    """Keeps a state: raises one token by every call, another one each time."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        raised = scores.clone()
        raised[:, (7 * self.num_calls) % scores.shape[1]] += 4.0
        return raised


@dataclass(frozen=True, slots=True)
class Combination:
    """What a seed names."""

    is_captured: bool
    model: PreTrainedModel
    drafter: stand.Drafter
    verifier: str
    prompts: list[list[int]]
    settings: dict[str, object]  # of `Engine.generate`, and of transformers' but for the next two
    door: str  # "generate", "run", "stream" or "custom"
    door_settings: dict[str, object]
    keeps_prompts: bool

    @classmethod
    def drawn(cls, seed: int, *, is_sampled: bool) -> Combination:
        draw = random.Random(seed)
        is_captured = draw.random() < 0.4
        model = _model(draw, is_captured)
        count = draw.randint(1, 3)
        begin = [draw.randrange(3, VOCABULARY_SIZE) for _ in range(draw.choice([0, 0, 40]))]
        prompts = [[*begin, *(draw.randrange(3, 20) for _ in range(draw.randint(1, 12)))] for _ in range(count)]
        door = draw.choice(["generate", "run", "stream", "custom"] if not is_sampled else ["generate", "run"])
        drafter, verifier = _drafter(draw, is_sampled, model)
        return cls(
            is_captured=is_captured,
            model=model,
            drafter=drafter,
            verifier=verifier,
            prompts=prompts,
            settings=_settings(draw, is_sampled),
            door=door,
            door_settings=_door_settings(draw, door),
            keeps_prompts=draw.random() < 0.3,
        )

    def engine(self, tokenizer: object = None) -> stand.Engine:
        backend = {"backend": "triton", "fuse": False} if self.is_captured else {"backend": "sdpa"}
        return stand.wrap(self.model, tokenizer, drafter=self.drafter, verifier=self.verifier, **backend)

    @torch.inference_mode()
    def by_transformers(self) -> list[list[int]]:
        """New tokens of each prompt by itself, greedy."""
        return [self._by_transformers(prompt) for prompt in self.prompts]

    def for_transformers(self) -> dict[str, object]:
        """The settings under transformers' names, without the processors."""
        settings = {name: value for name, value in self.settings.items() if name not in OWN_NAMES}
        if "stop_token_ids" in self.settings:
            settings["eos_token_id"] = self.settings["stop_token_ids"]
        return settings | {"do_sample": False}

    def _by_transformers(self, prompt: list[int]) -> list[int]:
        ids, own = torch.tensor([prompt]), [type(one)() for one in self.settings.get("logits_processors", [])]
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList(own),
            **self.for_transformers(),
        )
        return output[0, len(prompt) :].tolist()


def _model(draw: random.Random, is_captured: bool) -> PreTrainedModel:
    if is_captured:
        family = draw.choice(CAPTURED)
        return recurrent_kernel_model(family) if family in RECURRENT else kernel_model(family)
    family = draw.choice([*CONFIGS, *RECURRENT])
    return recurrent_model(family) if family in RECURRENT else tiny_model(family)


def _drafter(draw: random.Random, is_sampled: bool, model: PreTrainedModel) -> tuple[stand.Drafter, str]:
    """With rule `match` where rows are sampled, so that drafts change no token."""
    blended = {"budget": draw.choice([0, 3, 8, 24]), "kind": draw.choice(["sampled", "mixed", "deterministic"])}
    made = draw.choice(
        [
            lambda: stand.BlendedDrafter(**blended),
            lambda: stand.BlendedDrafter(**blended),
            lambda: stand.BlendedDrafter(**blended, floor=0.1),
            lambda: stand.BlendedDrafter(**blended, source=stand.NeighbourLaws()),
            lambda: stand.BlendedDrafter(**blended, source=stand.EagleLaws(random_eagle3(model), runs=2)),
            lambda: stand.BlendedDrafter(**blended, source=stand.DFlashLaws(random_dflash(model, **SELECTOR))),
            lambda: stand.DFlashDrafter(random_dflash(model, vocabulary=[*range(3, 40)]), budget=9),
            lambda: stand.EagleDrafter(random_eagle3(model, vocabulary=[*range(3, 40)]), budget=9),
            lambda: stand.FixedShapeDrafter(shape=TreeShape.from_branching([3, 2, 1])),
            lambda: stand.PromptLookupDrafter(),
            lambda: stand.TokenRecyclingDrafter(),
            lambda: stand.ModelDrafter(tiny_model("llama"), gamma=3),
        ]
    )()
    return made, "match" if is_sampled else draw.choice(["match", "coupled", "traversal"])


def _settings(draw: random.Random, is_sampled: bool) -> dict[str, object]:
    """Some of those that change the law, and where rows end."""
    tokens, limit = range(3, VOCABULARY_SIZE), draw.randint(1, MOST_NEW)
    further = {
        "repetition_penalty": draw.choice([1.2, 0.8]),
        "no_repeat_ngram_size": draw.choice([2, 3]),
        "bad_words_ids": [[draw.choice(tokens)], draw.sample(tokens, 2)],
        "min_new_tokens": draw.randint(1, limit),
        "suppress_tokens": draw.sample(tokens, 20),
        "sequence_bias": [[[draw.choice(tokens)], 4.0], [draw.sample(tokens, 2), 5.0]],
        "exponential_decay_length_penalty": (draw.randint(0, 9), 1.2),
        "prefix_allowed_tokens_fn": lambda number, ids: [(int(ids[-1]) + step) % 58 + 3 for step in range(9)] + [2],
        "logits_processors": [Raising()],
    }
    chosen = draw.sample(sorted(further), draw.choice([0, 0, 1, 2, 3]))
    settings: dict[str, object] = {name: further[name] for name in chosen}
    settings |= {"max_new_tokens": limit, "temperature": 0.0}
    if draw.random() < 0.5:
        settings["stop_token_ids"] = draw.sample(tokens, 3)
    if is_sampled:
        settings |= {
            "temperature": draw.choice([0.5, 1.0, 1.6]),
            "top_k": draw.choice([0, 9]),
            "seed": draw.randrange(9),
        }
        settings |= {"top_p": draw.choice([1.0, 0.8])}
    return settings


def _door_settings(draw: random.Random, door: str) -> dict[str, object]:
    if door == "custom":
        return {}
    settings: dict[str, object] = {"learn": draw.random() < 0.8}
    if draw.random() < 0.5:
        settings["max_rows"] = draw.randint(1, 3)
    if door != "stream" and draw.random() < 0.6:
        settings["logprobs"] = draw.randint(0, 4)
    return settings
