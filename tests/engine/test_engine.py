"""The whole path on real transformers models: exactness, ends, streams, errors."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from letter_tokenizer import letter_tokenizer
from tiny_models import CONFIGS, VOCABULARY_SIZE, tiny_model
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer
from two_tokens import plain_greedy

import stand
from stand.trees import BlendedLookup, LookupTree, TreeShape

END = 2
PROMPTS = [[5, 9, 11, 4, 5, 9], [7], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32]]


def engine_of(family: str = "qwen2", **kwargs) -> stand.Engine:
    drafter = stand.FixedShapeDrafter(shape=TreeShape.from_branching([3, 2, 1, 1]))
    return stand.wrap(tiny_model(family), drafter=drafter, **kwargs)


def blended_engine(family: str = "qwen2", *, verifier: str = "traversal", **settings) -> stand.Engine:
    """The default: growth under a budget."""
    return stand.wrap(tiny_model(family), drafter=stand.BlendedDrafter(**settings), verifier=verifier)


def greedy_by_transformers(family: str, prompt: list[int], max_new_tokens: int, **kwargs) -> list[int]:
    return plain_greedy(tiny_model(family), tuple(prompt), max_new_tokens, **kwargs)


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_transformers_token_for_token(family):
    output = engine_of(family).generate(
        input_ids=PROMPTS, num_return_sequences=2, max_new_tokens=40, temperature=0.0, seed=1
    )
    for row, tokens in enumerate(output.token_ids):
        assert tokens == greedy_by_transformers(family, PROMPTS[row // 2], 40), row
    assert output.stats.num_accepted_draft_tokens > 5  # drafts were in fact accepted


@pytest.mark.parametrize("verifier", ["match", "rrs", "traversal", "coupled", "ranked_traversal", "ot_traversal"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_is_the_same_under_every_verifier_and_with_a_penalty(verifier, penalty):
    output = engine_of(verifier=verifier).generate(
        input_ids=PROMPTS, max_new_tokens=40, temperature=0.0, repetition_penalty=penalty
    )
    for prompt, tokens in zip(PROMPTS, output.token_ids, strict=True):
        assert tokens == greedy_by_transformers("qwen2", prompt, 40, repetition_penalty=penalty)


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
@pytest.mark.parametrize("budget", [0, 5, 40])
def test_the_budget_changes_no_greedy_token_and_is_kept(kind, budget):
    engine = blended_engine(kind=kind, budget=budget)
    output = engine.generate(input_ids=PROMPTS, num_return_sequences=2, max_new_tokens=40, temperature=0.0)
    for row, tokens in enumerate(output.token_ids):
        assert tokens == greedy_by_transformers("qwen2", PROMPTS[row // 2], 40)
    assert output.stats.num_draft_tokens <= budget * output.stats.num_forwards
    assert (output.stats.num_accepted_draft_tokens > 0) == (budget > 0)


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
def test_match_makes_grown_drafts_plain_sampling_token_for_token(kind):
    engine = blended_engine(kind=kind, verifier="match")
    settings = {"input_ids": PROMPTS, "num_return_sequences": 3, "max_new_tokens": 40, "temperature": 0.8, "seed": 4}
    drafted, plain = engine.generate(**settings), engine.generate(**settings, draft=False)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_steps < plain.stats.num_steps


def test_rows_that_end_hand_their_budget_on():
    engine = blended_engine(budget=12)
    batch = []
    original = engine.drafter.lookup.draft

    class Spy:
        num_candidates = engine.drafter.lookup.num_candidates

        def __getattr__(self, name):
            return getattr(lookup, name)

        def draft(self, histories, budget, **kwargs):
            drawn = original(histories, budget, **kwargs)
            batch.append((len(histories), drawn.num_nodes - len(histories)))
            return drawn

    lookup, engine.drafter.lookup = engine.drafter.lookup, Spy()
    engine.generate(input_ids=PROMPTS, num_return_sequences=4, max_new_tokens=60, temperature=1.0, seed=1)
    many = [nodes / rows for rows, nodes in batch if rows == 12]
    few = [nodes / rows for rows, nodes in batch if rows <= 4]
    assert few and max(few) > 2 * max(many)
    assert max(nodes for _, nodes in batch) == 12


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_chain_rules_decode_chains(verifier):
    engine = stand.wrap(
        tiny_model("llama"), drafter=stand.FixedShapeDrafter(shape=TreeShape.chain(5)), verifier=verifier
    )
    output = engine.generate(input_ids=PROMPTS, max_new_tokens=30, temperature=0.0)
    for prompt, tokens in zip(PROMPTS, output.token_ids, strict=True):
        assert tokens == greedy_by_transformers("llama", prompt, 30)


@pytest.mark.parametrize("verifier", ["specinfer", "spectr"])
def test_rules_for_independent_siblings_decode_greedily(verifier):
    drafter = stand.FixedShapeDrafter(shape=TreeShape.from_branching([2, 1]), kind="independent")
    engine = stand.wrap(tiny_model("llama"), drafter=drafter, verifier=verifier)
    output = engine.generate(input_ids=PROMPTS, max_new_tokens=30, temperature=0.0)
    for prompt, tokens in zip(PROMPTS, output.token_ids, strict=True):
        assert tokens == greedy_by_transformers("llama", prompt, 30)
    assert output.stats.num_accepted_draft_tokens > 0


def test_a_chain_rule_refuses_a_branching_shape():
    with pytest.raises(ValueError, match="chain"):
        engine_of(verifier="block")  # seen before anything is generated


def test_the_same_seed_gives_the_same_rows_and_another_one_others():
    runs = [
        engine_of().generate(input_ids=PROMPTS, num_return_sequences=3, max_new_tokens=30, temperature=1.0, seed=seed)
        for seed in (8, 8, 9)
    ]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].token_ids != runs[2].token_ids
    assert len({tuple(tokens) for tokens in runs[0].token_ids[:3]}) == 3
    assert runs[0].seed == 8


@pytest.mark.parametrize(("verifier", "learn"), [("match", True), ("match", False), ("traversal", False)])
def test_a_rows_tokens_do_not_depend_on_its_batch_mates(verifier, learn):
    """Row 0 alone, and as the first of six rows with other prompts. Ratio rules promise it for a frozen drafter."""
    together = engine_of(verifier=verifier).generate(
        input_ids=PROMPTS, num_return_sequences=2, max_new_tokens=40, temperature=0.9, seed=3, learn=learn
    )
    alone = engine_of(verifier=verifier).generate(
        input_ids=PROMPTS[:1], max_new_tokens=40, temperature=0.9, seed=3, learn=learn
    )
    assert together.token_ids[0] == alone.token_ids[0]


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_some_rules_yield_plain_samplings_very_tokens(verifier):
    """Their noise belongs to (seed, row, position), so drafts change nothing."""
    settings = {"input_ids": PROMPTS, "num_return_sequences": 4, "max_new_tokens": 40, "temperature": 0.7, "seed": 11}
    engine = engine_of(verifier=verifier)
    drafted, plain = engine.generate(**settings), engine.generate(**settings, draft=False)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_steps < plain.stats.num_steps
    assert plain.stats.mean_acceptance_length == 1.0


def test_an_end_token_inside_an_accepted_run_cuts_it():
    free = engine_of().generate(input_ids=PROMPTS[:1], max_new_tokens=40, temperature=0.0, stop_token_ids=[])
    tokens = free.token_ids[0]
    assert free.finish_reasons == ["length"] and len(tokens) == 40
    for place in (5, 12, 23):
        end = tokens[place]
        cut = tokens[: tokens.index(end) + 1]
        engine = engine_of()
        for _ in range(2):  # the second time the drafter knows the way, so that the end lies inside a run
            output = engine.generate(input_ids=PROMPTS[:1], max_new_tokens=40, temperature=0.0, stop_token_ids=[end])
            assert output.token_ids[0] == cut
            assert output.finish_reasons == ["eos"]
            assert output.stats.num_tokens == len(cut)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_length_limit_is_kept_exactly(limit):
    engine = engine_of()
    engine.generate(input_ids=PROMPTS, max_new_tokens=40, temperature=0.0, stop_token_ids=[])
    output = engine.generate(input_ids=PROMPTS, max_new_tokens=limit, temperature=0.0, stop_token_ids=[])
    assert [len(tokens) for tokens in output.token_ids] == [limit] * 3
    assert output.finish_reasons == ["length"] * 3


def test_counters_add_up():
    output = engine_of().generate(input_ids=PROMPTS, num_return_sequences=2, max_new_tokens=40, temperature=0.5, seed=0)
    stats = output.stats
    assert stats.num_tokens == sum(map(len, output.token_ids))
    assert stats.num_accepted_draft_tokens == stats.accepted_by_depth.sum() == stats.accepted_by_slot.sum()
    assert 0 <= stats.num_tokens - stats.num_accepted_draft_tokens <= stats.num_steps
    assert stats.num_draft_tokens >= stats.num_accepted_draft_tokens > 0
    assert set(stats.seconds) == {"draft", "forward", "verify", "commit", "learn"}
    assert sum(stats.seconds.values()) + stats.prefill_seconds <= stats.wall_seconds
    written = json.loads(json.dumps(stats.as_dict()))
    assert written["accepted_by_slot"] == stats.accepted_by_slot.tolist()
    assert {field.name for field in dataclasses.fields(stats) if field.init} <= set(written)
    doubled = stats + stats
    assert doubled.num_tokens == 2 * stats.num_tokens
    assert doubled.mean_acceptance_length == stats.mean_acceptance_length
    assert doubled.accepted_by_depth.tolist() == (2 * stats.accepted_by_depth).tolist()


@pytest.mark.parametrize("make", [engine_of, blended_engine])
def test_the_lookup_tree_learns_and_survives_a_save(make, tmp_path):
    engine = make()
    first = engine.generate(input_ids=PROMPTS, max_new_tokens=40, temperature=0.0)
    engine.lookup.save(tmp_path / "lookup")
    loaded = type(engine.lookup).load(tmp_path / "lookup", fingerprint=engine.lookup.fingerprint)
    engine = stand.wrap(tiny_model("qwen2"), drafter=loaded)
    again = engine.generate(input_ids=PROMPTS, max_new_tokens=40, temperature=0.0)
    assert again.token_ids == first.token_ids
    assert again.stats.num_steps < first.stats.num_steps


@pytest.mark.parametrize("wrong", [letter_tokenizer()._tokenizer, type(letter_tokenizer()), "Qwen/Qwen3-8B"])
def test_what_is_no_tokenizer_of_transformers_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be one of transformers', got .*PreTrainedTokenizerFast\(tokenizer_obj"):
        stand.wrap(tiny_model("qwen2"), wrong)


@pytest.mark.parametrize("kind", [LookupTree, BlendedLookup])
def test_a_lookup_that_was_learned_without_a_tokenizer_serves_with_one(kind):
    model, tokenizer = tiny_model("qwen2"), letter_tokenizer()
    by_size = stand.wrap(model, drafter=stand.BlendedDrafter()).lookup.fingerprint
    stand.wrap(model, tokenizer, drafter=kind(fingerprint=by_size))
    named = stand.wrap(model, tokenizer).lookup.fingerprint
    stand.wrap(model, tokenizer, drafter=kind(fingerprint=named))
    with pytest.raises(ValueError, match="pass the tokenizer that it was learned with"):
        stand.wrap(model, drafter=kind(fingerprint=named))


@pytest.mark.parametrize("kind", [LookupTree, BlendedLookup])
def test_a_lookup_made_by_hand_belongs_to_the_first_vocabulary(kind, tmp_path):
    """Its file must not be taken by a model of another one; what has learned without a name stays free."""
    lookup = kind()
    drafter = {LookupTree: stand.FixedShapeDrafter, BlendedLookup: stand.BlendedDrafter}[kind]
    engine = stand.wrap(tiny_model("qwen2"), letter_tokenizer(), drafter=drafter(lookup))
    engine.generate(input_ids=PROMPTS, max_new_tokens=4)
    lookup.save(tmp_path / "lookup")
    for other in (lookup, kind.load(tmp_path / "lookup")):
        assert other.fingerprint == stand.wrap(tiny_model("qwen2"), letter_tokenizer()).lookup.fingerprint
        with pytest.raises(ValueError, match="a lookup must have been learned with this tokenizer"):
            stand.wrap(tiny_model("llama"), drafter=drafter(other))
    nameless = kind()
    nameless.learn([1], [2])
    stand.wrap(tiny_model("qwen2"), letter_tokenizer(), drafter=drafter(nameless))
    assert nameless.fingerprint == b""


def test_learn_false_leaves_the_lookup_tree_alone():
    engine = engine_of()
    engine.generate(input_ids=PROMPTS, max_new_tokens=10, temperature=0.0, learn=False)
    engine.generate(input_ids=PROMPTS, max_new_tokens=10, temperature=0.0, draft=False)
    assert len(engine.lookup) == 0


class Recorder(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_a_streamer_gets_prompt_tokens_and_end():
    recorder = Recorder()
    output = engine_of().generate(input_ids=PROMPTS[:1], max_new_tokens=20, seed=2, temperature=1.0, streamer=recorder)
    assert recorder.pieces[0] == PROMPTS[0]
    assert sum(recorder.pieces[1:], []) == output.token_ids[0]
    assert recorder.ended
    with pytest.raises(ValueError, match="shows one row, got 2"):
        engine_of().generate(input_ids=PROMPTS[:2], max_new_tokens=20, streamer=recorder)


class ForbidRepeats(LogitsProcessor):
    """Needs the node's own prefix: forbids its last token."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids[0, -1]] = float("-inf")
        return scores


def test_a_custom_processor_is_applied_with_the_nodes_own_prefix():
    settings = {"input_ids": PROMPTS, "max_new_tokens": 30, "temperature": 0.0, "stop_token_ids": []}
    drafted = engine_of().generate(**settings, logits_processors=[ForbidRepeats()])
    plain = engine_of().generate(**settings, logits_processors=[ForbidRepeats()], draft=False)
    assert drafted.token_ids == plain.token_ids
    for tokens in drafted.token_ids:
        assert all(left != right for left, right in zip(tokens, tokens[1:], strict=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of prompts and input_ids"),
        ({"input_ids": []}, "at least one prompt"),
        ({"input_ids": [[]]}, "at least one token"),
        ({"prompts": "text"}, "need a tokenizer"),
        ({"input_ids": [[VOCABULARY_SIZE]]}, r"must be in \[0, 61\)"),
        ({"input_ids": [[-1, 3]]}, r"must be in \[0, 61\)"),
        ({"input_ids": [[3] * 512]}, "shorter than the model's context of 512"),
        ({"input_ids": [[3] * 500], "max_new_tokens": 20}, "lower max_new_tokens to 12"),
        ({"input_ids": [[3]], "num_return_sequences": 0}, "num_return_sequences must be an integer >= 1, got 0"),
        ({"input_ids": [[3]], "max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"input_ids": [[3]], "top_p": 0.0}, "top_p must be in"),
        ({"input_ids": [[3]], "seed": -1}, "seed must be an integer"),
        ({"input_ids": [[3]], "stop": ["x"]}, "stop strings need a tokenizer"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        engine_of().generate(**arguments)


def test_bad_settings_of_wrap_are_refused():
    model = tiny_model("qwen2")
    with pytest.raises(ValueError, match="traversal"):  # the error lists what there is
        stand.wrap(model, verifier="no_such_rule")
    with pytest.raises(ValueError, match="needs one fixed law"):
        stand.wrap(model, verifier="greedy_block")
    with pytest.raises(ValueError, match="pass the object") as refused:
        stand.wrap(model, verifier="typical")
    remedy = re.search(r"the object (.*), else", str(refused.value))[1]  # as it is printed
    assert stand.wrap(model, verifier=eval(remedy, {"stand": stand})).verifier.name == "typical"
    for kind in (LookupTree, BlendedLookup):
        with pytest.raises(ValueError, match="this tokenizer"):
            stand.wrap(model, drafter=kind(fingerprint=b"x" * 16))
    with pytest.raises(ValueError, match="drafter must be a Drafter, a BlendedLookup or a LookupTree, got 'aime"):
        stand.wrap(model, drafter="aime.lookup")
    with pytest.raises(ValueError, match="or a LookupTree, got <class '.*BlendedDrafter'>; load"):
        stand.wrap(model, drafter=stand.BlendedDrafter)
    with pytest.raises(ValueError, match="lookup must be a LookupTree, got BlendedLookup"):
        stand.FixedShapeDrafter(BlendedLookup())
    for budget in (-1, "8", 1 << 30, True):
        with pytest.raises(ValueError, match="budget must be an integer"):
            stand.BlendedDrafter(budget=budget)
    with pytest.raises(ValueError, match="shape must be a TreeShape, got 'paper'"):
        stand.FixedShapeDrafter(shape="paper")
    with pytest.raises(ValueError, match="costs must be a CostTable"):
        stand.BlendedDrafter(costs=1.0)
    with pytest.raises(ValueError, match="floor must be a probability"):
        stand.BlendedDrafter(floor=1.5)


def test_more_rows_than_one_call_returns_are_refused():
    with pytest.raises(ValueError, match="at most 1048576 rows.*use engine.run"):
        engine_of().generate(input_ids=[[3] * 400], num_return_sequences=2**24, max_new_tokens=10)


@torch.inference_mode()
def test_broken_weights_are_reported_and_the_model_is_given_back():
    model = type(tiny_model("qwen2"))(CONFIGS["qwen2"]).eval()
    engine = stand.wrap(model)
    before = model.config._attn_implementation
    model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="finite best logit, got NaN"):
        engine.generate(input_ids=[[3, 4]], max_new_tokens=5)
    assert model.config._attn_implementation == before


def test_every_default_is_usable():
    output = stand.wrap(tiny_model("qwen2")).generate(input_ids=torch.tensor([[3, 4, 5]]))
    assert len(output) == 1 and output.texts is None
    assert np.isfinite(output.stats.tokens_per_second)


def test_a_prompt_keeps_its_number_over_calls():
    engine = stand.wrap(tiny_model("llama"), drafter=stand.BlendedDrafter(budget=4))
    numbers = []
    draft = engine.drafter.draft

    def noted(request):
        numbers.append(request.problems.tolist())
        return draft(request)

    engine.drafter.draft = noted
    for prompts in ([[3, 4, 5]], [[6, 7], [3, 4, 5]]):
        engine.generate(input_ids=prompts, max_new_tokens=2, seed=0)
    assert numbers[0] == [0] and [1, 0] in numbers


def test_draft_kinds_are_checked_at_once():
    with pytest.raises(ValueError, match="growth under a budget drafts one of sampled, mixed, deterministic"):
        stand.BlendedDrafter(kind="coupled")
    drafter = stand.FixedShapeDrafter(kind="coupled")
    assert stand.wrap(tiny_model("llama"), drafter=drafter, verifier="coupled").drafter is drafter
    with pytest.raises(ValueError, match="coupled, independent, got 'best'"):
        stand.FixedShapeDrafter(kind="best")
    with pytest.raises(ValueError, match="adapted=False; use verifier 'match' or 'coupled'"):
        stand.wrap(tiny_model("llama"), drafter=drafter)
