"""Rows that go away because memory has run out and come back later: the same tokens, the same law, nothing lost."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from plain_eagle import random_head
from resident import cache_bytes
from small_law import continuation_law, p_of_continuations, small_model
from tiny_models import kernel_model, tiny_model
from transformers import LogitsProcessorList
from with_pages import needs_pages

import stand
from stand.drafters.drafter import DraftRequest
from stand.row import Row
from stand.scheduling import free_memory, prompt_keys, within_pages
from stand.scheduling.admission import beginning
from stand.scheduling.page_allocator import PageAllocator, PagesExhaustedError
from stand.scheduling.within_pages import WithinPages, most_draft_pages
from stand.trees import DraftBatch

pytestmark = needs_pages

PROMPT = [5, 9, 11, 4, 5, 9]
ROWS = 32
SETTINGS = {"num_return_sequences": ROWS, "max_new_tokens": 72, "temperature": 1.0, "top_k": 0, "seed": 3}
WORST = len(PROMPT) - 1 + SETTINGS["max_new_tokens"]


@pytest.fixture(autouse=True)
def no_growth(monkeypatch):
    """Rows start as soon as a page is free, so that more of them come to be put back."""
    monkeypatch.setattr(within_pages, "GROWTH", 0)


def engine_of(verifier: str = "match", **settings) -> stand.Engine:
    drafter = stand.BlendedDrafter(budget=24)
    return stand.wrap(kernel_model("qwen2"), verifier=verifier, drafter=drafter, **settings)


def cap_of(share: float) -> float:
    """Bytes for this share of the worst case of all rows."""
    return share * ROWS * WORST * free_memory.bytes_per_token(kernel_model("qwen2"))


def tokens_of(trajectories) -> list[list[int]]:
    found = {one.row: one.token_ids for one in trajectories}
    return [found[row] for row in sorted(found)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    output = engine_of().generate(PROMPT, **SETTINGS, max_rows=ROWS)
    assert (
        output.stats.num_put_back == output.stats.num_replayed_tokens == 0 and len(set(map(len, output.token_ids))) > 10
    )
    assert np.mean([len(tokens) == 72 for tokens in output.token_ids]) > 0.2  # many need all of their room
    return output.token_ids


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_a_cap_of_a_quarter_of_the_worst_case_is_kept_and_changes_no_token(verifier, expected):
    taken, cap = [], cap_of(1 / 4)

    def watch(run):
        if len(taken) % 16 == 0:  # it takes milliseconds
            taken.append(cache_bytes(run))
        else:
            taken.append(taken[-1])

    run = engine_of(verifier).run([PROMPT], **SETTINGS, max_cache_bytes=cap, on_step=watch)
    pages = run._call.scheduler.admission.pages
    found = tokens_of(run)
    want = (
        expected if verifier == "match" else engine_of(verifier).generate(PROMPT, **SETTINGS, max_rows=ROWS).token_ids
    )
    assert found == want
    assert run.stats.num_put_back > 5 and run.stats.num_replayed_tokens > 200
    page_bytes = pages.page_size * free_memory.bytes_per_token(kernel_model("qwen2"))
    assert 0.8 * cap < pages.most_used * page_bytes <= cap  # by numbers
    assert 0.6 * cap < max(taken) <= 1.02 * cap  # as the system counts; a prompt's last page is not counted in numbers
    assert pages.num_used == 0


def test_wrong_keys_of_rows_that_come_back_are_seen(expected, monkeypatch):
    """The negative control: what comes back has the keys of other tokens."""
    run_chunk = prompt_keys.prefill_chunk

    def prefill_chunk(model, keys, token_ids, done, **named):
        others = token_ids if len(token_ids) == len(PROMPT) - 1 else np.full_like(token_ids, 3)
        return run_chunk(model, keys, others, done, **named)

    monkeypatch.setattr(prompt_keys, "prefill_chunk", prefill_chunk)
    found = tokens_of(engine_of().run([PROMPT], **SETTINGS, max_cache_bytes=cap_of(1 / 4)))
    assert 2 < sum(own != other for own, other in zip(found, expected, strict=True)) < ROWS - 2


def test_rows_of_many_prompts_under_a_cap():
    prompts = [PROMPT, [7], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32] * 3]
    settings = {**SETTINGS, "num_return_sequences": 7, "max_new_tokens": 70}
    want = engine_of().generate(prompts, **settings, max_rows=21)
    for max_rows in (None, 5):
        found = engine_of().generate(prompts, **settings, max_rows=max_rows, max_cache_bytes=cap_of(5.8 / ROWS))
        assert found.token_ids == want.token_ids and found.finish_reasons == want.finish_reasons
        assert found.stats.num_put_back > 0 or max_rows == 5


class Widened(stand.BlendedDrafter):
    """May draft eight times as much from some moment on, as after a call whose steps were timed."""

    factor = 1

    def most_nodes(self, num_rows):
        return 8 * self.factor * num_rows

    def draft(self, request):
        self.budget = self.most_nodes(len(request.histories))
        return super().draft(request)


def test_a_drafter_that_comes_to_ask_for_more_between_two_steps(expected):
    drafter, steps = Widened(budget=8), []
    engine = stand.wrap(kernel_model("qwen2"), verifier="match", drafter=drafter)

    def widen(run):
        steps.append(run.stats.num_forwards)
        if len(steps) % 5 == 0:
            drafter.factor = 9 - drafter.factor

    run = engine.run([PROMPT], **SETTINGS, max_cache_bytes=cap_of(1 / 4), on_step=widen)
    assert tokens_of(run) == expected and run.stats.num_put_back > 0
    assert steps == list(range(1, len(steps) + 1))


def test_rows_that_come_back_keep_their_counts():
    run = engine_of("traversal").run([PROMPT], **SETTINGS, max_cache_bytes=cap_of(1 / 4))
    found = list(run)
    assert len(found) == ROWS and sum(one.num_steps for one in found) == run.stats.num_steps
    assert sum(len(one.token_ids) for one in found) == run.stats.num_tokens and run.stats.num_put_back > 0
    assert sum(one.num_draft_tokens for one in found) == run.stats.num_draft_tokens
    assert all(0 <= one.started < one.ended for one in found)


def test_a_prompt_counts_once_and_is_taught_once_though_it_is_computed_again(monkeypatch):
    """Its keys go while rows that were put back wait, and are needed again by its next row."""
    opened, taught, engine = [], [], engine_of()
    opening = WithinPages.open
    monkeypatch.setattr(WithinPages, "open", lambda self, row: opened.append(row.num_steps) or opening(self, row))
    monkeypatch.setattr(engine.drafter, "learn_prompt", lambda prompt, *, problem: taught.append(len(prompt)))
    run = engine.run([PROMPT, [7, 7]], **SETTINGS, max_cache_bytes=cap_of(1 / 4))
    assert len(list(run)) == 2 * ROWS and opened.count(0) > 2
    assert run.stats.num_prompt_tokens == len(PROMPT) + 2 and taught == [len(PROMPT), 2]


SIZE, TOKENS, COUNT, START = 7, 3, 3000, [3, 5, 1, 3]


class Fickle(WithinPages):
    """Memory that runs out by chance, whatever the rows have."""

    def __init__(self, *, most_rows: int = 24, odds: float = 0.7):
        super().__init__(PageAllocator(4), most_rows=most_rows)
        self._odds, self._generator = odds, np.random.default_rng(8)

    def holds(self, live) -> bool:
        return self._generator.random() > self._odds


def counted(monkeypatch) -> tuple[dict[tuple[int, ...], int], stand.Stats]:
    """Continuations under `traversal` with drafts that learn, where rows are put back all the time."""
    drafter = stand.BlendedDrafter(budget=192)
    fickle = Fickle(most_rows=96, odds=0.85)
    monkeypatch.setattr("stand.engine.admission", lambda *given, **options: fickle)
    engine = stand.wrap(small_model(SIZE), drafter=drafter, verifier="traversal")
    engine.backend.page_size = None
    settings = {"max_new_tokens": TOKENS, "temperature": 1.0, "top_k": 0, "seed": 1, "stop_token_ids": []}
    run = engine.run([START], num_return_sequences=COUNT, **settings)
    counts: dict[tuple[int, ...], int] = {}
    for one in run:
        counts[tuple(one.token_ids)] = counts.get(tuple(one.token_ids), 0) + 1
    assert fickle.pages.num_used == 0 and sum(counts.values()) == COUNT
    return counts, run.stats


def test_rows_that_come_back_follow_the_exact_law(monkeypatch):
    law = continuation_law(small_model(SIZE), START, LogitsProcessorList(), end=-1, tokens=TOKENS)
    counts, stats = counted(monkeypatch)
    assert stats.num_put_back > COUNT / 20 and stats.mean_acceptance_length > 1.3
    assert p_of_continuations(counts, law) > 1e-3


@pytest.mark.parametrize("kind", ["eagle", "model"])
def test_drafters_that_remember_rows_find_them_again(kind, monkeypatch):
    """What they hold of a row is not asked for while it is away."""
    model, settings = tiny_model("llama"), {**SETTINGS, "num_return_sequences": 6, "max_new_tokens": 24}

    def engine() -> stand.Engine:
        drafter = stand.EagleDrafter(random_head(model), budget=12) if kind == "eagle" else stand.ModelDrafter(model)
        return stand.wrap(model, drafter=drafter, verifier="match")

    want = engine().generate([PROMPT, [7, 8]], **settings, max_rows=12)
    fickle = Fickle()
    monkeypatch.setattr("stand.engine.admission", lambda *given, **options: fickle)
    found = engine().generate([PROMPT, [7, 8]], **settings)
    assert found.token_ids == want.token_ids and found.stats.num_put_back > 5
    assert found.stats.num_accepted_draft_tokens > 0


def test_a_draft_that_decides_whether_it_is_used_is_seen(monkeypatch):
    """The negative control: a row draws a second draft, from the right law and with fresh numbers, where the first one
    did not suit. So it would be if a row were put back for what it had drafted."""
    law = continuation_law(small_model(SIZE), START, LogitsProcessorList(), end=-1, tokens=TOKENS)
    draft = stand.BlendedDrafter.draft

    def fitting(drafter, request):
        again = {field.name: getattr(request, field.name) for field in fields(request)} | {"seed": request.seed + 1}
        pairs = zip(draft(drafter, request), draft(drafter, DraftRequest(**again)), strict=True)
        suits = [(one if one.num_nodes > 1 and one.token_ids[1] % 2 == 0 else other) for one, other in pairs]
        return DraftBatch.concatenate(suits)

    monkeypatch.setattr(stand.BlendedDrafter, "draft", fitting)
    assert p_of_continuations(counted(monkeypatch)[0], law) < 1e-3


def test_the_first_row_of_all_is_never_put_back(monkeypatch):
    away: list[int] = []
    send_back = stand.scheduling.scheduler.Scheduler._send_back

    def watched(scheduler, row, going):
        assert row.index == max(other.index for other in going)
        send_back(scheduler, row, going)
        away.append(row.index)

    monkeypatch.setattr(stand.scheduling.scheduler.Scheduler, "_send_back", watched)
    list(engine_of().run([PROMPT], **SETTINGS, max_cache_bytes=cap_of(6 / ROWS)))
    assert away and 0 not in away and len(away) > len(set(away)) > 3  # some more than once


@pytest.mark.parametrize(("most_pages", "most_beyond"), [(1, 1), (3, 2)])
def test_most_draft_pages_is_what_the_worst_distribution_takes(most_pages, most_beyond):
    """Also where rows hold free pages that an earlier draft has taken."""
    generator = np.random.default_rng(4)
    for _ in range(300):
        size = int(generator.choice([1, 4, 16]))
        slacks = generator.integers(0, most_pages * size, generator.integers(1, 5)).tolist()
        nodes = int(generator.integers(0, 30))
        best = [0] * (nodes + 1)  # by nodes given out
        for slack in slacks:
            pages = [max(-(-(count - slack) // size), 0) for count in range(nodes + 1)]
            best = [max(best[rest] + pages[total - rest] for rest in range(total + 1)) for total in range(nodes + 1)]
        assert best[nodes] <= most_draft_pages(slacks, nodes, page_size=size) <= best[nodes] + most_beyond


def test_a_row_begins_with_its_prompt_or_with_what_it_had():
    row = Row(4, np.array(PROMPT, dtype=np.int32), 9, problem=2)
    assert beginning(row) == ("problem", 2)
    row.extend([3, 4])
    assert beginning(row) == ("row", 4)


def test_a_request_that_no_memory_holds_is_refused():
    with pytest.raises(ValueError, match="max_cache_bytes must hold one row with its 72 new tokens, 22 pages of 16"):
        engine_of().generate(PROMPT, **SETTINGS, max_cache_bytes=cap_of(1 / ROWS))
    requests = [stand.Request(PROMPT, max_new_tokens=20), PROMPT]
    with pytest.raises(ValueError, match="72 new tokens, 22 pages of 16 tokens, got 21; raise it"):
        list(engine_of().run(requests, **SETTINGS, max_cache_bytes=cap_of(4.4 / ROWS)))


@pytest.mark.parametrize(("limit", "num_pages"), [(64, 7), (65, 8)])
def test_the_least_cap_of_a_request_is_counted_to_the_token(limit, num_pages):
    """64 tokens before the pending one, those to come, 256 of a draft, in pages of 64; and the prompt's last page."""
    job = SimpleNamespace(prompt=[1] * 65, limit=limit)
    WithinPages(PageAllocator(64, num_pages), is_asked_for=True).check(job)
    with pytest.raises(ValueError, match=f"{limit} new tokens, {num_pages} pages of 64 tokens, got {num_pages - 1};"):
        WithinPages(PageAllocator(64, num_pages - 1), is_asked_for=True).check(job)


def test_a_request_that_fits_without_its_draft_alone_is_refused():
    """(5 + 72 + 500 nodes) tokens and a page for the prompt: what is allowed is enough, whatever is drafted."""
    page = 16 * free_memory.bytes_per_token(kernel_model("qwen2"))
    for num_pages in (22, 37):
        engine = stand.wrap(kernel_model("qwen2"), verifier="match", drafter=stand.BlendedDrafter(budget=500))
        with pytest.raises(ValueError, match=f"72 new tokens, 38 pages of 16 tokens, got {num_pages}; raise it"):
            engine.generate(PROMPT, **SETTINGS, max_cache_bytes=num_pages * page)
    settings = {**SETTINGS, "num_return_sequences": 1}
    assert engine.generate(PROMPT, **settings, max_cache_bytes=38 * page).stats.num_tokens > 0


@pytest.mark.parametrize("max_cache_bytes", [0, -1, "1G", True, float("nan")])
def test_bad_numbers_of_bytes_are_refused(max_cache_bytes):
    with pytest.raises(ValueError, match="max_cache_bytes must be a number of bytes that holds a page of 16 tokens"):
        engine_of().run([PROMPT], max_cache_bytes=max_cache_bytes)


def test_a_drafter_that_breaks_its_word_ends_the_call(monkeypatch):
    monkeypatch.setattr(stand.BlendedDrafter, "most_nodes", lambda drafter, num_rows: 0)
    with pytest.raises(PagesExhaustedError, match="pages must be free"):
        engine_of().generate(PROMPT, **SETTINGS, max_cache_bytes=cap_of(1 / 4))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_prompt_that_waits_makes_room_for_a_row_with_keys_of_its_own(is_known, monkeypatch):
    """A row that came back shares nothing with its prompt, whose keys wait for a further row. The cap is the smallest
    one that is accepted. Were every live row taken to share its prompt's keys, the run would end without memory."""
    monkeypatch.setattr(within_pages, "DRAFT_ROOM", 16)
    monkeypatch.setattr(within_pages, "GROWTH", 64)
    if not is_known:
        monkeypatch.setattr(WithinPages, "is_shared", lambda self, start: start[0] == "problem")
    engine = engine_of()
    limits = (60, 200, 200, 20, 100)
    requests = [stand.Request([5] * 40, max_new_tokens=limit, id=number) for number, limit in enumerate(limits)]
    page = engine.backend.page_size * free_memory.bytes_per_token(engine.model)
    num_pages = -(-(39 + 200 + 16) // engine.backend.page_size) + 1
    settings = {"max_rows": 2, "draft": False, "temperature": 1.0, "seed": 0, "stop_token_ids": []}
    run = engine.run(requests, **settings, max_cache_bytes=num_pages * page)
    if not is_known:
        with pytest.raises(PagesExhaustedError):
            list(run)
        return
    assert {one.id: len(one.token_ids) for one in run} == dict(enumerate(limits))
    assert run.stats.num_put_back > 0


@pytest.mark.parametrize("prompt", [[5] * 6, [5] * 90])
def test_a_row_alone_outgrows_what_was_free_but_not_what_was_asked_for(prompt, monkeypatch):
    engine = engine_of()
    page = engine.backend.page_size * free_memory.bytes_per_token(engine.model)
    settings = {"max_new_tokens": 100, "temperature": 0.0, "stop_token_ids": []}
    expected = engine.generate([prompt, prompt[::2]], **settings, max_rows=2, learn=False).token_ids
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: 3.5 * page / free_memory.SHARE)
    assert engine.generate([prompt, prompt[::2]], **settings, learn=False).token_ids == expected
    with pytest.raises(ValueError, match="max_cache_bytes must hold one row"):
        engine.generate([prompt], **settings, max_cache_bytes=3.5 * page)


@pytest.mark.parametrize(("asked_for", "is_held"), [(12, True), (6, False)])
def test_what_was_asked_for_counts_where_less_was_free(asked_for, is_held):
    """As where a pool is taken: the limit is lowered to what is free, and a row alone may go beyond it."""
    pages = PageAllocator(4, asked_for)
    admission = WithinPages(pages, is_asked_for=True)
    row = Row(0, np.arange(10, dtype=np.int32), 30)
    admission.open(row)
    admission.enter(row)
    pages.num_pages = 3
    if is_held:
        admission.take([row], [40])
        assert pages.num_pages == pages.num_used == 11  # the prompt's last page was shared
    else:
        with pytest.raises(PagesExhaustedError):
            admission.take([row], [40])


@pytest.mark.parametrize("count", [2, 3])
def test_a_prompt_is_computed_into_what_the_row_before_has_given_back(count):
    """Caps that hold any one of the rows and not two of their prompts: they run one after another."""
    prompts = [[5 + (place * factor) % 50 for place in range(400)] for factor in (3, 7, 11)[:count]]
    settings = {"max_new_tokens": 5, "temperature": 0, "stop_token_ids": []}
    engine = engine_of()
    expected = engine.generate(prompts, **settings, max_rows=1, learn=False).token_ids
    page = engine.backend.page_size * free_memory.bytes_per_token(engine.model)
    served = 0
    for num_pages in range(38, 60, 2):
        limit = {"max_cache_bytes": num_pages * page}
        try:
            tokens = engine.generate(prompts, **settings, **limit, learn=False).token_ids
        except ValueError as error:
            assert "must hold one row" in str(error) and not served
            continue
        assert tokens == expected == tokens_of(engine.run(prompts, **settings, **limit, learn=False))
        served += 1
    assert served > 7
