"""Training of EAGLE heads: pairs are aligned, generations and runs go on where they ended, the shipped head is good."""

import json
import random

import pytest
import torch
from measuring.setup import REASONER
from plain_eagle import random_head
from tiny_models import tiny_model
from train_eagle import read_arguments
from train_streams import read_arguments as read_streams
from trained_heads import assert_small_and_good, greedy_generations
from training.generations import Generation, read_generations, shuffled_batches, write_generations
from training.head_command import DRAFTERS, prompt_source, run
from training.head_training import train_head
from training.recipes.eagle import RECIPE, agreement_on, head_batch
from transformers import AutoTokenizer

import stand
from stand.drafters.eagle.head import EagleHead

SHIPPED = DRAFTERS / RECIPE.name


def test_the_places_that_count_are_those_whose_laws_wrote_the_generation():
    """Of greedy texts the target's LM head guesses every counted token; one place further it must not."""
    model = tiny_model("llama")
    generations = greedy_generations(model, [[5, 9, 11, 4, 5, 9], [7, 8], [8, 30, 31, 32]])
    batch = head_batch(model, generations)
    head = random_head(model)
    with torch.no_grad():
        guesses = head.logits(batch.targets).argmax(dim=-1)
    for row, one in enumerate(generations):
        places = torch.nonzero(batch.counts[row])[:, 0]
        assert guesses[row][places].tolist() == one.token_ids[one.prompt_length :]
        assert batch.token_ids[row, : len(one.token_ids) - 1].tolist() == one.token_ids[1:]
    assert torch.equal(batch.features[:, 1:], batch.targets[:, :-1])


def test_batches_hold_every_generation_once_and_no_more_than_asked():
    generations = [Generation(list(range(size)), 1) for size in (5, 3, 9, 4, 4, 20, 6)]
    batches = list(shuffled_batches(generations, tokens_per_batch=12, seed="1"))
    assert sorted(len(one.token_ids) for batch in batches for one in batch) == [3, 4, 4, 5, 6, 9, 20]
    assert all(len(batch) == 1 or len(batch) * max(len(one.token_ids) for one in batch) <= 12 for batch in batches)


def test_generations_go_on_where_a_kill_ended_them(tmp_path):
    model, path = tiny_model("llama"), tmp_path / "generations.jsonl"
    settings = {"rows": 2, "max_new_tokens": 6, "temperature": 1.0, "seed": 3}

    def write(num_tokens):
        return write_generations(
            stand.wrap(model), path, lambda rng: [rng.randrange(3, 60) for _ in range(4)], num_tokens=num_tokens,
            **settings,
        )  # fmt: skip

    first = write(10)
    path.write_text(path.read_text() + '{"token_ids": [1, 2')
    assert read_generations(path) == first
    longer = write(30)
    assert longer[: len(first)] == first and len(longer) > len(first)
    assert read_generations(path) == longer


def test_a_head_learns_and_goes_on_from_its_state(tmp_path, capsys):
    model = tiny_model("llama")
    generations = greedy_generations(model, [[token, token + 1, 5] for token in range(3, 40, 3)])
    head = random_head(model).train()
    before = agreement_on(_plain(head), model, generations)
    settings = {"minutes": 1, "tokens_per_batch": 60, "learning_rate": 5e-3, "save_minutes": 60, "seed": 0}
    train_head(RECIPE, head, model, generations, tmp_path, steps=40, **settings)
    after = agreement_on(head, model, generations)
    assert after > before + 0.1, (before, after)
    fresh = random_head(model, seed=5).train()
    progress = train_head(RECIPE, fresh, model, generations, tmp_path, steps=42, **settings)
    assert progress["step"] == 42 and agreement_on(fresh, model, generations) > before + 0.1
    ended = {name: value.clone() for name, value in fresh.state_dict().items()}
    assert train_head(RECIPE, fresh, model, generations, tmp_path, steps=42, **settings)["step"] == 42  # as it is
    assert all(torch.equal(value, ended[name]) for name, value in fresh.state_dict().items())
    said = capsys.readouterr().err
    assert "goes on from step 40" in said and "step 42: loss" in said  # the last one, though 42 is no round number
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def _plain(head: EagleHead) -> EagleHead:
    head.config._attn_implementation = "sdpa"
    return head


def test_another_model_needs_an_output_of_its_own():
    with pytest.raises(SystemExit):
        read_arguments(["--model", "smollm2"])


@pytest.mark.parametrize("times", [1, 8])
def test_held_out_problems_of_a_file_are_not_trained_on(times, tmp_path):
    """Also where the file has every problem several times."""
    path = tmp_path / "problems.jsonl"
    lines = (json.dumps({"problem": f"{n}{n}", "answer": n}) + "\n" for n in range(10, 30))
    path.write_text("".join(times * line for line in lines))
    arguments = read_arguments(["--problems", str(path)])
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    drawn = [
        {tuple(prompt_source(arguments, tokenizer, held_out=held_out)(random.Random(n))) for n in range(200)}
        for held_out in (False, True)
    ]
    assert len(drawn[0]) + len(drawn[1]) == 20 and not drawn[0] & drawn[1]


def test_the_shipped_head_is_small_and_keeps_its_promise():
    drafter = stand.EagleDrafter(SHIPPED, budget=13, runs=1)
    facts = assert_small_and_good(SHIPPED, drafter, problems=13)
    assert facts["parameters"] == sum(parameter.numel() for parameter in drafter.head.parameters())


@pytest.mark.long
def test_the_command_trains_and_evaluates(tmp_path):
    options = ["--tokens", "80", "--held-out-tokens", "40", "--max-new-tokens", "20", "--steps", "2", "--rows", "2"]
    paths = ["--checkpoints", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "head")]
    facts = run(RECIPE, read_arguments([*options, *paths]))
    assert facts["steps"] == 2 and 0 <= facts["held_out_agreement"] <= 1
    again = run(RECIPE, read_arguments([*options, *paths, "--evaluate"]))
    assert again["held_out_agreement"] == facts["held_out_agreement"]
    for other, remedy in (
        (["--temperature", "0.5"], "--fresh"),
        (["--max-new-tokens", "21", "--evaluate"], "give those"),  # never what would remove a training's texts
        (["--instruction", "Hurry."], "--fresh"),
    ):
        with pytest.raises(ValueError, match=f"must go on with the settings of .*{other[0][2:5]}.* -> .*{remedy}"):
            run(RECIPE, read_arguments([*options, *paths, *other]))
    weights = (tmp_path / "head" / "model.safetensors").read_bytes()
    diverging = [*options, *paths, "--fresh", "--learning-rate", "1e30"]
    with pytest.raises(ValueError, match="trained weights must be finite, got others in .*--learning-rate"):
        run(RECIPE, read_arguments(diverging))
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == weights


def test_every_model_has_checkpoints_of_its_own():
    named = [read_arguments(["--output", "head", *model]).checkpoints.name for model in ([], ["--model", "smollm2"])]
    assert named == ["eagle_checkpoints_reasoner", "eagle_checkpoints_smollm2"]


@pytest.mark.parametrize(
    "options",
    [("--steps", "-1"), ("--minutes", "0"), ("--tokens", "0"), ("--held-out-tokens", "0"), ("--top-p", "0.9"),
     ("--top-k", "5"), ("--device", "foo"), ("--rows", "-1"), ("--steps", "0"), ("--output", "/no/such/folder"),
     ("--fresh", "--evaluate"), ("--evaluate", "--output", "nothing_there"), ("--num-problems", "3"),
     ("--output", str(SHIPPED.with_name("streams"))), ("--output", str(REASONER), "--model", str(REASONER)),
     ("--output", str(SHIPPED / "training.json")), ("--checkpoints", str(SHIPPED / "training.json")),
     ("--dtype", "float16")],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        read_arguments([*options])
    assert options[0] in capsys.readouterr().err.splitlines()[-1]


def test_only_weights_of_its_kind_are_replaced(tmp_path):
    """A model's folder holds a model.safetensors, too; so does one of streams, and a damaged one tells nothing."""
    for name in ("model.safetensors", "training.json"):
        (tmp_path / name).write_bytes((SHIPPED / name).read_bytes())
    read_arguments(["--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        read_streams(["--output", str(tmp_path)])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        read_arguments(["--output", str(tmp_path)])
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(SystemExit, match="2"):
        read_arguments(["--output", str(tmp_path)])


def test_a_single_problem_leaves_none_to_learn_from(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1", "answer": 2}) + "\n")
    arguments = read_arguments(["--problems", str(path)])
    with pytest.raises(ValueError, match="--problems must hold 2 different problems or more"):
        prompt_source(arguments, AutoTokenizer.from_pretrained(REASONER), held_out=False)
