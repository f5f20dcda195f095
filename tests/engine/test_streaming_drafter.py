"""Drafts of streams: recorded laws against a slow twin, the target's outputs bit by bit, and the output's law."""

from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from plain_streams import plain_stream_logits, random_streams
from small_law import continuation_law, p_of_continuations, small_model
from tiny_models import VOCABULARY_SIZE, kernel_model, tiny_model
from transformers import LogitsProcessorList
from turns import PROMPTS, restless_calls, take_turns
from two_tokens import assert_greedy_equals_transformers
from with_pages import needs_pages

import stand
from stand.drafters.costs.step_cost import StepCost
from stand.drafters.streams import rider
from stand.drafters.streams.weights import Streams
from stand.scheduling import within_pages
from stand.scheduling.free_memory import bytes_per_token
from stand.step import EagerStep
from stand.trees import DraftBatch, DraftTree, OutsideLaws

TARGETS = ("llama", "qwen2")
PLACEMENTS = ("end", "nodes")
GAMMA = 3


class CheckedDrafter(stand.StreamingDrafter):
    """Compares every recorded law with that of streams run plainly behind the row's tokens."""

    num_checked = 0

    def attach(self, model, fingerprint):
        super().attach(model, fingerprint)
        self._model = model

    def draft(self, request) -> DraftBatch:
        batch = super().draft(request)
        batch.check()
        for row, (history, law) in enumerate(zip(request.histories, self.rider.laws_of(request), strict=True)):
            assert (law is None) == (request.steps[row] == 0)
            if request.steps[row] == 0:
                assert batch[row].num_nodes == 1
            elif self.num_checked < 150:
                self._check_row(batch[row], history.tolist(), int(request.max_depths[row]))
        return batch

    def _check_row(self, draft, history: list[int], max_depth: int) -> None:
        logits = plain_stream_logits(self.rider.streams, self._model, history[:-1]) / self.rider.temperature
        depths, taken = {0: 0}, {}
        for node in range(1, draft.num_nodes):
            parent = int(draft.parents[node])
            depths[node] = depths[parent] + 1
            assert depths[node] <= min(max_depth, GAMMA)
            row = logits[depths[parent]]
            law = np.exp(row - row.max()) * np.isin(np.arange(len(row)), np.argsort(-row)[: self.rider.law_size])
            law[taken.setdefault(parent, [])] = 0.0
            taken[parent].append(int(draft.token_ids[node]))
            recorded, support = np.zeros(VOCABULARY_SIZE), draft.support_ids[parent]
            recorded[support[support >= 0]] = draft.law[node][support >= 0]
            np.testing.assert_allclose(recorded, law / law.sum(), atol=1e-4)
            self.num_checked += 1


def checked(target: str, **settings) -> CheckedDrafter:
    return CheckedDrafter(random_streams(tiny_model(target)), num_candidates=7, temperature=1.3, **settings)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_recorded_laws_are_the_streams_own_whatever_happens_to_the_rows(target, placement):
    drafter = checked(target, budget=14, placement=placement)
    engine = stand.wrap(tiny_model(target), drafter=drafter)
    restless_calls(engine, seed=4, max_new_tokens=6)
    assert drafter.num_checked > 60


def test_calls_that_take_turns_keep_their_rows_apart():
    drafter = checked("llama", budget=6)
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    take_turns(engine, PROMPTS[:2], max_new_tokens=6)
    assert drafter.num_checked > 10


def test_both_placements_give_the_same_drafts_and_old_laws_go(monkeypatch):
    monkeypatch.setattr(rider, "MOST_HELD", 3)
    written = []
    for placement in PLACEMENTS:
        drafter = stand.StreamingDrafter(random_streams(tiny_model("llama")), budget=16, placement=placement)
        engine = stand.wrap(tiny_model("llama"), drafter=drafter)
        output = engine.generate(input_ids=PROMPTS, max_new_tokens=16, temperature=1.0, seed=5)
        written.append((output.token_ids, output.stats.num_draft_tokens, output.stats.num_steps))
        assert len(drafter.rider._laws) <= max(3, len(PROMPTS))
    assert written[0] == written[1]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_law_serves_one_step(is_idle):
    """Also where the streams are not run again behind it: what is held is of rows that have not drafted yet."""
    own, ends = stand.StreamingDrafter(random_streams(tiny_model("llama"))).rider, [np.zeros(0, dtype=np.int64)]
    guesses = np.zeros((1, GAMMA, 10), dtype=np.int32), np.full((1, GAMMA, 10), 0.1, dtype=np.float32)
    batch = DraftBatch.concatenate([DraftTree.chain([9])])
    first, second = (np.array(tokens, dtype=np.int32) for tokens in ([5, 9], [5, 9, 11]))
    own.kept(batch, SimpleNamespace(histories=[first]), ends, lambda: guesses)
    assert own.laws_of(draft_request([second], step=1)) != [None]
    own.is_idle = is_idle
    own.kept(batch, SimpleNamespace(histories=[second]), ends, lambda: guesses)
    assert own.laws_of(draft_request([second], step=1)) == [None]


@pytest.mark.parametrize("num_tokens", [1, 4, 6])
def test_a_part_of_the_tails_is_the_first_rows(num_tokens):
    """As captured steps ask for it."""
    model, streams = tiny_model("llama"), random_streams(tiny_model("llama"))
    own, hidden = stand.StreamingDrafter(streams).rider, torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    own.attach(model)
    with torch.inference_mode(), patch.object(own, "_through", lambda states, positions, **how: states):
        found = own.guess(hidden, torch.zeros(1, num_tokens), attention="sdpa", cache=None, plan=None)
        begun = streams.begin(hidden).reshape(2 * GAMMA, 32)[:num_tokens]
        expected = streams.best_tokens(begun, temperature=own.temperature, count=own.law_size)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_captured_steps_carry_streams_at_ends_alone(placement):
    drafter = stand.StreamingDrafter(random_streams(tiny_model("llama")), placement=placement)
    assert drafter.rider.is_capturable == (placement == "end")


# The target's outputs, bit by bit.


class Replayed(stand.Drafter):
    """Drafts that are given beforehand, without streams."""

    remembers = False  # its calls have the numbers of those that were recorded

    def __init__(self, batches):
        self.batches = iter(batches)

    def draft(self, request):
        return next(self.batches)


class RecordedDrafter(stand.StreamingDrafter):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.batches = []

    def draft(self, request):
        self.batches.append(super().draft(request))
        return self.batches[-1]


def logits_of(drafter, model, monkeypatch) -> list[torch.Tensor]:
    """Of every step of a call with three rows and of one with one, where further packed tokens would change bits."""
    seen, verify = [], EagerStep.verify
    with monkeypatch.context() as patched:
        patched.setattr(EagerStep, "verify", lambda self: (seen.append(self._logits.clone()), verify(self))[1])
        engine = stand.wrap(model, drafter=drafter)
        for prompts in (PROMPTS[:3], PROMPTS[:1]):
            engine.generate(input_ids=prompts, max_new_tokens=9, temperature=1.0, top_k=0, seed=4, stop_token_ids=[])
    return seen


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_targets_logits_are_bit_equal_with_streams_and_without(target, placement, monkeypatch):
    """The same drafts, once with streams and once by an engine that has never seen any."""
    model = tiny_model(target)
    drafter = RecordedDrafter(random_streams(model), budget=8, placement=placement)
    with_streams = logits_of(drafter, model, monkeypatch)
    without = logits_of(Replayed(drafter.batches), model, monkeypatch)
    assert len(with_streams) == len(without) > 8
    assert all(torch.equal(one, other) for one, other in zip(with_streams, without, strict=True))


class MeddlingRider(rider.StreamRider):
    """Moves one key of the target by a little after its forward."""

    def scored(self, cache, batch, lengths):
        super().scored(cache, batch, lengths)
        cache.keys[0][0, :, 0] += 1e-3


def test_a_rider_that_touches_a_key_is_seen(monkeypatch):
    model = tiny_model("llama")
    drafter = RecordedDrafter(random_streams(model), budget=8)
    drafter.rider.__class__ = MeddlingRider
    with_streams = logits_of(drafter, model, monkeypatch)
    without = logits_of(Replayed(drafter.batches), model, monkeypatch)
    assert not all(torch.equal(one, other) for one, other in zip(with_streams, without, strict=False))


# The output's law.


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("blended", [False, True])
def test_greedy_equals_transformers(target, blended):
    model = tiny_model(target)
    streams = random_streams(model)
    source = stand.BlendedDrafter(budget=16, source=stand.StreamLaws(streams))
    drafter = source if blended else stand.StreamingDrafter(streams, budget=16)
    assert_greedy_equals_transformers(stand.wrap(model, drafter=drafter), model, PROMPTS)


class LyingDrafter(stand.StreamingDrafter):
    """Records flatter laws than it draws from."""

    def draft(self, request):
        drawn = super().draft(request)
        law = np.where(drawn.law > 0, 0.5 * drawn.law + 0.5 / np.maximum((drawn.law > 0).sum(1, keepdims=True), 1), 0)
        columns = {name: getattr(drawn, name) for name in drawn.__dataclass_fields__}
        return DraftBatch(**{**columns, "law": law.astype(np.float32)})


@pytest.mark.long
@pytest.mark.parametrize(("kind", "is_honest"), [(stand.StreamingDrafter, True), (LyingDrafter, False)])
def test_continuations_follow_the_exact_law(kind, is_honest):
    """2,000 of four tokens: drafts begin after the first one."""
    model, counts = small_model(5), Counter()
    streams = random_streams(model, num_layers=1)
    engine = stand.wrap(model, drafter=kind(streams, budget=3 * 500), verifier="traversal")
    for seed in range(4):
        output = engine.generate(
            input_ids=[[3, 1, 3]], num_return_sequences=500, max_new_tokens=4, temperature=1.0, top_k=0, seed=seed,
            stop_token_ids=[2],
        )  # fmt: skip
        counts.update(map(tuple, output.token_ids))
    assert output.stats.num_accepted_draft_tokens > 100
    law = continuation_law(model, [3, 1, 3], LogitsProcessorList(), end=2, tokens=4)
    assert (p_of_continuations(counts, law) > 1e-4) == is_honest, p_of_continuations(counts, law)


# The engine around it.


@pytest.mark.long
@needs_pages
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pages_hold_the_streams_too(placement, monkeypatch):
    """Rows are put back where pages run out, and with `match` no token changes."""
    monkeypatch.setattr(within_pages, "GROWTH", 0)
    model = kernel_model("qwen2")
    settings = {"num_return_sequences": 12, "max_new_tokens": 60, "temperature": 1.0, "top_k": 0, "seed": 3}
    written = []
    for share in (None, 0.3):
        drafter = stand.StreamingDrafter(random_streams(model), budget=24, placement=placement)
        engine = stand.wrap(model, drafter=drafter, verifier="match")
        cap = None if share is None else (share * 12 * 66 + 200) * bytes_per_token(model)
        output = engine.generate(PROMPTS[0], **settings, max_cache_bytes=cap)
        written.append(output.token_ids)
    assert output.stats.num_put_back > 0 and written[0] == written[1]


def test_slots_of_a_step_are_known_before_it():
    streams = random_streams(tiny_model("llama"))
    sizes = np.array([4, 1])
    for placement, slots in (("end", [3, 3]), ("nodes", [12, 3])):
        drafter = stand.StreamingDrafter(streams, budget=3, placement=placement)
        assert drafter.rider.num_slots(sizes).tolist() == slots
        assert drafter.most_slots(2) == 3 + sum(slots)
        source = stand.StreamLaws(streams, placement=placement)
        assert stand.BlendedDrafter(budget=3, source=source).most_slots(2) == 3 + sum(slots)
    assert stand.BlendedDrafter(budget=3).most_slots(2) == 3


@pytest.mark.parametrize(
    "settings",
    [{"budget": -1}, {"placement": "prompt"}, {"temperature": 0.0}, {"num_candidates": 0}, {"num_candidates": 65}],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        stand.StreamingDrafter("streams", **settings)


@pytest.mark.parametrize("sizes", [{"num_streams": 0}, {"num_layers": 0}, {"rank": 0}])
def test_streams_of_no_size_are_refused(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be an integer of at least 1, got 0"):
        Streams(tiny_model("llama"), **sizes)


@pytest.mark.parametrize(("budget", "is_idle"), [(0, True), (8, False)])
def test_streams_do_not_run_where_nothing_is_drafted(budget, is_idle):
    source = stand.StreamLaws(random_streams(tiny_model("llama")), always=True)
    engine = stand.wrap(tiny_model("llama"), drafter=stand.BlendedDrafter(budget=budget, source=source))
    runs, through = [], type(source.rider)._through
    with patch.object(type(source.rider), "_through", lambda *args, **how: runs.append(0) or through(*args, **how)):
        engine.generate(input_ids=[[5, 9]], max_new_tokens=8, temperature=1.0, seed=1)
    assert source.rider.is_idle == is_idle and bool(runs) != is_idle
    assert 0 <= source.rider.last_seconds < 60  # of one run


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_streams_that_always_run_do_so_again_after_steps_without_drafts(placement):
    model, cost = tiny_model("llama"), StepCost(num_rows=1, length=8, tokens=(1, 2, 3), seconds=(1.0, 1.0, 1.0))
    source = stand.StreamLaws(random_streams(model), placement=placement, always=True)
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(costs=stand.CostTable((cost,)), source=source))
    with patch.object(source.rider, "guesses", wraps=source.rider.guesses) as guesses:
        for num_rows in (3, 1):  # three rows fill a step of three tokens
            engine.generate(input_ids=[[5, 9]] * num_rows, max_new_tokens=8, do_sample=False)
            assert bool(guesses.call_count) == (num_rows == 1)


def test_laws_are_those_of_the_rows_that_have_some(monkeypatch):
    source = stand.StreamLaws(random_streams(tiny_model("llama")))
    source.attach(tiny_model("llama"))
    ids, probs = np.arange(GAMMA * 10, dtype=np.int32).reshape(GAMMA, 10), np.full((GAMMA, 10), 0.1, dtype=np.float32)
    monkeypatch.setattr(source.rider, "laws_of", lambda request: [None, (ids, probs), (ids + 7, probs)])
    made = []
    monkeypatch.setattr("stand.drafters.streams.laws.OutsideLaws", type("Laws", (), {
        "ANY_TOKEN": OutsideLaws.ANY_TOKEN, "__init__": lambda self, *given, **settings: made.extend(given),
    }))  # fmt: skip
    source._known_laws(None)
    offsets, parents, _, law_ids, _ = made
    assert offsets.tolist() == [0, 0, GAMMA, 2 * GAMMA] and parents.tolist() == [-1, 0, 1] * 2
    assert np.array_equal(law_ids, np.concatenate([ids, ids + 7]))


@pytest.mark.parametrize("pays", [True, False])
def test_a_step_without_a_run_counts_as_one_without(pays, monkeypatch):
    source, ended = stand.StreamLaws(random_streams(tiny_model("llama"))), []
    engine = stand.wrap(tiny_model("llama"), drafter=stand.BlendedDrafter(budget=8, source=source))
    monkeypatch.setattr(type(source._paying), "pays", lambda self, run, **kind: pays)
    monkeypatch.setattr(type(source._paying), "end_step", lambda self, num_runs: ended.append(num_runs))
    engine.generate(input_ids=[[5, 9]], max_new_tokens=6, temperature=1.0, seed=1)
    assert set(ended) == {int(pays)}


def test_a_rule_for_chains_is_refused():
    with pytest.raises(ValueError, match="block"):
        stand.wrap(
            tiny_model("llama"), drafter=stand.StreamingDrafter(random_streams(tiny_model("llama"))), verifier="block"
        )
