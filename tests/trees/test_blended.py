"""The blended lookup: against its slow twin, its drafts, its memory bound, its files."""

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
from noisy_walks import NUM_ODDS, draft, odds_of, stream
from reference_blended import SlowBlend, entry_prior

from stand.trees import BlendedLookup, DraftBatch, LookupFileError
from stand.trees.blended.file import read_blended_lookup, write_blended_lookup
from stand.trees.lookups import HAS_WIDE_VECTORS

MB = 1 << 20


def assert_same_laws(lookup, slow, contexts, scope=0):
    compared = 0
    for context in contexts:
        expected = slow.predict(list(context), scope=scope)
        token_ids, probabilities = lookup.predict(np.array(context, np.int32), limit=10_000, scope=scope)
        assert set(token_ids.tolist()) == set(expected)
        for token, probability in zip(token_ids.tolist(), probabilities.tolist(), strict=True):
            assert probability == pytest.approx(expected[token], rel=2e-3, abs=1e-6)
        assert sum(expected.values()) <= 1 + 1e-6
        compared += len(expected)
    return compared


@pytest.mark.parametrize(
    ("parameters", "vocabulary"),
    [({}, 6), ({}, 60), ({"depth": 3}, 12), ({"rate": 0.0}, 12), ({"fade": 0.5, "depth": 12}, 5)],
)
def test_twin_after_runs(parameters, vocabulary):
    lookup, slow = BlendedLookup(**parameters), SlowBlend(**parameters)
    rng = np.random.default_rng(3)
    for run in range(6):
        tokens = stream(250, vocabulary=vocabulary, seed=run % 3)
        scope = run % 2
        cut = int(rng.integers(0, 20))
        lookup.learn(tokens[:cut], tokens[cut:], scope=scope)
        slow.learn(tokens[:cut].tolist(), tokens[cut:].tolist(), scope=scope)
    lookup.check()
    tokens = stream(250, vocabulary=vocabulary, seed=1)
    contexts = [tokens[:length] for length in (*range(1, 14), *range(20, 250, 20))]
    assert assert_same_laws(lookup, slow, contexts, scope=1) > 100


def test_twin_after_rows():
    lookup, slow = BlendedLookup(), SlowBlend()
    rng = np.random.default_rng(5)
    for run in range(5):
        tokens = stream(120, vocabulary=9, seed=run % 2)
        ids = np.array([[token, *(token + 1 + rng.permutation(8)[:3]) % 9] for token in tokens[1:]], np.int32)
        probs = np.sort(rng.dirichlet(np.full(4, 0.4), len(ids)).astype(np.float32))[:, ::-1].copy()
        lookup.learn(tokens[:1], tokens[1:], top_ids=ids, top_probs=probs)
        for i in range(len(ids)):
            slow.learn_row(tokens[: i + 1].tolist(), list(zip(ids[i].tolist(), probs[i].tolist(), strict=True)))
    lookup.check()
    contexts = [stream(120, vocabulary=9)[:length] for length in range(1, 120, 6)]
    assert assert_same_laws(lookup, slow, contexts) > 100


def test_the_twin_sees_a_difference():
    lookup, slow = BlendedLookup(fade=0.95), SlowBlend(fade=0.8)
    tokens = stream(400, vocabulary=6)
    lookup.learn([], tokens)
    slow.learn([], tokens.tolist())
    with pytest.raises(AssertionError):
        assert_same_laws(lookup, slow, [tokens[:length] for length in range(5, 100, 5)])


def test_learn_batch_teaches_the_context_of_every_node():
    batch = DraftBatch(
        token_ids=np.array([5, 6, 7, 8, 5, 9], np.int32),
        parents=np.array([-1, 0, 1, 0, -1, 0], np.int32),
        offsets=np.array([0, 4, 6], np.int32),
        depths=np.array([0, 1, 2, 1, 0, 1], np.int32),
        ranks=np.array([0, 0, 0, 1, 0, 0], np.int32),
        support_ids=np.full((6, 1), -1, np.int32),
        law=np.zeros((6, 1), np.float32),
    )
    histories = [np.array([1, 2], np.int32), np.array([], np.int32)]
    ids = np.array([[6, 8], [7, -1], [1, 2], [3, -1], [9, -1], [4, 4]], np.int32)
    ids[5] = [4, 5]
    probs = np.array([[0.6, 0.4], [1, 0], [0.5, 0.5], [1, 0], [1, 0], [0.9, 0.1]], np.float32)
    lookup, by_hand = BlendedLookup(), BlendedLookup()
    lookup.learn_batch(batch, histories, ids, probs, scopes=[3, 4])
    paths = [[1, 2, 5], [1, 2, 5, 6], [1, 2, 5, 6, 7], [1, 2, 5, 8], [5], [5, 9]]
    for node, path in enumerate(paths):
        scope = 3 if node < 4 else 4
        by_hand.learn(path, [0], top_ids=ids[node : node + 1], top_probs=probs[node : node + 1], scope=scope)
    for path in paths:
        for one, two in zip(lookup.predict(path, scope=3), by_hand.predict(path, scope=3), strict=True):
            assert np.array_equal(one, two)
    some = BlendedLookup()
    some.learn_batch(batch, histories, ids, probs, np.array([1]))
    assert some.predict([1, 2, 5, 6])[0].tolist() == [7]
    alone = some.predict([1, 2, 5])  # 7 is known to the empty context alone
    assert alone[0].tolist() == [7] and alone[1][0] < some.predict([1, 2, 5, 6])[1][0]


def best_paths(lookup, history, budget, *, scope=0):
    """Path probabilities of the best tree, by growing far too much of it."""
    import heapq

    heap, best = [(-1.0, [])], []
    while heap and len(best) <= budget:
        negative, path = heapq.heappop(heap)
        best.append(-negative)
        token_ids, probabilities = lookup.predict(np.append(history, path).astype(np.int32), limit=10_000, scope=scope)
        for token, probability in zip(token_ids.tolist(), probabilities.tolist(), strict=True):
            heapq.heappush(heap, (negative * probability, [*path, token]))
    return best[1:]


@pytest.mark.parametrize("budget", [1, 5, 40])
def test_growth_is_close_to_the_best_tree(budget):
    lookup = BlendedLookup()
    tokens = stream(3000)
    lookup.learn([], tokens)
    reached = possible = 0.0
    for end in range(100, 140):
        batch = draft(lookup, [tokens[:end]], budget)
        batch.check()
        assert batch.num_nodes <= budget + 1
        reached += float(batch.path_probabilities[1:].sum())
        possible += sum(best_paths(lookup, tokens[:end], budget))
    assert 0.97 * possible <= reached <= 1.0001 * possible


def test_path_probabilities_are_calibrated():
    tokens = stream(30_000, vocabulary=50, stay=np.linspace(0, 1, 50))
    lookup = BlendedLookup()
    expected, reached, counts = np.zeros(5), np.zeros(5), np.zeros(5)
    lookup.learn([], tokens[:10_000])
    for end in range(10_000, 29_000, 4):
        batch = draft(lookup, [tokens[end - 20 : end]], 12)
        on_path = [0]
        for node in range(1, batch.num_nodes):
            is_hit = batch.parents[node] in on_path and batch.token_ids[node] == tokens[end + batch.depths[node] - 1]
            if is_hit:
                on_path.append(node)
            bin_number = min(4, int(batch.path_probabilities[node] * 5))
            expected[bin_number] += batch.path_probabilities[node]
            reached[bin_number] += is_hit
            counts[bin_number] += 1
        lookup.learn(tokens[end - 20 : end], tokens[end : end + 4])
    assert counts.min() > 300
    share = reached / counts
    allowed = 0.03 + 2 * np.sqrt(share * (1 - share) / counts)
    assert (np.abs(expected / counts - share) < allowed).all()


@pytest.mark.parametrize("kind", ["deterministic", "mixed", "sampled"])
def test_drafts_are_sound_and_repeatable(kind):
    lookup = BlendedLookup(num_candidates=32)
    tokens = stream(4000, vocabulary=200, stay=0.2)
    lookup.learn([], tokens)
    histories = [np.array([row], np.int32) for row in range(5)]
    batch = draft(lookup, histories, 25, kind=kind)
    batch.check()
    again = draft(lookup, histories, 25, kind=kind)
    assert len(batch) == 5 and 20 < batch.num_nodes <= 30 and batch.adapted
    for name in ("token_ids", "parents", "offsets", "depths", "ranks", "support_ids", "law", "path_estimates"):
        assert np.array_equal(getattr(batch, name), getattr(again, name)), name
    if kind != "deterministic":
        others = [draft(lookup, histories, 25, kind=kind, steps=np.full(5, step)) for step in range(1, 6)]
        assert any(not np.array_equal(batch.token_ids, other.token_ids) for other in others)


def test_a_batch_is_like_one_from_its_constructor():
    lookup = BlendedLookup()
    lookup.learn([], stream(400))
    batch = draft(lookup, [stream(100), stream(77)], 20)
    again = replace(batch)
    for field in fields(DraftBatch):
        assert getattr(again, field.name) is getattr(batch, field.name)
    for name in ("token_ids", "parents", "offsets", "depths", "ranks", "support_ids"):
        assert getattr(batch, name).dtype == np.int32 and getattr(batch, name).flags.c_contiguous
    assert batch.law.dtype == batch.path_probabilities.dtype == np.float32
    token_ids = batch.token_ids
    kept = token_ids.copy()
    del batch, again
    draft(lookup, [stream(300), stream(200)], 20)
    assert np.array_equal(token_ids, kept)  # views keep the memory


@pytest.mark.parametrize("make", [list, np.int64, lambda tokens: np.repeat(tokens, 2)[::2], memoryview])
def test_histories_of_every_kind_are_read(make):
    lookup = BlendedLookup()
    lookup.learn([], stream(400))
    history = stream(100)
    expected = draft(lookup, [history], 20)
    given = history.astype(np.int64) if make is np.int64 else make(history)
    assert np.array_equal(draft(lookup, [given], 20).token_ids, expected.token_ids)


DRAFT_AS_BYTES = """
import sys
import numpy as np
from stand.trees.lookups import BlendedLookup, HAS_WIDE_VECTORS
rng = np.random.default_rng(5)
lookup = BlendedLookup()
for scope in range(3):
    lookup.learn([], (rng.zipf(1.3, 6000) % 500).astype(np.int32), scope=scope)
out = [np.int32(HAS_WIDE_VECTORS).tobytes()]
for step in range(300):
    histories = [(rng.zipf(1.3, 30) % 500).astype(np.int32) for _ in range(3)]
    for kind in ("deterministic", "mixed", "sampled"):
        batch = lookup.draft(histories, 90, seed=1, rows=[0, 1, 2], steps=[step] * 3, kind=kind, scopes=[0, 1, 2])
        out += [batch.token_ids.tobytes(), batch.parents.tobytes(), batch.path_probabilities.tobytes()]
    lookup.record_outcome(batch, [[], [], []], batch.token_ids[batch.offsets[1:] - 1], kind="sampled")
sys.stdout.buffer.write(b"".join(out))
"""


@pytest.mark.skipif(not HAS_WIDE_VECTORS, reason="needs a processor with AVX-512")
def test_vectors_change_nothing():
    def run(**changes):
        environment = {name: value for name, value in os.environ.items() if name != "STAND_PORTABLE"} | changes
        return subprocess.run(
            [sys.executable, "-c", DRAFT_AS_BYTES], env=environment, capture_output=True, check=True
        ).stdout

    wide, portable = run(), run(STAND_PORTABLE="1")
    assert wide[:4] == np.int32(1).tobytes() and portable[:4] == np.int32(0).tobytes()
    assert len(wide) > 100_000 and wide[4:] == portable[4:]


def test_mixed_drafts_hold_a_sampled_child_first_where_they_hold_one():
    lookup = BlendedLookup(num_candidates=32)
    tokens = stream(4000, vocabulary=200, stay=0.2)
    lookup.learn([], tokens)
    batch = draft(lookup, [np.array([row], np.int32) for row in range(6)], 30, kind="mixed")
    sampled = np.flatnonzero((batch.law > 0).sum(1) > 1)
    assert len(sampled) > 0 and (batch.ranks[sampled] == 0).all()
    assert 30 < batch.num_nodes <= 36


@pytest.mark.parametrize("kind", ["mixed", "sampled"])
def test_drawn_children_follow_their_recorded_laws(kind):
    """Accepting and rejecting by the recorded laws gives back the target's law, whatever the draft's was."""
    vocabulary = 12
    lookup = BlendedLookup(num_candidates=8)
    lookup.learn([], stream(3000, vocabulary=vocabulary, stay=0.1))
    target = np.random.default_rng(2).dirichlet(np.ones(vocabulary))
    counts = np.zeros(vocabulary)
    rng = np.random.default_rng(4)
    num_draws = 6000
    for step in range(num_draws):
        one = draft(lookup, [np.array([3, 4], np.int32)], 3, kind=kind, steps=[step], max_depths=[1])[0]
        left = target.copy()
        for node in range(1, one.num_nodes):
            law = np.zeros(vocabulary)
            law[one.support_ids[0][one.support_ids[0] >= 0]] = one.law[node][one.support_ids[0] >= 0]
            token = one.token_ids[node]
            if rng.random() * law[token] < left[token]:
                break
            left = np.maximum(left - law, 0)
            left /= left.sum()
        else:
            token = rng.choice(vocabulary, p=left)
        counts[token] += 1
    chi_square = ((counts - num_draws * target) ** 2 / (num_draws * target)).sum()
    assert chi_square < 35  # 11 degrees of freedom: p = 2e-4


def test_the_budget_goes_where_acceptance_is_likely():
    lookup = BlendedLookup()
    sure = np.tile(np.arange(20, dtype=np.int32), 30)
    lookup.learn([], sure)
    lookup.learn([], 20 + stream(3000, stay=0.0))
    batch = draft(lookup, [sure[:45], np.array([25, 31], np.int32)], 20)
    sizes = np.diff(batch.offsets) - 1
    assert sizes.sum() == 20 and sizes[0] > 3 * max(1, sizes[1])
    both = draft(lookup, [sure[:45], sure[:52]], 20)
    assert abs(int(np.diff(both.offsets)[0]) - 11) <= 3


def test_floor_and_depths_bound_drafts():
    lookup = BlendedLookup()
    tokens = stream(3000)
    lookup.learn([], tokens)
    histories = [tokens[:90], tokens[:95]]
    batch = draft(lookup, histories, 60, max_depths=[2, 0])
    assert batch.depths.max() == 2 and batch.offsets[2] - batch.offsets[1] == 1
    floored = draft(lookup, histories, 60, floor=0.3)
    assert floored.path_probabilities.min() >= 0.3 and 2 < floored.num_nodes < 62
    assert draft(lookup, histories, 0).num_nodes == 2
    assert draft(BlendedLookup(), [np.array([4], np.int32)], 80).num_nodes == 1


def probabilities_by_path(batch):
    """(row, tokens from the root) -> path probability, of every node but the roots."""
    found = {}
    for row, (first, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        paths = [()]
        for node in range(first + 1, end):
            paths.append((*paths[batch.parents[node]], int(batch.token_ids[node])))
            found[row, paths[-1]] = float(batch.path_probabilities[node])
    return found


@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_floor_leaves_out_what_is_below_and_nothing_else(num_rows):
    lookup = BlendedLookup()
    tokens = stream(6000, vocabulary=60, stay=0.6)
    lookup.learn([], tokens)
    compared = 0
    for end in range(900, 900 + 40 * 20, 40 * num_rows):
        histories = [tokens[: end + 40 * row] for row in range(num_rows)]
        free = probabilities_by_path(draft(lookup, histories, 60 * num_rows))
        floored = probabilities_by_path(draft(lookup, histories, 60 * num_rows, floor=0.15))
        assert {path for path, probability in free.items() if probability >= 0.17} <= set(floored)
        assert all(probability == pytest.approx(free[path], abs=0.03) for path, probability in floored.items())
        compared += len(floored)
    assert compared > 50


def test_memory_is_bounded_and_what_is_recent_stays():
    lookup = BlendedLookup(max_bytes=MB)
    rng = np.random.default_rng(0)
    for _ in range(60):
        lookup.learn([], rng.integers(0, 30_000, 2000))
        assert lookup.nbytes <= MB
    lookup.check()
    assert lookup.num_evicted > 10_000
    kept = rng.integers(0, 30_000, 300)
    for _ in range(3):
        lookup.learn([], kept)
    hits = sum(lookup.predict(kept[:end], limit=1)[0].tolist() == [kept[end]] for end in range(2, 300))
    assert hits > 280
    lookup.check()


@pytest.mark.parametrize(
    ("parameters", "vocabulary"),
    [({}, 50), ({}, 12), ({"depth": 2}, 50), ({"depth": 3}, 40), ({"depth": 1}, 9), ({"max_bytes": MB}, 3000)],
)
@pytest.mark.parametrize("every", [2, 3, 100])
def test_remembered_ends_are_where_walking_leads(parameters, vocabulary, every):
    """Rows that take turns replace, move and evict what the others' ends remember; `check` finds each end by walking.

    One token stands at `every` so many places: where it is frequent, its contexts are replaced while they are in use.
    """
    lookup = BlendedLookup(**parameters)
    rng = np.random.default_rng(5)
    texts = [stream(1500, vocabulary=vocabulary, seed=row % 4, stay=0.7) for row in range(9)]
    for text in texts:
        text[::every] = 0
    ends = [20] * len(texts)
    for step in range(600):
        row = int(rng.integers(len(texts)))
        history, run = texts[row][: ends[row]], texts[row][ends[row] :][: int(1 + rng.exponential(8))]
        if step % 10 == 9:  # laws move and replace contexts too
            ids = rng.permuted(np.tile(np.arange(9, dtype=np.int32), (len(run), 1)), axis=1)[:, :5].copy()
            lookup.learn(history, run, top_ids=ids, top_probs=np.full(ids.shape, 0.2, np.float32))
        else:
            lookup.learn(history, run)
        lookup.check()
        ends[row] += len(run)
        if ends[row] + 100 > len(texts[row]):
            ends[row] = int(rng.integers(20, 1000))
    assert (lookup.num_evicted > 0) == ("max_bytes" in parameters)


def test_an_end_is_not_remembered_where_its_run_replaced_what_leads_there():
    lookup = BlendedLookup()
    head, hub, lightest, others = np.arange(100, 111, dtype=np.int32), 1, 2, range(300, 331)
    lookup.learn(head, np.array([hub, lightest, 200, 201], np.int32))
    for lap in range(2):  # the hub's successors are as many as fit now, and all others weigh more
        for other in others:
            lookup.learn(np.arange(12, dtype=np.int32) + 1000 * (other + 100 * lap), np.array([hub, other], np.int32))
    for length in range(6, 20):
        run = np.array([hub, lightest, 200, hub, 999 + length, *range(5, length)], np.int32)
        lookup.learn(head, run)
        lookup.check()


def test_often_used_contexts_outlive_rare_ones():
    lookup = BlendedLookup(max_bytes=MB)
    rng = np.random.default_rng(0)
    useful = rng.integers(0, 1000, 200)
    for _ in range(150):
        lookup.learn([], useful)
        lookup.learn([], rng.integers(1000, 30_000, 1000))
    hits = sum(lookup.predict(useful[:end], limit=1)[0].tolist() == [useful[end]] for end in range(2, 200))
    assert lookup.num_evicted > 10_000 and hits > 190
    lookup.check()


def test_replaced_entries_free_what_hung_on_them(tmp_path):
    lookup = BlendedLookup()
    rng = np.random.default_rng(1)
    for first in range(400):
        lookup.learn([], np.concatenate([[7, 1000 + first], rng.integers(0, 900, 30)]))
    lookup.check()
    assert len(lookup.predict([7], limit=200)[0]) <= 32 + 64  # of order 1 and of the empty context
    lookup.save(tmp_path / "full.blend")
    sizes = read_blended_lookup(tmp_path / "full.blend", num_odds=NUM_ODDS)[1]["sizes"]
    assert sizes[0] == 64 and sizes[1:].max() == 32  # the empty context stands first


def test_tokens_that_never_followed_the_newest_one_are_known():
    lookup = BlendedLookup()
    lookup.learn([], [1, 2, 3, 1, 4, 5])
    after = dict(zip(*(array.tolist() for array in lookup.predict([1, 9])), strict=True))  # 9 was never seen
    assert set(after) == {1, 2, 3, 4, 5}
    assert min(after[3], after[5]) > 2 * max(after[1], after[2], after[4])  # they came two places after 1
    batch = draft(lookup, [np.array([1, 9], np.int32)], 5)
    assert {3, 5} <= set(batch.token_ids[1:].tolist())


def test_large_token_ids_never_pass_the_cap():
    lookup = BlendedLookup(max_bytes=MB)
    lookup.learn([], [1, 2**31 - 1, 5, 2**31 - 1, 5])
    assert lookup.nbytes <= MB and lookup.predict([1, 2**31 - 1], limit=1)[0].tolist() == [5]


def test_clear_forgets_everything():
    lookup, fresh = BlendedLookup(), BlendedLookup()
    tokens = stream(500)
    lookup.learn([], tokens)
    lookup.clear()
    assert len(lookup) == 0 and lookup.nbytes == fresh.nbytes
    for one in (lookup, fresh):
        one.learn([], tokens[:100])
    assert np.array_equal(lookup.predict(tokens[:50])[1], fresh.predict(tokens[:50])[1])


@pytest.fixture
def saved(tmp_path):
    lookup = BlendedLookup(fingerprint=b"vocabulary", max_bytes=2 * MB)
    lookup.learn([], stream(3000))
    lookup.save(tmp_path / "run.blend")
    return lookup, tmp_path / "run.blend"


def test_round_trip(saved, tmp_path):
    lookup, path = saved
    again = BlendedLookup.load(path, fingerprint=b"vocabulary")
    again.check()
    assert len(again) == len(lookup) and again.max_bytes == 2 * MB and again.fingerprint == b"vocabulary"
    again.save(tmp_path / "again.blend")
    assert (tmp_path / "again.blend").read_bytes() == path.read_bytes()
    tokens = stream(3000)
    same = [
        set(lookup.predict(tokens[:end])[0][:1]) == set(again.predict(tokens[:end])[0][:1])
        for end in range(5, 3000, 50)
    ]
    assert np.mean(same) > 0.8
    again.learn([], tokens)
    again.check()
    assert BlendedLookup.load(path, max_bytes=4 * MB).max_bytes == 4 * MB


def test_odds_stand_in_files_by_order_weight_age_and_rank(tmp_path):
    odds = odds_of(BlendedLookup(), tmp_path / "fresh.blend")[: 14 * 144].reshape(14, 16, 3, 3)
    expected = [entry_prior(*place) for place in np.ndindex(odds.shape)]
    assert odds.ravel() == pytest.approx(np.array(expected), rel=1e-4)


def largest_step(lookup, tmp_path):
    """Of the odds at one token, as a factor."""
    before = odds_of(lookup, tmp_path / "before.blend")
    lookup.learn(stream(40), [3])
    return np.abs(np.log(odds_of(lookup, tmp_path / "after.blend") / before)).max()


def test_odds_from_a_file_are_no_longer_young(saved, tmp_path):
    young = BlendedLookup()
    young.learn([], stream(200))
    settled = BlendedLookup.load(saved[1])
    assert largest_step(settled, tmp_path) < 0.06 < 0.09 < largest_step(young, tmp_path)


def test_files_that_do_not_fit_are_refused(saved, tmp_path):
    _, path = saved
    with pytest.raises(LookupFileError, match="vocabulary"):
        BlendedLookup.load(path, fingerprint=b"another")
    large = BlendedLookup()
    large.learn([], np.random.default_rng(0).integers(0, 30_000, 30_000))
    large.save(tmp_path / "large.blend")
    with pytest.raises(LookupFileError, match="larger cap"):
        BlendedLookup.load(tmp_path / "large.blend", max_bytes=MB)


def test_a_small_file_must_not_claim_all_addresses(tmp_path):
    BlendedLookup(max_bytes=1 << 30).save(tmp_path / "modest.blend")
    assert BlendedLookup.load(tmp_path / "modest.blend").max_bytes == 1 << 30
    BlendedLookup(max_bytes=32 << 30).save(tmp_path / "greedy.blend")
    with pytest.raises(LookupFileError, match="max_bytes of at most 1073741824 .* got 34359738368; pass max_bytes"):
        BlendedLookup.load(tmp_path / "greedy.blend")
    assert BlendedLookup.load(tmp_path / "greedy.blend", max_bytes=MB).max_bytes == MB


def test_a_damaged_file_is_refused(saved):
    _, path = saved
    whole = path.read_bytes()
    for at in (0, 9, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(LookupFileError):
            BlendedLookup.load(path)
    path.write_bytes(whole[:-5])
    with pytest.raises(LookupFileError):
        BlendedLookup.load(path)


def small_file(**changes):
    """Three contexts: the empty one -> 7, [4] -> 5, and [4, 5] -> 6."""
    arrays = {
        "roots": [8],
        "sizes": [1, 1, 1],
        "visits": [1, 1, 1],
        "tokens": [7, 5, 6],
        "weights": [4096, 4096, 4096],
        "has_child": [0, 1, 0],
        "odds": np.ones(NUM_ODDS),
    } | changes
    dtypes = {"roots": np.uint32, "tokens": np.uint32, "weights": np.uint16, "odds": np.float32}
    return {name: np.array(values, dtypes.get(name, np.uint8)) for name, values in arrays.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"roots": [8, 8], "sizes": [1, 1, 1, 0], "visits": [1, 1, 1, 1]},
        {"roots": []},
        {"roots": [9]},  # nothing may hang on the context of the token before the newest
        {"has_child": [1, 1, 0]},  # nor on the empty one
        {"sizes": [1, 2, 1]},
        {"sizes": [65, 1, 1]},
        {"sizes": [1, 2, 0], "tokens": [7, 5, 5]},
        {"visits": [1, 0, 1]},
        {"has_child": [0, 0, 0]},
        {"has_child": [0, 1, 1]},
        {"has_child": [0, 2, 0]},
        {"tokens": [7, 2**31, 6]},
        {"odds": np.zeros(NUM_ODDS)},
        {"odds": np.full(NUM_ODDS, np.nan)},
        {"odds": np.where(np.arange(NUM_ODDS) < NUM_ODDS - 1, 1.0, 3.1)},
        {"odds": np.where(np.arange(NUM_ODDS) < NUM_ODDS - 1, 1.0, 0.1)},
    ],
    ids=str,
)
def test_broken_contents_are_refused(tmp_path, changes):
    parameters = {"depth": 8, "max_bytes": MB, "fade": 0.9, "rate": 0.1, "num_candidates": 10, "fingerprint": b""}
    path = tmp_path / "hand.blend"
    write_blended_lookup(path, parameters, small_file())
    lookup = BlendedLookup.load(path)
    lookup.check()
    assert lookup.predict([4, 5], limit=1)[0].tolist() == [6] and len(lookup) == 3
    write_blended_lookup(path, parameters, small_file(**changes))
    with pytest.raises(LookupFileError):
        BlendedLookup.load(path)
    write_blended_lookup(path, parameters | {"depth": 99}, small_file())
    with pytest.raises(LookupFileError):
        BlendedLookup.load(path)


@pytest.mark.parametrize(
    "parameters",
    [
        {"depth": 0},
        {"depth": 13},
        {"max_bytes": 1000},
        {"fade": 0.0},
        {"rate": 0.6},
        {"num_candidates": 0},
        {"fingerprint": 1},
    ],
    ids=str,
)
def test_bad_parameters_are_refused(parameters):
    with pytest.raises(ValueError, match="got"):
        BlendedLookup(**parameters)


def test_bad_arguments_are_refused():
    lookup = BlendedLookup()
    history = np.array([1, 2], np.int32)
    with pytest.raises(ValueError, match="negative"):
        lookup.learn([], [1, -1])
    with pytest.raises(ValueError, match="negative"):
        lookup.learn([-1], [1])
    with pytest.raises(ValueError, match="scope"):
        lookup.learn([], [1], scope=255)
    with pytest.raises(ValueError, match="scope"):
        lookup.learn([], [1], scope=2**70)
    with pytest.raises(ValueError, match="kind"):
        draft(lookup, [history], 4, kind="best")
    with pytest.raises(ValueError, match="pending"):
        draft(lookup, [history[:0]], 4)
    with pytest.raises(ValueError, match="floor"):
        draft(lookup, [history], 4, floor=1.5)
    with pytest.raises(ValueError, match="budget"):
        draft(lookup, [history], -1)
    with pytest.raises(ValueError, match="max_depths"):
        draft(lookup, [history], 4, max_depths=[1, 2])
    with pytest.raises(ValueError, match="scopes"):
        draft(lookup, [history], 4, scopes=[1, 2])
    with pytest.raises(TypeError, match="pickled"):
        lookup.__reduce__()


def test_verbs_are_atomic_under_threads():
    lookup = BlendedLookup(max_bytes=MB)
    tokens = stream(4000, vocabulary=3000)
    failures = []

    def work(row):
        try:
            for start in range(0, 3600, 40):
                lookup.learn(tokens[start : start + 8], tokens[start + 8 : start + 60], scope=row)
                draft(lookup, [tokens[start : start + 8]], 20, scopes=[row])
        except (ValueError, RuntimeError, MemoryError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    lookup.check()


class Reporter:
    """Says how large a lookup is when the collector finds it: it is in a cycle."""

    def __init__(self, lookup, seen):
        self.lookup, self.seen, self.itself = lookup, seen, self

    def __del__(self):
        self.seen.append(len(self.lookup))


def test_the_collector_may_run_finalisers_that_use_the_lookup():
    """A draft makes objects, which may start a collection; then a finaliser would wait for its own thread's lock."""
    lookup, seen = BlendedLookup(), []
    lookup.learn([], [1, 2, 3, 4] * 20)

    def draft():
        for _ in range(300):
            Reporter(lookup, seen)
            lookup.draft([np.array([1, 2], np.int32)], 5, seed=1, rows=[0], steps=[0])

    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    try:
        drafting = threading.Thread(target=draft, daemon=True)
        drafting.start()
        drafting.join(timeout=60)
        assert not drafting.is_alive() and len(seen) > 200
    finally:
        gc.set_threshold(*before)


def test_drafts_of_many_threads_are_those_of_one():
    lookup = BlendedLookup()
    lookup.learn([], np.random.default_rng(3).integers(0, 20, 4000))
    histories = [np.random.default_rng(seed).integers(0, 20, 30).astype(np.int32) for seed in range(40)]

    def draft(history):
        return lookup.draft([history], 12, seed=1, rows=[0], steps=[0], kind="sampled").token_ids.tolist()

    expected = [draft(history) for history in histories]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert list(pool.map(draft, histories)) == expected
