"""Tests that interpret kernels are skipped where the installed interpreter cannot run, and say so."""

import importlib.util

import pytest

NEEDS_NO_INTERPRETER = {
    "test_gpu_packing", "test_gpu_work_list", "test_gpu_compile", "test_gpu_replay", "test_gpu_device",
}  # fmt: skip


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("triton") is None:
        return
    from stand.gpu.kernels.launch import interpreter_obstacle

    obstacle = interpreter_obstacle()
    if obstacle is None:
        return
    for item in items:
        if item.path.parent.name == "gpu" and item.path.stem not in NEEDS_NO_INTERPRETER:
            item.add_marker(pytest.mark.skip(reason=obstacle))
