"""Rows beyond what is live at once: each has the tokens of its own call, whatever its place, order and batch mates."""

import copy
import gc
import random
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from failures import failing_after
from letter_tokenizer import LETTERS, letter_tokenizer
from pearson import p_value
from tiny_models import SHAPE, tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, Qwen2Config
from with_pages import needs_pages

import stand
from stand.backend import CapturedBackend
from stand.call import Call
from stand.forward.cache import mapped_memory, tree_cache
from stand.forward.cache.paged_cache import PagedCache, PromptRoom
from stand.forward.cache.tree_cache import TreeCache
from stand.numbered_keys import NumberedKeys
from stand.row import Row
from stand.scheduling import free_memory, prompt_keys
from stand.scheduling.admission import AtMost
from stand.scheduling.memory import WithinMemory
from stand.scheduling.page_allocator import PageAllocator
from stand.scheduling.request import Job
from stand.scheduling.scheduler import Entry, Move, Scheduler
from stand.scheduling.within_pages import WithinPages
from stand.trees import problem_key

PROMPTS = [[5, 9, 11, 4, 5, 9], [7], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32]]
SETTINGS = {"num_return_sequences": 3, "max_new_tokens": 24, "temperature": 0.9, "seed": 3}


def engine_of(verifier: str = "match", **settings) -> stand.Engine:
    return stand.wrap(tiny_model("qwen2"), verifier=verifier, drafter=stand.BlendedDrafter(budget=12), **settings)


def cap_of(num_pages: int, engine: stand.Engine) -> int:
    """Bytes of so many pages."""
    return num_pages * engine.backend.page_size * free_memory.bytes_per_token(engine.model)


def tokens_of(trajectories) -> dict[int, list[int]]:
    found = {}
    for trajectory in trajectories:
        assert trajectory.row not in found
        found[trajectory.row] = trajectory.token_ids
    return found


def jobs_of(*counts: int) -> list[Job]:
    """Jobs with so many rows each, of one prompt token."""
    first = np.concatenate([[0], np.cumsum(counts)])
    prompt = np.zeros(1, dtype=np.int32)
    return [
        Job(number, prompt, 9, range(first[number], first[number + 1]), None, number, None)
        for number in range(len(counts))
    ]


def numbers_of(scheduler: Scheduler) -> list[int]:
    return [row.index for row in scheduler.live]


def end(scheduler: Scheduler, *numbers: int) -> None:
    for row in scheduler.live:
        if row.index in numbers:
            row.finish_reason = "eos"
            scheduler.end(row)


def test_places_are_handed_on_in_order():
    read = []
    jobs = jobs_of(2, 3, 1, 4)
    scheduler = Scheduler((read.append(job.number) or job for job in jobs), AtMost(4))
    changes = scheduler.settle(lambda row: "keys")
    assert [(change.place, change.row.index) for change in changes] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert read == [0, 1] and scheduler.next_row().index == 4 and scheduler.num_places == 4
    end(scheduler, 1, 2)
    assert [row.index for _, row in scheduler.ended] == [1, 2]
    told: list[object] = []

    def leave(row: Row, place: int) -> None:
        told.append((place, row.index))

    def ready(row: Row) -> str | None:
        told.append(row.index)
        return "keys" if row.index < 5 else None  # the next prompt is not ready

    changes = scheduler.settle(ready, leave)
    assert [type(change) for change in changes] == [Entry, Move] and numbers_of(scheduler) == [0, 4, 3]
    assert told == [(1, 1), (2, 2), 4, 5]  # who leaves gives the memory for those who enter
    assert (changes[1].source, changes[1].target, changes[1].row.index) == (3, 2, 3)
    scheduler.settle(lambda row: "keys")
    assert numbers_of(scheduler) == [0, 4, 3, 5] and read == [0, 1, 2]
    end(scheduler, 0, 3, 4, 5)
    scheduler.settle(lambda row: "keys")
    end(scheduler, 6, 7, 8, 9)
    told.clear()
    assert scheduler.settle(ready, leave) == [] and told == [(place, 6 + place) for place in range(4)]
    assert scheduler.live == [] and scheduler.next_row() is None


def test_a_request_ends_with_its_last_row():
    scheduler = Scheduler(iter(jobs_of(2, 1)), AtMost(2))
    scheduler.settle(lambda row: "keys")
    first, second = scheduler.live
    first.finish_reason = second.finish_reason = "eos"
    assert not scheduler.end(second) and scheduler.end(first)


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_tokens_are_those_of_one_batch_for_every_number_of_places(verifier):
    settings = {**SETTINGS, "seed": 6}  # rows end at different steps
    expected = engine_of(verifier).generate(PROMPTS, **settings)
    assert len(set(map(len, expected.token_ids))) > 2
    for max_rows in (1, 4, 9):
        output = engine_of(verifier).generate(PROMPTS, **settings, max_rows=max_rows)
        assert output.token_ids == expected.token_ids and output.finish_reasons == expected.finish_reasons
    found = tokens_of(engine_of(verifier).run(iter(PROMPTS), max_rows=2, **settings))
    assert [found[row] for row in range(9)] == expected.token_ids


def test_tokens_follow_a_rows_number_and_not_the_order_of_requests():
    expected = engine_of().generate(PROMPTS, **SETTINGS).token_ids
    requests = [stand.Request(PROMPTS[row // 3], rows=[row], id=f"row {row}") for row in (8, 1, 4, 0, 7)]
    requests.append(stand.Request(PROMPTS[1], rows=[5, 3]))
    found = list(engine_of().run(requests, max_rows=3, **SETTINGS))
    assert tokens_of(found) == {row: expected[row] for row in (8, 1, 4, 0, 7, 5, 3)}
    assert {trajectory.id for trajectory in found} == {"row 8", "row 1", "row 4", "row 0", "row 7", None}


def test_ratio_rules_repeat_and_all_rows_live_is_one_batch():
    runs = [engine_of("traversal").generate(PROMPTS, **SETTINGS, max_rows=rows).token_ids for rows in (2, 2, 9, None)]
    assert runs[0] == runs[1] and runs[2] == runs[3] != runs[0]


@pytest.mark.parametrize("pages", [None, pytest.param(20, marks=[pytest.mark.slow, needs_pages])])
def test_hundreds_of_mixed_requests_are_each_their_own_call(pages):
    """End tokens, stop strings, short and long limits, greedy: 12 kinds in random order."""
    generator = random.Random(3)
    engine = stand.wrap(tiny_model("qwen2"), letter_tokenizer(), drafter=stand.BlendedDrafter(budget=32))
    kinds, alone = [], []
    for kind in range(12):
        prompt, limit = [generator.randrange(3, 61) for _ in range((1, 2, 5, 17)[kind % 4])], (1, 3, 9, 20)[kind // 3]
        settings = {"max_new_tokens": limit, "do_sample": False, "draft": False}
        if kind % 3:
            plain = engine.generate(input_ids=prompt, **settings).token_ids[0]
            token = plain[generator.randrange(len(plain))]
            settings |= {"stop": LETTERS[token]} if kind % 3 == 1 else {"stop_token_ids": [token, 60]}
        output = engine.generate(input_ids=prompt, **settings)
        kinds.append({"prompt": prompt, **{name: settings[name] for name in settings if name[:4] in ("max_", "stop")}})
        alone.append((output.token_ids[0], output.texts[0], output.finish_reasons[0]))
    assert set(Counter(reason for *_, reason in alone).values()) == {4}
    order = [generator.randrange(12) for _ in range(250)]
    settings = {"max_rows": 32, "max_cache_bytes": pages and cap_of(pages, engine), "do_sample": False}
    run = engine.run((stand.Request(**kinds[kind], id=kind) for kind in order), **settings)
    found = list(run)
    assert not run.num_slots and run.num_cached == 0
    assert [kind for _, kind in sorted((one.row, one.id) for one in found)] == order
    for one in found:
        assert (one.token_ids, one.text, one.finish_reason) == alone[one.id]
    assert [one.row for one in found] != sorted(one.row for one in found)  # they come as they end


SIZE, COUNT = 7, 2400


def small_model():
    torch.manual_seed(2)
    config = {**SHAPE, "vocab_size": SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_config(Qwen2Config(**config)).eval()


@torch.inference_mode()
def exact_law(model, prompt: list[int]) -> np.ndarray:
    """[SIZE * SIZE] float64: of the first two tokens after the prompt."""
    firsts = torch.tensor([[*prompt, token] for token in range(SIZE)])
    logits = model(input_ids=firsts, use_cache=False).logits.double()
    first, second = torch.softmax(logits[0, -2], dim=-1), torch.softmax(logits[:, -1], dim=-1)
    return (first[:, None] * second).flatten().numpy()


def p_of_run(model, prompts) -> float:
    """The least of the prompts' p-values; 24 places for all rows, drafts that learn."""
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=36), verifier="traversal")
    requests = [stand.Request(prompt, id=place) for place, prompt in enumerate(prompts)]
    counts = np.zeros((len(prompts), SIZE * SIZE))
    settings = {"num_return_sequences": COUNT // 2, "max_new_tokens": 3, "temperature": 1.0, "top_k": 0, "seed": 1}
    run = engine.run(requests, max_rows=24, stop_token_ids=[], **settings)
    for one in run:
        counts[one.id, one.token_ids[0] * SIZE + one.token_ids[1]] += 1
    assert counts.sum(axis=1).tolist() == [COUNT // 2] * 2 and run.stats.mean_acceptance_length > 1.2
    return min(p_value(own, own.sum() * exact_law(model, prompt)) for own, prompt in zip(counts, prompts, strict=True))


@needs_pages
def test_rows_that_take_others_places_follow_the_exact_law(monkeypatch):
    model, prompts = small_model(), [[3, 5, 1, 3], [6, 2, 2, 4, 0, 6]]
    assert p_of_run(model, prompts) > 1e-3
    entered = PagedCache.enter

    def enter(cache, row, prefilled, length):
        """The negative control: a row that enters late finds the keys of the one before."""
        if not cache.keys or not cache.keys[0][row].any():
            entered(cache, row, prefilled, length)

    monkeypatch.setattr(PagedCache, "enter", enter)
    monkeypatch.setattr(PagedCache, "leave", lambda cache, row: None)
    assert p_of_run(model, prompts) < 1e-6


class Stop(Exception):
    """An error of the caller's."""


def interrupt(engine: stand.Engine, generator: random.Random, patch: pytest.MonkeyPatch) -> None:
    """A run that ends at a random moment."""
    settings = {"num_return_sequences": 2, "max_new_tokens": 4, "temperature": 0.9, "seed": generator.randrange(99)}
    where, error = generator.choice(WHERE), generator.choice([Stop(), KeyboardInterrupt()])
    on_step = failing_after(generator.randrange(5), lambda *told: None, error) if where == "on_step" else None
    if where == "forward":
        patch.setattr(engine.model, "forward", failing_after(generator.randrange(6), engine.model.forward, error))
    elif where in ("draft", "learn", "learn_prompt"):
        work = getattr(stand.BlendedDrafter, where)
        patch.setattr(stand.BlendedDrafter, where, failing_after(generator.randrange(3), work, error))
    requests = [*PROMPTS, "no request"] if where == "request" else PROMPTS
    cap = generator.choice([None, cap_of(6, engine)])
    run = engine.run(requests, max_rows=2, max_cache_bytes=cap, on_step=on_step, **settings)
    if where == "close":
        next(run)
        run.close()
        assert list(run) == []
        return
    with pytest.raises((Stop, KeyboardInterrupt, ValueError)):
        for _ in run:
            if where == "consumer":
                raise Stop
    del run


WHERE = ("on_step", "forward", "draft", "learn", "learn_prompt", "request", "close", "consumer")


@needs_pages
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_interruptions_leave_nothing_behind(count):
    engine, generator = engine_of(), random.Random(1)
    settings = {"num_return_sequences": 2, "max_new_tokens": 5, "temperature": 0.9, "seed": 5, "max_rows": 3}
    expected = engine_of().generate(PROMPTS[:2], **settings).token_ids
    attention = engine.model.config._attn_implementation
    for attempt in range(count):
        with pytest.MonkeyPatch.context() as patch:
            interrupt(engine, generator, patch)
        assert engine.model.config._attn_implementation == attention
        if attempt % 10 == 0:
            assert engine.generate(PROMPTS[:2], **settings).token_ids == expected
    gc.collect()
    kinds = (TreeCache, PagedCache, PromptRoom, PageAllocator, Call, Row)
    assert not [kept for kept in gc.get_objects() if type(kept) in kinds]
    assert mapped_memory.FILE_NAME not in Path("/proc/self/maps").read_text(encoding="utf-8")


def after_failing(
    requests, error, *, max_rows: int, match: str | None = None
) -> tuple[list[stand.Trajectory], list[str]]:
    """What a run gives before it ends in an error, and the error's notes."""
    engine = engine_of()
    run, found = engine.run(requests, max_rows=max_rows, max_new_tokens=9, stop_token_ids=[], seed=0), []
    with pytest.raises(error, match=match) as raised:
        for one in run:
            found.append(one)
    assert list(run) == [] and engine.generate(PROMPTS[0], max_new_tokens=2, seed=0).token_ids
    return found, getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("max_rows", [1, 2, 9])
def test_a_bad_request_ends_no_row_of_those_before(max_rows):
    requests = [*PROMPTS, stand.Request([61], id="seventh"), PROMPTS[0]]
    found, notes = after_failing(requests, ValueError, max_rows=max_rows, match=r"must be in \[0, 61\)")
    wanted = engine_of().run(PROMPTS, max_rows=max_rows, max_new_tokens=9, stop_token_ids=[], seed=0)
    assert [(one.row, one.token_ids) for one in found] == [(one.row, one.token_ids) for one in wanted]
    assert notes == [f"request {len(PROMPTS)} of the run, counted from 0, with the id 'seventh'"]


def test_a_request_that_can_never_fit_is_named_too():
    long = stand.Request(PROMPTS[0], max_new_tokens=10**6)
    found, notes = after_failing([PROMPTS[0], long], ValueError, max_rows=2)
    assert len(found) == 1 and notes == ["request 1 of the run, counted from 0"]


def test_what_makes_requests_may_fail():
    def requests():
        yield PROMPTS[0]
        yield PROMPTS[1]
        raise OSError("the file of prompts is gone")

    found, notes = after_failing(requests(), OSError, max_rows=3, match="is gone")
    assert len(found) == 2 and notes == []


def test_a_request_that_a_template_refuses_is_named():
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    engine = stand.wrap(tiny_model("qwen2"), tokenizer)
    chat = [{"role": "system", "content": "a"}]
    with pytest.raises(ValueError, match="got TemplateError: no system role; change the chat") as raised:
        list(engine.run([stand.Request(chat, id="mine")], max_rows=1, max_new_tokens=2))
    assert raised.value.__notes__ == ["request 0 of the run, counted from 0, with the id 'mine'"]


def test_a_bad_first_request_is_raised_at_once():
    assert after_failing([[61], *PROMPTS], ValueError, max_rows=2) == ([], ["request 0 of the run, counted from 0"])


def test_prompts_run_once_and_in_single_chunks_beside_running_rows(monkeypatch):
    monkeypatch.setattr("stand.forward.model.PROMPT_CHUNK", 4)
    monkeypatch.setattr(prompt_keys, "PROMPT_CHUNK", 4)
    engine, events = engine_of(), []
    prompts = [list(range(first, first + length)) for first, length in ((3, 6), (4, 19), (5, 13))]
    run_chunk, forward = prompt_keys.prefill_chunk, stand.step.EagerStep.forward
    monkeypatch.setattr(
        prompt_keys, "prefill_chunk", lambda *given, **named: events.append(len(given[2])) or run_chunk(*given, **named)
    )
    monkeypatch.setattr(
        stand.step.EagerStep, "forward", lambda step, batch, *rest: events.append("step") or forward(step, batch, *rest)
    )
    settings = {"num_return_sequences": 3, "max_new_tokens": 12, "temperature": 0.9, "seed": 2}
    found = tokens_of(engine.run(prompts, max_rows=2, **settings))
    chunks = [event for event in events if event != "step"]
    assert Counter(chunks) == {5: 2, 18: 5, 12: 3}  # every chunk once
    begun = events[events.index("step") :]
    assert all("step" in pair for pair in zip(begun, begun[1:], strict=False))  # never two chunks in a row
    monkeypatch.undo()
    assert [found[row] for row in range(9)] == engine_of().generate(prompts, **settings).token_ids


def test_keys_of_a_prompt_stay_until_its_last_row_has_started(monkeypatch):
    kept, keep_only = [], prompt_keys.PromptKeys.keep_only

    def watched(keys, row, problems=()):
        keep_only(keys, row, problems)
        kept.append(len(keys._prompts))

    monkeypatch.setattr(prompt_keys.PromptKeys, "keep_only", watched)
    run = engine_of().run(PROMPTS, max_rows=2, **SETTINGS)
    list(run)
    assert max(kept) == 1 and kept[-1] == 0
    assert run.stats.num_prompt_tokens == sum(map(len, PROMPTS))


def test_requests_are_read_one_ahead():
    read = []

    def requests():
        for place, prompt in enumerate(PROMPTS * 3):
            read.append(place)
            yield prompt

    run = engine_of().run(requests(), max_rows=2, max_new_tokens=5, seed=0)
    assert read == []
    started = []
    for _ in run:
        started.append(len(read))
    assert started[0] <= 4 and len(read) == 9 and started == sorted(started)


def engine_with_rooms() -> stand.Engine:
    """As where the cache has no pages."""
    engine = engine_of()
    engine.backend.page_size = None
    return engine


def test_rooms_are_as_many_as_memory_holds(monkeypatch):
    model = tiny_model("qwen2")
    room = 5 + 24 + tree_cache.DRAFT_ROOM
    free = 3.5 * room * free_memory.bytes_per_token(model) / free_memory.SHARE
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: free)
    settings = {**SETTINGS, "num_return_sequences": 8}
    live, expected = [], engine_of().generate(PROMPTS[:1], **settings, max_rows=8)
    run = engine_with_rooms().run(PROMPTS[:1], **settings, on_step=lambda run: live.append(run.num_live))
    found = tokens_of(run)
    assert max(live) == 3 and [found[row] for row in range(8)] == expected.token_ids
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: 1.0)
    assert engine_with_rooms().generate(PROMPTS, **SETTINGS).stats.num_forwards > 3 * expected.stats.num_forwards
    capped = engine_with_rooms().generate(
        PROMPTS[:1], **settings, max_rows=8, max_cache_bytes=free_memory.SHARE * free * 2.5 / 3.5
    )
    assert capped.token_ids == expected.token_ids and capped.stats.num_forwards > 2 * expected.stats.num_forwards


@pytest.mark.parametrize("new_engine", [engine_of, engine_with_rooms])
def test_where_no_memory_is_free_a_row_or_two_run_at_a_time(new_engine, monkeypatch):
    expected, live = engine_of().generate(PROMPTS, **SETTINGS).token_ids, []
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: 1.0)
    found = tokens_of(new_engine().run(PROMPTS, **SETTINGS, on_step=lambda run: live.append(run.num_decoded)))
    assert max(live) <= 2 and [found[row] for row in range(9)] == expected


def test_a_cap_below_one_token_is_refused():
    engine = engine_with_rooms()
    least = free_memory.bytes_per_token(engine.model)
    with pytest.raises(ValueError, match=f"holds a page of 1 tokens, {least} bytes each, got {least - 1}"):
        engine.generate(PROMPTS, **SETTINGS, max_cache_bytes=least - 1)
    assert engine.generate([[7]], max_new_tokens=2, max_cache_bytes=least).token_ids


def test_a_run_counts_the_keys_that_it_holds():
    """Those of a prompt once, and what each row that goes on has beside them."""
    told = []

    def on_step(run):
        rows = [row for row in run._call.scheduler.live if row.finish_reason is None]
        shared = {tuple(row.prompt): len(row.prompt) - 1 for row in rows}
        told.append((run.num_live, run.num_cached))
        assert run.num_cached == sum(shared.values()) + sum(len(row.history) - len(row.prompt) for row in rows)

    requests = [stand.Request(PROMPTS[0], num_return_sequences=2, max_new_tokens=3), PROMPTS[1]]
    settings = {"max_new_tokens": 5, "temperature": 0.9, "stop_token_ids": [], "seed": 0, "draft": False}
    assert len(list(engine_of().run(requests, max_rows=3, on_step=on_step, **settings))) == 3
    assert told[0] == (3, 5 + 2 * 1 + 0 + 1) and told[-1] == (0, 0)


@needs_pages
def test_a_long_first_prompt_does_not_limit_the_rows_behind_it():
    """Under a cap that holds it alone, or several short rows."""
    engine, live = engine_of(), []
    requests = [[3] * 300, *([4, 5, number] for number in range(6, 8))]
    settings = {"max_rows": 4, "max_new_tokens": 200, "temperature": 0.9, "stop_token_ids": [], "seed": 1}
    cap = cap_of(-(-(300 + 200 + tree_cache.DRAFT_ROOM) // engine.backend.page_size) + 1, engine)
    run = engine.run(requests, **settings, max_cache_bytes=cap, on_step=lambda run: live.append(run.num_decoded))
    found = tokens_of(run)
    assert live[0] == 1 and max(live) > 1
    assert found == tokens_of(engine_of().run(requests, **settings))


def test_places_that_take_memory_are_those_of_the_rows_that_enter_first():
    """As in a captured step, whose buffers and split keys follow from the number of places."""
    for most_places, num_places in ((None, 2), (8, 8)):
        admission = WithinPages(PageAllocator(4, 2), most_rows=8, most_places=most_places, growth=0)
        scheduler = Scheduler(iter(jobs_of(1, 1, 1)), admission)
        scheduler.settle(admission.open)
        assert (len(scheduler.live), scheduler.num_places) == (2, num_places)
    backend = engine_of().backend
    assert not backend.has_pool and CapturedBackend(tiny_model("qwen2"), "asked for").has_pool


@needs_pages
@pytest.mark.parametrize("is_read_to_its_end", [False, True])
def test_a_run_that_has_ended_keeps_no_keys(is_read_to_its_end):
    gc.collect()  # what other tests have left
    run = engine_of().run([[3] * 40, [4] * 40, [5] * 40], max_rows=1, max_new_tokens=5, temperature=0.9)
    next(run)
    assert run.num_slots > 0
    if is_read_to_its_end:
        assert len(list(run)) == 2
    run.close()
    gc.disable()
    try:
        assert run._call._prompts._prompts == {} and run.stats.num_tokens > 0
        assert not [kept for kept in gc.get_objects() if type(kept) in (PagedCache, PromptRoom)]
    finally:
        gc.enable()


def test_prompts_are_numbered_and_the_latest_are_remembered():
    numbers = NumberedKeys(3)
    prompts = [problem_key([number]) for number in range(5)]
    assert [numbers.of(prompts[place]) for place in (0, 1, 0, 2, 0, 3)] == [0, 1, 0, 2, 0, 3]
    assert [numbers.of(prompts[place]) for place in (0, 2, 1)] == [0, 2, 4]  # the second one was forgotten


def test_a_step_may_hold_fewer_rows_than_memory():
    rows = [Row(index, np.zeros(3, dtype=np.int32), 5) for index in range(3)]
    assert WithinMemory(float("inf"), 1, most_rows=3).allows(rows[:2], rows[2])
    assert not WithinMemory(float("inf"), 1, most_rows=2).allows(rows[:2], rows[2])


def test_the_memory_of_a_token_is_what_the_cache_takes():
    model = tiny_model("qwen2")
    cache = TreeCache(num_rows=1, room=256)
    with torch.inference_mode(), stand.forward.tree_attention.tree_attention(model):
        stand.forward.model.prefill(model, cache, np.arange(3, 9, dtype=np.int32), row=0)
    assert free_memory.bytes_per_token(model) * 256 == cache.nbytes
    assert 0 < tree_cache.available_bytes(torch.device("cpu")) < 2**50


class Remembering(LogitsProcessor):
    """Forbids the token that was best when it was last asked."""

    def __init__(self):
        self.last = None

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        if self.last is not None:
            scores[0, self.last] = -float("inf")
        self.last = int(scores[0].argmax())
        return scores


@pytest.mark.parametrize("own", [[], [Remembering()]], ids=["penalty", "state"])
def test_processors_know_rows_of_later_requests(own):
    settings = {**SETTINGS, "repetition_penalty": 1.3, "min_new_tokens": 3, "no_repeat_ngram_size": 3}
    expected = engine_of().generate(PROMPTS, **settings, logits_processors=own)
    found = tokens_of(engine_of().run(PROMPTS, **settings, logits_processors=own, max_rows=2))
    assert [found[row] for row in range(9)] == expected.token_ids


def test_requests_with_other_processors_are_refused():
    requests = [PROMPTS[0], stand.Request(PROMPTS[1], stop_token_ids=[])]
    run = engine_of().run(requests, max_rows=1, max_new_tokens=4, min_new_tokens=2, seed=0)
    with pytest.raises(ValueError, match="must need the same processors, got none beside MinLength"):
        list(run)


def test_settings_are_those_of_the_moment_when_a_run_was_made():
    """Whatever a config is changed to before the requests are read, those with settings of their own among them."""
    requests = [stand.Request([5, 9, 11], max_new_tokens=8), stand.Request([3, 4], stop_token_ids=[7]), [3, 4]]

    def tokens(change) -> dict:
        config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=0.2, top_k=0, eos_token_id=2)
        run = engine_of().run(requests, generation_config=config, seed=3)
        change(config)
        return tokens_of(run)

    def to_others(config):
        config.temperature, config.max_new_tokens, config.eos_token_id = 5.0, 3, [*range(60)]

    assert tokens(to_others) == tokens(lambda config: None)


@pytest.mark.parametrize(
    "requests", ["text", {"input_ids": [[3], [4]]}, [{"role": "user", "content": "text"}], stand.Request([3])]
)
def test_one_prompt_is_no_list_of_requests(requests):
    with pytest.raises(ValueError, match=f"got one {type(requests).__name__} itself; put it into a list"):
        engine_of().run(requests)


@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        (stand.Request([3, 4], rows=[0]), "no other row of the run has"),
        (stand.Request([3, 4], rows=[5, 5]), "no other row of the run has"),
        (stand.Request([3, 4], rows=[-1]), r"numbers in \[0, 2\*\*32\)"),
        (stand.Request([3, 4], rows=[]), "numbers in"),
        (stand.Request([3, 4], rows=[1, 2], num_return_sequences=3), "rows must name 3 rows, got 2"),
        (stand.Request([3, 4], rows=3), "rows must be a list of integers, got 3; write rows="),
        (stand.Request([3, 4], rows="12"), "rows must be a list of integers, got '12'"),
        (stand.Request([3, 4], rows=[1.5]), "rows must be a list of integers, got .1.5."),
        (stand.Request([3, 4], num_return_sequences=0), "num_return_sequences must be an integer >= 1"),
        (stand.Request([3, 4], num_return_sequences=torch.tensor(2.5)), "must be an integer >= 1, got tensor.2.5"),
        (stand.Request([3, 4], num_return_sequences=np.array([1, 2])), "must be an integer >= 1, got array"),
        (stand.Request([3, 4], rows=[True]), "rows must be a list of integers, got .True."),
        (stand.Request([3, 4], rows=range(2**40)), "must name at most 1048576 rows, got range.*; leave rows out"),
        (stand.Request([[3, 4], [5]]), "one prompt, got 2"),
        (stand.Request([3, 4], max_new_tokens=1000), "fit into the model's context"),
    ],
)
def test_requests_that_mean_nothing_are_refused(request_, rule):
    with pytest.raises(ValueError, match=rule):
        list(engine_of().run([[3, 4], request_], max_new_tokens=2, seed=0))


def test_more_rows_than_steps_hold_are_told(monkeypatch):
    engine = engine_of()
    monkeypatch.setattr(type(engine.backend), "most_rows", 3)
    with pytest.warns(UserWarning, match="max_rows must be at most 3 for sdpa steps here, got 4; the others wait"):
        output = engine.generate(PROMPTS, **SETTINGS, max_rows=4)
    assert len(output.token_ids) == 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(PROMPTS, **SETTINGS, max_rows=3)


def test_a_run_has_one_caller_at_a_time():
    run = engine_of().run([[3, 4]], max_new_tokens=8, seed=0, on_step=next)
    with pytest.raises(ValueError, match="must be asked by one caller at a time"):
        next(run)


def test_rows_are_counted_up_to_the_last_number():
    """After row 2**32 - 2 there is one more."""
    named = stand.Request([3, 4], rows=[2**32 - 2])
    run = engine_of().run([named, [5, 6]], max_new_tokens=2, seed=0)
    assert sorted(one.row for one in run) == [2**32 - 2, 2**32 - 1]
    with pytest.raises(ValueError, match="got 4294967296 after the run's largest"):
        list(engine_of().run([named, [5, 6], [5, 6]], max_new_tokens=2, seed=0))


@pytest.mark.parametrize("row", [0, 3, 4, 6, 7, 9, 20])
def test_numbers_of_rows_that_were_counted_between_named_ones_are_taken(row):
    named = [[3, 4], stand.Request([3, 4], rows=[2]), [5, 6], stand.Request([3, 4], rows=[5]), [5, 6], [5, 6]]
    requests = [*named, stand.Request([3, 4], rows=[20]), stand.Request([3, 4], rows=[row])]  # counted: 0, 3, 6, 7
    run = engine_of().run(requests, max_new_tokens=2, seed=0)
    if row in (4, 9):
        assert sorted(one.row for one in run) == sorted([0, 2, 3, 5, 6, 7, 20, row])
    else:
        with pytest.raises(ValueError, match="no other row of the run has"):
            list(run)


@pytest.mark.parametrize("max_rows", [0, -1, 1.5, "8", True, torch.tensor(2.5), np.array(2.5), np.array([1, 2])])
def test_bad_numbers_of_rows_are_refused(max_rows):
    with pytest.raises(ValueError, match="max_rows must be an integer >= 1"):
        engine_of().run(PROMPTS, max_rows=max_rows)


def test_what_a_trajectory_says():
    engine = stand.wrap(tiny_model("qwen2"), letter_tokenizer(), verifier="match")
    run = engine.run(["abc", "fghijk"], num_return_sequences=3, max_new_tokens=20, temperature=0.9, max_rows=2, seed=7)
    found = list(run)
    assert run.seed == 7 and all(one.seed == 7 for one in found) and run.num_live == 0
    assert sum(len(one.token_ids) for one in found) == run.stats.num_tokens
    assert sum(one.num_steps for one in found) == run.stats.num_steps
    assert sum(one.num_draft_tokens for one in found) == run.stats.num_draft_tokens > 0
    assert {one.num_prompt_tokens for one in found} == {3, 6}
    ends = [one.ended for one in found]
    assert ends == sorted(ends) and all(0 <= one.started < one.ended <= run.stats.wall_seconds for one in found)
    assert max(one.started for one in found) > min(ends)  # a place was handed on


def test_a_cap_without_end_is_none():
    model = tiny_model("qwen2")
    asked = {"input_ids": [[5, 6, 7]], "max_new_tokens": 6, "num_return_sequences": 3, "seed": 1}
    engines = [stand.wrap(model, verifier="match") for _ in range(2)]
    assert (
        engines[0].generate(**asked, max_cache_bytes=float("inf")).token_ids == engines[1].generate(**asked).token_ids
    )


def test_a_run_can_be_closed_after_a_step():
    settings = {"max_rows": 2, "max_new_tokens": 9, "temperature": 0.9, "seed": 3}
    expected, engine = tokens_of(engine_of().run(PROMPTS * 3, **settings)), engine_of()
    found = []

    def close_after_the_first(run: stand.Run) -> None:
        if any(row.finish_reason for row in run._call.scheduler.live):
            run.close()

    run = engine.run(PROMPTS * 3, on_step=close_after_the_first, **settings)
    for one in run:
        found.append((one.row, one.token_ids))
    assert found and dict(found).items() <= expected.items() and len(found) < len(expected)
    assert list(run) == [] and tokens_of(engine.run(PROMPTS * 3, **settings)) == expected


def test_what_is_called_after_a_step_must_be_callable():
    with pytest.raises(ValueError, match="on_step must be callable with the run, got 5; leave it out"):
        stand.wrap(tiny_model("qwen2")).run([[5, 6]], max_new_tokens=2, on_step=5)
    with pytest.raises(ValueError, match="requests must be prompts or Requests, got one NoneType itself"):
        stand.wrap(tiny_model("qwen2")).run(None, max_new_tokens=2)


def test_a_tokenizers_padding_is_told_from_text_where_the_model_names_none():
    model, tokenizer = copy.deepcopy(tiny_model("qwen2")), letter_tokenizer()
    tokenizer.pad_token = LETTERS[7]
    padded = torch.tensor([[tokenizer.pad_token_id, 9, 11], [5, 9, 11]])
    settings = {"max_new_tokens": 3, "temperature": 0.0, "stop_token_ids": []}
    model.generation_config.pad_token_id = None
    without = stand.wrap(model, tokenizer).generate(input_ids=padded, **settings)
    assert without.token_ids[0] == stand.wrap(model).generate(input_ids=[[9, 11]], **settings).token_ids[0]
    model.generation_config.pad_token_id = 0  # the model's own comes first
    own = stand.wrap(model, tokenizer).generate(input_ids=padded, **settings)
    assert own.token_ids[0] == stand.wrap(model).generate(input_ids=padded[:1].tolist(), **settings).token_ids[0]
