"""Training of streams: what they learn from, the laws that they are trained to have, and the shipped ones."""

import numpy as np
import pytest
import torch
from plain_streams import plain_stream_logits, random_streams
from tiny_models import tiny_model
from train_streams import read_arguments
from trained_heads import assert_small_and_good, greedy_generations
from training.head_command import DRAFTERS, run
from training.head_training import train_head
from training.recipes.streams import RECIPE, compared_laws, stream_batch, stream_states

import stand

SHIPPED = DRAFTERS / "streams"


@torch.no_grad()
def test_trained_laws_are_those_of_decoding_and_aims_are_the_targets_later_ones():
    """Of greedy texts the aim of stream j at token t holds token t + j + 1 the best; texts of two lengths."""
    model = tiny_model("llama")
    streams = random_streams(model)
    streams.config._attn_implementation = "sdpa"
    generations = greedy_generations(model, [[5, 9, 11, 4, 5, 9], [7, 8]], stop_token_ids=[])
    batch = stream_batch(streams, model, generations)
    places = torch.arange(batch.hidden.shape[1])
    states = stream_states(streams, batch, places)
    for stream in range(3):
        logits, aims = compared_laws(streams, batch, places, stream, states)
        counted = [(row, place) for row, place in batch.counts[:, :, stream].nonzero().tolist()]
        expected = [generations[row].token_ids[place + stream + 2] for row, place in counted]
        assert aims.argmax(dim=-1).tolist() == expected and len(expected) == 2 * (11 - stream)
        for (row, place), law in list(zip(counted, logits, strict=True))[::5]:
            plain = plain_stream_logits(streams, model, generations[row].token_ids[: place + 1])[stream]
            np.testing.assert_allclose(law.numpy(), plain, atol=1e-3)
    some = stream_states(streams, batch, places[::2])
    torch.testing.assert_close(some, states[:, ::2], atol=1e-4, rtol=1e-3)


@pytest.mark.long
def test_streams_learn_and_go_on_from_their_state(tmp_path, capsys):
    model = tiny_model("llama")
    generations = greedy_generations(model, [[token, token + 1, 5] for token in range(3, 40, 3)], stop_token_ids=[])
    streams = random_streams(model, scale=0.0)
    streams.config._attn_implementation = "sdpa"
    batch = stream_batch(streams, model, generations)

    @torch.no_grad()
    def loss_of(one) -> float:
        torch.manual_seed(0)  # the same places
        return float(RECIPE.loss(one, batch)[0])

    before = loss_of(streams)
    settings = {"minutes": 1, "tokens_per_batch": 100, "learning_rate": 1e-2, "save_minutes": 60, "seed": 0}
    train_head(RECIPE, streams, model, generations, tmp_path, steps=50, **settings)
    after = loss_of(streams)
    assert after < 0.9 * before, (before, after)
    fresh = random_streams(model, seed=5, scale=0.0)
    fresh.config._attn_implementation = "sdpa"
    assert loss_of(fresh) > 0.95 * before
    assert train_head(RECIPE, fresh, model, generations, tmp_path, steps=51, **settings)["step"] == 51
    assert loss_of(fresh) < 0.9 * before
    assert "goes on from step 50" in capsys.readouterr().err
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def test_the_shipped_streams_are_small_and_keep_their_promise():
    drafter = stand.StreamingDrafter(SHIPPED, budget=64)
    facts = assert_small_and_good(SHIPPED, drafter, problems=8)
    assert facts["parameters"] == sum(parameter.numel() for parameter in drafter.rider.streams.parameters())


@pytest.mark.long
def test_the_command_trains_and_evaluates(tmp_path):
    options = ["--tokens", "80", "--held-out-tokens", "40", "--max-new-tokens", "20", "--steps", "2", "--rows", "2"]
    paths = ["--checkpoints", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "streams"), "--streams", "2"]
    facts = run(RECIPE, read_arguments([*options, *paths]))
    assert facts["steps"] == 2 and len(facts["held_out_agreement"]) == 2
    again = run(RECIPE, read_arguments([*options, *paths, "--evaluate"]))
    assert again["held_out_agreement"] == facts["held_out_agreement"]


def test_another_model_needs_an_output_of_its_own():
    with pytest.raises(SystemExit):
        read_arguments(["--model", "smollm2"])
