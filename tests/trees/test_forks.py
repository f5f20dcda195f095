"""Forks while threads are at work: the child finds every lookup whole and unlocked."""

import os
import subprocess
import sys

import pytest

FORKS = """
import os, signal, sys, threading, warnings
import numpy as np
from stand.trees import BlendedLookup, LookupTree, TreeShape

warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: that is the point
tokens = np.random.default_rng(0).integers(0, 500, 4_000).astype(np.int32)
keys = {"seed": 0, "rows": [0], "steps": [0]}
blended, tree = BlendedLookup(), LookupTree()
is_over = False

def learn(lookup):
    while not is_over:
        lookup.learn([], tokens)

def draft():
    while not is_over:
        blended.draft([tokens[:50]], 500, **keys)

threads = [threading.Thread(target=learn, args=(blended,)), threading.Thread(target=learn, args=(tree,)),
           threading.Thread(target=draft)]
for thread in threads:
    thread.start()
failures = 0
for _ in range(8):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        blended.check()
        blended.learn([], tokens[:100])
        tree.learn([], tokens[:100])
        fine = blended.draft([tokens[:50]], 9, **keys).num_nodes == 10 and len(tree) > 100
        fine = fine and tree.draft([tokens[:50]], TreeShape.chain(2), **keys).num_nodes > 1
        BlendedLookup().learn([], tokens[:9])
        os._exit(0 if fine else 1)
    failures += os.waitpid(child, 0)[1] != 0
is_over = True
for thread in threads:
    thread.join()
print(failures)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_of_a_busy_process_can_go_on():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.split()) == (0, ["0"]), done.stderr


MAKERS = """
import os, sys, threading, warnings
from stand.trees import LookupTree

warnings.simplefilter("ignore", DeprecationWarning)
failures = []
sys.unraisablehook = lambda unraisable: failures.append(unraisable.exc_value)
kept = [LookupTree() for _ in range(300)]
is_over = False

def make():
    while not is_over:
        made = [LookupTree() for _ in range(50)]

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=make) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(40):
    child = os.fork()
    if child == 0:
        LookupTree().learn([], [1, 2])
        os._exit(0 if not failures and kept[0].lookup([1]) is None else 1)
    if os.waitpid(child, 0)[1] != 0:
        failures.append(child)
is_over = True
for thread in threads:
    thread.join()
print(len(failures))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_lookups_may_be_made_while_another_thread_forks():
    done = subprocess.run([sys.executable, "-c", MAKERS], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.split()) == (0, ["0"]), done.stderr
