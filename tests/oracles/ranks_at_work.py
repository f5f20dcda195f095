"""What one of two processes that share models by tensor parallelism decodes, and what it would have decided alone.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python ranks_at_work.py FOLDER

The folder holds saved models. Answers are written there, one file per rank: `answers-0.json`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from failures import failure_of
from torch import distributed
from transformers import AutoModelForCausalLM, DistributedConfig, PreTrainedModel
from transformers.generation import StoppingCriteria

import stand
from stand.laws.logprobs import MODES
from stand.scheduling import memory
from stand.scheduling.kept_prompts import KeptPrompts
from stand.verifiers import get_verifier

PROMPTS = [[5, 9, 30, 7, 5, 9, 30, 7, 5, 9, 30, 4], [11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13]]
LONG = [(7 * place) % 60 + 1 for place in range(600)]  # more than a chunk of a kept prompt
NEW_TOKENS = 40
BUDGETS = (24, 5)  # of the first and the second rank's drafters
SAMPLED = {"num_return_sequences": 4, "max_new_tokens": NEW_TOKENS, "temperature": 1.0}
GREEDY = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0}


class AfterSeven(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= len(PROMPTS[0]) + 7])


class Watched(stand.BlendedDrafter):
    """Notes how many nodes it would have drafted."""

    def __init__(self, **settings: object):
        super().__init__(**settings)
        self.num_nodes: list[int] = []

    def draft(self, request: object) -> object:
        batch = super().draft(request)
        self.num_nodes.append(batch.num_nodes)
        return batch


class Heads(stand.LawSource):
    """That needs no features."""

    def laws(self, *_: object) -> None:
        raise NotImplementedError


class Blurred(stand.ModelDrafter):
    """Its logits differ from rank to rank."""

    noise = 0.0

    def _draw(self, logits: torch.Tensor, points: object, **how: object) -> tuple:
        return super()._draw(logits + self.noise * torch.randn_like(logits), points, **how)


class Ending(type(get_verifier("traversal"))):
    """Fails at its third step."""

    num_steps = 0

    def verify(self, *arguments: object) -> object:
        self.num_steps += 1
        if self.num_steps == 3:
            raise ArithmeticError("third step")
        return super().verify(*arguments)


def loaded(folder: Path, **settings: object) -> PreTrainedModel:
    attention = {"attn_implementation": "eager"} if folder.name == "gemma2" else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention, **settings).eval()


def engine_of(model: PreTrainedModel, rank: int, **settings: object) -> stand.Engine:
    return stand.wrap(model, drafter=Watched(budget=BUDGETS[rank]), **settings)


def decoded(folder: Path, rank: int) -> dict[str, object]:
    """Of every model: greedy tokens, and those under `match`, which follow from seed, prompt and row."""
    answers = {}
    for place in sorted(folder.iterdir()):
        if place.is_dir():
            model = loaded(place, distributed_config=DistributedConfig(tp_size=2))
            greedy = engine_of(model, rank).generate(PROMPTS, **GREEDY).token_ids
            matched = engine_of(model, rank, verifier="match").generate(PROMPTS, **SAMPLED, seed=3).token_ids
            answers[place.name] = {"greedy": greedy, "matched": matched}
    return answers


def decided(model: PreTrainedModel, rank: int) -> dict[str, object]:
    """What ranks would decide each for itself: all arguments that may differ here do."""
    engine = engine_of(model, rank)
    sampled = engine.generate(PROMPTS, **SAMPLED)
    answers = {
        "backend": engine.backend.name,
        "fusion": engine.backend.fusion is None,
        "sampled": sampled.token_ids,
        "seed": sampled.seed,
        "tokens_per_step": sampled.stats.mean_acceptance_length,
        "own_nodes": engine.drafter.num_nodes,
        "cost": [*engine.measure_cost(num_rows=2, length=16, most_tokens=8, seconds=0.1).seconds],
    }
    verifier = ("traversal", "match")[rank]
    answers["rules"] = engine_of(model, rank, verifier=verifier).generate(PROMPTS, **SAMPLED, seed=1).token_ids
    criteria = {} if rank else {"stopping_criteria": [AfterSeven()]}
    answers["ends"] = engine.generate(PROMPTS[0], **SAMPLED, **criteria, stop_token_ids=[], seed=2).token_ids
    free = memory.most_bytes
    live: list[int] = []
    with mock.patch.object(memory, "most_bytes", lambda *given: free(*given) if rank == 0 else 60_000):
        run = engine.run(PROMPTS, **SAMPLED, seed=4, on_step=lambda run: live.append(run.num_decoded))
        answers["in_memory"] = {trajectory.row: trajectory.token_ids for trajectory in run}
    answers["most_live"] = max(live)
    with engine.keep_prompts(1e9):
        kept = [engine.generate(LONG, **GREEDY) for _ in range(2)]
    answers["kept"] = [kept[1].stats.num_copied_prompt_tokens, kept[0].token_ids == kept[1].token_ids]
    with engine.keep_prompts(1e9):
        with mock.patch.object(KeptPrompts, "_keep", lambda *_: None) if rank else nullcontext():
            kept = [engine.generate(LONG, **GREEDY)]
        kept.append(engine.generate(LONG, **GREEDY))
    answers["kept_by_one"] = [kept[1].stats.num_copied_prompt_tokens, kept[0].token_ids == kept[1].token_ids]
    answers["learned"] = len(engine.lookup)
    ranks = engine.backend.ranks
    answers["room"] = [ranks.room((100.0, 150.0)[rank], torch.device(kind)) for kind in ("cpu", "cuda")]
    with mock.patch.object(Blurred, "noise", (0.0, 0.3)[rank]):
        chains = stand.wrap(model, drafter=Blurred(model, gamma=3))
        answers["draft_model"] = chains.generate(PROMPTS, **SAMPLED, seed=5).token_ids
    return answers


def refused(model: PreTrainedModel, rank: int) -> dict[str, str]:
    engine = engine_of(model, rank)
    ending = engine_of(model, rank, verifier=Ending() if rank == 0 else "traversal")
    one_more = [PROMPTS[0], *PROMPTS[: 1 - rank]]
    needy = Watched(budget=8)
    needy.requires_features = True
    return {
        "prompts": failure_of(lambda: engine.generate(PROMPTS[rank], **GREEDY)),
        "limits": failure_of(lambda: engine.generate(PROMPTS, **GREEDY | {"max_new_tokens": 5 + rank})),
        "logprobs": failure_of(lambda: engine.generate(PROMPTS, **GREEDY, logprobs=(None, 2)[rank])),
        "kinds": failure_of(lambda: engine.generate(PROMPTS, **GREEDY, logprobs=2, logprobs_mode=MODES[rank])),
        "more_prompts": failure_of(lambda: list(engine.run(one_more, **GREEDY))),
        "seed": failure_of(lambda: engine.generate(PROMPTS, seed=-1 if rank == 0 else 1)),
        "rule": failure_of(lambda: ending.generate(PROMPTS, **SAMPLED)),
        "needy": failure_of(lambda: stand.wrap(model, drafter=needy)),
        "source": failure_of(lambda: stand.wrap(model, drafter=stand.BlendedDrafter(source=Heads()))),
        "share": failure_of(lambda: stand.wrap(model, drafter=stand.BlendedDrafter(share="somewhere"))),
        "afterwards": engine.generate(PROMPTS, **GREEDY).token_ids,
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    answers = {"decoded": decoded(folder, rank)}
    model = loaded(folder / "llama", distributed_config=DistributedConfig(tp_size=2))
    answers |= {"decided": decided(model, rank), "refused": refused(model, rank)}
    (folder / f"answers-{rank}.json").write_text(json.dumps(answers))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
