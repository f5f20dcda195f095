"""The law of whole continuations of a tiny model, from plain forwards, and a test of counts against it."""

from functools import lru_cache

import torch
from pearson import p_value
from tiny_models import SHAPE
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

Law = dict[tuple[int, ...], float]


@lru_cache
def small_model(size: int, **changes: int) -> PreTrainedModel:
    """A random model with `size` tokens, whose laws are neither flat nor certain; changes: of its config."""
    torch.manual_seed(2)
    config = {**SHAPE, "vocab_size": size, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config["initializer_range"] = 0.2
    return AutoModelForCausalLM.from_config(Qwen2Config(**{**config, **changes})).eval()


def continuation_law(model: PreTrainedModel, prompt: list[int], processors, *, end: int, tokens: int) -> Law:
    """The chance of every continuation that ends with the token `end` or has so many tokens."""
    chances, open_paths = {}, {(): 1.0}
    while open_paths:
        paths = list(open_paths)
        prefixes = torch.tensor([[*prompt, *path] for path in paths])
        with torch.inference_mode():
            logits = model(input_ids=prefixes, use_cache=False).logits[:, -1].float()
        grown = {}
        for row, path in enumerate(paths):
            law = torch.softmax(processors(prefixes[row][None], logits[row][None].clone())[0].double(), dim=-1)
            for token in torch.nonzero(law).flatten().tolist():
                chance, continuation = open_paths[path] * float(law[token]), (*path, token)
                ends = token == end or len(continuation) == tokens
                (chances if ends else grown)[continuation] = chance
        open_paths = grown
    total = sum(chances.values())
    if abs(total - 1.0) > 1e-6:
        raise ValueError(f"the chances of all continuations must sum to 1, got {total}")
    return chances


def p_of_continuations(counts: dict[tuple[int, ...], int], law: Law) -> float:
    """p-value of counts of continuations under their law. What cannot come has p 0."""
    if set(counts) - set(law):
        return 0.0
    total = sum(counts.values())
    return p_value([counts.get(path, 0) for path in law], [total * chance for chance in law.values()])
