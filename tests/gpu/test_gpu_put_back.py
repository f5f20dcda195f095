"""Captured steps under a cap: rows share their prompt's pages, are put back, and keep their tokens."""

from weakref import WeakSet

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from failures import failing_after
from plain_kernels import use_plain_kernels
from plain_scan import use_plain_scans
from recurrent_models import recurrent_kernel_model
from step_pair import HOT
from tiny_models import kernel_model

import stand
from stand.backend import CapturedBackend
from stand.forward.cache.key_shape import key_shape
from stand.gpu import device_cache
from stand.gpu.captured_step import CapturedStep
from stand.gpu.packets import page_table
from stand.gpu.packets.page_table import PageTable
from stand.gpu.tuning import attention_tiles as tiles
from stand.scheduling import free_memory, memory, within_pages
from stand.scheduling.page_allocator import PageAllocator

PROMPT = np.random.default_rng(1).integers(3, 40, 75).tolist()  # a whole page of 64, and a part
SETTINGS = {
    "num_return_sequences": 8, "max_new_tokens": 70, "stop_token_ids": [], "temperature": 1.0, "top_k": 0, "seed": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """Array twins of the kernels; rows start as soon as a page is free, so that more of them come to be put back."""
    use_plain_kernels(monkeypatch)
    use_plain_scans(monkeypatch)
    monkeypatch.setattr(within_pages, "GROWTH", 0)


def engine_of(*, captured: bool = True, verifier: str = "match") -> stand.Engine:
    engine = stand.wrap(
        kernel_model("qwen2"), verifier=verifier, drafter=stand.BlendedDrafter(budget=24), backend="sdpa"
    )
    if captured:
        engine.backend = CapturedBackend(engine.model, "for this test")
    return engine


def cap_of(num_pages: int) -> int:
    return num_pages * tiles.PAGE_SIZE * free_memory.bytes_per_token(kernel_model("qwen2"))


@pytest.fixture(scope="module")
def expected():
    return engine_of(captured=False).generate(PROMPT, **SETTINGS, max_rows=8).token_ids


def test_a_cap_is_kept_and_changes_no_token(expected):
    """11 pages, where all rows at their limits need 17; the pool is no larger."""
    engine = engine_of()
    output = engine.generate(PROMPT, **SETTINGS, max_cache_bytes=cap_of(11))
    assert output.token_ids == expected and str(engine.backend) == "triton"
    assert output.stats.num_put_back > 1 and output.stats.num_replayed_tokens > 100
    assert engine.backend._previous.captured._table.cache.num_pages == 11
    again = engine.generate(PROMPT, **SETTINGS, max_cache_bytes=cap_of(10))  # less: the pool of before is too large
    assert again.token_ids == expected and engine.backend._previous.captured._table.cache.num_pages == 10


def test_nothing_is_recorded_anew_while_rows_grow(monkeypatch, expected):
    """Pages are handed out: the pool stays where it is, and each step size is recorded once."""
    grown, sizes = [], []
    record = CapturedStep._record
    monkeypatch.setattr(page_table.DeviceCache, "grow", lambda *given: grown.append(given))
    monkeypatch.setattr(CapturedStep, "_record", lambda step, size: sizes.append(size) or record(step, size))
    assert engine_of().generate(PROMPT, **SETTINGS, max_rows=8).token_ids == expected
    assert not grown and len(sizes) == len(set(sizes)) > 1


@pytest.mark.parametrize("verifier", ["coupled", "traversal"])
def test_other_rules_under_a_cap(verifier):
    """With `coupled` the tokens are those without a cap; with `traversal` every row still ends."""
    output = engine_of(verifier=verifier).generate(PROMPT, **SETTINGS, max_cache_bytes=cap_of(11))
    assert len(output.token_ids) == 8 and output.stats.num_put_back > 0
    if verifier == "coupled":
        assert output.token_ids == engine_of(captured=False, verifier=verifier).generate(PROMPT, **SETTINGS).token_ids


def test_samples_share_their_prompts_whole_pages(monkeypatch):
    """The prompt's keys are written once; of its two pages each of four rows copies the second one."""
    written, copied, shared = [], [], []
    write, copy = page_table.DeviceCache.write, page_table.DeviceCache.copy
    monkeypatch.setattr(
        page_table.DeviceCache, "write", lambda *given, **rest: written.append(given) or write(*given, **rest)
    )
    monkeypatch.setattr(page_table.DeviceCache, "copy", lambda *given: copied.extend(given[2]) or copy(*given))
    launch = CapturedStep.launch
    monkeypatch.setattr(
        CapturedStep, "launch", lambda step: shared.append(step._table.numbers[:4, :2].copy()) or launch(step)
    )
    engine_of().generate(PROMPT, **{**SETTINGS, "num_return_sequences": 4, "max_new_tokens": 9})
    assert len(written) == 1 and len(copied) in (3, 4)  # 3: the prompt's own page is left to the last one
    assert len(set(shared[0][:, 0])) == 1 and len(set(shared[0][:, 1])) == 4


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_wrong_page_is_noticed(monkeypatch, place, expected):
    """Control: from some time on, rows have one page of another row."""
    extend = PageTable.extend

    def wrong(table, rows, lengths, offsets, places, **options):
        extend(table, rows, lengths, offsets, places, **options)
        if min(lengths) > 128:
            table.numbers[places[2:], place] = table.numbers[places[0], (place + 1) % 3]

    monkeypatch.setattr(PageTable, "extend", wrong)
    found = engine_of().generate(PROMPT, **SETTINGS, max_rows=8).token_ids
    assert found != expected


def test_a_copy_that_is_left_out_is_noticed(monkeypatch, expected):
    """Control: rows write behind their prompt on a page whose beginning they do not have."""
    monkeypatch.setattr(page_table.DeviceCache, "copy", lambda *given: None)
    assert engine_of().generate(PROMPT, **SETTINGS, max_rows=8).token_ids != expected


def test_a_failure_under_a_cap_goes_on_over_the_same_pages(monkeypatch, expected):
    """Also in the step in which a row has just copied its prompt's last page; rows are still put back."""
    monkeypatch.setattr(CapturedStep, "launch", failing_after(12, CapturedStep.launch, RuntimeError("gone")))
    engine = engine_of()
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        output = engine.generate(PROMPT, **SETTINGS, max_cache_bytes=cap_of(11))
    assert output.token_ids == expected and output.stats.num_put_back > 1
    assert engine.backend.page_size is None and not engine.backend.has_pool  # later calls have rooms


def test_a_pool_that_no_longer_fits_beside_the_prompts_keys_is_smaller(monkeypatch):
    """Of 60 pages' memory prompts have taken rooms when the pool is taken: 27 are left, where rows need up to 41."""
    settings = {**SETTINGS, "max_new_tokens": 200}
    wanted, engine = engine_of(captured=False).generate(PROMPT, **settings).token_ids, engine_of()
    left = iter([cap_of(60), cap_of(27) / free_memory.SHARE + 1])
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: next(left))
    output = engine.generate(PROMPT, **settings)
    assert output.token_ids == wanted and output.stats.num_put_back > 0
    assert str(engine.backend) == "triton" and engine.backend._previous.captured._table.cache.num_pages == 27


@pytest.mark.parametrize("family", ["qwen2", "recurrent"])
def test_a_pool_that_memory_limits_serves_the_next_call_too(monkeypatch, family):
    """What the pool holds counts as free, but for the page that is nobody's."""
    model, caches = kernel_model("qwen2") if family == "qwen2" else recurrent_kernel_model("qwen3_5"), []
    engine = stand.wrap(model, backend="triton", verifier="match", drafter=stand.BlendedDrafter(budget=8), fuse=False)
    page, own = 64 * key_shape(model).token_bytes, 8 * key_shape(model).row_bytes

    def left(device):
        return (
            14 * page + own - sum(sum(block.nbytes for block in cache.blocks) + own for cache in caches[:1])
        ) / free_memory.SHARE

    monkeypatch.setattr(free_memory, "available_bytes", left)
    for _ in range(2):
        engine.generate(PROMPT[:9], **{**SETTINGS, "max_new_tokens": 60, "num_return_sequences": 8})
        caches.append(engine.backend._previous.captured._table.cache)
    assert caches[0] is caches[1] and 10 < caches[0].num_pages <= 14


def test_a_limit_is_not_lowered_below_what_rows_begin_with(monkeypatch):
    pages, model = PageAllocator(64, 99), kernel_model("qwen2")
    pages.write("a prompt", 0, 640)
    rows = [stand.row.Row(0, np.zeros(641, dtype=np.int32), 9)]
    for num_pages, limit in ((200, 99), (50, 50), (20, 20), (19, 20), (0, 20)):  # 10, 2 for the row, 8 for drafts
        monkeypatch.setattr(
            free_memory, "available_bytes", lambda device, n=num_pages: cap_of(n) / free_memory.SHARE + 1
        )
        free_memory.lower_limit(pages, rows, model, num_tokens=512, num_places=2)
        assert pages.num_pages == limit
    free_memory.lower_limit(None, rows, model, num_tokens=512, num_places=2)
    pages = PageAllocator(64, 99)
    pages.write("a prompt", 0, 640)
    for num_pages, limit in ((23, 99), (24, 24)):  # 2 for each of three rows
        monkeypatch.setattr(
            free_memory, "available_bytes", lambda device, n=num_pages: cap_of(n) / free_memory.SHARE + 1
        )
        free_memory.lower_limit(pages, rows * 3, model, num_tokens=512, num_places=2)
        assert pages.num_pages == limit


def test_eager_steps_after_an_ordinary_call_have_its_pools_memory(monkeypatch):
    """Admission counts what the call before has left as free."""
    pools, free = WeakSet(), cap_of(120)
    new = page_table.DeviceCache.__init__
    monkeypatch.setattr(page_table.DeviceCache, "__init__", lambda one, **rest: pools.add(one) or new(one, **rest))

    def left(device):
        return free - sum(pool.nbytes for pool in pools if hasattr(pool, "storage"))

    engine, settings = engine_of(), {**SETTINGS, "max_new_tokens": 437, "stop_token_ids": list(range(61))}
    for module, name in ((free_memory, "available_bytes"), (device_cache, "_free_bytes")):
        monkeypatch.setattr(module, name, left)
    for asked in ({}, HOT, {}, HOT):
        engine.generate(PROMPT, **{**settings, **asked})
        assert str(engine.backend) == "triton" and bool(engine.backend.held_bytes) == (not asked)


@pytest.mark.parametrize("asked", [HOT, {"repetition_penalty": 1.2}], ids=["eager", "penalties"])
def test_other_steps_under_a_cap(expected, asked):
    """Eager ones over a pool of their own, and captured ones in two parts."""
    settings = {**SETTINGS, **asked}
    wanted = engine_of(captured=False).generate(PROMPT, **settings, max_rows=8).token_ids
    output = engine_of().generate(PROMPT, **settings, max_cache_bytes=cap_of(11))
    assert output.token_ids == wanted != expected and output.stats.num_put_back > 1


def test_prompts_of_several_requests_under_a_cap():
    prompts, settings = [PROMPT, [7], PROMPT[:64], PROMPT[:65]], {**SETTINGS, "num_return_sequences": 2}
    wanted = engine_of(captured=False).generate(prompts, **settings, max_rows=8)
    found = engine_of().generate(prompts, **settings, max_cache_bytes=cap_of(10))
    assert found.token_ids == wanted.token_ids and found.stats.num_put_back > 0


def test_a_prompts_keys_are_given_back_when_its_last_row_has_started(monkeypatch):
    released = []
    release = PageAllocator.release
    monkeypatch.setattr(PageAllocator, "release", lambda pages, owner: released.append(owner) or release(pages, owner))
    run = engine_of().run([PROMPT, [7, 8]], **{**SETTINGS, "num_return_sequences": 2}, max_rows=2)
    next(iter(run))
    assert ("prompt", 1) in released
    run.close()


def test_admission_counts_pages_of_the_pool(monkeypatch):
    backend = CapturedBackend(kernel_model("qwen2"), "for this test")
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: 4 * cap_of(10))
    most_slots = {"most_slots": lambda rows: 8}
    asked = memory.admission(backend._model, 300, cap_of(7), backend=backend, **most_slots)
    assert asked.pages.num_pages == 7 and backend.page_size == tiles.PAGE_SIZE
    for max_rows in (None, 4):  # what is free bounds the pool, whether rows are counted or not
        allowed = memory.admission(backend._model, max_rows, None, backend=backend, **most_slots)
        assert allowed.pages.num_pages == 32


def test_what_a_call_takes_when_it_begins():
    rows = [stand.row.Row(0, np.zeros(75, dtype=np.int32), 150), stand.row.Row(1, np.zeros(5, dtype=np.int32), 10**9)]
    size = page_table.PoolSize.of(rows[:1], 3, None)
    assert (size.width, size.num_pages) == (8, 5 * 8)  # 74 + 150 + 256 slots; two prompts beside three rows
    assert page_table.PoolSize.of(rows, 3, PageAllocator(64, 99)).num_pages == 99
    assert page_table.PoolSize.of(rows, 3, None).width == -(-(4 + page_table.FIRST_ROOM + 256) // 64)


def test_a_table_of_its_own_shares_nothing():
    torch.manual_seed(0)
    keys = stand.forward.cache.tree_cache.TreeCache(1, 100)
    keys.keys, keys.values = [torch.randn(1, 2, 256, 16)], [torch.randn(1, 2, 256, 16)]
    keys.layer_places, model = {0: 0}, kernel_model("qwen2")
    cache = page_table.DeviceCache.like(keys, model=model, num_pages=2, page_size=64, num_places=2)
    table = PageTable(cache, num_places=2, width=1)
    rows = [stand.row.Row(row, np.zeros(76, dtype=np.int32), 9) for row in range(2)]
    moved = []
    for place, row in enumerate(rows):
        table.enter(place, row, keys, before_moving=lambda: moved.append(1))
    assert moved and cache.num_pages == 4 and sorted(table.numbers[:, :2].flatten().tolist()) == [0, 1, 2, 3]
    for place in (0, 1):
        pages = cache.blocks[0][0, table.numbers[place, :2]].transpose(0, 1).flatten(1, 2)
        assert torch.equal(pages[:, :75], keys.keys[0][0, :, :75])
