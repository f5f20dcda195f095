"""Runs trials in child processes: one that crashes or hangs is counted, and the next ones go on in a new child."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from abuse_parts.trial import WRONG, Outcome, Trial, judge

BATCH = 500  # trials of a child
LIMIT_S = 60.0  # of a trial


def run_all(trials: Iterable[Trial], on_outcome: Callable[[Trial, Outcome], None], *, limit_s: float = LIMIT_S) -> None:
    """Every trial in order; `on_outcome` hears of each as it ends."""
    trials = iter(trials)
    while batch := list(islice(trials, BATCH)):
        while batch:
            batch = batch[_run_child(batch, on_outcome, limit_s) :]


def _run_child(batch: Sequence[Trial], on_outcome: Callable[[Trial, Outcome], None], limit_s: float) -> int:
    """How many of the batch one child did; what it died of is the outcome of the last one."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _report(batch, write_end)
    os.close(write_end)
    try:
        num_done, is_over = _follow(batch, read_end, on_outcome, limit_s)
    except BaseException:  # an interrupt: a child that goes on would write into a folder that is being removed
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    if not is_over:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0 and num_done == len(batch):
        return num_done
    died = f"hung for {limit_s:g} s" if status == -signal.SIGKILL else f"crashed with exit status {status}"
    on_outcome(batch[min(num_done, len(batch) - 1)], Outcome(WRONG, died))
    return num_done + 1


def _follow(
    batch: Sequence[Trial], read_end: int, on_outcome: Callable[[Trial, Outcome], None], limit_s: float
) -> tuple[int, bool]:
    """How many trials of the batch the child told of, and whether it has ended: else one of them takes too long."""
    num_done, text = 0, b""
    with open(read_end, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], limit_s)[0]:
            new = pipe.read(1 << 16)
            if not new:
                return num_done, True
            *lines, text = (text + new).split(b"\n")
            for line in lines:
                on_outcome(batch[num_done], Outcome(*json.loads(line)))
                num_done += 1
    return num_done, False


def _report(batch: Sequence[Trial], write_end: int) -> None:
    """In the child: one line per trial, and no way out but this one."""
    status = 1
    try:
        for trial in batch:
            outcome = judge(trial)
            os.write(write_end, json.dumps([outcome.verdict, outcome.detail[:400]]).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)
