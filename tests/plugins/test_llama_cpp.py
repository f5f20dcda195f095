"""The engine around a model of llama.cpp: against texts scored one by one, and llama.cpp's own rules for batches."""

import gc
import importlib
import sys
from itertools import pairwise

import fake_llama_cpp as fake
import numpy as np
import pytest
import torch
from plain_logprobs import difference
from transformers import LogitsProcessor

import stand
from stand.forward.cache.tree_cache import CacheMemoryError
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import UnsupportedModelError, check_tree
from stand.laws.logprobs import MODES
from stand.trees import DraftBatch

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
LONG = {"max_new_tokens": 40}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    return fake.install(monkeypatch)


def wrap(llm=None, **settings):
    door = importlib.import_module("stand.plugins.llama_cpp")
    return door.wrap(fake.Llama() if llm is None else llm, **settings)


def drafting(llm=None, *, budget=12, **settings):
    return wrap(llm, drafter=stand.BlendedDrafter(budget=budget), **settings)


def num_filled(engine) -> int:
    """Cells, after what is collected late has gone."""
    gc.collect()
    engine.model.context._tidy()
    assert len(engine.model.context._free) == fake.NO_SEQUENCES
    return len(fake.CONTEXTS[-1].cells)


def greedy(prompt, count, *, window=0):
    text = tuple(prompt)
    for _ in range(count):
        text += (int(fake.plain_logits(text[-window:]).argmax()),)
        if text[-1] == fake.END:
            break
    return list(text[len(prompt) :])


def test_greedy_output_is_that_of_texts_scored_one_by_one():
    engine = drafting()
    for _ in range(2):  # the second call drafts by what the first one taught
        output = engine.generate(input_ids=PROMPTS, do_sample=False, **LONG)
        assert output.token_ids == [greedy(prompt, 40) for prompt in PROMPTS]
    assert output.stats.mean_acceptance_length > 3
    assert output.stats.num_draft_tokens > output.stats.num_accepted_draft_tokens  # paths were left, too
    assert num_filled(engine) == 0


def test_sampled_tokens_are_those_without_drafts():
    settings = {"num_return_sequences": 5, "temperature": 0.7, "top_p": 0.9, "seed": 4, **LONG}
    engine = drafting(verifier="match")
    plain = engine.generate(input_ids=PROMPTS, draft=False, **settings)
    drafted = engine.generate(input_ids=PROMPTS, **settings)
    assert drafted.token_ids == plain.token_ids and drafted.stats.mean_acceptance_length > 1.1
    assert len({tuple(row) for row in plain.token_ids}) > 5


def test_tokens_may_be_limited():
    """By transformers' processors, which are asked at every node."""
    asked = {"num_return_sequences": 5, "temperature": 1.0, "seed": 4, "stop_token_ids": [], **LONG}
    asked["prefix_allowed_tokens_fn"] = lambda number, tokens: [(int(tokens[-1]) + step) % 32 for step in (1, 5, 6)]
    engine = drafting(verifier="match")
    plain = engine.generate(input_ids=PROMPTS, draft=False, **asked)
    drafted = engine.generate(input_ids=PROMPTS, **asked)
    assert drafted.token_ids == plain.token_ids and drafted.stats.mean_acceptance_length > 1.1
    steps = {(after - before) % 32 for row in plain.token_ids for before, after in pairwise(row)}
    assert steps == {1, 5, 6}


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_of_texts_scored_one_by_one(mode):
    asked = {"num_return_sequences": 2, "temperature": 0.7, "top_k": 0, "seed": 4, "logprobs": 2, "logprobs_mode": mode}
    engine = drafting()
    for _ in range(2):
        output = engine.generate(input_ids=PROMPTS, **asked, **LONG)
    assert output.stats.mean_acceptance_length > 1.1
    scale = 1.0 if mode == MODES[0] else 0.7
    for row, (tokens, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        text = [*PROMPTS[row // 2], *tokens]
        prefixes = [tuple(text[:length]) for length in range(len(PROMPTS[row // 2]), len(text))]
        logits = torch.stack([torch.as_tensor(fake.plain_logits(prefix)).float() for prefix in prefixes])
        assert difference(found, tokens, torch.log_softmax(logits / scale, dim=-1)) < 1e-4


def test_logits_are_not_written_over():
    cache = wrap().model.new_cache()

    def logits(tokens, length):
        plan = StepPlan.for_prompt(np.array(tokens, dtype=np.int32), length, row=0)
        cache.begin(plan)
        return cache.run(plan, 1)

    first = logits([5, 6], 0)
    assert cache.num_slots == 2 and cache.nbytes == 2 * 3 * 2 * 2 * 16 * 2
    kept = first.clone()
    assert not torch.equal(logits([7], 2), kept)
    assert torch.equal(first, kept) and np.array_equal(kept[0].numpy(), fake.plain_logits((5, 6)))


def test_rows_of_one_prompt_share_its_cells():
    engine = drafting()
    prompt = list(np.random.default_rng(0).integers(4, 32, 300))
    engine.generate(input_ids=[prompt], num_return_sequences=8, max_new_tokens=5, temperature=1.0, seed=0)
    assert fake.CONTEXTS[-1].most_cells < 300 + 8 * (5 + 12) + 12


def test_rows_that_do_not_fit_wait_or_are_put_back(monkeypatch):
    monkeypatch.setattr("stand.scheduling.within_pages.GROWTH", 16)
    settings = {"num_return_sequences": 6, "max_new_tokens": 120, "temperature": 0.9, "seed": 1, "stop_token_ids": []}
    plain = drafting(verifier="match").generate(input_ids=[PROMPTS[0]], **settings)
    engine = drafting(verifier="match", num_slots=512)
    tight = engine.generate(input_ids=[PROMPTS[0]], **settings)
    assert tight.stats.num_put_back > 0 and fake.CONTEXTS[-1].most_cells <= 512
    assert tight.token_ids == plain.token_ids
    assert num_filled(engine) == 0


def test_cells_are_free_after_an_error_and_after_a_stream_that_was_left():
    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 12:
                raise RuntimeError("of the user's")
            return scores

    engine = drafting()
    with pytest.raises(RuntimeError, match="of the user's"):
        engine.generate(
            input_ids=PROMPTS, temperature=1.0, seed=0, stop_token_ids=[], logits_processors=[Failing()], **LONG
        )
    assert num_filled(engine) == 0
    run = engine.run(PROMPTS, num_return_sequences=3, temperature=1.0, seed=0, max_rows=2, **LONG)
    next(run)
    run.close()
    del run
    assert num_filled(engine) == 0
    assert engine.generate(input_ids=PROMPTS, do_sample=False, **LONG).token_ids[1] == greedy(PROMPTS[1], 40)


def test_calls_that_take_turns_share_what_is_there():
    engine = drafting(num_slots=700)
    first = engine.run([PROMPTS[0]] * 2, do_sample=False, **LONG)
    taken = [next(first)]
    assert engine.backend.num_slots < 700 - 8
    second = engine.generate(input_ids=PROMPTS, do_sample=False, **LONG)
    taken += list(first)
    assert [row.token_ids for row in taken] == [greedy(PROMPTS[0], 40)] * 2
    assert second.token_ids == [greedy(prompt, 40) for prompt in PROMPTS]


def test_prompts_are_kept_from_call_to_call():
    engine = drafting(fake.Llama(fake.FakeModel(longest=4096), n_ctx=4096))
    prompt = list(np.random.default_rng(0).integers(4, 32, 600))
    token_bytes = 3 * 2 * 2 * 16 * 2  # layers, keys and values, heads, numbers of two bytes
    with engine.keep_prompts(1000 * token_bytes):
        engine.generate(input_ids=[prompt], max_new_tokens=4, do_sample=False)
        before = fake.CONTEXTS[-1].num_decoded
        again = engine.generate(input_ids=[[*prompt, 9]], max_new_tokens=4, do_sample=False)
    assert again.stats.num_copied_prompt_tokens == 512 and fake.CONTEXTS[-1].num_decoded - before < 200
    assert again.token_ids == [greedy([*prompt, 9], 4)]
    assert engine.backend.num_slots == 4096  # what was kept went with the block
    message = "must hold a page beside .* and 1.57056e\\+06 bytes of prompts to be kept; .* or raise num_slots"
    with engine.keep_prompts(4090 * token_bytes), pytest.raises(ValueError, match=message):
        engine.generate(input_ids=[prompt], max_new_tokens=4, do_sample=False)
    with engine.keep_prompts(3200 * token_bytes), pytest.raises(ValueError, match="must hold one row with its 90 new"):
        engine.generate(input_ids=[prompt], max_new_tokens=90, do_sample=False)
    assert num_filled(engine) == 0


def test_windows_are_seen_though_cells_go():
    window = 24
    engine = drafting(fake.Llama(fake.FakeModel(longest=4096, window=window), n_ctx=4096))
    prompt = list(np.random.default_rng(0).integers(4, 32, 600))
    prompts = [PROMPTS[0], prompt, [*prompt[:560], 7]]
    with engine.keep_prompts(1e6):
        for _ in range(2):
            output = engine.generate(input_ids=prompts, do_sample=False, **LONG)
            assert output.token_ids == [greedy(one, 40, window=window) for one in prompts]
            assert output.stats.num_copied_prompt_tokens == 0  # what the beginning alone would see is gone
    assert output.stats.mean_acceptance_length > 2
    whole = prompt[:513]  # but for its last token a chunk
    with engine.keep_prompts(1e6):
        engine.generate(input_ids=[whole], do_sample=False, max_new_tokens=2)
        output = engine.generate(input_ids=[prompt], do_sample=False, **LONG)
    assert output.stats.num_copied_prompt_tokens == 512
    assert output.token_ids == [greedy(prompt, 40, window=window)]
    assert num_filled(engine) == 0


def test_branches_that_were_idle_for_a_window_are_of_use_again():
    engine = drafting(fake.Llama(fake.FakeModel(window=6)), verifier="match")
    settings = {"num_return_sequences": 4, "temperature": 0.7, "seed": 2, "max_new_tokens": 150, "stop_token_ids": []}
    plain = engine.generate(input_ids=[PROMPTS[0]], draft=False, **settings)
    assert engine.generate(input_ids=[PROMPTS[0]], **settings).token_ids == plain.token_ids


def test_long_texts_are_not_copied_for_every_branch(monkeypatch):
    engine, copied = drafting(), []
    monkeypatch.setattr(engine.model.context, "copy", _noting(engine.model.context.copy, copied))
    engine.generate(
        input_ids=PROMPTS, num_return_sequences=3, temperature=1.0, seed=0, stop_token_ids=[], max_new_tokens=100
    )
    assert sum(start == 0 for start, _ in copied) < len(copied) / 5
    assert sum(end - start for start, end in copied if start) < 10 * sum(start > 0 for start, _ in copied)


def _noting(copy, copied):
    def copy_and_note(source, target, start, end):
        copied.append((start, end))
        copy(source, target, start, end)

    return copy_and_note


def test_idle_branches_make_room_for_others():
    engine = drafting(budget=100)
    engine.generate(input_ids=PROMPTS, num_return_sequences=30, temperature=2.0, seed=0, max_new_tokens=30)
    assert num_filled(engine) == 0


def test_idle_branches_are_all_given_back():
    model = wrap().model
    cache, tree = model.new_cache(), check_tree(np.arange(7, dtype=np.int32))
    for length in (0, 1):
        plan = StepPlan.for_drafts(DraftBatch.concatenate([tree]), np.array([length]))
        cache.begin(plan)
        cache.run(plan, 7)
        assert len(model.context._free) == fake.NO_SEQUENCES - 3  # a row's own, and two further leaves'
        cache.give_back_idle()
        assert len(model.context._free) == fake.NO_SEQUENCES - 3  # they are in use
        cache.keep_states([0])
    cache.give_back_idle()
    assert len(model.context._free) == fake.NO_SEQUENCES - 1


def test_an_end_token_of_the_model_ends_a_row_and_the_context_limits_it():
    engine = drafting(fake.Llama(fake.FakeModel(ends=(3, 4), longest=64)))
    assert engine.model.generation_config.eos_token_id == [3, 4]
    assert engine.model.generation_config.bos_token_id is None
    output = engine.generate(input_ids=[PROMPTS[0]], num_return_sequences=20, temperature=1.5, seed=0)
    ended = zip(output.token_ids, output.finish_reasons, strict=True)
    assert {row[-1] for row, reason in ended if reason == "eos"} == {3, 4}
    with pytest.raises(ValueError, match="context of 64 tokens"):
        engine.generate(input_ids=[PROMPTS[0]], max_new_tokens=61)
    scaled = fake.Llama(fake.FakeModel(longest=64), n_ctx=1000, rope_freq_scale=0.5)
    with pytest.raises(ValueError, match=r"context of 712 tokens \(num_slots has room for no more\), got 4 \+ 900"):
        wrap(scaled).generate(input_ids=[PROMPTS[0]], max_new_tokens=900)
    chosen = fake.Llama(fake.FakeModel(longest=64), n_ctx=1000, rope_scaling_type=2)
    assert wrap(chosen).model.config.max_position_embeddings == 712


def test_settings_of_the_llama_hold(library, monkeypatch):
    llm = fake.Llama()
    llm._lora_adapter, llm.lora_scale = 17, 0.5
    engine = wrap(llm, num_slots=2048)
    params = fake.CONTEXTS[-1].params
    assert fake.CONTEXTS[-1].adapters == [0.5] and len(fake.CONTEXTS) == 1
    assert (params.n_ctx, params.n_seq_max, params.kv_unified, params.type_k) == (2048, 256, True, 1)
    assert params.n_batch == params.n_ubatch == 512 and llm.context_params.n_batch == 8
    assert (
        str(engine.backend) == "llama.cpp 0.3.36 2-2 threads 0 layers offloaded" and engine.backend.name == "llama.cpp"
    )
    llm.model_params.n_gpu_layers = 0x7FFFFFFF  # all three, and what is behind them
    for has_gpu, count in ((False, 0), (True, 4)):
        monkeypatch.setattr(library, "llama_supports_gpu_offload", lambda has_gpu=has_gpu: has_gpu)
        assert engine.model.way == f"llama.cpp 0.3.36 2-2 threads {count} layers offloaded"
    assert engine.model.config.head_dim == 16
    llm.metadata = {}
    assert wrap(llm).model.config.head_dim == 64 // 4
    assert engine.model.get_memory_footprint() == 12345 and engine.model.dtype is torch.float16


@pytest.mark.parametrize("has_gpu", [False, True])
def test_steps_of_a_build_with_a_gpu_are_timed_by_the_time_of_day(library, monkeypatch, has_gpu):
    """The thread sleeps meanwhile: its own time would say that any step is as cheap as the smallest."""
    monkeypatch.setattr(library, "llama_supports_gpu_offload", lambda: has_gpu)
    assert wrap(fake.Llama()).backend.computes_elsewhere is has_gpu


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "encoder", "diffusion"])
def test_kinds_that_keep_other_things_than_keys_are_refused(kind):
    with pytest.raises(UnsupportedModelError, match="every layer must keep keys.*call stand.wrap"):
        wrap(fake.Llama(fake.FakeModel(kinds=frozenset({kind}))))
    assert not fake.CONTEXTS


def test_a_build_that_scores_trees_wrongly_is_refused():
    with pytest.raises(UnsupportedModelError, match="trees must be scored as texts are"):
        wrap(fake.Llama(fake.FakeModel(sees_others=True)))


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"needs a llama_cpp.Llama, got str"):
        wrap("model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"stand.plugins.llama_cpp.wrap"):
        stand.wrap(fake.Llama())
    with pytest.raises(ValueError, match="num_slots must be at least 512, got 64"):
        wrap(fake.Llama(n_ctx=64))
    with pytest.raises(CacheMemoryError, match="lower num_slots"):
        wrap(num_slots=1 << 21)
    with pytest.raises(ValueError, match="at most 128 nodes in steps of llama.cpp, got BlendedDrafter with 300 for 1"):
        drafting(budget=300).generate(input_ids=[[5]], max_new_tokens=2)
    with pytest.raises(ValueError, match="must do without its hidden states, got StatefulDrafter"):
        wrap(drafter=StatefulDrafter())
    with pytest.raises(ValueError, match="block"):
        wrap(verifier="block")  # of chains, and drafts are trees
    engine = wrap()
    with pytest.raises(ValueError, match="at most 256 tokens, got 513"):
        engine.model.context.decode(np.zeros(513), np.arange(513), [[0]] * 513, num_outputs=1)
    with pytest.raises(RuntimeError, match="llama_decode must return 0, got -1"):
        engine.model.context.decode(np.zeros(1), np.ones(1), [[999]], num_outputs=1)
    engine.model.llm._model.model = None
    with pytest.raises(RuntimeError, match="closed Llama"):
        engine.generate(input_ids=[[5, 6]], max_new_tokens=2)


class StatefulDrafter(stand.Drafter):
    requires_features = True

    def draft(self, request):
        raise AssertionError


def test_too_many_sequences_and_too_few_cells_are_told():
    engine = wrap(num_slots=512)
    context = engine.model.context
    taken = [context.take() for _ in range(fake.NO_SEQUENCES)]
    with pytest.raises(CacheMemoryError, match="at most 256 at once"):
        context.take()
    context.decode(np.zeros(512), np.arange(512), [[taken[0]]] * 512, num_outputs=256)
    with pytest.raises(CacheMemoryError, match="must fit into 512 slots"):
        context.decode(np.zeros(1), np.zeros(1), [[taken[1]]], num_outputs=1)


def test_a_model_that_was_closed_first_ends_in_no_crash():
    engine = wrap()
    engine.model.llm._model.model = None
    del engine
    gc.collect()
    assert fake.CONTEXTS[-1].is_open
    engine = wrap()
    del engine
    gc.collect()
    assert not fake.CONTEXTS[-1].is_open


def test_without_the_library_the_door_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ImportError, match="stand.plugins.llama_cpp needs llama_cpp, .*pip install llama-cpp-python"):
        wrap()


def test_steps_are_timed_within_their_limits():
    engine = wrap()
    cost = engine.measure_cost(num_rows=8, length=20)
    assert cost.most_tokens == 8 + 128
    assert num_filled(engine) == 0


def test_many_rows_are_timed_as_many_as_are_live(monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_COSTS", str(tmp_path))
    monkeypatch.setattr("stand.drafters.costs.known.SHARED_SIZES", (1,))
    engine = wrap(num_slots=16384)
    output = engine.generate(input_ids=[[5, 6]], num_return_sequences=70, max_new_tokens=3, temperature=1.0, seed=0)
    assert len(output.token_ids) == 70
    names = [path.name for path in tmp_path.iterdir()]
    assert names and all("llama.cpp-0.3.36-2-2-threads" in name for name in names)


def test_the_stand_in_refuses_what_llama_cpp_refuses():
    from stand.plugins.llama_cpp.context import Context

    context = Context(fake.Llama(), 512)
    context.decode(np.array([5]), np.array([0]), [[3]], num_outputs=1)
    context.copy(3, 4)

    def refused(positions, owners):
        with pytest.raises(RuntimeError, match="got -1"):
            context.decode(np.full(len(positions), 5), np.array(positions), owners, num_outputs=1)

    refused([0], [[3]])  # it is there
    refused([2], [[3]])  # one is left out
    refused([1, 3], [[3], [3]])
    refused([2, 1], [[3], [3]])
    refused([1], [[3, 5]])  # 5 has not seen what 3 has
    with pytest.raises(AssertionError, match=r"sees positions \[1\]"):
        context.decode(np.array([5]), np.array([1]), [[6]], num_outputs=1)
