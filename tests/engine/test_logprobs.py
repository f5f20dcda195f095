"""Log-probabilities of new tokens and of the likeliest ones: those of plain forwards, whatever was drafted."""

import copy
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from every_day import every_day
from image_cases import IMAGE, image_model, image_prompt
from letter_tokenizer import letter_tokenizer
from plain_logprobs import difference, largest_error, plain_log_laws
from printed_page import run_page
from recurrent_models import RECURRENT, recurrent_model
from scripted_drafter import ScriptedDrafter
from step_pair import taught_lookup
from tiny_models import CONFIGS, VOCABULARY_SIZE, kernel_model, tiny_model
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process as library
from with_pages import needs_pages

import stand
from stand.laws.logprobs import MODES, PROCESSED, RAW
from stand.plugins.generate import stand_generate, use_engine
from stand.scheduling import within_pages
from stand.scheduling.free_memory import bytes_per_token

PAGE = Path(__file__).parents[2] / "docs" / "logprobs.md"
PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8], [9, 10, 9]]
SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
WARPERS = [library.TemperatureLogitsWarper(0.7), library.TopKLogitsWarper(20), library.TopPLogitsWarper(0.9)]
GREEDY = {"temperature": 0}
TOLERANCE = 1e-3  # of numbers down to -40; the chunks of recurrent layers round otherwise than their steps
ALL = [*CONFIGS, *RECURRENT]


class InPlace(LogitsProcessor):
    """Raises the token after the last one in the very scores that it was given."""

    def __call__(self, input_ids, scores):
        scores[:, (input_ids[0, -1] + 1) % scores.shape[1]] += 3.0
        return scores


@lru_cache
def model_of(family: str):
    return tiny_model(family) if family in CONFIGS else recurrent_model(family)


@lru_cache
def engine_of(family: str, verifier: str = "traversal") -> stand.Engine:
    """Drafts much, and often rightly."""
    model = model_of(family)
    drafter = stand.BlendedDrafter(taught_lookup(model, PROMPTS, 40), budget=16)
    return stand.wrap(model, drafter=drafter, verifier=verifier, backend="sdpa")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", every_day(ALL, "llama", "gemma3", "qwen3_next", "gpt_oss"))
def test_logprobs_are_those_of_plain_forwards(family, mode):
    engine, asked = engine_of(family), {"max_new_tokens": 24, "logprobs": 3, "logprobs_mode": mode, "learn": False}
    output = engine.generate(PROMPTS, num_return_sequences=2, seed=5, **SAMPLED, **asked)
    assert output.stats.mean_acceptance_length > 1.1
    processors = WARPERS if mode == PROCESSED else []
    assert largest_error(output, engine.model, PROMPTS, processors) < TOLERANCE
    greedy = engine.generate(PROMPTS, **GREEDY, **asked)
    assert greedy.stats.mean_acceptance_length > 1.1
    assert largest_error(greedy, engine.model, PROMPTS) < TOLERANCE


@pytest.mark.parametrize("verifier", ["match", "coupled", "rrs"])
def test_every_rule_notes_the_path_that_it_keeps(verifier):
    engine = engine_of("llama", verifier)
    output = engine.generate(PROMPTS, **SAMPLED, max_new_tokens=24, seed=2, logprobs=0, learn=False)
    assert output.stats.mean_acceptance_length > 1.2
    assert largest_error(output, engine.model, PROMPTS) < TOLERANCE


def test_without_drafts_they_are_the_same_kind_of_numbers():
    engine = engine_of("llama")
    output = engine.generate(PROMPTS, **SAMPLED, max_new_tokens=12, seed=2, logprobs=2, draft=False)
    assert largest_error(output, engine.model, PROMPTS) < TOLERANCE


@pytest.mark.parametrize("settings", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize(
    "own",
    [library.RepetitionPenaltyLogitsProcessor(1.6), InPlace(), library.SuppressTokensLogitsProcessor([*range(20, 40)])],
    ids=["penalty", "in place", "suppressed"],
)
def test_raw_ones_are_before_processors_and_processed_ones_behind_them(own, settings):
    engine, asked = engine_of("llama"), {"max_new_tokens": 20, "seed": 3, "logprobs": 4, "learn": False}
    warpers = WARPERS if settings is SAMPLED else []
    by_mode = {
        mode: engine.generate(PROMPTS, **settings, **asked, logits_processors=[own], logprobs_mode=mode)
        for mode in MODES
    }
    assert by_mode[RAW].token_ids == by_mode[PROCESSED].token_ids
    assert largest_error(by_mode[RAW], engine.model, PROMPTS) < TOLERANCE
    assert largest_error(by_mode[PROCESSED], engine.model, PROMPTS, [own, *warpers]) < TOLERANCE
    assert largest_error(by_mode[RAW], engine.model, PROMPTS, [own]) > 0.01  # the other kind is told apart


def test_what_filters_take_out_has_no_probability():
    output = engine_of("llama").generate(
        PROMPTS, temperature=1.0, top_k=3, max_new_tokens=8, seed=1, logprobs=5, logprobs_mode=PROCESSED
    )
    for found in output.logprobs:
        assert np.isfinite(found.top[:, :3]).all() and np.isneginf(found.top[:, 3:]).all()
        assert np.allclose(np.exp(found.top).sum(axis=1), 1.0, atol=1e-5) and np.isfinite(found.of_tokens).all()


def test_types_and_shapes():
    output = engine_of("llama").generate(PROMPTS, **SAMPLED, max_new_tokens=9, seed=1, logprobs=2, stop_token_ids=[])
    for found in output.logprobs:
        assert (found.of_tokens.dtype, found.top_ids.dtype, found.top.dtype) == (np.float32, np.int32, np.float32)
        assert found.of_tokens.shape == (9,) and found.top_ids.shape == found.top.shape == (9, 2)
        assert (found.top[:, 0] >= found.top[:, 1]).all() and (found.top[:, 0] >= found.of_tokens).all()
    own = engine_of("llama").generate(PROMPTS, **SAMPLED, max_new_tokens=9, seed=1, logprobs=0, stop_token_ids=[])
    assert all(found.top.shape == found.top_ids.shape == (9, 0) for found in own.logprobs)
    assert engine_of("llama").generate(PROMPTS, **GREEDY, max_new_tokens=3).logprobs is None


def test_all_tokens_may_be_asked_for():
    engine = engine_of("llama")
    output = engine.generate(PROMPTS[0], **SAMPLED, max_new_tokens=6, seed=1, logprobs=VOCABULARY_SIZE)
    assert np.allclose(np.exp(output.logprobs[0].top.astype(np.float64)).sum(axis=1), 1.0, atol=1e-5)
    assert largest_error(output, engine.model, PROMPTS[:1]) < TOLERANCE


def test_asking_changes_no_token():
    settings = {"num_return_sequences": 3, "max_new_tokens": 30, "seed": 4, "learn": False, **SAMPLED}
    plain = engine_of("llama").generate(PROMPTS, **settings)
    assert plain.token_ids == engine_of("llama").generate(PROMPTS, **settings, logprobs=2).token_ids


def test_tokens_that_a_stop_cuts_off_are_not_noted():
    """The draft is the row's own greedy text, so that its end lies within what is kept."""
    model = tiny_model("llama")
    free = stand.wrap(model).generate(PROMPTS[0], **GREEDY, max_new_tokens=12, stop_token_ids=[], draft=False)
    text = free.token_ids[0]
    end = next(place for place in range(3, 12) if text[place] not in text[:place])
    engine = stand.wrap(model, drafter=ScriptedDrafter(text, [len(PROMPTS[0])]))
    output = engine.generate(PROMPTS[0], **GREEDY, max_new_tokens=12, stop_token_ids=[text[end]], logprobs=1)
    assert output.token_ids[0] == text[: end + 1] and output.stats.num_steps < end
    assert largest_error(output, model, PROMPTS[:1]) < TOLERANCE


def test_each_trajectory_of_a_run_has_its_own():
    engine, prompts = engine_of("llama"), [[number, 5, 9, 4] for number in range(3, 15)]
    found = list(engine.run(prompts, max_rows=3, **SAMPLED, max_new_tokens=20, seed=6, logprobs=2))
    assert len(found) == 12 and [one.row for one in found] != sorted(one.row for one in found)
    for one in found:
        laws = plain_log_laws(engine.model, prompts[one.row], one.token_ids)
        assert difference(one.logprobs, one.token_ids, laws) < TOLERANCE
    assert next(engine.run(prompts, max_rows=3, **SAMPLED, max_new_tokens=2)).logprobs is None


@needs_pages
def test_rows_that_are_put_back_keep_what_was_noted(monkeypatch):
    monkeypatch.setattr(within_pages, "GROWTH", 0)
    model, rows, most = kernel_model("qwen2"), 24, 60
    cap = rows * (len(PROMPTS[0]) + most) * bytes_per_token(model) / 4
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=24))
    asked = {"temperature": 1.0, "top_k": 0, "max_new_tokens": most, "seed": 3, "logprobs": 1}
    output = engine.generate(PROMPTS[:1], num_return_sequences=rows, max_cache_bytes=cap, **asked)
    assert output.stats.num_put_back > 5
    assert largest_error(output, model, PROMPTS[:1]) < TOLERANCE


def test_behind_images():
    model, inputs = image_model("llava"), image_prompt("llava")
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=8))
    output = engine.generate(
        inputs, **GREEDY, max_new_tokens=12, stop_token_ids=[], suppress_tokens=[IMAGE], logprobs=2
    )
    prompt, tokens = inputs["input_ids"][0].tolist(), output.token_ids[0]
    laws = plain_log_laws(model, prompt, tokens, pixel_values=inputs["pixel_values"])
    assert difference(output.logprobs[0], tokens, laws) < TOLERANCE


def test_for_custom_generate():
    model = copy.deepcopy(tiny_model("llama"))  # which keeps the engine
    use_engine(stand.wrap(model, drafter=stand.BlendedDrafter(budget=8)))
    asked = {"custom_generate": stand_generate, "max_new_tokens": 10, "do_sample": False}
    prompt = torch.tensor([PROMPTS[0]])
    found = model.generate(prompt, **asked, stand_logprobs=2, return_dict_in_generate=True)
    laws = plain_log_laws(model, PROMPTS[0], found.sequences[0, len(PROMPTS[0]) :].tolist())
    assert difference(found.logprobs[0], found.sequences[0, len(PROMPTS[0]) :].tolist(), laws) < TOLERANCE
    with pytest.raises(ValueError, match="stand_logprobs needs return_dict_in_generate=True"):
        model.generate(prompt, **asked, stand_logprobs=2)
    with pytest.raises(ValueError, match="stand_logprobs_mode needs stand_logprobs, got 'raw_logprobs' alone"):
        model.generate(prompt, **asked, stand_logprobs_mode=RAW)
    stop = StoppingCriteriaList([stand.LowConfidence(1e9, window=2)])
    ended = model.generate(prompt, **asked, stand_logprobs=2, stopping_criteria=stop, pad_token_id=0)
    assert ended.shape == (1, len(PROMPTS[0]) + 2)


class Recording(StoppingCriteria):
    """Notes what it is told, token by token, and ends a row at a token without much chance."""

    wants_logprobs = True

    def __init__(self):
        self.told = []

    def __call__(self, input_ids, scores, *, logprobs, **_):
        assert len(logprobs) == 1 and scores is None
        self.told.append((int(input_ids[0, -1]), float(logprobs.of_tokens[0])))
        TOLD[tuple(input_ids[0].tolist())] = list(self.told)
        return self.told[-1][1] < -4.0


TOLD = {}  # by text: what the copy of its row was told


def test_criteria_are_told_of_the_newest_token_and_may_end_a_row_by_it():
    engine = engine_of("llama")
    asked = {"num_return_sequences": 4, "max_new_tokens": 40, "temperature": 1.4, "top_k": 0, "seed": 8, "learn": False}
    asked["stop_token_ids"] = []  # an end token ends a row before criteria are asked
    free = engine.generate(PROMPTS, **asked, logprobs=1)
    output = engine.generate(PROMPTS, **asked, logprobs=1, stopping_criteria=[Recording()])
    assert output.stats.mean_acceptance_length > 1.05 and "criteria" in output.finish_reasons
    for row, (tokens, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        told = TOLD[(*PROMPTS[row // 4], *tokens)]
        assert [token for token, _ in told] == tokens
        assert np.array_equal(np.array([value for _, value in told], dtype=np.float32), found.of_tokens)
        is_low = found.of_tokens < -4.0
        assert not is_low[:-1].any() and is_low[-1] == (output.finish_reasons[row] == "criteria")
    assert max(map(len, output.token_ids)) <= max(map(len, free.token_ids))


@pytest.mark.parametrize("window", [1, 6, 50])
def test_rows_end_where_their_confidence_falls(window):
    """With the rule `match` rows share nothing, so that an end of one changes no other's tokens."""
    engine = engine_of("llama", "match")
    asked = {"num_return_sequences": 4, "max_new_tokens": 40, **SAMPLED, "seed": 8, "learn": False, "logprobs": 5}
    free = engine.generate(PROMPTS, **asked, stop_token_ids=[])
    means = [
        np.convolve(found.confidence(), np.ones(window) / window, mode="valid") if window <= 40 else np.array([])
        for found in free.logprobs
    ]
    threshold = float(np.median([mean.min() for mean in means if len(mean)])) if window <= 40 else 1e9
    criterion = stand.LowConfidence(threshold, window=window)
    output = engine.generate(PROMPTS, **asked, stop_token_ids=[], stopping_criteria=[criterion])
    assert criterion._count == 0  # rows have copies
    for whole, tokens, mean, reason in zip(free.token_ids, output.token_ids, means, output.finish_reasons, strict=True):
        low = np.flatnonzero(mean < threshold - 1e-9)
        length = low[0] + window if len(low) else 40
        assert tokens == whole[:length] and reason == ("criteria" if length < 40 or len(low) else "length")
    assert ("criteria" in output.finish_reasons) == (window <= 40)


def test_confidence_is_minus_the_mean_of_the_likeliest():
    found = engine_of("llama").generate(PROMPTS[:1], **SAMPLED, max_new_tokens=8, seed=1, logprobs=4).logprobs[0]
    assert (
        np.allclose(found.confidence(), -found.top.mean(axis=1), atol=1e-5) and found.confidence().dtype == np.float64
    )
    with pytest.raises(ValueError, match="confidence needs the likeliest tokens, got logprobs=0"):
        engine_of("llama").generate(PROMPTS[:1], max_new_tokens=1, **GREEDY, logprobs=0).logprobs[0].confidence()


class Huge(LogitsProcessor):
    """Makes the fifth place's tokens all but one as unlikely as float32 can say."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] != len(PROMPTS[0]) + 4:
            return scores
        return torch.where(scores == scores.max(), scores, torch.finfo(torch.float32).min / 2)


def test_a_huge_confidence_leaves_the_window_without_a_trace():
    engine = engine_of("llama")
    asked = {**GREEDY, "max_new_tokens": 40, "stop_token_ids": [], "logprobs": 30, "logprobs_mode": PROCESSED}
    asked |= {"logits_processors": [Huge()], "learn": False}
    found = engine.generate(PROMPTS[:1], **asked).logprobs[0].confidence()
    assert found[4] > 1e30 and np.delete(found, 4).max() < 100
    least = min(found[place : place + 3].mean() for place in range(38))
    for threshold, reason in ((0.99 * least, "length"), (1.01 * least, "criteria")):
        stop = stand.LowConfidence(threshold, window=3)
        assert engine.generate(PROMPTS[:1], **asked, stopping_criteria=stop).finish_reasons == [reason]


SHARP = [({"temperature": 0.05, "top_k": 0}, 4), ({"temperature": 0.05, "top_k": 9}, 4), (GREEDY, 80)]


@pytest.mark.parametrize(("settings", "sharper"), SHARP, ids=["sampled", "filtered", "greedy"])
def test_what_is_too_unlikely_for_a_float32_is_told_all_the_same(settings, sharper):
    """Only what filters take out has none: a law's own probabilities end at 1e-45."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharper)
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=8))
    output = engine.generate(PROMPTS[:1], **settings, max_new_tokens=6, seed=1, logprobs=12, logprobs_mode=PROCESSED)
    top_k, temperature = settings.get("top_k"), settings["temperature"]
    warpers = [library.TemperatureLogitsWarper(temperature)] if temperature else []
    warpers += [library.TopKLogitsWarper(top_k)] if top_k else []
    found = output.logprobs[0].top
    assert found[np.isfinite(found)].min() < -110 and np.isneginf(found).any() == bool(top_k)
    assert largest_error(output, model, PROMPTS[:1], warpers) < 20 * TOLERANCE  # of numbers 80 times as large


def test_criteria_in_lists_of_lists_are_told_too():
    engine, asked = engine_of("llama"), {**GREEDY, "max_new_tokens": 9, "stop_token_ids": [], "logprobs": 2}
    nested = [StoppingCriteriaList([stand.LowConfidence(1e9, window=2)])]
    output = engine.generate(PROMPTS, **asked, stopping_criteria=nested)
    assert output.finish_reasons == ["criteria"] * 3 and list(map(len, output.token_ids)) == [2, 2, 2]


class AsAnArray(StoppingCriteria):
    """Answers as numpy does, and tries to change what it was shown."""

    wants_logprobs = True

    def __call__(self, input_ids, scores, *, logprobs, **_):
        with pytest.raises(ValueError, match="read-only"):
            logprobs.of_tokens[:] = 7
        return logprobs.of_tokens < 1e9


def test_arrays_of_one_truth_value_are_answers_and_what_criteria_see_is_read_only():
    output = engine_of("llama").generate(PROMPTS, **GREEDY, max_new_tokens=9, logprobs=0, stopping_criteria=AsAnArray())
    assert output.finish_reasons == ["criteria"] * 3 and set(map(len, output.token_ids)) == {1}


def test_texts_longer_than_the_first_arrays():
    engine = engine_of("llama")
    output = engine.generate(PROMPTS, **SAMPLED, max_new_tokens=200, stop_token_ids=[], seed=4, logprobs=1, learn=False)
    assert largest_error(output, engine.model, PROMPTS) < TOLERANCE


def test_what_a_confidence_cannot_be_made_of():
    engine, criterion = engine_of("llama"), [stand.LowConfidence(1.0, window=1)]
    with pytest.raises(ValueError, match="a stopping criterion that wants log-probabilities needs logprobs"):
        engine.generate(PROMPTS, **GREEDY, max_new_tokens=2, stopping_criteria=criterion)
    asked = {"max_new_tokens": 2, "stopping_criteria": criterion, "logprobs": 5, "seed": 0}
    with pytest.raises(ValueError, match="confidence needs as many tokens of some probability"):
        engine.generate(PROMPTS, temperature=1.0, top_k=3, **asked, logprobs_mode=PROCESSED)
    with pytest.raises(ValueError, match="needs the 1 likeliest tokens or more, got logprobs=0"):
        engine.generate(PROMPTS, **GREEDY, max_new_tokens=2, stopping_criteria=criterion, logprobs=0)
    with pytest.raises(ValueError, match="LowConfidence needs log-probabilities, got none"):
        criterion[0](None, None)
    assert stand.LowConfidence(np.float32(3)).threshold == stand.LowConfidence(torch.tensor(3.0)).threshold == 3.0
    with pytest.raises(ValueError, match="threshold must be a number, got 'low'"):
        stand.LowConfidence("low")
    with pytest.raises(ValueError, match="threshold must be a number, got nan"):
        stand.LowConfidence(float("nan"))
    with pytest.raises(ValueError, match="window must be an integer >= 1, got 0"):
        stand.LowConfidence(1.0, window=0)


@pytest.mark.parametrize("count", [-1, True, 1.5, "3", VOCABULARY_SIZE + 1])
def test_counts_that_do_not_fit(count):
    with pytest.raises(ValueError, match="logprobs must be"):
        engine_of("llama").generate(PROMPTS, max_new_tokens=2, logprobs=count)


def test_modes_that_do_not_fit():
    engine = engine_of("llama")
    with pytest.raises(ValueError, match="logprobs_mode must be one of raw_logprobs, processed_logprobs, got 'raw'"):
        engine.generate(PROMPTS, max_new_tokens=2, logprobs=1, logprobs_mode="raw")
    with pytest.raises(ValueError, match="logprobs_mode needs logprobs, got 'raw_logprobs' alone"):
        engine.run(PROMPTS, max_new_tokens=2, logprobs_mode=RAW)


def test_a_stream_has_no_place_for_them():
    engine = stand.wrap(tiny_model("llama"), letter_tokenizer())
    with pytest.raises(ValueError, match="a stream has no place for log-probabilities, got logprobs=1"):
        engine.stream([3, 4], max_new_tokens=2, logprobs=1)


@pytest.mark.long
@pytest.mark.skipif(not PAGE.is_file(), reason="needs the source tree, docs included")
def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    namespace = run_page(PAGE, tmp_path, monkeypatch)
    assert len(namespace["output"].logprobs) == 8 and namespace["first"].top.shape[1] == 20
    assert namespace["votes"].most_common(1)[0][0] == "4"  # 8^34 mod 5
    reasons = namespace["more"].finish_reasons
    assert set(reasons) <= {"criteria", "eos", "length"} and namespace["threshold"] > 0
