"""The bench of cache layouts in small: equal logits are checked, and what the pages take is seen."""

import json

import bench_cache
import pytest

from stand.forward.cache import mapped_memory

pytestmark = pytest.mark.skipif(not mapped_memory.is_available(), reason="needs Linux")
SMALL = ["--rows", "3", "--lengths", "20,300", "--prompt", "16", "--nodes", "2", "--steps", "4"]


def test_all_ways_are_timed_and_pages_take_least(capsys):
    bench_cache.main(SMALL)
    *_, document = capsys.readouterr().out.splitlines()
    found = json.loads(document)
    assert list(found) == list(bench_cache.WAYS) and found["rooms"]["ratio"] == 1.0
    assert all(0 < figures["low"] <= figures["ratio"] <= figures["high"] for figures in found.values())
    # Of 16 slots each: one with the prompt, which all share, and what 25, 165 and 305 slots need behind it.
    pages, tokens = 1 + 1 + 10 + 19, 16 + 6 + 146 + 286
    assert found["pages"]["over_tokens"] == pytest.approx(16 * pages / tokens) and 2 < found["rooms"]["over_tokens"]


def test_a_way_with_other_logits_is_a_fault(monkeypatch):
    update = bench_cache.GatheredCache.update

    def turned(cache, *given, **options):
        keys, values = update(cache, *given, **options)
        return keys, values.flip(2)

    monkeypatch.setattr(bench_cache.GatheredCache, "update", turned)
    with pytest.raises(AssertionError, match="logits of 'gathered' must be those of 'rooms'"):
        bench_cache.main(SMALL)


@pytest.mark.parametrize(
    "given",
    [
        ["--lengths", "100"],
        ["--lengths", "500,100"],
        ["--lengths", "1,2,3"],
        ["--nodes", "-1"],
        ["--prompt", "100"],
        ["--rows", "1"],
    ],
)
def test_sizes_that_mean_nothing_are_refused(given, capsys):
    with pytest.raises(SystemExit) as refusal:
        bench_cache.read_options(given)
    assert refusal.value.code == 2 and given[0] in capsys.readouterr().err.splitlines()[-1]
