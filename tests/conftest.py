"""One thread: the suite's matrices are tiny, and two busy threads are slower than one.

Triton chooses between its interpreter and its compiler when a kernel is decorated, so the choice comes before any
import: the compiler with `STAND_PTX=90`, whose kernels run on the PTX machine of tests/oracles.

No steps are timed: drafts have fixed budgets, and nothing is written to the home folder.
"""

import gc
import importlib.util
import os
import sys

import pytest
from thinned import files_in_turn, share, thinned

os.environ.setdefault("TRITON_INTERPRET", "0" if "STAND_PTX" in os.environ else "1")
os.environ["STAND_COSTS"] = "off"

try:
    import torch
except ModuleNotFoundError:  # the drafter alone is installed; see scripts/check_wheel.py
    pass
else:
    torch.set_num_threads(1)

if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
    from quick_interpreter import make_quick

    make_quick()


def pytest_collection_finish(session):
    """What was imported stays: the collector need not look at it again and again."""
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--every", type=share, default=1, help="take the N-th part of the cases of each test")
    parser.addoption("--turn", type=int, default=0, help="which part that is")


@pytest.hookimpl(trylast=True)  # of what -m and -k have left
def pytest_collection_modifyitems(config, items):
    every, turn = config.getoption("--every"), config.getoption("--turn")
    tests = [((item.path, item.cls, getattr(item, "originalname", item.name)), item.nodeid) for item in items]
    kept = thinned(tests, every=every, turn=turn)
    if every > 1:
        long = {item.nodeid: item.path.name for item in items if item.get_closest_marker("long")}
        in_turn = files_in_turn(long.values(), turn=turn)
        kept -= {name for name, file in long.items() if file not in in_turn}
    if left_out := [item for item in items if item.nodeid not in kept]:
        items[:] = [item for item in items if item.nodeid in kept]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def interpreter():
    """For tests that interpret kernels: where the installed interpreter cannot run, they are skipped and say so."""
    from stand.gpu.kernels.launch import interpreter_obstacle

    if obstacle := interpreter_obstacle():
        pytest.skip(obstacle)


ABOUT_CHECKS = {
    "test_gpu_features",
    "test_gpu_self_check",
    "test_refused_models",
}  # files whose tests have everything checked


@pytest.fixture(scope="session")
def passed_checks():
    from remembered_checks import PassedChecks

    return PassedChecks()


@pytest.fixture(autouse=True)
def quick_wrap(request):
    """Models that have passed the checks of `wrap` are not checked again. What passes where a test may have patched
    something is remembered for its own file alone."""
    if "stand.wrapping" not in sys.modules or request.path.stem in ABOUT_CHECKS:
        yield
        return
    passed = request.getfixturevalue("passed_checks")
    with passed.skipped(own=request.path.stem if "monkeypatch" in request.fixturenames else ""):
        yield
