"""Versions of everything that a figure of a GPU may depend on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str | None]:
    """Of everything that a figure may depend on; None where there is none."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda, "driver": driver_version()}
    found["torch"] = str(torch.__version__)  # with its build, which the package's own record may leave out
    for package in ("triton", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def driver_version() -> str | None:
    """Of the first GPU, as nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return (answer.stdout.splitlines() or [None])[0]
