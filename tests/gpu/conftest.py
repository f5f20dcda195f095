"""How kernels run here: in Triton's interpreter, or, with `STAND_PTX=90` (or 80), compiled on the PTX machine.

Tests that cannot run in one of the two are skipped there, and say so.
"""

import importlib.util
import os

import pytest

NEEDS_NO_INTERPRETER = {
    "test_gpu_packing", "test_gpu_work_list", "test_gpu_compile", "test_gpu_replay", "test_gpu_device", "test_gpu_ptx",
}  # fmt: skip
NEEDS_INTERPRETER = {
    "test_cpu_tensors_need_the_interpreter", "test_an_interpreter_that_cannot_run_is_named",
    "test_sums_that_overflow_and_functions_within_functions_give_the_same_bits",
}  # fmt: skip
LONG_TO_COMPILE = {"test_room_decides_nothing"}  # four more sizes of the filter, half a minute
CAPABILITY = os.environ.get("STAND_PTX")
PADDED = {"_rope_and_store"}  # tokens of padding share a slot that nobody reads


@pytest.hookimpl(tryfirst=True)  # before those with a marker are chosen
def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("triton") is None:
        return
    from stand.gpu.kernels.launch import interpreter_obstacle

    obstacle = None if CAPABILITY else interpreter_obstacle()
    for item in items:
        if item.path.parent.name != "gpu":
            continue
        if obstacle and item.path.stem not in NEEDS_NO_INTERPRETER:
            item.add_marker(pytest.mark.skip(reason=obstacle))
        if CAPABILITY and item.originalname in NEEDS_INTERPRETER:
            item.add_marker(pytest.mark.skip(reason="is about the interpreter; STAND_PTX asks for compiled kernels"))
        if CAPABILITY and item.originalname in LONG_TO_COMPILE:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def compiled(request):
    """The machine's driver while kernels are compiled, else None."""
    if not CAPABILITY:
        yield None
        return
    from ptx.driver import compiled_kernels

    from stand.gpu.kernels import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "is_interpreted", lambda kernel: True)  # CPU tensors are served
        patch.setattr(launch, "interpreter_obstacle", lambda: None)
        cache = request.config.rootpath / "build" / "ptx"
        with compiled_kernels(int(CAPABILITY), cache, may_collide=PADDED) as driver:
            yield driver
