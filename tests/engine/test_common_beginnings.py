"""Prompts that begin alike: chunks that another prompt has computed are copied, to the bit, and no token changes."""

import contextlib
import copy
import gc
import itertools
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recurrent_models import RECURRENT, recurrent_model
from tiny_models import tiny_model
from with_pages import needs_pages

import stand
from stand.forward import model as forward_model
from stand.forward.cache.tree_cache import TreeCache
from stand.row import Row
from stand.scheduling import prefilled, prompt_keys
from stand.scheduling.admission import Admission
from stand.scheduling.prefilled import Prefilled, common_pieces

CHUNK = 8
SHARED = [5, 9, 11, 4, 5, 9, 7, 3, 2, 6, 12, 13, 4, 4, 8, 30, 31, 5, 6]  # two chunks and three tokens
PROMPTS = [[*SHARED, *tail] for tail in ([7, 7], [8, 30, 31], [], [7, 7, 9, 9, 9, 1, 2, 3])] + [
    SHARED[1:],
    SHARED[:17],
    [3],
]


HYBRIDS = [family for family in ("qwen3_5", "nemotron_h", "lfm2") if family in RECURRENT]  # of every kind


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    for module in (forward_model, prompt_keys, prefilled):
        monkeypatch.setattr(module, "PROMPT_CHUNK", CHUNK)


def decoded(model=None, drafter=None, **settings):
    """By row, under a rule whose tokens do not follow from when other rows enter."""
    drafter = drafter or stand.BlendedDrafter(budget=12)
    engine = stand.wrap(model or tiny_model("qwen2"), drafter=drafter, verifier="match", fuse=False)
    asked = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3, "num_return_sequences": 2} | settings
    run = engine.run(PROMPTS, **asked)
    found = {one.row: one.token_ids for one in run}
    return found, run.stats


def without_copies(monkeypatch):
    monkeypatch.setattr(prompt_keys, "common_pieces", lambda source, target: 0)


@pytest.mark.parametrize("max_rows", [1, 3, 99])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_oss"])
def test_no_token_changes(monkeypatch, family, max_rows):
    found, stats = decoded(tiny_model(family), max_rows=max_rows)
    copied = 3 * 2 * CHUNK  # of the second, third and fourth prompt
    copied += CHUNK if max_rows == 99 else 0  # another one lies between; a prompt's own last chunk is computed
    assert stats.num_copied_prompt_tokens == stats.as_dict()["num_copied_prompt_tokens"] == copied
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS))
    without_copies(monkeypatch)
    wanted, stats = decoded(tiny_model(family), max_rows=max_rows)
    assert found == wanted and stats.num_copied_prompt_tokens == 0


@pytest.mark.parametrize("max_rows", [1, 3, 99])
@pytest.mark.parametrize("family", HYBRIDS)
def test_no_token_of_a_hybrid_changes(monkeypatch, family, max_rows):
    found, stats = decoded(recurrent_model(family), max_rows=max_rows)
    assert stats.num_copied_prompt_tokens == 2 * 2 * CHUNK  # the second prompt finds no states, and notes some
    without_copies(monkeypatch)
    wanted, stats = decoded(recurrent_model(family), max_rows=max_rows)
    assert found == wanted and stats.num_copied_prompt_tokens == 0


def keys_of_all(monkeypatch, model) -> list[list[torch.Tensor]]:
    """Of every prompt, when it is complete, its recurrent states among them."""
    kept, count = [], prompt_keys.PromptKeys._count

    def noting(keys, row, prompt):
        stored = [states[:, :, : row.num_cached].clone() for states in (*prompt.keys.keys, *prompt.keys.values)]
        stored += [states.clone() for layer in prompt.keys.recurrent.layers.values() for states in layer.stored]
        kept.append(stored)
        count(keys, row, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(prompt_keys.PromptKeys, "_count", noting)
        decoded(model)
    return kept


@pytest.mark.parametrize("family", ["qwen2", *HYBRIDS])
def test_keys_are_the_same_to_the_bit(monkeypatch, family):
    model = tiny_model(family) if family == "qwen2" else recurrent_model(family)
    copied = keys_of_all(monkeypatch, model)
    without_copies(monkeypatch)
    computed = keys_of_all(monkeypatch, model)
    assert len(copied) == len(computed) == len(PROMPTS)
    for ours, theirs in zip(copied, computed, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_wrong_beginning_changes_tokens(monkeypatch):
    """Control: another prompt's keys for a prompt that does not begin with them."""
    wanted, _ = decoded()
    monkeypatch.setattr(
        prompt_keys, "common_pieces", lambda source, target: int(source.done >= CHUNK < len(target.token_ids))
    )
    found, _ = decoded()
    assert found != wanted and found[0] == wanted[0]


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_short_prompts_are_not_kept(is_recurrent):
    engine = engine_of(recurrent_model("qwen3_5") if is_recurrent else None)
    with engine.keep_prompts(1e9):
        engine.generate(input_ids=SHARED[:CHUNK], max_new_tokens=2, temperature=0.9)
        assert engine._kept.prompts == []


def test_what_was_kept_goes_with_the_block():
    """At once, not when the collector of cycles comes by."""
    engine = engine_of()
    gc.disable()
    try:
        with engine.keep_prompts(1e9):
            engine.generate(input_ids=SHARED, max_new_tokens=2, temperature=0.9)
            run = engine.run([SHARED, SHARED], max_rows=1, max_new_tokens=2, temperature=0.9)
            next(run)
            left = weakref.ref(engine._kept)
        next(run)
        assert left() is not None
        assert list(run) == [] and left() is None
    finally:
        gc.enable()


class Recorder(stand.Drafter):
    """Notes the features of prompts."""

    requires_features = True

    def __init__(self):
        self.prompts = {}

    def follow_prompt(self, token_ids, features):
        self.prompts[tuple(token_ids.tolist())] = features.clone()

    def draft(self, request):
        return stand.trees.DraftBatch.pending([history[-1] for history in request.histories])


def test_hidden_states_come_along(monkeypatch):
    copied, computed = Recorder(), Recorder()
    _, stats = decoded(drafter=copied)
    assert stats.num_copied_prompt_tokens == 56
    without_copies(monkeypatch)
    decoded(drafter=computed)
    assert copied.prompts.keys() == computed.prompts.keys() and len(copied.prompts) == len(PROMPTS)
    assert all(torch.equal(features, computed.prompts[prompt]) for prompt, features in copied.prompts.items())


def test_states_of_another_place_change_tokens(monkeypatch):
    """Control: what a hybrid's prompt begins with is the state behind its end."""
    wanted, _ = decoded(recurrent_model("qwen3_5"))
    monkeypatch.setattr(Prefilled, "begins_at", lambda self, most: most)
    found, _ = decoded(recurrent_model("qwen3_5"))
    assert found != wanted and found[0] == wanted[0]


def prompt_of(token_ids: list[int], done: int) -> Prefilled:
    return Prefilled(None, np.array(token_ids, dtype=np.int32), done)


def test_of_a_row_that_comes_back_only_what_was_computed_counts():
    keys = object.__new__(prompt_keys.PromptKeys)
    keys.num_replayed = 3
    prompt = prompt_of(SHARED, 19)
    prompt.copied = 2 * CHUNK
    keys._count(SimpleNamespace(num_steps=5, num_cached=19), prompt)
    assert keys.num_replayed == 3 + 19 - 16


@torch.inference_mode()
def test_chunks_are_run_as_far_as_is_allowed():
    """Of three chunks none before anything is allowed, then one wherever a token is."""
    row, told = Row(0, np.array(SHARED, dtype=np.int32), 5), []
    keys = prompt_keys.PromptKeys(
        tiny_model("qwen2"), new_keys=partial(TreeCache, 1), admission=Admission(), on_ready=told.append,
        feature_layers=None,
    )  # fmt: skip
    assert keys.ready(row) is None
    for is_ready in (False, False, True, True):
        keys.allow(1)
        assert (keys.ready(row) is not None) == is_ready == (told == [row])


@pytest.mark.parametrize(
    ("source", "done", "target", "chunks"),
    [
        (SHARED, 19, [*SHARED, 1], 2),
        (SHARED, 19, SHARED[:17], 2),
        (SHARED, 19, SHARED[:16], 2),
        (SHARED, 15, [*SHARED, 1], 1),
        (SHARED, -1, [*SHARED, 1], 0),
        (SHARED, 19, [1, *SHARED], 0),
        (SHARED, 19, [*SHARED[:15], 1, *SHARED[16:]], 1),
        (SHARED, 19, [*SHARED[:7], 1, *SHARED[8:]], 0),
        (SHARED, 19, [], 0),
    ],
)
def test_whole_chunks_of_what_is_common(source, done, target, chunks):
    assert common_pieces(prompt_of(source, done), prompt_of(target, -1)) == chunks


# From call to call.


def engine_of(model=None, drafter=None) -> stand.Engine:
    drafter = drafter or stand.BlendedDrafter(budget=12)
    return stand.wrap(model or copy.deepcopy(tiny_model("qwen2")), drafter=drafter, verifier="match", fuse=False)


def turns(engine, *, count: int = 3, **settings) -> tuple[list[list[int]], list[int]]:
    """Tokens of calls, each of which goes on with all that came before and three tokens more, and how many keys were
    copied."""
    tokens, copied, history = [], [], list(SHARED)
    for seed in range(count):
        output = engine.generate(input_ids=history, max_new_tokens=9, temperature=0.9, seed=seed, **settings)
        tokens.append(output.token_ids[0])
        copied.append(output.stats.num_copied_prompt_tokens)
        history += [*output.token_ids[0], 7, 7, 7]
    return tokens, copied


def test_turns_of_a_chat_go_on_with_what_is_there():
    wanted, none = turns(engine_of())
    engine = engine_of()
    with engine.keep_prompts(1e9):
        found, copied = turns(engine)
        assert len(engine._kept.prompts) == 1  # a prompt that begins the next one is not kept beside it
    assert none == [0, 0, 0] and copied[0] == 0 and copied[1] == 16 and copied[2] >= 24
    assert found == wanted
    assert turns(engine)[1] == none and engine._kept is None


@pytest.mark.parametrize("family", HYBRIDS)
def test_turns_with_a_hybrid_go_on_with_the_states_that_are_there(family):
    wanted, none = turns(engine_of(recurrent_model(family)), count=4)
    engine = engine_of(recurrent_model(family))
    with engine.keep_prompts(1e9):
        found, copied = turns(engine, count=4)
        kept = engine._kept.prompts
        assert len(kept) == 1 and len(kept[0].states) == 4  # behind each turn
    assert none == [0, 0, 0, 0] and copied[0] == 0 and copied[1] == 16 and copied[2] >= 24 and copied[3] >= 32
    assert found == wanted


def test_branches_of_a_hybrid_begin_where_states_are_known():
    """The first prompt leaves states behind its second chunk alone; who parts from it before notes some there."""
    branch = [*SHARED[:9], 1, 1, 1, 1, 1, 1, 1, 1]
    wanted, found, copied = [], [], []
    for engine, tokens in (
        (engine_of(recurrent_model("qwen3_5")), wanted),
        (engine_of(recurrent_model("qwen3_5")), found),
    ):
        with engine.keep_prompts(1e9) if tokens is found else contextlib.nullcontext():
            for prompt in (SHARED, branch, [*SHARED, 2, 2, 2, 2, 2, 2, 2], [*branch[:12], 5, 5, 5, 5, 5], SHARED):
                output = engine.generate(input_ids=prompt, max_new_tokens=3, temperature=0.9, seed=1)
                tokens.append(output.token_ids)
                copied.append(output.stats.num_copied_prompt_tokens)
    assert found == wanted and copied == 5 * [0] + [0, 0, 16, 8, 16]


def test_branches_take_from_the_one_they_share_most_with():
    engine, copied = engine_of(), []
    with engine.keep_prompts(1e9):
        for prompt in (SHARED, [*SHARED[:9], 1, 1, 1, 1, 1, 1, 1, 1], [*SHARED, 2, 2, 2, 2, 2, 2, 2], [3] * 20, SHARED):
            output = engine.generate(input_ids=prompt, max_new_tokens=3, temperature=0.9, seed=1)
            copied.append(output.stats.num_copied_prompt_tokens)
        kept = [prompt.token_ids.tolist() for prompt in engine._kept.prompts]
    assert copied == [0, 8, 16, 0, 16]
    assert kept[-1][:16] == SHARED[:16] and [3] * 16 in kept and len(kept) == 3


def change_in_place(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)


def change_by_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def change_by_a_fused_optimiser(model):
    """Which torch's counters of changes do not count."""
    weights = [parameter.requires_grad_() for parameter in model.parameters()]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(weights, lr=0.05, fused=True).step()


def change_a_module(model):
    model.model.norm = copy.deepcopy(model.model.norm)


def change_a_setting(model):
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}


CHANGES = [change_in_place, change_by_data, change_by_a_fused_optimiser, change_a_module, change_a_setting]


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_forget(change):
    """What was kept is of no use to them; control: unchanged, it is used."""
    engine = engine_of()
    with engine.keep_prompts(1e9):
        for is_changed in (False, True):
            if is_changed:
                change(engine.model)
            output = engine.generate(input_ids=SHARED, max_new_tokens=9, temperature=0.9, seed=2)
            again = engine.generate(input_ids=SHARED, max_new_tokens=9, temperature=0.9, seed=2)
            assert output.stats.num_copied_prompt_tokens == 0 and again.stats.num_copied_prompt_tokens == 16
    changed = copy.deepcopy(tiny_model("qwen2"))
    change(changed)
    wanted = engine_of(changed).generate(input_ids=SHARED, max_new_tokens=9, temperature=0.9, seed=2)
    assert output.token_ids == again.token_ids == wanted.token_ids


def switch(model, is_on: bool):
    """As an adapter is."""
    model.model.layers[0].self_attn.scaling = (3.0 if is_on else 1.0) * 8**-0.5


def test_a_call_in_another_one_takes_its_own_weights():
    """A run waits while another call runs the model as it is not in the run: neither takes what the other leaves."""
    prompts, settings = [[3] * 20, [4] * 20, [*SHARED, 7], SHARED], {"max_new_tokens": 9, "temperature": 0.9, "seed": 2}
    engine, model = engine_of(), copy.deepcopy(tiny_model("qwen2"))
    wanted = [one.token_ids for one in engine_of(model).run(prompts, max_rows=1, **settings)]
    switch(model, True)
    wanted_inside = engine_of(model).generate(input_ids=SHARED, **settings).token_ids
    with engine.keep_prompts(1e9):
        run = engine.run(prompts, max_rows=1, **settings)
        found = [next(run).token_ids]
        switch(engine.model, True)
        inside = engine.generate(input_ids=SHARED, **settings)
        switch(engine.model, False)
        found += [one.token_ids for one in run]
        assert run.stats.num_copied_prompt_tokens == 16  # of its own
        switch(engine.model, True)
        after = engine.generate(input_ids=SHARED, **settings)
        assert after.stats.num_copied_prompt_tokens == 16  # of the call inside
    assert found == wanted and inside.token_ids == after.token_ids == wanted_inside != [wanted[3]]


def test_other_precision_forgets():
    engine = engine_of()
    with engine.keep_prompts(1e9):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9)
        output = engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9)
    assert output.stats.num_copied_prompt_tokens == 0


@pytest.mark.parametrize("precision", ["high", "medium"])  # TF32 on a GPU; bfloat16 on a CPU that has it
def test_other_precision_of_products_forgets(precision):
    engine, copied = engine_of(), []
    with engine.keep_prompts(1e9):
        for setting in (precision, precision, "highest"):
            torch.set_float32_matmul_precision(setting)
            try:
                output = engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9)
            finally:
                torch.set_float32_matmul_precision("highest")
            copied.append(output.stats.num_copied_prompt_tokens)
    assert copied == [0, 16, 0]


def test_nothing_is_kept_beside_a_foreign_hook():
    """What it does may change, as here, and nothing tells."""
    engine, bias = engine_of(), torch.zeros(32)
    handle = engine.model.model.layers[0].register_forward_hook(lambda module, args, output: output + bias)
    with engine.keep_prompts(1e9):
        for _ in range(2):
            bias += 0.3
            output = engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9)
            assert output.stats.num_copied_prompt_tokens == 0 and engine._kept.prompts == []
        handle.remove()
        copied = [
            engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9).stats.num_copied_prompt_tokens
            for _ in range(2)
        ]
    assert copied == [0, 16]


@pytest.mark.parametrize("config", [{"size": 3}, "a text"])
def test_modules_may_have_configurations_of_any_kind(config):
    engine = engine_of()
    engine.model.model.layers[0].mlp.config = config
    with engine.keep_prompts(1e9):
        for _ in range(2):
            output = engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9)
    assert output.stats.num_copied_prompt_tokens == 16


def test_bytes_are_a_limit():
    engine = engine_of()
    with engine.keep_prompts(1e9):
        engine.generate(input_ids=SHARED, max_new_tokens=2, temperature=0.9)
        of_one = engine._kept.nbytes
    assert of_one > 0
    for limit, count in ((1, 0), (of_one, 1), (2.5 * of_one, 2)):
        with engine.keep_prompts(limit):
            for first in (3, 4, 5):
                engine.generate(input_ids=[first, *SHARED], max_new_tokens=2, temperature=0.9)
            assert len(engine._kept.prompts) == count and engine._kept.nbytes <= limit
            assert [prompt.token_ids[0] for prompt in engine._kept.prompts] == [3, 4, 5][3 - count :]
            before = list(engine._kept.prompts)
            if limit <= of_one:  # which is of a room of 256 tokens
                engine.generate(input_ids=20 * SHARED, max_new_tokens=2, temperature=0.9)
                assert engine._kept.prompts == before  # too long, and drops no other


def test_states_count_and_those_of_short_beginnings_go_first():
    engine = engine_of(recurrent_model("qwen3_5"))
    with engine.keep_prompts(1e9):
        turns(engine)
        (kept,) = engine._kept.prompts
        of_one = kept.keys.recurrent.row_bytes
        assert kept.nbytes == kept.keys.nbytes + 2 * of_one  # the last ones are the cache's own
        most = engine._kept.nbytes
    for limit, behind in ((most - 1, 2), (most - of_one, 2), (most - of_one - 1, 1), (most - 2 * of_one - 1, 0)):
        with engine.keep_prompts(limit):
            turns(engine)
            assert [len(prompt.states) for prompt in engine._kept.prompts] == ([behind] if behind else [])
            assert all(prompt.keys.recurrent is prompt.states[max(prompt.states)] for prompt in engine._kept.prompts)
            assert engine._kept.nbytes <= limit


def test_hidden_states_count():
    engine = engine_of(drafter=Recorder())
    with engine.keep_prompts(1e9):
        engine.generate(input_ids=SHARED, max_new_tokens=2, temperature=0.9)
        (kept,) = engine._kept.prompts
        most = engine._kept.nbytes
        assert most == kept.keys.nbytes + 2 * CHUNK * engine.model.config.hidden_size * 4
    for limit, count in ((most, 1), (most - 1, 0)):
        with engine.keep_prompts(limit):
            engine.generate(input_ids=SHARED, max_new_tokens=2, temperature=0.9)
            assert len(engine._kept.prompts) == count


def test_hidden_states_are_kept_where_there_were_any():
    """A call without drafts asks for none: what it left is of no use to one that does."""
    wanted, found = Recorder(), Recorder()
    for drafter in (wanted, found):
        engine = engine_of(drafter=drafter)
        with engine.keep_prompts(1e9) if drafter is found else contextlib.nullcontext():
            copied = [
                engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9, seed=1, draft=draft).stats
                for draft in (False, True, True)
            ]
    assert [stats.num_copied_prompt_tokens for stats in copied] == [0, 0, 16]
    prompt = tuple(SHARED)
    assert torch.equal(found.prompts[prompt], wanted.prompts[prompt])


def test_hidden_states_are_of_all_chunks_or_of_none():
    """A call without drafts goes on with a prompt that has some; the next one needs those of the whole."""
    longer, wanted, found = [*SHARED, *SHARED[:9]], Recorder(), Recorder()
    for drafter in (wanted, found):
        engine = engine_of(drafter=drafter)
        with engine.keep_prompts(1e9) if drafter is found else contextlib.nullcontext():
            for prompt, draft in ((SHARED, True), (longer, False), (longer, True)):
                engine.generate(input_ids=prompt, max_new_tokens=3, temperature=0.9, seed=1, draft=draft)
    assert torch.equal(found.prompts[tuple(longer)], wanted.prompts[tuple(longer)])


@needs_pages
def test_what_cannot_be_copied_is_not_kept(monkeypatch):
    engine, enter = engine_of(), TreeCache.enter

    def failing(self, *given):
        if type(self) is TreeCache:
            raise torch.OutOfMemoryError("no memory")
        enter(self, *given)

    with engine.keep_prompts(1e9):
        wanted = engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9, seed=1).token_ids
        engine._kept.prompts.clear()
        monkeypatch.setattr(TreeCache, "enter", failing)
        assert engine.generate(input_ids=SHARED, max_new_tokens=3, temperature=0.9, seed=1).token_ids == wanted
        assert engine._kept.prompts == []


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_of_a_chunk_that_was_cut_are_not_kept(monkeypatch, family):
    """An interrupt within the third chunk, behind layers that have gone on, once with states noted behind the first."""
    prompt, settings = [*SHARED, *SHARED], {"max_new_tokens": 9, "temperature": 0.9, "seed": 2}
    wanted = engine_of(recurrent_model(family)).generate(input_ids=prompt, **settings).token_ids
    update = TreeCache.update
    for before in ([], SHARED[:9]):
        calls = itertools.count(len(before) // CHUNK + 1)

        def cut(*given, calls=calls, **named):
            if next(calls) == 3:
                raise KeyboardInterrupt
            return update(*given, **named)

        engine = engine_of(recurrent_model(family))
        with engine.keep_prompts(1e9):
            if before:
                engine.generate(input_ids=before, **settings)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(TreeCache, "update", cut)
                engine.generate(input_ids=prompt, **settings)
            output = engine.generate(input_ids=prompt, **settings)
        assert output.token_ids == wanted and output.stats.num_copied_prompt_tokens == len(before) // CHUNK * CHUNK


@pytest.mark.parametrize("max_bytes", [0, -1, True, "2e9", None, float("nan")])
def test_what_is_no_number_of_bytes_is_refused(max_bytes):
    with pytest.raises(ValueError, match="max_bytes must be a number above 0, got .*; 2e9 keeps"):
        engine_of().keep_prompts(max_bytes).__enter__()


def test_blocks_are_not_nested():
    engine = engine_of()
    with engine.keep_prompts(1e9), pytest.raises(ValueError, match="must not be nested, got a block within"):
        engine.keep_prompts(1e9).__enter__()
    assert engine._kept is None
