"""Requests that come while others are decoded: the same tokens, the same law, and each one's error its own."""

import asyncio
import copy
import gc
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from failures import failing_after
from small_law import continuation_law, p_of_continuations, small_model
from tiny_models import tiny_model
from transformers import LogitsProcessor, LogitsProcessorList
from waiting_prompt import PATIENCE, WaitingPrompt
from with_pages import needs_pages

import stand
from stand.call import Call
from stand.row import Row
from stand.scheduling import free_memory
from stand.scheduling.admission import AtMost
from stand.scheduling.arrivals import Arrivals, Ticket
from stand.scheduling.kept_prompts import KeptPrompts
from stand.scheduling.request import Job
from stand.scheduling.scheduler import Scheduler

PROMPTS = [[5, 9, 11, 4, 5, 9], [7], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32]]
SETTINGS = {"max_new_tokens": 24, "temperature": 0.9, "seed": 3}
ORACLES = Path(__file__).resolve().parents[1] / "oracles"


def engine_of(verifier: str = "match", **settings) -> stand.Engine:
    return stand.wrap(tiny_model("qwen2"), verifier=verifier, drafter=stand.BlendedDrafter(budget=12), **settings)


def tokens_of(futures) -> dict[int, list[int]]:
    return {one.row: one.token_ids for future in futures for one in future.result(PATIENCE)}


@pytest.mark.parametrize("verifier", ["match", "coupled"])
@pytest.mark.parametrize("max_rows", [1, 2, 16])
def test_tokens_are_those_of_a_run_whenever_requests_come(verifier, max_rows):
    """Rows are numbered in the order in which requests come; the later ones come while the first is decoded."""
    requests = [stand.Request(prompt, num_return_sequences=2, id=place) for place, prompt in enumerate(PROMPTS)]
    wanted = {one.row: (one.id, one.token_ids) for one in engine_of(verifier).run(requests, **SETTINGS)}
    coming, futures = iter(requests[1:]), []
    with engine_of(verifier).open_run(max_rows=max_rows, **SETTINGS) as run:

        def next_comes(row: int, token_ids: list[int]) -> None:
            futures.extend(run.submit(request) for request in [next(coming, None)] if request is not None)

        futures.append(run.submit(requests[0], on_tokens=next_comes))
        futures[0].result(PATIENCE)
    found = {one.row: (one.id, one.token_ids) for future in futures for one in future.result(PATIENCE)}
    assert found == wanted and run.seed == 3 and run.stats.num_tokens == sum(len(own) for _, own in found.values())


def test_prompts_of_live_rows_are_computed_once():
    """Requests for one prompt come one by one; of other prompts' keys those of the latest rows stay."""
    prompts = [[5, 9, 11, 4, 5, 9], [7, 8, 9], [8, 30, 31, 32]]
    wanted = {one.row: one.token_ids for one in engine_of().run(prompts * 3, **SETTINGS)}
    for order, num_computed in ((prompts[:1] * 9, 6), ((prompts[:2] * 5)[:9], 9), (prompts * 3, 3 * 13)):
        with engine_of().open_run(max_rows=16, stop_token_ids=[], **SETTINGS) as run:
            coming, futures = iter(order[1:]), []

            def next_comes(row: int, token_ids: list[int], *, coming=coming, futures=futures, run=run) -> None:
                futures.extend(run.submit(prompt) for prompt in [next(coming, None)] if prompt is not None)

            futures.append(run.submit(order[0], on_tokens=next_comes))
            found = tokens_of(futures)  # they become more meanwhile
            assert run.stats.num_prompt_tokens == num_computed
        if order == prompts * 3:
            assert {row: tokens[: len(wanted[row])] for row, tokens in found.items()} == wanted


def test_a_run_goes_on_after_nobody_was_live():
    with engine_of().open_run(**SETTINGS) as run:
        first = run.submit(PROMPTS[0]).result(PATIENCE)
        assert run.is_open
        before = run.stats.wall_seconds
        second = run.submit(stand.Request(PROMPTS[0], max_new_tokens=60)).result(PATIENCE)
        assert run.stats.wall_seconds > before
    assert (first[0].row, second[0].row) == (0, 1) and first[0].token_ids != second[0].token_ids
    assert not run.is_open


class Counted:
    """Continuations of an open run in which every row that ends calls for another one."""

    def __init__(self, engine: stand.Engine, count: int):
        settings = {"max_new_tokens": TOKENS, "temperature": 1.0, "top_k": 0, "seed": 5, "stop_token_ids": []}
        self.futures = []
        self._count, self._lock = count, threading.Lock()
        with engine.open_run(max_rows=24, **settings) as self._run:
            for _ in range(20):
                self._submit()
            for future in self.futures:  # they become more meanwhile
                future.result(PATIENCE)
        self.stats = self._run.stats

    def _submit(self) -> None:
        with self._lock:
            if self._count:
                self._count -= 1
                self.futures.append(self._run.submit(START, on_tokens=self._told))

    def _told(self, row: int, token_ids: list[int]) -> None:
        self._submit()

    def continuations(self) -> Counter:
        return Counter(tuple(one.token_ids) for future in self.futures for one in future.result(PATIENCE))


START, TOKENS, SIZE, COUNT = [3, 1, 2], 3, 5, 3000


@pytest.mark.long
def test_rows_that_come_meanwhile_follow_the_exact_law(monkeypatch):
    """Drafts learn from all of them. Control: rows share the numbers of their tests, and the lookup learns from them
    meanwhile."""
    model = small_model(SIZE)
    law = continuation_law(model, START, LogitsProcessorList(), end=-1, tokens=TOKENS)

    def counted() -> Counted:
        drafter = stand.BlendedDrafter(budget=96)
        return Counted(stand.wrap(model, drafter=drafter, verifier="traversal"), COUNT)

    found = counted()
    assert sum(found.continuations().values()) == COUNT and found.stats.mean_acceptance_length > 1.2
    assert p_of_continuations(found.continuations(), law) > 1e-3
    noise = Call._noise
    monkeypatch.setattr(Call, "_noise", lambda call, live: replace(noise(call, live), rows=live.indices % 2))
    assert p_of_continuations(counted().continuations(), law) < 1e-6


def test_a_request_that_cannot_be_read_fails_alone():
    with engine_of().open_run(max_rows=2, **SETTINGS) as run:
        futures = [run.submit(PROMPTS[0]), run.submit([61]), run.submit(stand.Request([5], rows=[0])), run.submit([7])]
    assert len(tokens_of([futures[0], futures[3]])) == 2
    with pytest.raises(ValueError, match=r"must be in \[0, 61\)"):
        futures[1].result()
    with pytest.raises(ValueError, match="of which \\[0\\] are taken"):
        futures[2].result()


@needs_pages
@pytest.mark.parametrize("bad", [[61], stand.Request([7], max_new_tokens=400)], ids=["not read", "too large"])
def test_requests_that_fail_hold_nothing(bad, monkeypatch):
    """Their errors are kept. With the frames of the run in them, they would hold prompts' keys, and its pages would
    soon be gone. The processors of their requests go, too."""
    engine, errors = engine_of(), []
    cap = 600 * free_memory.bytes_per_token(engine.model)
    with engine.open_run(max_rows=2, max_cache_bytes=cap, repetition_penalty=1.1, **SETTINGS) as run:
        for number in range(30):
            futures = [run.submit(PROMPTS[number % 3]), run.submit(bad), run.submit(PROMPTS[0])]
            errors.append(futures[1].exception(PATIENCE))
            tokens_of([futures[0], futures[2]])
        assert run.submit([7]).result(PATIENCE)
        scheduler, law = run._call.scheduler, run._call._law
    assert all(isinstance(error, ValueError) and error.__traceback__ is None for error in errors)
    assert scheduler.admission.pages.num_used == 0
    assert not (scheduler._open or scheduler._num_left or scheduler._turns or law._processors.by_request)


def test_a_request_that_memory_does_not_hold_fails_alone():
    engine = engine_of()
    with engine.open_run(max_cache_bytes=600 * free_memory.bytes_per_token(engine.model), **SETTINGS) as run:
        small, large = run.submit(PROMPTS[0]), run.submit(stand.Request([7], max_new_tokens=400))
        later = run.submit(PROMPTS[1])
    assert len(tokens_of([small, later])) == 2
    if engine.backend.page_size is not None:
        with pytest.raises(ValueError, match="max_cache_bytes must hold one row with its 400 new tokens"):
            large.result()


@pytest.mark.parametrize("max_rows", [1, 2])
def test_whoever_ceases_to_wait_ends_his_rows_and_nobody_elses(max_rows):
    """Rows that are live, rows that wait for a place, and a request that was never read."""
    settings = {**SETTINGS, "max_new_tokens": 200, "stop_token_ids": []}
    wanted = engine_of().generate(PROMPTS[0], **settings).token_ids[0]
    told: dict[str, int] = {"long": 0, "other": 0}
    futures = {}
    with engine_of().open_run(max_rows=max_rows, **settings) as run:

        def cancel_others(row: int, token_ids: list[int]) -> None:
            told["long"] += len(token_ids)
            if told["long"] > 40 and "later" not in futures:
                assert futures["many"].cancel() and futures["unread"].cancel()
                futures["later"] = run.submit(stand.Request([8], max_new_tokens=2))

        def count(row: int, token_ids: list[int]) -> None:
            told["other"] += len(token_ids)

        begins = threading.Event()
        futures["long"] = run.submit(stand.Request(WaitingPrompt(begins, PROMPTS[0])), on_tokens=cancel_others)
        futures["many"] = run.submit(stand.Request([7], num_return_sequences=5), on_tokens=count)
        futures["unread"] = run.submit(PROMPTS[1])
        begins.set()
        (long,) = futures["long"].result(PATIENCE)
        assert long.token_ids == wanted and len(wanted) == 200
        assert len(futures["later"].result(PATIENCE)[0].token_ids) == 2
    assert futures["many"].cancelled() and futures["unread"].cancelled()
    assert (told["other"] > 0) == (max_rows == 2) and told["other"] < 400


@pytest.mark.parametrize("error", [KeyError("mine"), asyncio.CancelledError("mine"), SystemExit("mine")])
def test_what_a_callback_raises_fails_its_request(error):
    with engine_of().open_run(**SETTINGS) as run:
        failed = run.submit(PROMPTS[0], on_tokens=failing_after(1, lambda row, token_ids: None, error))
        with pytest.raises(type(error), match="mine") as raised:
            failed.result(PATIENCE)
        assert "failures.py" in raised.value.__notes__[0]  # where it was raised
        assert len(tokens_of([run.submit(PROMPTS[1])])) == 1


def test_a_callback_that_is_none_is_refused_at_once():
    with (
        engine_of().open_run(**SETTINGS) as run,
        pytest.raises(ValueError, match="on_tokens must be callable, got 5"),
    ):
        run.submit(PROMPTS[0], on_tokens=5)


class Failing(LogitsProcessor):
    """Fails in the third place of a row that begins with 7."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids[0, 0] == 7 and input_ids.shape[1] == 4:
            raise ArithmeticError("no law")
        return scores


def test_an_error_of_a_step_ends_the_run():
    run = engine_of().open_run(logits_processors=[Failing()], stop_token_ids=[], **SETTINGS)
    assert len(tokens_of([run.submit(PROMPTS[0])])) == 1
    gate = threading.Event()
    futures = [run.submit(stand.Request(WaitingPrompt(gate, prompt))) for prompt in (PROMPTS[0], [7])]
    gate.set()
    for future in futures:
        with pytest.raises(ArithmeticError, match="no law"):
            future.result(PATIENCE)
    run._thread.join(PATIENCE)
    assert not run.is_open
    with pytest.raises(RuntimeError, match="must not have failed, got a request after a step's error") as raised:
        run.submit([7])
    assert isinstance(raised.value.__cause__, ArithmeticError)
    run.close()
    del raised, future, futures  # whose tracebacks hold this frame


class LeavesNone(LogitsProcessor):
    """Forbids all tokens in the `place`th place of a row that begins with 7."""

    def __init__(self, place: int):
        self.place = place

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - torch.inf if input_ids[0, 0] == 7 and input_ids.shape[1] == self.place else scores


def allows_none(place: int) -> dict:
    allowed = list(range(3, 40))
    return {
        "prefix_allowed_tokens_fn": lambda number, tokens: (
            [] if int(tokens[0]) == 7 and len(tokens) == place else allowed
        )
    }


@pytest.mark.parametrize("place", [1, 4, 5, 6, 7])
@pytest.mark.parametrize(
    ("settings_at", "rule"),
    [
        (lambda place: {"logits_processors": [LeavesNone(place)]}, "must leave a token of finite score"),
        (allows_none, "must allow a token behind every text"),
    ],
    ids=["a processor", "a function"],
)
def test_where_processors_leave_no_token_only_that_request_fails(settings_at, rule, place):
    """At the first place of the row, and at later ones: drafted or behind a draft."""
    asked = {**SETTINGS, **settings_at(place), "stop_token_ids": []}
    others = [stand.Request(PROMPTS[0], num_return_sequences=2, rows=[0, 1]), stand.Request(PROMPTS[2], rows=[2])]
    with engine_of().open_run(**asked) as run:
        wanted = tokens_of([run.submit(request) for request in others])
    told, gate = [], threading.Event()
    with engine_of().open_run(**asked) as run:
        failed = run.submit(
            stand.Request(WaitingPrompt(gate, [7]), rows=[3], id="seven"),
            on_tokens=lambda row, tokens: told.extend(tokens),
        )
        futures = [run.submit(request) for request in others]
        gate.set()
        assert tokens_of(futures) == wanted
        with pytest.raises(ValueError, match=rule) as raised:
            failed.result(PATIENCE)
        assert "request 0 of the run, counted from 0, with the id 'seven'" in raised.value.__notes__
        assert len(tokens_of([run.submit([9])])) == 1
    assert len(told) == place - 1  # what was drawn before
    del raised


def test_a_closed_run_takes_nothing_more():
    run = engine_of().open_run(**SETTINGS)
    future = run.submit(PROMPTS[0])
    run.close()
    run.close()
    assert future.done()
    with pytest.raises(RuntimeError, match="must not be closed, got a request after that; open another one"):
        run.submit(PROMPTS[0])


def test_an_error_in_the_block_cancels_what_was_submitted():
    gate = threading.Event()
    with pytest.raises(KeyError), engine_of().open_run(max_rows=1, **SETTINGS) as run:
        futures = [run.submit(stand.Request(WaitingPrompt(gate, [5]))), run.submit([7])]
        gate.set()
        raise KeyError
    assert all(future.cancelled() or future.result() for future in futures) and futures[1].cancelled()


def test_a_search_awaits_what_it_has_submitted():
    """Branches that go on with what others have drawn; one that is given up."""

    async def branch(run: stand.OpenRun, prompt: list[int], depth: int) -> int:
        if depth == 0:
            return 1
        request = stand.Request(prompt, num_return_sequences=2, max_new_tokens=4)
        found = await asyncio.wrap_future(run.submit(request))
        return sum(await asyncio.gather(*(branch(run, [*prompt, *one.token_ids], depth - 1) for one in found)))

    async def search() -> tuple[int, bool]:
        with engine_of().open_run(max_rows=4, **SETTINGS) as run:
            given_up = asyncio.wrap_future(run.submit(stand.Request([9], max_new_tokens=400, stop_token_ids=[])))
            count = await branch(run, [5, 9, 11], 3)
            given_up.cancel()
            return count, given_up.cancelled()

    assert asyncio.run(search()) == (8, True)


def test_runs_and_calls_of_one_model_take_turns():
    """A short one, with settings of its own, and a generate end long before a long one does."""
    engine = engine_of()
    seen: list[int] = []
    begun = threading.Event()

    def tell(row: int, token_ids: list[int]) -> None:
        seen.append(len(token_ids))
        begun.set()

    beside = {"stop_token_ids": [], "draft": False}
    with engine.open_run(max_new_tokens=500, **beside) as long, engine.open_run(max_new_tokens=3, **beside) as short:
        last = long.submit([7], on_tokens=tell)
        assert begun.wait(PATIENCE)
        assert len(short.submit([5]).result(PATIENCE)[0].token_ids) == 3
        between = sum(seen)
        assert len(engine.generate([5], max_new_tokens=3, **beside).token_ids[0]) == 3
        assert between < 400 and sum(seen) < 450 and not last.done()
        assert len(last.result(PATIENCE)[0].token_ids) == 500


def test_logprobs_come_with_trajectories_and_rows_that_were_cancelled_need_none():
    engine = engine_of()
    wanted = engine.generate(PROMPTS[0], logprobs=2, **SETTINGS).logprobs[0]
    told = []

    def tell(row: int, token_ids: list[int], logprobs: stand.TokenLogprobs) -> None:
        told.append((token_ids, logprobs))
        second.cancel()

    with engine_of().open_run(max_rows=1, logprobs=2, **SETTINGS) as run:
        gate = threading.Event()
        first = run.submit(stand.Request(WaitingPrompt(gate, PROMPTS[0])), on_tokens=tell)
        second = run.submit(stand.Request([7], num_return_sequences=3))
        gate.set()
        found = first.result(PATIENCE)[0].logprobs
    np.testing.assert_allclose(found.of_tokens, wanted.of_tokens, atol=1e-5)
    assert second.cancelled() and run._call.logprobs._noted == {} and len(told) > 1
    assert all(len(tokens) == len(own) for tokens, own in told)
    for name in ("of_tokens", "top_ids", "top"):
        assert (np.concatenate([getattr(own, name) for _, own in told]) == getattr(found, name)).all()


def test_whoever_waits_for_futures_is_told_of_those_that_were_cancelled():
    with engine_of().open_run(max_rows=1, **SETTINGS) as run:
        gate = threading.Event()
        futures = [run.submit(stand.Request(WaitingPrompt(gate, PROMPTS[0])))]
        futures += [run.submit(stand.Request([7], num_return_sequences=2)), run.submit([8])]
        for future in futures[1:]:
            future.cancel()
        gate.set()
        assert wait(futures, PATIENCE).not_done == set()


def test_a_run_that_is_closed_ends_the_request_that_is_being_read():
    gate = threading.Event()
    run = engine_of().open_run(max_rows=1, stop_token_ids=[], **{**SETTINGS, "max_new_tokens": 500})
    told: list[int] = []
    future = run.submit(
        stand.Request(WaitingPrompt(gate, [7])), on_tokens=lambda row, token_ids: told.extend(token_ids)
    )
    while run._arrivals.is_waiting:
        time.sleep(0.001)
    run.close(cancel=True, wait=False)
    gate.set()
    run.close()
    assert future.cancelled() and len(told) < 20


def test_a_run_that_nobody_has_any_more_ends():
    run = engine_of().open_run(**SETTINGS)
    future, thread = run.submit(PROMPTS[0]), run._thread
    del run
    gc.collect()
    assert len(tokens_of([future])) == 1
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.long
def test_an_interpreter_may_end_amid_a_run():
    """Without an end of the run its thread would abort the process."""
    program = (
        "from tiny_models import tiny_model\nimport stand, time\n"
        "run = stand.wrap(tiny_model('qwen2'), drafter=stand.BlendedDrafter(budget=12)).open_run(stop_token_ids=[])\n"
        "futures = [run.submit(stand.Request([5, n], max_new_tokens=500)) for n in range(40)]\n"
        "time.sleep(0.3)\nraise SystemExit(3)\n"
    )
    asked = [sys.executable, "-c", program]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ORACLES)
    assert done.returncode == 3 and "terminate" not in done.stderr


def test_prompts_that_are_kept_are_not_taken_over_after_weights_may_have_changed():
    """The run is one call, but nobody was live in between."""
    model = copy.deepcopy(tiny_model("qwen2"))
    prompt = [5 + place % 40 for place in range(1200)]
    settings = {"max_new_tokens": 3, "temperature": 0.0, "logprobs": 0}
    model.config.max_position_embeddings = 2048
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=12))
    with engine.keep_prompts(1e9), engine.open_run(**settings) as run:
        run.submit(prompt).result(PATIENCE)
        run.submit(prompt).result(PATIENCE)
        assert run.stats.num_copied_prompt_tokens == 1024
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.01)
        (found,) = run.submit(prompt).result(PATIENCE)
        assert run.stats.num_copied_prompt_tokens == 1024
    (wanted,) = stand.wrap(model).run([prompt], **settings)
    np.testing.assert_allclose(found.logprobs.of_tokens, wanted.logprobs.of_tokens, atol=1e-5)


def test_whoever_comes_behind_the_look_at_the_weights_comes_in_with_the_next_one(monkeypatch):
    """Nobody waits when the run looks; then the weights change, and a request comes before the run asks for one."""
    model, begin = copy.deepcopy(tiny_model("qwen2")), KeptPrompts.begin
    prompt = [5 + place % 40 for place in range(1200)]
    settings = {"max_new_tokens": 3, "temperature": 0.0, "logprobs": 0}
    model.config.max_position_embeddings = 2048
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=12))
    late = []

    def watched(kept):
        age = begin(kept)
        if run.stats.num_prompt_tokens and not (late or run._arrivals.open or run._arrivals.is_waiting):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.01)
            late.append(run.submit(prompt))
        return age

    monkeypatch.setattr(KeptPrompts, "begin", watched)
    with engine.keep_prompts(1e9), engine.open_run(**settings) as run:
        run.submit(prompt).result(PATIENCE)
        while not late:
            time.sleep(0.01)
        (found,) = late[0].result(PATIENCE)
        assert run.stats.num_copied_prompt_tokens == 0
    (wanted,) = stand.wrap(model).run([prompt], **settings)
    np.testing.assert_allclose(found.logprobs.of_tokens, wanted.logprobs.of_tokens, atol=1e-5)


def test_nothing_is_left_behind():
    def alive() -> list[object]:
        gc.collect()
        return [kept for kept in gc.get_objects() if type(kept) in (Call, Row, Ticket, Arrivals)]

    before = alive()
    with engine_of().open_run(**SETTINGS) as run:
        tokens_of([run.submit(PROMPTS[0]), run.submit(PROMPTS[1])])
        thread = run._thread
    assert not thread.is_alive()
    del run, thread
    assert len(alive()) <= len(before)


def test_ranks_that_share_a_model_are_refused(monkeypatch):
    engine = engine_of()
    monkeypatch.setattr(type(engine.backend), "ranks", object(), raising=False)
    engine.backend.__dict__.pop("ranks", None)
    with pytest.raises(ValueError, match="a process with the model for itself, got ranks that share it; use run"):
        engine.open_run(**SETTINGS)


@pytest.mark.parametrize("max_rows", [0, -1, 1.5, True, None])
def test_bad_numbers_of_rows_are_refused(max_rows):
    with pytest.raises(ValueError, match="max_rows must be an integer >= 1"):
        engine_of().open_run(max_rows=max_rows, **SETTINGS)


def test_settings_that_do_not_fit_are_refused_at_once():
    with pytest.raises(ValueError, match="temperature"):
        engine_of().open_run(temperature=-1.0)


class Cramped(AtMost):
    """Memory in which three places leave no row room to come to its end."""

    def is_cramped(self, row: Row) -> bool:
        return self.settled[-1:] == [8]

    @property
    def settled(self) -> list[int]:
        return SETTLED

    def settle(self, num_places: int) -> None:
        SETTLED.append(num_places)


SETTLED: list[int] = []


def test_places_become_fewer_where_they_leave_no_row_room():
    """Eight were reckoned with, as nobody knew how many rows would come."""
    SETTLED.clear()
    arrivals = Arrivals(lambda request: request, lambda job: None, 8)
    arrivals._begun = lambda ticket: ticket.request
    scheduler = Scheduler(arrivals, Cramped(8))
    for number in range(2):
        job = Job(number, np.zeros(1, dtype=np.int32), 9, [number], None, number, None)
        arrivals.put(Ticket(job, None))
        scheduler.settle(lambda row: "keys")
        assert [row.index for row in scheduler.live] == [number]
        scheduler.live[0].finish_reason = "eos"
        scheduler.end(scheduler.live[0])
        scheduler.settle(lambda row: "keys")
    assert SETTLED == [8, 4]
