"""Texts that outgrow a LongRoPE model's short factors: the tokens of plain forwards over the whole text, and so of
transformers' `generate` where it loses no keys, whatever shares the batch, the memory or the prompts."""

import copy
import inspect
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from longrope_models import longrope_phi3
from plain_forwards import greedy_by_plain_forwards
from tiny_models import SHAPE
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM, RepetitionPenaltyLogitsProcessor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import stand
from stand.forward import long_factors as factors_module
from stand.forward import model as forward_model
from stand.forward import self_check
from stand.forward.cache.tree_cache import DRAFT_ROOM
from stand.forward.long_factors import long_factors, served_positions, switching_length
from stand.scheduling import prefilled, prompt_keys, within_pages
from stand.scheduling.free_memory import bytes_per_token
from stand.scheduling.scheduler import Scheduler

BORDER, CONTEXT = 40, 160
LENGTHS = (3, BORDER - 9, BORDER - 1, BORDER, BORDER + 1, BORDER + 20, 12)
PREPARING = inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation)
GREEDY = {"temperature": 0.0, "stop_token_ids": []}


def config_of(border: int = BORDER, context: int = CONTEXT) -> Phi3Config:
    return longrope_phi3(border, context, eos_token_id=None)


@cache
def model_of():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of()).eval()


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, SHAPE["vocab_size"], length).tolist()


@cache
def expected(length: int, count: int) -> list[int]:
    """Alone, by a plain forward per token."""
    return greedy_by_plain_forwards(copy.deepcopy(model_of()), prompt_of(length), count)


@pytest.mark.skipif("next_sequence_length" not in PREPARING, reason="this transformers loses a text's keys there")
@pytest.mark.parametrize("length", LENGTHS)
def test_transformers_writes_the_same(length):
    prompt = torch.tensor([prompt_of(length)])
    output = copy.deepcopy(model_of()).generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=70, eos_token_id=None
    )
    assert output[0, length:].tolist() == expected(length, 70)


def engine_of(**options) -> stand.Engine:
    options.setdefault("drafter", stand.BlendedDrafter(budget=24))
    return stand.wrap(model_of(), **options)


def generated(engine: stand.Engine, count: int = 70, **settings) -> list[list[int]]:
    prompts = [prompt_of(length) for length in LENGTHS]
    return engine.generate(input_ids=prompts, max_new_tokens=count, **{**GREEDY, **settings}).token_ids


def test_every_text_is_that_of_plain_forwards():
    """Also with drafts that have been learned across the border, where most are right."""
    engine, wanted = engine_of(), [expected(length, 70) for length in LENGTHS]
    for _ in range(2):
        assert generated(engine) == wanted
    again = engine.generate(input_ids=[prompt_of(12)], max_new_tokens=70, **GREEDY)
    assert again.token_ids == [expected(12, 70)]
    assert again.stats.mean_acceptance_length > 2 and again.stats.num_put_back == 1


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("settings", [{"max_rows": 1}, {"max_rows": 3}, {"draft": False}])
def test_few_places_and_no_drafts(settings, fuse):
    assert generated(engine_of(fuse=fuse), **settings) == [expected(length, 70) for length in LENGTHS]


def test_rows_that_cross_one_after_another_while_others_wait():
    """A run of more requests than places, those of long prompts between short ones."""
    requests = [
        stand.Request(prompt_of(length), max_new_tokens=count, id=place)
        for place, (length, count) in enumerate(zip(LENGTHS, (70, 5, 40, 2, 30, 9, 60), strict=True))
    ]
    found = {one.id: one for one in engine_of().run(requests, max_rows=2, **GREEDY)}
    counts = [request.max_new_tokens for request in requests]
    for place, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        assert found[place].token_ids == expected(length, count)


def test_rows_are_also_put_back_for_memory(monkeypatch):
    monkeypatch.setattr(within_pages, "GROWTH", 0)  # rows start as soon as a page is free
    cap = 6 * 128 * bytes_per_token(model_of())
    output = engine_of().generate(
        input_ids=[prompt_of(length) for length in LENGTHS], max_new_tokens=70, max_cache_bytes=cap, **GREEDY
    )
    assert output.token_ids == [expected(length, 70) for length in LENGTHS]
    assert output.stats.num_put_back > sum(length <= BORDER for length in LENGTHS)


@pytest.mark.filterwarnings("ignore:greedy rows of a prompt are all equal")
@pytest.mark.parametrize("spare", [0, 2])
def test_the_only_live_row_crosses_beside_a_prompt_that_others_wait_with(spare):
    """Memory holds one row: what the row had shared with those that wait must go before it is computed anew."""
    border, count = 1300, 20
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(border, 3000)).eval()
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=24))
    prompt, settings = prompt_of(border - 10), {"max_new_tokens": count, "max_rows": 1, **GREEDY}
    wanted = engine.generate(input_ids=[prompt], **settings).token_ids
    page = engine.backend.page_size or 128
    least = -(-(border - 11 + count + DRAFT_ROOM) // page) + 1
    cap = (least + spare) * page * bytes_per_token(model)
    output = engine.generate(input_ids=[prompt], num_return_sequences=3, max_cache_bytes=cap, **settings)
    assert output.token_ids == 3 * wanted and output.stats.num_put_back == 3


def test_prompts_that_begin_alike_share_nothing_across_the_border(monkeypatch):
    for module in (forward_model, prefilled, prompt_keys):
        monkeypatch.setattr(module, "PROMPT_CHUNK", 8)
    text = prompt_of(BORDER + 30)
    prompts = [text[:20], text[: BORDER + 5], text[: BORDER - 3], text]
    wanted = [engine_of().generate(input_ids=[prompt], max_new_tokens=30, **GREEDY).token_ids[0] for prompt in prompts]
    engine = engine_of()
    with engine.keep_prompts(1e9):
        for _ in range(2):
            output = engine.generate(input_ids=prompts, max_new_tokens=30, **GREEDY)
            assert output.token_ids == wanted
        assert output.stats.num_copied_prompt_tokens > 0
        assert not any(prompt.is_beyond for prompt in engine._kept.prompts)


@pytest.mark.skipif(not forward_model.chooses_on_device(), reason="this transformers moves them")
def test_prompts_are_kept_though_every_forward_writes_its_frequencies(monkeypatch):
    for module in (forward_model, prefilled, prompt_keys):
        monkeypatch.setattr(module, "PROMPT_CHUNK", 8)
    engine, found = engine_of(), []
    with engine.keep_prompts(1e9):
        for count in (4, 4, 40, 4):  # the third one crosses
            output = engine.generate(input_ids=[prompt_of(BORDER - 9)], max_new_tokens=count, **GREEDY)
            found.append(output.stats.num_copied_prompt_tokens)
            assert output.token_ids == [expected(BORDER - 9, count)]
        assert found == [0, 24, 24, 24]
        model_of().model.rotary_emb.original_inv_freq.mul_(1.0)  # written by somebody else
        output = engine.generate(input_ids=[prompt_of(BORDER - 9)], max_new_tokens=4, **GREEDY)
        assert output.stats.num_copied_prompt_tokens == 0


@pytest.mark.parametrize("verifier", ["traversal", "match", "coupled"])
def test_sampled_rows_are_those_of_plain_forwards(verifier):
    """With `match` and `coupled` drafts change no token; with all rules a text's law is that of its own forward: at a
    temperature near 0 the best token."""
    cold = {"temperature": 1e-3, "top_k": 0, "seed": 2, "stop_token_ids": []}
    assert generated(engine_of(verifier=verifier), **cold) == [expected(length, 70) for length in LENGTHS]
    if verifier == "traversal":
        return
    warm = {"temperature": 0.8, "top_k": 0, "seed": 2, "num_return_sequences": 2, "stop_token_ids": []}
    engine = engine_of(verifier=verifier)
    plain = generated(engine, draft=False, **warm)
    assert generated(engine, **warm) == generated(engine, **warm) == plain


def test_penalties_and_streams_cross_too():
    engine, prompt = engine_of(), prompt_of(BORDER - 9)
    settings = {"max_new_tokens": 40, "temperature": 0.0, "repetition_penalty": 1.3, "stop_token_ids": []}
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    wanted = greedy_by_plain_forwards(copy.deepcopy(model_of()), prompt, 40, processor=penalty)
    call, _ = engine._new_call(None, None, input_ids=[prompt], **settings)
    with torch.inference_mode():
        for _ in call.steps():
            model_of()(torch.arange(9)[None])  # between two steps the model is free
    ((_, row),) = call.scheduler.ended
    assert row.new_token_ids.tolist() == wanted


def test_keys_that_are_not_computed_anew_are_seen(monkeypatch):
    """Control: rows go on with the keys of short factors."""
    monkeypatch.setattr(Scheduler, "_has_crossed", lambda scheduler, row: False)
    assert generated(engine_of()) != [expected(length, 70) for length in LENGTHS]


def test_steps_are_timed_beyond_the_border_too():
    cost = stand.wrap(model_of()).measure_cost(length=2 * BORDER, most_tokens=4, seconds=0.0)
    assert cost.length == 2 * BORDER


def test_prompts_by_short_factors_are_seen(monkeypatch):
    """Control: prompts beyond the border, computed in chunks that lie before it."""
    monkeypatch.setattr(prompt_keys, "PROMPT_CHUNK", 8)
    monkeypatch.setattr(forward_model, "PROMPT_CHUNK", 8)
    wanted = [expected(BORDER + 20, 30)]
    prompt = prompt_of(BORDER + 20)
    assert engine_of().generate(input_ids=[prompt], max_new_tokens=30, **GREEDY).token_ids == wanted
    monkeypatch.setattr(prompt_keys, "lies_beyond", lambda row, border: False)
    assert engine_of().generate(input_ids=[prompt], max_new_tokens=30, **GREEDY).token_ids != wanted


class Deep(stand.BlendedDrafter):
    """Heeds no depth."""

    def draft(self, request):
        return super().draft(replace(request, max_depths=request.max_depths + 50))


def test_drafts_across_the_border_are_refused():
    engine = engine_of(drafter=Deep(budget=24))
    engine.generate(input_ids=[prompt_of(BORDER + 1)], max_new_tokens=60, **GREEDY)
    with pytest.raises(ValueError, match="must end within 40 tokens where its factors change, got .* must heed"):
        for _ in range(3):
            engine.generate(input_ids=[prompt_of(12)], max_new_tokens=60, **GREEDY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_factors_have_the_type_that_the_model_has_them_in(dtype):
    """A model that was cast keeps them in its own type, where their rounding is seen in far positions: transformers
    5.22 to 5.24 the long ones too, earlier ones not."""
    model = copy.deepcopy(model_of()).to(dtype)
    positions, nothing = torch.tensor([[3, BORDER + 90]]), torch.zeros(1)
    own = model.model.rotary_emb(nothing, positions)
    with long_factors(model):
        assert all(map(torch.equal, model.model.rotary_emb(nothing, positions), own))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_factors_are_put_back(error):
    model = copy.deepcopy(model_of())
    rope = model.model.rotary_emb
    model(torch.arange(5)[None])
    positions = torch.tensor([[1, 7]])
    short = [part.clone() for part in rope(torch.zeros(1), positions)]
    factors = rope.inv_freq
    try:
        with long_factors(model):
            long = rope(torch.zeros(1), positions)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        pass
    assert not torch.equal(long[0], short[0])
    assert rope.inv_freq is factors and rope.rope_type == "longrope"
    assert all(map(torch.equal, rope(torch.zeros(1), positions), short))
    far = rope(torch.zeros(1), torch.tensor([[1, 7, BORDER]]))
    assert torch.equal(far[0][:, :2], long[0])


def test_the_check_at_loading_sees_other_factors(monkeypatch):
    """Those of `long_factors` must be the ones that the model chooses by itself."""
    assert self_check.far_position_difference(model_of()) < 1e-5
    wrong = {**ROPE_INIT_FUNCTIONS, "longrope": lambda *given, **asked: (torch.full((4,), 0.1), 1.0)}
    monkeypatch.setattr(factors_module, "ROPE_INIT_FUNCTIONS", wrong)
    assert self_check.far_position_difference(model_of()) > 0.01
    with pytest.raises(stand.UnsupportedModelError, match="must not depend on later positions"):
        self_check.check_model(model_of())


def test_who_switches():
    assert switching_length(model_of()) == BORDER and served_positions(model_of()) == CONTEXT
    short = AutoModelForCausalLM.from_config(config_of(context=BORDER)).eval()
    assert switching_length(short) is None and served_positions(short) == BORDER
    assert "phi3" in factors_module.COMPUTING_ANEW
