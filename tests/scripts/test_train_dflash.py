"""Training of block heads: what is trained is what drafts compute, which places count, and what files go on from."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch
from estimated_rows import EstimatedBlocks
from random_dflash import CONVOLUTIONS, MARKOV, SELECTOR, random_dflash
from tiny_models import tiny_model
from train_dflash import main, read_arguments
from trained_heads import greedy_generations
from training.generations import Generation
from training.head_command import run
from training.head_training import train_head
from training.layer_batch import layer_batch
from training.recipes import dflash
from training.recipes.dflash import (
    RECIPE,
    agreement_on,
    anchors_of,
    compared,
    estimates_at,
    head_loss,
    new_head,
    pair_loss,
)
from workloads.tiny_classes import tiny_model as tiny_class

import stand
from stand.drafters.dflash.head import DFlashHead
from stand.drafters.dflash.settings import DFlashSettings
from stand.forward.tree_attention import ATTENTION_NAME

PROMPTS = [[token, token + 1, 5] for token in range(3, 40, 3)]
TEXTS = [[5, 9, 11, 4, 5, 9, 30, 31, 7, 8, 12, 3], [40, 41, 42, 43, 44]]
KINDS = ("dflash", "dflash2", "dspark")
OPTIONS = {"block_size": 5, "layers": 2, "layers_read": 3, "rank": 4, "mask_token_id": None}


def head_for(model, kind: str = "dflash", **changed) -> DFlashHead:
    torch.manual_seed(0)
    head = new_head(model, Namespace(head_kind=kind, **(OPTIONS | changed)), [])
    head.config._attn_implementation = "sdpa"  # as `train_head` sets it
    return head


def assert_drafts_are_trained(head, model) -> None:
    """At every place of every text but its first one, whose drafts nothing stands before."""
    batch = layer_batch(head, model, [Generation(text, 1) for text in TEXTS])
    places = torch.arange(1, 12).expand(2, -1)
    head.config._attn_implementation = "sdpa"
    with torch.no_grad():
        trained = estimates_at(head, batch, places)
    head.config._attn_implementation = ATTENTION_NAME
    for row, text in enumerate(TEXTS):
        for column, place in enumerate(range(1, len(text))):
            with torch.inference_mode():
                drafted = EstimatedBlocks(model, head).run([np.array(text[: place + 1], dtype=np.int32)])[0]
            torch.testing.assert_close(trained[row, column], drafted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["llama", "gemma2"])
def test_estimates_of_new_heads_are_those_of_drafts(target, kind):
    assert_drafts_are_trained(head_for(tiny_model(target), kind), tiny_model(target))


@pytest.mark.parametrize(
    "settings",
    [
        {"windows": (True, False)},
        {"windows": (True, True), "is_causal": (True, False)},
        {"is_causal": (True, True), "has_anchor_law": True, **CONVOLUTIONS},
        {"input_embedding_scale": 3.0, "block_size": 9, "windows": (False, True)},
    ],
)
def test_estimates_of_published_heads_are_those_of_drafts(settings):
    """Which can be evaluated, too."""
    assert_drafts_are_trained(random_dflash(tiny_model("llama"), **settings), tiny_model("llama"))


def test_a_difference_of_masks_is_seen(monkeypatch):
    masks_of = dflash.masks_of
    monkeypatch.setattr(dflash, "masks_of", lambda head, at, length: masks_of(head, at + 1, length))
    with pytest.raises(AssertionError, match="not close"):
        assert_drafts_are_trained(head_for(tiny_model("llama")), tiny_model("llama"))


@pytest.mark.parametrize("has_anchor_law", [False, True])
def test_the_places_that_count_are_those_whose_laws_wrote_the_generation(has_anchor_law, monkeypatch):
    """Of greedy texts the target's LM head guesses every counted token, from what the head learns to say there."""
    model = tiny_model("llama")
    head = random_dflash(model, has_anchor_law=has_anchor_law, block_size=4)
    head.config._attn_implementation = "sdpa"
    texts = greedy_generations(model, [[5, 9, 11, 4, 5, 9], [7, 8], [8, 30, 31, 32]])
    batch = layer_batch(head, model, texts)
    anchors = torch.arange(batch.counts.shape[1]).expand(3, -1).masked_fill(~batch.counts, -1)
    monkeypatch.setattr(dflash, "anchors_of", lambda batch: anchors)
    with torch.no_grad():
        estimates, last, before, numbers = compared(head, batch)
    expected = [
        (one.token_ids[at + number], number, one.token_ids[at + number + 1])
        for one in texts
        for at in range(one.prompt_length - 1, len(one.token_ids) - 1)
        for number in range(head.settings.num_guesses)
        if at + number < len(one.token_ids) - 1
    ]
    guessed = model.get_output_embeddings()(last).argmax(dim=-1)
    assert list(zip(before.tolist(), numbers.tolist(), guessed.tolist(), strict=True)) == expected
    assert len(estimates) == len(expected) > 60


def test_blocks_begin_where_the_next_token_counts(monkeypatch):
    model = tiny_model("llama")
    texts = [Generation(TEXTS[0], 4), Generation(TEXTS[1], 1), Generation([7, 8], 2), Generation([7, 8], 1)]
    batch = layer_batch(head_for(model), model, texts)
    torch.manual_seed(0)
    found = [sorted(one for one in row if one >= 0) for row in anchors_of(batch).tolist()]
    assert found == [list(range(3, 11)), [1, 2, 3], [], []]
    monkeypatch.setattr(dflash, "ANCHORS", 8)
    draws = [anchors_of(batch)[0].tolist() for _ in range(40)]
    assert all(len(row) == 2 and 3 <= min(row) < max(row) <= 10 for row in map(sorted, draws))
    assert {one for row in draws for one in row} == set(range(3, 11))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_which_nothing_counts_teach_nothing(kind):
    model = tiny_model("llama")
    head = head_for(model, kind)
    loss, agreement = head_loss(head, layer_batch(head, model, [Generation([7, 8], 2), Generation([7, 8], 1)]))
    loss.backward()
    assert loss.item() == agreement == 0.0
    assert all(weights.grad is None or not weights.grad.any() for weights in head.parameters())
    assert agreement_on(head, model, [Generation([7, 8], 2)]) == [0.0] * 4


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_pairs_learn_the_targets_law_among_the_likeliest(kind):
    head = random_dflash(tiny_model("llama"), **(SELECTOR if kind == "dflash2" else MARKOV))
    generator = torch.Generator().manual_seed(0)
    estimates, before = torch.randn(6, 32, generator=generator), torch.tensor([5, 9, 7, 5, 8, 60])
    wanted = torch.randn(6, 61, generator=generator).softmax(dim=-1)
    size = min(head.pairs.num_candidates, 61)
    with torch.no_grad():
        law = head.laws(estimates[:, None], before, temperature=1.0, count=size, width=1)
        found = pair_loss(head, estimates, before, head.logits(estimates), wanted)
    ids, probs = law.pair_ids[:, 0, 0].long(), law.pair_probs[:, 0, 0]
    torch.testing.assert_close(found, -(wanted.gather(1, ids) * probs.log()).sum(dim=1), atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns_and_goes_on_from_its_state(kind, tmp_path):
    model = tiny_model("llama")
    generations = greedy_generations(model, PROMPTS)
    head = head_for(model, kind).train()
    before = agreement_on(head, model, generations)
    settings = {"minutes": 1, "tokens_per_batch": 60, "learning_rate": 5e-3, "save_minutes": 60, "seed": 0}
    train_head(RECIPE, head, model, generations, tmp_path, steps=80, **settings)
    after = agreement_on(head, model, generations)
    assert len(after) == 4 and all(one > other + 0.1 for one, other in zip(after, before, strict=True)), (before, after)
    fresh = head_for(model, kind).train()
    assert train_head(RECIPE, fresh, model, generations, tmp_path, steps=81, **settings)["step"] == 81
    assert agreement_on(fresh, model, generations)[0] > before[0] + 0.1
    fresh.save(tmp_path / "head")
    read = DFlashHead.load(model, tmp_path / "head")
    read.config._attn_implementation = "sdpa"
    assert np.allclose(agreement_on(read, model, generations), agreement_on(fresh, model, generations), atol=0.1)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


@pytest.mark.parametrize("kind", KINDS)
def test_agreement_is_that_of_the_likeliest_tokens(kind, monkeypatch):
    """A head that says what the target reads agrees everywhere; where pairs or places say another token, not there."""
    model = tiny_model("llama")
    head, generations = head_for(model, kind), greedy_generations(model, PROMPTS)
    with torch.no_grad():
        for name, weights in head.named_parameters():
            if "codebook" in name or "markov" in name:
                weights.zero_()
    found = []

    def perfect(head, batch):
        _, last, before, numbers = compared(head, batch)
        found.append(last)
        wrong = last.roll(1, dims=0)
        return torch.where((numbers == wrong_place)[:, None], wrong, last), last, before, numbers

    monkeypatch.setattr(dflash, "compared", perfect)
    wrong_place = -1
    assert agreement_on(head, model, generations) == [1.0] * 4
    monkeypatch.setattr(dflash, "MOST_LAW_NUMBERS", 61 * 7)  # seven places at a time
    assert agreement_on(head, model, generations) == [1.0] * 4 and len(found[0]) > 100
    wrong_place = 2
    first, second, third, last = agreement_on(head, model, generations)
    assert first == second == last == 1.0 and third < 0.5
    if head.pairs is not None:
        wrong_place = -1
        with torch.no_grad():
            for name, weights in head.named_parameters():
                if "codebook" in name or "markov" in name or "hidden_projection" in name:
                    weights.copy_(3 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(0)))
        assert max(agreement_on(head, model, generations)) < 0.9


@pytest.mark.parametrize("target", ["gemma3_text", "phi3", "opt", "gpt_oss", "qwen3_5_text"])
def test_a_head_is_made_for_any_target_whose_decoder_has_layers(target):
    """Whatever its rotary positions and its norms are called; its final norm is taken from families that are known."""
    head = head_for(tiny_class(target), "dspark", layers=1)
    assert head.settings.config.rope_parameters["rope_type"] == "default" and head.config.hidden_size == 32
    assert torch.equal(head.norm.weight, torch.ones(32).to(head.norm.weight))
    assert len(head.feature_layers) >= 1 and head.settings.block_size == 5


def test_what_a_new_head_is():
    model = tiny_model("llama")
    second, spark = head_for(model, "dflash2"), head_for(model, "dspark", mask_token_id=7, layers=1, layers_read=1)
    assert second.pairs.num_candidates == 16 and second.settings.selector_rank == 4 and second.has_windows is False
    assert second.settings.conv_kernel_size == 2 and second.settings.mask_token_id == 60
    assert spark.settings.markov_rank == 4 and spark.settings.mask_token_id == 7 and len(spark.layers) == 1
    assert spark.feature_layers == (1,) and torch.equal(spark.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 1}, "blocks of 2 places or more, got 1; choose other settings"),
        ({"mask_token_id": 61}, "a mask token from 0 to 60, got 61; choose other settings"),
        ({"mask_token_id": -1}, "a mask token from 0 to 60, got -1; choose"),
    ],
)
def test_settings_that_the_target_does_not_fit_are_refused(changed, message):
    with pytest.raises(ValueError, match=f"a DFlash head must have {message}"):
        head_for(tiny_model("llama"), **changed)


def test_convolutions_need_groups_that_channels_fall_into():
    model, given = tiny_model("llama"), {"conv_kernel_size": 2, "selector_rank": 4, "selector_top_k": 2}
    with pytest.raises(ValueError, match="32 channels fall into, got kernels of 2 for groups of 5; choose other"):
        DFlashSettings.for_target(model, conv_group_size=5, **given)
    assert DFlashSettings.for_target(model, conv_group_size=8, **given).num_guesses == 7


# The command.


SHORT = ["--tokens", "80", "--held-out-tokens", "40", "--max-new-tokens", "20", "--rows", "2", "--layers", "1"]


@pytest.mark.long
def test_the_command_trains_and_evaluates(tmp_path):
    """Its folder drafts by its path alone, and goes on with the same options only."""
    paths = ["--checkpoints", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "head")]
    options = [*SHORT, "--steps", "2", "--vocabulary-size", "100", "--block-size", "4", "--rank", "5", *paths]
    facts = run(RECIPE, read_arguments(options))
    assert facts["steps"] == 2 and len(facts["held_out_agreement"]) == 3 and facts["vocabulary_size"] <= 100
    again = run(RECIPE, read_arguments([*SHORT[:8], *paths, "--evaluate"]))
    assert again["held_out_agreement"] == facts["held_out_agreement"]
    told = json.loads((tmp_path / "head" / "config.json").read_text())
    assert told["draft_vocab_size"] == facts["vocabulary_size"] and told["architectures"] == ["DFlash2DraftModel"]
    assert json.loads((tmp_path / "head" / "training.json").read_text())["steps"] == 2
    for other, name in (
        (["--kind", "dspark"], "head_kind 'dflash2' -> 'dspark'"),
        (["--block-size", "6"], "block_size 4 -> 6"),
        (["--layers", "2"], "layers 1 -> 2"),
        (["--layers-read", "1"], "layers_read 3 -> 1"),
        (["--rank", "6"], "rank 5 -> 6"),
        (["--mask-token-id", "5"], "mask_token_id None -> 5"),
    ):
        with pytest.raises(ValueError, match=f"must go on with the settings of .*, got {name}; .*--fresh"):
            run(RECIPE, read_arguments([*options, *other]))
    with pytest.raises(SystemExit):
        read_arguments(["--output", str(tmp_path / "checkpoints"), "--checkpoints", str(tmp_path / "others")])
    assert stand.DFlashLaws(tmp_path / "head").requires_features


def test_settings_are_checked_before_texts_are_written(tmp_path, monkeypatch, capsys):
    """Which take long, and whose folder belongs to its settings."""
    options = [*SHORT, "--checkpoints", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "head")]
    for other, message in (
        (["--block-size", "1"], "blocks of 2 places or more, got 1"),
        (["--mask-token-id", "1000000"], "a mask token from 0 to .*, got 1000000"),
        (["--mask-token-id", "-1"], "a mask token from 0 to .*, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            run(RECIPE, read_arguments([*options, *other]))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("sys.argv", ["train_dflash.py", *options, "--block-size", "1"])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("train_dflash: a DFlash head must have blocks of 2")


@pytest.mark.parametrize(
    "options",
    [("--kind", "eagle"), ("--block-size", "0"), ("--layers", "0"), ("--layers-read", "0"), ("--rank", "0"),
     ("--mask-token-id", "last"), ("--top-k", "5"), ("--dtype", "float16"), ("--output", "/no/such/folder")],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        read_arguments([*options])
    assert options[0] in capsys.readouterr().err.splitlines()[-1]


def test_another_model_needs_an_output_of_its_own():
    with pytest.raises(SystemExit):
        read_arguments(["--model", "smollm2"])
    assert read_arguments(["--model", "smollm2", "--output", "head"]).checkpoints.name == "dflash_checkpoints_smollm2"
