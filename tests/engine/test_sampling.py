"""The law at each node is what transformers' own processors would give plain sampling there."""

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stand.row import Row
from stand.sampling import SamplingParams, TargetLaw
from stand.trees import DraftBatch, DraftTree

VOCABULARY_SIZE = 23


def case():
    """Two rows with drafts of 4 and 3 nodes, their prefixes per node, and random logits."""
    generator = np.random.default_rng(5)
    rows, drafts, prefixes = [], [], []
    for index, parents in enumerate(([-1, 0, 0, 1], [-1, 0, 1])):
        history = generator.integers(0, VOCABULARY_SIZE, 6 + index).astype(np.int32)
        tokens = generator.integers(0, VOCABULARY_SIZE, len(parents)).astype(np.int32)
        tokens[0] = history[-1]
        empty = np.zeros((len(parents), 1), dtype=np.int32)
        rows.append(Row(index, history, 8))
        drafts.append(DraftTree(tokens, np.array(parents, dtype=np.int32), empty, empty.astype(np.float32)))
        for node in range(len(parents)):
            path, place = [], node
            while place > 0:
                path.insert(0, int(tokens[place]))
                place = parents[place]
            prefixes.append([*history.tolist(), *path])
    logits = torch.from_numpy(generator.normal(0, 3, (7, VOCABULARY_SIZE))).float()
    return DraftBatch.concatenate(drafts), rows, prefixes, logits


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"temperature": 1.0},
        {"temperature": 1.7, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 3, "repetition_penalty": 1.3},
    ],
)
def test_laws_equal_the_processors_of_transformers(settings):
    batch, rows, prefixes, logits = case()
    law = TargetLaw(SamplingParams(**settings))
    got = law.probabilities(law.process(logits, batch, rows))
    reference = LogitsProcessorList()
    if "repetition_penalty" in settings:
        reference.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    reference.append(TemperatureLogitsWarper(settings["temperature"]))
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in settings:
            reference.append(warper(settings[name]))
    for node, prefix in enumerate(prefixes):
        expected = torch.softmax(reference(torch.tensor([prefix]), logits[node][None].clone())[0], dim=-1)
        torch.testing.assert_close(got[node], expected)


def test_a_processor_sees_the_nodes_own_prefix():
    batch, rows, prefixes, logits = case()
    processor = NoRepeatNGramLogitsProcessor(1)  # forbids every token of the prefix
    scores = TargetLaw(SamplingParams(logits_processors=(processor,))).process(logits, batch, rows)
    for node, prefix in enumerate(prefixes):
        assert set(torch.nonzero(torch.isinf(scores[node])).flatten().tolist()) == set(prefix)


def test_temperature_zero_is_all_mass_on_the_best_token():
    batch, rows, _, logits = case()
    logits[0] = 0.0  # a tie: the lowest id wins
    law = TargetLaw(SamplingParams(temperature=0.0))
    probabilities = law.probabilities(law.process(logits, batch, rows))
    assert probabilities.sum(dim=-1).tolist() == [1.0] * 7
    assert probabilities.argmax(dim=-1).tolist() == [0, *logits[1:].argmax(dim=-1).tolist()]


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0; use 1"),
        ({"top_p": 1.7}, r"top_p must be in \(0, 1\], got 1.7"),
        ({"temperature": -1.0}, "temperature must be >= 0, got -1.0; use 0"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
        ({"top_k": -2}, "top_k must be an integer >= 0"),
        ({"min_p": 2.0}, r"min_p must be in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0"),
    ],
)
def test_bad_settings_name_rule_value_and_remedy(bad, rule):
    with pytest.raises(ValueError, match=rule):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    ("fill", "kind"), [(float("nan"), "NaN"), (float("-inf"), "only -inf"), (float("inf"), r"\+inf")]
)
def test_broken_logits_are_refused(fill, kind):
    batch, rows, _, logits = case()
    logits[3] = fill
    with pytest.raises(ValueError, match=f"finite best logit, got {kind}"):
        law = TargetLaw(SamplingParams())
        law.probabilities(law.process(logits, batch, rows))


def test_defaults_come_from_the_models_generation_config():
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    assert SamplingParams.from_config(config) == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    assert SamplingParams.from_config(config, top_k=0, min_p=None).top_k == 0
    assert SamplingParams.from_config(GenerationConfig(do_sample=False)).is_greedy
    assert SamplingParams.from_config(GenerationConfig(do_sample=False), temperature=0.7).temperature == 0.7


def test_only_filters_that_may_take_tokens_out_count():
    for settings in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert TargetLaw(SamplingParams(**settings)).has_filters
        assert not TargetLaw(SamplingParams(**settings, temperature=0.0)).has_filters
    assert not TargetLaw(SamplingParams(temperature=0.6)).has_filters
