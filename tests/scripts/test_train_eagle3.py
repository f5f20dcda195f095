"""Training of EAGLE-3 heads: what is trained is what drafts compute, and the files are those of other tools."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch
from estimated_rows import EstimatedRows
from tiny_models import tiny_model
from train_eagle import read_arguments, recipe_of
from trained_heads import greedy_generations
from training.generations import Generation
from training.head_command import run
from training.head_training import train_head
from training.layer_batch import layer_batch
from training.recipes.eagle3 import DEPTH, RECIPE, agreement_on, new_head, unrolled

import stand
from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.forward.tree_attention import ATTENTION_NAME

PROMPTS = [[token, token + 1, 5] for token in range(3, 40, 3)]


def head_for(model, generations=(), *, size: int = 1000) -> Eagle3Head:
    torch.manual_seed(0)
    return new_head(model, Namespace(vocabulary_size=size), list(generations))


@pytest.mark.parametrize("target", ["llama", "gemma2"])
def test_estimates_in_a_row_are_those_of_drafts(target):
    """Of every column of the training: the chain of the text's own tokens behind it."""
    model = tiny_model(target)
    head, tokens = head_for(model), [5, 9, 11, 4, 5, 9, 30, 31, 7, 8, 12, 3]
    with torch.no_grad():
        trained = [estimates for estimates, _ in unrolled(head, layer_batch(head, model, [Generation(tokens, 1)]))]
    head.config._attn_implementation = ATTENTION_NAME
    assert [len(estimates) for estimates in trained] == [len(tokens) - 1 - depth for depth in range(1, DEPTH + 1)]
    for column in range(1, len(tokens) - 1 - DEPTH):
        rows = EstimatedRows(model, head)
        with torch.inference_mode():
            _, estimate = rows.catch_up([np.array(tokens[: column + 2], dtype=np.int32)])
        for depth in range(DEPTH):
            torch.testing.assert_close(estimate[0], trained[depth][column], atol=1e-5, rtol=1e-4)
            above = None if depth == 0 else depth - 1
            with torch.inference_mode():
                estimate = rows.extend([0], [tokens[column + 2 + depth]], [above], estimate)


def test_the_places_that_count_are_those_whose_laws_wrote_the_generation():
    """Of greedy texts the target's LM head guesses every counted token, at every depth."""
    model = tiny_model("llama")
    head, lm_head = head_for(model), model.get_output_embeddings()
    for one in greedy_generations(model, [[5, 9, 11, 4, 5, 9], [7, 8], [8, 30, 31, 32]]):
        with torch.no_grad():
            for depth, (_, last) in enumerate(unrolled(head, layer_batch(head, model, [one])), start=1):
                written = one.token_ids[max(one.prompt_length, depth + 1) :]
                assert lm_head(last).argmax(dim=-1).tolist() == written


@pytest.mark.long
def test_a_head_learns_and_goes_on_from_its_state(tmp_path):
    model = tiny_model("llama")
    generations = greedy_generations(model, PROMPTS)
    head = head_for(model, generations).train()
    before = agreement_on(head, model, generations)
    settings = {"minutes": 1, "tokens_per_batch": 60, "learning_rate": 5e-3, "save_minutes": 60, "seed": 0}
    train_head(RECIPE, head, model, generations, tmp_path, steps=100, **settings)
    after = agreement_on(head, model, generations)
    assert all(one > other + 0.1 for one, other in zip(after, before, strict=True)), (before, after)
    fresh = head_for(model, generations).train()
    assert train_head(RECIPE, fresh, model, generations, tmp_path, steps=101, **settings)["step"] == 101
    assert agreement_on(fresh, model, generations)[0] > before[0] + 0.1
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def test_a_new_head_reads_frequent_tokens_as_the_target_does():
    model = tiny_model("llama")
    head = head_for(model, [Generation([9, 9, 9, 4, 4, 30, 30, 7], 1)], size=3)
    assert head.vocabulary.tolist() == [4, 9, 30] and head.num_guessed == 3
    assert torch.equal(head.lm_head.weight, model.get_output_embeddings().weight[[4, 9, 30]])


def test_the_version_is_chosen_before_the_options():
    assert recipe_of(["--version", "3", "--minutes", "1"]) is RECIPE
    assert recipe_of([]).name == recipe_of(["--version", "1"]).name == "eagle"
    assert read_arguments(["--version", "3"]).output.name == "eagle3"
    with pytest.raises(SystemExit):
        read_arguments(["--version", "2"])


@pytest.mark.long
def test_the_command_trains_and_evaluates(tmp_path):
    """Its folder drafts by its path alone; it is replaced by a later training, another kind's is not."""
    options = ["--version", "3", "--tokens", "80", "--held-out-tokens", "40", "--max-new-tokens", "20", "--rows", "2"]
    paths = ["--checkpoints", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "head")]
    facts = run(RECIPE, read_arguments([*options, "--steps", "2", "--vocabulary-size", "100", *paths]))
    assert facts["steps"] == 2 and len(facts["held_out_agreement"]) == DEPTH and facts["vocabulary_size"] <= 100
    again = run(RECIPE, read_arguments([*options, *paths, "--evaluate"]))
    assert again["held_out_agreement"] == facts["held_out_agreement"]
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["draft_vocab_size"] == facts["vocabulary_size"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    read_arguments([*options, *paths])
    with pytest.raises(SystemExit):
        read_arguments(["--output", str(tmp_path / "head"), "--checkpoints", str(tmp_path / "others")])
    assert stand.EagleDrafter(tmp_path / "head").requires_features
