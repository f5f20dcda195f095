"""What tests of trained heads learn from, and how good the shipped ones must be."""

import json
from pathlib import Path

import torch
from measuring.setup import REASONER
from training.generations import Generation
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from workloads.problems import held_out_problems

import stand

MOST_BYTES = 2 * 2**20  # of a shipped folder


def greedy_generations(model: PreTrainedModel, prompts: list[list[int]], **settings: object) -> list[Generation]:
    """Twelve tokens behind each prompt, or fewer; settings: of `generate`."""
    output = stand.wrap(model).generate(input_ids=prompts, max_new_tokens=12, temperature=0.0, **settings)
    return [
        Generation([*prompt, *tokens], len(prompt)) for prompt, tokens in zip(prompts, output.token_ids, strict=True)
    ]


def assert_small_and_good(folder: Path, drafter: stand.Drafter, *, problems: int) -> dict[str, object]:
    """Greedy, held-out problems of the bundled model: the first drafted token is kept in at least 0.7 of the steps.

    Returns what the folder says of its training.
    """
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32).eval()
    engine = stand.wrap(model, AutoTokenizer.from_pretrained(REASONER), drafter=drafter)
    chats = [[{"role": "user", "content": item.problem}] for item in held_out_problems(problems, seed=5)]
    stats = engine.generate(chats, max_new_tokens=40, temperature=0.0).stats
    assert stats.accepted_by_depth[0] / stats.num_steps >= 0.7
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))
