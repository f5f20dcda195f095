"""The flags of the build: those that a compiler does not take are left out."""

import os
import runpy
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parent.parent / "setup.py"
pytestmark = pytest.mark.skipif(not SETUP.exists() or sys.platform != "linux", reason="needs the source, on Linux")
OF_GCC = (
    "-fno-schedule-insns2",
    "-fvect-cost-model=dynamic",
    "-fno-caller-saves",
    "-fno-thread-jumps",
    "-fno-ipa-cp-clone",
    "-fno-reorder-blocks-and-partition",
    "-fno-tree-ch",
    "-fno-tree-dominator-opts",
    "-fno-tree-pre",
    "--param=inline-unit-growth=12",
    "--param=inline-unit-growth=5",
    "-Wl,--no-ld-generated-unwind-info",
)
COMPILERS = {"gcc": (), "clang": OF_GCC, "clang with GNU's linker": OF_GCC[:-1], "gcc with lld": OF_GCC[-1:]}


def flags(monkeypatch, compiler: str) -> set[str]:
    """What the build gives to any module, with a compiler of that name."""
    setuptools, build = pytest.importorskip("setuptools"), pytest.importorskip("Cython.Build")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(build, "cythonize", lambda extensions, **_: extensions)
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("STAND_DEBUG", raising=False)
    monkeypatch.chdir(SETUP.parent)
    extensions = runpy.run_path(str(SETUP))["EXTENSIONS"]
    return {flag for each in extensions for flag in (*each.extra_compile_args, *each.extra_link_args)}


@pytest.mark.parametrize("name", COMPILERS)
def test_a_flag_that_the_compiler_or_its_linker_refuses_is_left_out(name, tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    refuse = "".join(f'case " $* " in *" {flag} "*) exit 1;; esac\n' for flag in COMPILERS[name])
    compiler.write_text(f"#!/bin/sh\n{refuse}exit 0\n", encoding="utf-8")
    compiler.chmod(0o755)
    found = flags(monkeypatch, f"{os.fspath(compiler)} --with-an-option")
    assert {flag for flag in OF_GCC if flag in found} == set(OF_GCC) - set(COMPILERS[name])
    assert {"-O2", "-Os", "-ftree-vectorize", "-ffp-contract=off"} <= found


def test_without_a_compiler_the_build_is_the_one_to_say_so(monkeypatch):
    assert flags(monkeypatch, "no-such-compiler").isdisjoint(OF_GCC)
