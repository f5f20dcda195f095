"""Requests that come while captured steps run: the tokens of eager runs, within the memory that is allowed."""

import pytest

pytest.importorskip("triton")

from concurrent.futures import Future

import numpy as np
from plain_kernels import use_plain_kernels
from plain_scan import use_plain_scans
from recurrent_models import RECURRENT, recurrent_kernel_model
from tiny_models import kernel_model

import stand
from stand.backend import CapturedBackend
from stand.forward.cache.key_shape import key_shape
from stand.gpu.packets import page_table
from stand.gpu.pooled_step import PooledStep
from stand.scheduling.within_pages import WithinPages

PROMPTS = [np.random.default_rng(1).integers(3, 40, length).tolist() for length in (75, 3, 20, 64, 5, 90)]
SETTINGS = {"max_new_tokens": 40, "temperature": 1.0, "top_k": 0, "seed": 3, "stop_token_ids": []}
PATIENCE = 120  # seconds


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    use_plain_kernels(monkeypatch)
    use_plain_scans(monkeypatch)
    monkeypatch.setattr(PooledStep, "starting", None)  # no eager step runs in a captured backend's calls


def engine_of(model: object, *, captured: bool = True) -> stand.Engine:
    engine = stand.wrap(model, verifier="match", drafter=stand.BlendedDrafter(budget=24), backend="sdpa", fuse=False)
    if captured:
        engine.backend = CapturedBackend(engine.model, "for this test")
    return engine


def decoded(engine: stand.Engine, **settings) -> dict[int, list[int]]:
    """Tokens by row, where each further request comes while those before are decoded."""
    coming, futures = iter(PROMPTS[1:]), []

    def next_comes(row: int, token_ids: list[int]) -> None:
        futures.extend(run.submit(prompt) for prompt in [next(coming, None)] if prompt is not None)

    def tokens_of(future: Future) -> list[tuple[int, list[int]]]:
        return [(one.row, one.token_ids) for one in future.result(PATIENCE)]

    with engine.open_run(**SETTINGS, **settings) as run:
        futures.append(run.submit(PROMPTS[0], on_tokens=next_comes))
        return dict(pair for future in futures for pair in tokens_of(future))  # they become more meanwhile


@pytest.mark.parametrize("max_rows", [1, 3, 16])
def test_tokens_are_those_of_an_eager_run(max_rows):
    wanted = {
        one.row: one.token_ids for one in engine_of(kernel_model("qwen2"), captured=False).run(PROMPTS, **SETTINGS)
    }
    engine = engine_of(kernel_model("qwen2"))
    assert decoded(engine, max_rows=max_rows) == wanted and str(engine.backend) == "triton"


def test_two_runs_of_other_laws_have_steps_of_their_own():
    engine, plain = engine_of(kernel_model("qwen2")), engine_of(kernel_model("qwen2"), captured=False)
    hot = {**SETTINGS, "temperature": 2.0}
    with engine.open_run(max_rows=2, **SETTINGS) as cool_run, engine.open_run(max_rows=2, **hot) as hot_run:
        futures = [run.submit(prompt) for prompt in PROMPTS for run in (cool_run, hot_run)]
        found = [future.result(PATIENCE)[0].token_ids for future in futures]
    for first, settings in enumerate((SETTINGS, hot)):
        assert found[first::2] == [
            one.token_ids for one in sorted(plain.run(PROMPTS, **settings), key=lambda one: one.row)
        ]
    assert str(engine.backend) == "triton"


@pytest.mark.parametrize("family", [family for family in ("qwen3_5", "lfm2") if family in RECURRENT])
@pytest.mark.parametrize("places", [2, 12])
def test_states_of_many_places_leave_a_row_its_room(family, places, monkeypatch):
    """Nobody knows how many rows come, so places are reckoned with for as many as may. Under a cap that holds the
    states of few, they become fewer."""
    unsettled, unsettle = [], WithinPages.unsettle
    monkeypatch.setattr(WithinPages, "unsettle", lambda within: (unsettled.append(1), unsettle(within)))
    model = recurrent_kernel_model(family)
    engine, plain = engine_of(model), engine_of(model, captured=False)
    shape, page = key_shape(model), page_table.PAGE_SIZE * key_shape(model).token_bytes
    needed = -(-(90 + 40 + 256) // page_table.PAGE_SIZE) + 1
    cap = needed * page + 3 * max(shape.row_bytes, page)
    wanted = {one.row: one.token_ids for one in plain.run(PROMPTS, **SETTINGS)}
    assert decoded(engine, max_rows=places, max_cache_bytes=cap) == wanted
    assert str(engine.backend) == "triton" and engine.backend.held_bytes <= cap
