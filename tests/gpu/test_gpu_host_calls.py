"""How much Python a step costs beside drafting and the device: functions called per step, which no other load changes.

The device decides at once, and drafting is not counted.
"""

import gc
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from plain_kernels import use_plain_kernels
from tiny_models import kernel_model

import stand
from stand.backend import CapturedBackend
from stand.gpu import captured_step, swapped_forwards
from stand.gpu.runner import Program
from stand.trees import DraftBatch, DraftTree

WIDTH = 8
SHORT, LONG = 20, 60  # steps of the two calls whose difference is counted


class IdleRunner:
    """In place of a device: every row keeps the path to its last node, and goes on with token 5."""

    def record(self, step, best):
        output = step.__self__._output
        return Program(lambda: self.decide(output), lambda: None)

    def decide(self, output):
        host = output._verdict.host
        host["stops"][: len(self.stops)] = self.stops
        host["next_tokens"][:] = 5

    def step(self, program):
        program.step()

    def wait(self, program):
        pass

    def wait_for_step(self):
        pass

    def wait_for_best(self):
        pass

    def forget(self):
        pass


class Canned(stand.Drafter):
    """The same tree of two children per node for every row, made beforehand."""

    def __init__(self, num_rows: int, num_nodes: int):
        parents = ((np.arange(num_nodes) + 1) // 2 - 1).astype(np.int32)
        tokens = np.arange(num_nodes, dtype=np.int32) % WIDTH
        ids = np.tile(np.arange(WIDTH, dtype=np.int32), (num_nodes, 1))
        law = np.full((num_nodes, WIDTH), 1 / WIDTH, dtype=np.float32)
        self.batch = DraftBatch.concatenate([DraftTree(tokens, parents, ids, law)] * num_rows)
        self.last = self.batch.offsets[1:].astype(np.int64) - 1

    def draft(self, request):
        profiler = sys.getprofile()
        sys.setprofile(None)
        self.batch.token_ids[self.batch.offsets[:-1]] = [history[-1] for history in request.histories]
        sys.setprofile(profiler)
        return self.batch


def is_compiled_here(function) -> bool:
    """Whether it is of this project's compiled modules: what they do is not Python."""
    owner = getattr(function, "__self__", None)
    modules = (getattr(function, "__module__", None), type(owner).__module__)
    return any((module or "").startswith("stand.") for module in modules)


def calls_per_step(monkeypatch, verifier: str, num_rows: int, num_nodes: int) -> float:
    """Functions of Python, and of C beyond this project's own, that are called in a step of `num_rows` rows of
    `num_nodes` nodes; 1 node: no draft."""
    runner, drafter = IdleRunner(), Canned(num_rows, num_nodes)
    runner.stops = drafter.last
    monkeypatch.setattr(captured_step, "runner_for", lambda device: runner)
    engine = stand.wrap(kernel_model("qwen2"), verifier=verifier, backend="sdpa", drafter=drafter)
    engine.backend = CapturedBackend(engine.model, "idle")
    most = 1 + int(drafter.batch.depths.max())  # tokens per step

    def counted(num_steps: int) -> int:
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event == "call" or (event == "c_call" and not is_compiled_here(argument))

        settings = {"num_return_sequences": num_rows, "max_new_tokens": num_steps * most, "stop_token_ids": []}
        gc.collect()
        gc.disable()  # what it calls on its way is not the step's
        sys.setprofile(count)
        try:
            output = engine.generate(
                input_ids=[[3, 4, 5]], temperature=0.6, top_k=0, seed=0, learn=False, draft=num_nodes > 1, **settings
            )
        finally:
            sys.setprofile(None)
            gc.enable()
        assert output.stats.num_forwards == num_steps
        return calls

    counted(SHORT)  # records
    return (counted(LONG) - counted(SHORT)) / (LONG - SHORT)


# Counted with Python 3.11, whose comprehensions are calls, and less than one more. About 40 of them are for a row that
# gets another page: every tenth step for the first, three of four for 16 rows of 7 nodes, whose rows grow by 3 tokens a
# step. Two, and three with drafts, are for places where processes that share a model would agree. Up to six are checks
# of arguments in plain Python.
MOST_CALLS = {
    ("traversal", 1, 81): 139, ("match", 1, 1): 105, ("traversal", 16, 7): 269, ("match", 16, 7): 265,
    ("match", 16, 1): 225,
}  # fmt: skip


@pytest.mark.parametrize(("verifier", "num_rows", "num_nodes"), MOST_CALLS)
def test_few_functions_are_called_per_step(monkeypatch, verifier, num_rows, num_nodes):
    calls = calls_per_step(monkeypatch, verifier, num_rows, num_nodes)
    assert 30 < calls <= MOST_CALLS[verifier, num_rows, num_nodes]


def test_more_python_per_row_is_noticed(monkeypatch):
    """Control: a copy more for every row."""
    before = calls_per_step(monkeypatch, "match", 16, 7)
    of = stand.row.LiveRows.of
    monkeypatch.setattr(stand.row.LiveRows, "of", lambda rows: ([row.history.copy() for row in rows], of(rows))[1])
    assert calls_per_step(monkeypatch, "match", 16, 7) > before + 16


class BodyRunner(IdleRunner):
    """Runs every body, as a CPU does."""

    def record(self, step, best):
        output = step.__self__._output
        return Program(lambda: (step(), self.decide(output)), lambda: None)


@pytest.mark.parametrize(("runner", "most"), [(IdleRunner(), 0), (BodyRunner(), 12)], ids=["replays", "bodies"])
def test_a_stream_swaps_forwards_where_bodies_run_alone(monkeypatch, runner, most):
    """Between two of its steps the model is as it was, and swapping takes milliseconds. Control: bodies that run."""
    drafter, swapped, swap = Canned(1, 1), [], swapped_forwards.tree_attention
    runner.stops = drafter.last
    use_plain_kernels(monkeypatch)
    monkeypatch.setattr(captured_step, "runner_for", lambda device: runner)
    monkeypatch.setattr(swapped_forwards, "tree_attention", lambda *given: swapped.append(1) or swap(*given))
    engine = stand.wrap(kernel_model("qwen2"), verifier="match", backend="sdpa", drafter=drafter)
    engine.backend = CapturedBackend(engine.model, "as on a GPU")
    call, _ = engine._new_call(None, None, input_ids=[[3, 4, 5]], draft=False, learn=False, max_new_tokens=12)
    with torch.inference_mode():
        assert sum(1 for _ in call.steps()) == 12
    assert len(swapped) == most
