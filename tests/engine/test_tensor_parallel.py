"""Two processes that share a model by tensor parallelism (gloo, on a CPU) decode as one does."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import ranks_at_work
import torch
from ranks_at_work import BUDGETS, GREEDY, PROMPTS, SAMPLED, engine_of, loaded
from recurrent_models import RECURRENT, recurrent_model
from shared_results import found_once
from started_ranks import run_two_ranks
from tiny_models import CONFIGS, tiny_model
from torch import distributed
from transformers import AutoModelForCausalLM

from stand.forward.ranks import ALONE

pytestmark = pytest.mark.long

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("needs a torch with torch.distributed and gloo", allow_module_level=True)

FAMILIES = ("llama", "gemma2", "qwen3_moe", "qwen3_5", "bamba")
EVEN_VOCABULARY = 64  # transformers 5.16 shares no others


def saved_model(family: str, folder: Path) -> None:
    config = copy.deepcopy((recurrent_model(family) if family in RECURRENT else tiny_model(family)).config)
    config.vocab_size, config.max_position_embeddings = EVEN_VOCABULARY, 1024
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """Of those families that this run asks about, and of the first."""
    made, asked = tmp_path_factory.mktemp("models"), [item.name for item in request.session.items]
    for family in FAMILIES:
        if family == FAMILIES[0] or f"{test_tokens_are_those_of_one_process.__name__}[{family}]" in asked:
            saved_model(family, made)
    return made


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory) -> list[dict]:
    """The answers of both ranks."""
    return found_once(tmp_path_factory, "ranks", partial(answers_of_ranks, folder))


def answers_of_ranks(folder: Path) -> list[dict]:
    run_two_ranks(ranks_at_work.__file__, str(folder))
    return [json.loads((folder / f"answers-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_process(folder, ranks, family):
    whole = loaded(folder / family)
    greedy = engine_of(whole, 0).generate(PROMPTS, **GREEDY).token_ids
    matched = engine_of(whole, 0, verifier="match").generate(PROMPTS, **SAMPLED, seed=3).token_ids
    for answers in ranks:
        assert answers["decoded"][family] == {"greedy": greedy, "matched": matched}


@pytest.mark.parametrize("what", ["sampled", "seed", "rules", "ends", "in_memory", "most_live", "cost", "learned"])
def test_all_ranks_do_what_the_first_decides(ranks, what):
    first, second = (answers["decided"][what] for answers in ranks)
    assert first == second


def test_ranks_would_have_decided_otherwise(folder, ranks):
    """Controls: without an agreement the second rank's draft, rule, end and rows would have been others."""
    first, second = (answers["decided"] for answers in ranks)
    assert first["tokens_per_step"] > 1 and sum(first["own_nodes"]) > sum(second["own_nodes"])
    own = engine_of(loaded(folder / "llama"), 1, verifier="match").generate(PROMPTS, **SAMPLED, seed=1)
    assert own.token_ids != second["rules"]
    assert {len(tokens) for tokens in second["ends"]} == {7}
    assert first["most_live"] < len(PROMPTS) * SAMPLED["num_return_sequences"]


def test_steps_are_eager_and_not_fused(ranks):
    for answers in ranks:
        assert (answers["decided"]["backend"], answers["decided"]["fusion"]) == ("sdpa", True)


def test_prompts_are_kept(ranks):
    for answers in ranks:
        assert answers["decided"]["kept"] == [512, True]


def test_prompts_are_computed_again_where_a_rank_has_not_kept_them(ranks):
    for answers in ranks:
        assert answers["decided"]["kept_by_one"] == [0, True]


def test_ranks_of_a_draft_model_draw_alike(ranks):
    """One of them sees other logits, and would go on with other tokens."""
    first, second = (answers["decided"]["draft_model"] for answers in ranks)
    assert first == second


def test_ranks_on_a_cpu_share_its_memory(ranks):
    first, second = (answers["decided"]["room"] for answers in ranks)
    assert first == second == [50.0, 100.0]


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("prompts", "ValueError: ranks that share a model must make the same calls", "ValueError: ranks that share"),
        ("limits", "ValueError: ranks that share a model must make the same calls", "ValueError: ranks that share"),
        ("logprobs", "ValueError: ranks that share a model must make the same calls", "ValueError: ranks that share"),
        ("kinds", "ValueError: ranks that share a model must make the same calls", "ValueError: ranks that share"),
        ("more_prompts", "ValueError: ranks that share a model must make the same calls", "ValueError: ranks that"),
        ("seed", "ValueError: seed must be", "RuntimeError: ranks must go on together, got ValueError: seed must be"),
        ("rule", "ArithmeticError: third step", "RuntimeError: ranks must go on together, got ArithmeticError: third"),
        ("needy", "ValueError: drafters of a model of several processes", "ValueError: drafters of a model of several"),
        ("source", "ValueError: source and share must be left out", "ValueError: source and share must be left out"),
        ("share", "ValueError: source and share must be left out", "ValueError: source and share must be left out"),
    ],
)
def test_what_ends_one_rank_ends_all(ranks, what, first, second):
    for answers, expected in zip(ranks, (first, second), strict=True):
        assert answers["refused"][what].startswith(expected)


def test_later_calls_go_on(ranks):
    for answers in ranks:
        assert answers["refused"]["afterwards"] == answers["decoded"]["llama"]["greedy"]


def test_one_process_agrees_with_itself():
    assert (ALONE.agreed(max, 3, 4), ALONE.room(4.0, torch.device("cpu")), ALONE.are_alike(5)) == (4, 4.0, True)
    ALONE.check_alike([5], "prompts")
    assert BUDGETS[0] != BUDGETS[1] and set(FAMILIES) <= CONFIGS.keys() | RECURRENT.keys()
