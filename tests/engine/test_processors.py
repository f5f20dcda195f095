"""Processors run at every node as plain decoding of that prefix would run them, in transformers' order."""

import copy

import numpy as np
import pytest
import torch
from node_cases import draft_of, node_case
from scripted_drafter import ScriptedDrafter
from small_law import small_model
from tiny_models import VOCABULARY_SIZE, tiny_model
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import logits_process as library

import stand
from stand.generation_settings import GenerationSettings
from stand.laws.processors import ProcessorChain, checked_processors
from stand.laws.sampling import SamplingParams
from stand.row import Row
from stand.trees import DraftBatch


class Boost(LogitsProcessor):
    """The user's own: raises the token after the last one, by more the longer the prefix is."""

    def __call__(self, input_ids, scores):
        raised = scores.clone()
        raised[:, (input_ids[0, -1] + 1) % scores.shape[1]] += 0.3 * input_ids.shape[1]
        return raised


COMBINATIONS = [
    {"repetition_penalty": 1.3, "temperature": 0.7},
    {"typical_p": 0.8, "temperature": 0.7, "own": [Boost()]},
    {"epsilon_cutoff": 0.1, "eta_cutoff": 0.4, "top_p": 0.9, "own": [Boost()]},
    {"top_h": 0.4, "temperature": 1.5, "own": [Boost()]},
    {"repetition_penalty": 1.5, "own": [Boost()], "top_p": 0.95, "typical_p": 0.9, "eta_cutoff": 0.4},
    {"no_repeat_ngram_size": 1, "temperature": 1.3, "own": [Boost()]},
    {"bad_words_ids": [[3], [4, 5]], "sequence_bias": [[[7], 4.0], [[9, 8], -9.0]], "repetition_penalty": 1.2},
    {"min_new_tokens": 9, "suppress_tokens": [*range(20, 50)], "begin_suppress_tokens": [3, 6], "top_k": 25},
    {"forced_eos_token_id": 4, "own": [Boost()], "renormalize_logits": True},
    {"encoder_repetition_penalty": 1.4, "own": [Boost()], "top_p": 0.9},
    {"watermarking_config": {"greenlist_ratio": 0.4, "bias": 3.0}, "top_p": 0.8, "own": [Boost()]},
    {"own": [library.TemperatureLogitsWarper(0.5), Boost(), library.TopKLogitsWarper(4)], "temperature": 2.0},
    {"own": [library.RepetitionPenaltyLogitsProcessor(2.0), Boost()], "repetition_penalty": 1.1, "min_length": 12},
    {"remove_invalid_values": True, "repetition_penalty": 1.3, "own": [library.SuppressTokensLogitsProcessor([28])]},
    {"encoder_no_repeat_ngram_size": 1, "own": [Boost()]},
    {"exponential_decay_length_penalty": (0, 6.0), "suppress_tokens": [*range(20, 50)]},
    {"own": [library.RepetitionPenaltyLogitsProcessor(2.5, prompt_ignore_length=2)], "temperature": 0.8},
]
NAMES = [" ".join(asked) for asked in COMBINATIONS]
# The laws are normalised and finite already; of two penalties the user's own counts, in the place of the setting.
WITHOUT_TRACE = {(8, "renormalize_logits"), (13, "remove_invalid_values"), (12, "repetition_penalty")}


def transformers_list(asked: dict, prompt: list[int], limit: int) -> LogitsProcessorList:
    """What `generate` itself runs after this prompt."""
    model, lists = tiny_model("qwen2"), []
    settings = {name: value for name, value in asked.items() if name != "own"}

    def keep_list(self, input_ids, logits_processor, **kwargs):
        lists.append(logits_processor)
        return input_ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_sample", keep_list)
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(do_sample=True, max_new_tokens=limit, **settings),
            logits_processor=LogitsProcessorList(copy.deepcopy(asked.get("own", []))),
        )
    return lists[0]


def law_of(asked: dict, prompts: list[np.ndarray], limit: int):
    settings = {name: value for name, value in asked.items() if name != "own"}
    model = tiny_model("qwen2")
    resolved = GenerationSettings.resolve(model, do_sample=True, **settings)
    lists = [resolved.processors(model, prompt, limit, own=asked.get("own") or ()) for prompt in prompts]
    law = resolved.law(lists[0])
    for request, processors in enumerate(lists[1:], start=1):
        law.admit(request, processors)
    return law


def differences(asked: dict, run: dict | None = None) -> list[float]:
    """Total variation between each node's law and that of the list that `generate` makes for the node's prompt."""
    batch, rows, prefixes, logits = node_case(VOCABULARY_SIZE, seed=11)  # no drafted token is forbidden
    logits = logits / 2
    law = law_of(asked if run is None else run, [row.history for row in rows], limit=3)
    got = law.laws(law.process(logits, batch, rows)).probabilities
    found = []
    for node, prefix in enumerate(prefixes):
        prompt = rows[int(node >= batch.offsets[1])].history.tolist()
        scores = transformers_list(asked, prompt, limit=3)(torch.tensor([prefix]), logits[node][None].clone())
        found.append(float((got[node] - torch.softmax(scores[0], dim=-1)).abs().sum()) / 2)
    return found


@pytest.mark.parametrize("asked", COMBINATIONS, ids=NAMES)
def test_laws_are_those_of_transformers_own_list(asked):
    assert max(differences(asked)) < 1e-6


@pytest.mark.parametrize("place", range(len(COMBINATIONS)), ids=NAMES)
def test_every_part_of_a_combination_is_seen(place):
    """Negative control: without any one setting, the law of some node is another."""
    asked = COMBINATIONS[place]
    for name in asked:
        if (place, name) in WITHOUT_TRACE:
            continue
        rest = {kept: value for kept, value in asked.items() if kept != name}
        assert max(differences(asked, rest)) > 1e-4, name


@pytest.mark.parametrize("asked", [COMBINATIONS[place] for place in (1, 2, 4, 5, 11)])
def test_another_order_is_seen(asked, monkeypatch):
    """Negative control: the processors of the chain, or chain and filters, the other way round."""
    backwards = ProcessorChain.__init__

    def reversed_chain(self, first, **ends):
        backwards(self, list(reversed(first)), **ends)

    monkeypatch.setattr("stand.laws.sampling.SamplingParams.at_the_end_of", lambda processors: (SamplingParams(), 0))
    assert max(differences(asked)) < 1e-6  # all of them in the chain, nothing after it
    admit = ProcessorChain.admit
    monkeypatch.setattr(ProcessorChain, "__init__", reversed_chain)
    monkeypatch.setattr(
        ProcessorChain, "admit", lambda self, request, others, **_: admit(self, request, list(reversed(others)))
    )
    assert max(differences(asked)) > 1e-3


class Counting(LogitsProcessor):
    """Its answer depends on what it was asked before: how often, and with what."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == 1
        self.seen.append(int(input_ids[0, -1]))
        return scores + torch.linspace(0, 1, scores.shape[1]).roll(sum(self.seen) + 7 * len(self.seen))


def test_a_processor_with_a_state_sees_each_row_as_if_decoded_alone():
    """Three steps over drafts with branches; what is not kept leaves no trace, rows do not mix."""
    generator, size = np.random.default_rng(3), VOCABULARY_SIZE
    user_processor = Counting()
    histories = [[5, 9, 11], [7, 7, 2, 4]]
    rows = [Row(index, np.array(history, dtype=np.int32), 20, request=index) for index, history in enumerate(histories)]
    chain = ProcessorChain([user_processor])
    chain.admit(1, [user_processor])
    kept_paths = [((1, 3), ()), ((), (2,)), ((1,), (1, 3))]  # node places per step and row
    plain = [Counting(), Counting()]
    parents = [-1, 0, 0, 1]
    for step in range(3):
        tokens = [[int(row.history[-1]), *generator.integers(0, size, 3).tolist()] for row in rows]
        batch = DraftBatch.concatenate([draft_of(row_tokens, parents) for row_tokens in tokens])
        logits = torch.from_numpy(generator.normal(0, 1, (8, size))).float()
        scores = chain(logits, batch, rows)
        for index, row in enumerate(rows):
            path = kept_paths[step][index]
            prefix = row.history.tolist()
            for node in (0, *path):
                prefix = prefix if node == 0 else [*prefix, tokens[index][node]]
                expected = plain[index](torch.tensor([prefix]), logits[4 * index + node][None])
                assert torch.equal(scores[4 * index + node], expected[0])
            row.extend([*(tokens[index][node] for node in path), int(generator.integers(size))])
    assert user_processor.seen == []  # only copies are asked


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_a_processor_with_a_state_changes_no_token_when_drafts_are_used(verifier):
    engine = stand.wrap(tiny_model("qwen2"), verifier=verifier)
    asked = {"input_ids": [[5, 9, 11, 4, 5, 9], [7]], "num_return_sequences": 2, "max_new_tokens": 24, "seed": 3}
    asked |= {"temperature": 0.6, "logits_processors": LogitsProcessorList([Counting()]), "stop_token_ids": []}
    asked |= {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 14, 15], ngram_len=3)}
    plain = engine.generate(**asked, draft=False)
    drafted = engine.generate(**asked)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_steps < plain.stats.num_steps


class Grammar(LogitsProcessor):
    """A token follows the one before it by 1 to 3; knows nothing of other texts, and nothing after an end token."""

    END = 20

    def __call__(self, input_ids, scores):
        before, last = input_ids[0, -2:].tolist()
        assert self.END not in (before, last) and (last - before) % 20 in (1, 2, 3), "no text of this grammar"
        allowed = [(last + step) % 20 for step in (1, 2, 3)] + [self.END]
        return torch.full_like(scores, -torch.inf).index_copy(1, torch.tensor(allowed), scores[:, allowed])


@pytest.mark.parametrize("settings", [{"seed": 1, "temperature": 1.0, "top_k": 0}, {}])
def test_processors_are_asked_about_no_text_that_they_forbid_or_that_has_ended(settings):
    """As in plain decoding: whatever a drafter that was taught other texts drafts."""
    engine = stand.wrap(tiny_model("qwen2"), verifier="match")
    prompts, ends = [[3, 4], [9, 7, 8]], {"stop_token_ids": [Grammar.END]}
    engine.generate(input_ids=prompts, max_new_tokens=40, temperature=1.5, seed=0, stop_token_ids=[])
    asked = {"input_ids": prompts, "max_new_tokens": 40, "logits_processors": Grammar(), **ends, **settings}
    expected = engine.generate(draft=False, **asked).token_ids
    assert all(set(tokens) <= {*range(21)} for tokens in expected)
    for _ in range(2):
        output = engine.generate(**asked)
        assert output.token_ids == expected
    assert output.stats.num_accepted_draft_tokens > 3


def test_a_draft_ends_no_call_where_no_token_may_follow_it():
    """Here every token may come once, and a text that has all of them has ended."""
    engine = stand.wrap(small_model(5), drafter=stand.BlendedDrafter(budget=60), verifier="match")
    asked = {"input_ids": [0], "num_return_sequences": 20, "no_repeat_ngram_size": 1, "stop_token_ids": [4], "seed": 0}
    asked |= {"temperature": 1.0, "top_k": 0, "max_new_tokens": 6}
    plain, drafted = (engine.generate(draft=draft, **asked) for draft in (False, True))
    assert [1, 2, 3, 4] in map(sorted, plain.token_ids)
    assert drafted.token_ids == plain.token_ids and drafted.stats.num_accepted_draft_tokens > 3


def test_processors_without_prefix_run_once_for_all_nodes(monkeypatch):
    calls = []
    original = library.TypicalLogitsWarper.__call__

    def counted(self, input_ids, scores):
        calls.append(len(scores))
        return original(self, input_ids, scores)

    monkeypatch.setattr(library.TypicalLogitsWarper, "__call__", counted)
    differences({"typical_p": 0.8, "repetition_penalty": 1.2, "own": [Boost()]}, None)
    assert calls[0] == 7 and set(calls[1:]) == {1}  # ours, then transformers' node by node


class TakesMore(LogitsProcessor):
    def __call__(self, input_ids, scores, beam):
        return scores


class Uncopyable(LogitsProcessor):
    def __deepcopy__(self, memo):
        raise TypeError("no copies")

    def __call__(self, input_ids, scores):
        return scores


class OwnConstraint(library.PrefixConstrainedLogitsProcessor):
    """Derives from what is served."""


class Narrow(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores[:, 1:]


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (3, "must be callable with .input_ids, scores., got 3"),
        (Boost, "must be callable"),
        (TakesMore(), "must take input_ids and scores alone, got TakesMore with input_ids, scores, beam"),
        (library.ClassifierFreeGuidanceLogitsProcessor(1.5), "got ClassifierFree.*side by side; leave it out"),
        (OwnConstraint(lambda row, ids: [1], 1), "got OwnConstraint: its class may ask for a row's number"),
        (Uncopyable(), "must be copyable.*got Uncopyable with TypeError: no copies; .* give the class a __deepcopy__"),
        (lambda ids, scores, beam: scores, "alone, got function with ids, scores, beam"),
        (lambda scores: scores, "alone, got function with scores; give it"),
        (lambda: None, "alone, got function with none; give it"),
        (min, "alone, got builtin_function_or_method with none; give it"),
        (Narrow(), r"must return scores \[1, 61\] for one row, got \[1, 60\] from Narrow"),
    ],
)
def test_processors_that_cannot_run_node_by_node_are_refused(processor, reason):
    with pytest.raises(ValueError, match=reason):
        stand.wrap(tiny_model("qwen2")).generate(input_ids=[3, 4], max_new_tokens=2, logits_processors=processor)


def test_one_processor_needs_no_list():
    assert checked_processors(None) == []
    processor = Boost()
    assert checked_processors(processor) == checked_processors(iter([processor])) == [processor]


class Raises(LogitsProcessor):
    """Forbids one token and makes another one likely; counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, 1], scores[:, 11] = -torch.inf, 90.0 + self.calls
        return scores


def top_one_but(*token_ids: int) -> list[LogitsProcessor]:
    return [library.TopKLogitsWarper(1), library.SuppressTokensLogitsProcessor(list(token_ids))]


LATE = {  # forbidden tokens that come back, dead ends of functions and filters; and a draft
    "a function, then a forced token": (
        {"prefix_allowed_tokens_fn": lambda number, tokens: [11], "forced_bos_token_id": 1}, (1, 11, 11, 11)
    ),
    "one's own, then a forced token": (
        {"logits_processors": [Raises(), library.ForcedBOSTokenLogitsProcessor(1)]}, (1, 11, 11, 11)
    ),
    "one's own, then finite scores": (
        {"logits_processors": [Raises(), library.InfNanRemoveLogitsProcessor()]}, (1, 11, 11)
    ),
    "a filter, then a list": ({"logits_processors": top_one_but(59, 28)}, (3,)),
    "a filter, then another list": ({"logits_processors": top_one_but(*range(20, 40))}, (3, 9, 41)),
    "a function without an answer": (
        {"prefix_allowed_tokens_fn": lambda number, tokens: [] if int(tokens[-1]) == 3 else [3, 11, 12]}, (3,)
    ),
}  # fmt: skip


def outcome(engine, **asked) -> list:
    """The tokens, or what a row that comes to a dead end raises."""
    try:
        return list(map(list, engine.generate(**asked).token_ids))
    except ValueError:
        return ["a dead end"]


@pytest.mark.parametrize("case", LATE)
def test_drafts_change_nothing_where_forbidden_tokens_come_back_or_dead_ends_are_drafted(case):
    settings, tokens = LATE[case]
    engine = stand.wrap(tiny_model("qwen2"), drafter=ScriptedDrafter(tokens, prompt_lengths=[1]))
    asked = {"max_new_tokens": 6, "temperature": 0.0, "stop_token_ids": [], **settings}
    expected = [outcome(engine, input_ids=[[prompt]], **asked, draft=False) for prompt in range(3, 20)]
    assert [outcome(engine, input_ids=[[prompt]], **asked) for prompt in range(3, 20)] == expected
    assert expected.count(["a dead end"]) < len(expected)
