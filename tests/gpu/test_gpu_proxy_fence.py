"""Fences between asynchronous copies and wgmma: in what Triton writes itself (3.7.1) and where they are added."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs

from stand.gpu.kernels import proxy_fence
from stand.gpu.kernels.proxy_fence import add_fences, fences_added

FENCE = "fence.proxy.async.shared::cta;"
LOOP = """
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
    cp.async.commit_group;
    cp.async.wait_group \t2;
    bar.sync \t0;
    wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r3}, %rd2, %rd3, 1, 1, 1, 0, 0;
    cp.async.wait_all;
"""
PTX = """
from compile_kernels import compile_specimen
from specimens.attention import of_attention
for specimen in of_attention():
    if specimen.name == "{name}":
        print(compile_specimen(specimen, 90)[0].asm["ptx"])
"""


def num_unfenced(ptx: str) -> int:
    """Products that may read what copies have brought since the last fence; -1 where there are none of either."""
    unfenced, seen, is_fenced = 0, set(), True
    for name in re.findall(r"cp\.async\.wait|fence\.proxy\.async|wgmma\.mma_async", ptx):
        seen.add(name)
        is_fenced = name == "fence.proxy.async" or (is_fenced and name != "cp.async.wait")
        unfenced += name == "wgmma.mma_async" and not is_fenced
    return unfenced if {"cp.async.wait", "wgmma.mma_async"} <= seen else -1


def test_every_wait_gets_a_fence_before_its_barrier():
    fenced = add_fences(LOOP)
    assert fenced.count(FENCE) == 2 and num_unfenced(LOOP) == 1 and num_unfenced(fenced) == 0
    assert re.search(r"wait_group \t2;\s+fence[^;]+;\s+bar\.sync", fenced)
    assert fenced.replace(f"\n\t{FENCE}", "") == LOOP


@pytest.mark.parametrize("product", ["mma.sync.aligned.m16n8k16", "add.f32"])
def test_other_kernels_stay_as_they_are(product):
    ptx = LOOP.replace("wgmma.mma_async.sync.aligned.m64n32k16", product)
    assert add_fences(ptx) == ptx


@pytest.mark.long
@pytest.mark.parametrize("name", ["7B small tiles", pytest.param("Gemma 2", marks=pytest.mark.slow)])
def test_compiled_attention_has_its_fences(name, tmp_path):
    """By the Triton at hand, in the way that launches take."""
    source = tmp_path / "ptx.py"
    source.write_text(PTX.format(name=name), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2] / "scripts")
    result = subprocess.run([sys.executable, str(source)], capture_output=True, text=True, env=environment, timeout=120)
    kernels = result.stdout.split(".version")[1:]
    assert len(kernels) == 1, result.stderr
    assert num_unfenced(kernels[0]) == 0 < num_unfenced(kernels[0].replace("fence.proxy.async", ""))


class Backend:
    """Of Triton, as far as a hook sees it."""

    def compile(self) -> str:
        stages = {"ptx": lambda source, metadata: source}
        hook = knobs.runtime.add_stages_inspection_hook
        if hook is not None:
            hook(self, stages, "options", "language", 90)
        return stages["ptx"](LOOP, {})


@pytest.fixture
def old_triton(monkeypatch):
    monkeypatch.setattr(proxy_fence, "MUST_ADD_FENCES", True)
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)


def test_stages_are_replaced_within_alone(old_triton):
    with fences_added():
        assert Backend().compile() == add_fences(LOOP)
    assert Backend().compile() == LOOP and knobs.runtime.add_stages_inspection_hook is None


def test_nothing_is_replaced_where_triton_has_the_fences(old_triton, monkeypatch):
    monkeypatch.setattr(proxy_fence, "MUST_ADD_FENCES", False)
    with fences_added():
        assert knobs.runtime.add_stages_inspection_hook is None


def test_another_hook_is_asked_too_and_comes_back(old_triton, monkeypatch):
    asked = []

    def other(*given):
        asked.append(given)
        return ("other key", "17")

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", other)
    with pytest.raises(ZeroDivisionError), fences_added():
        assert Backend().compile() == add_fences(LOOP)
        key, digest = knobs.runtime.add_stages_inspection_hook()  # as Triton 3.7.0 asks
        assert "other key" in key and "17" in digest and FENCE in key and FENCE in digest
        raise ZeroDivisionError
    assert knobs.runtime.add_stages_inspection_hook is other
    assert [len(given) for given in asked] == [5, 0]


def test_threads_do_not_take_each_others_hook_away(old_triton):
    """The first one to end must not leave the second one without fences."""
    entered, may_end, outcome = threading.Event(), threading.Event(), []

    def first():
        with fences_added():
            entered.set()
            may_end.wait(10)

    def second():
        with fences_added():
            outcome.append(Backend().compile())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert outcome == [add_fences(LOOP)] and knobs.runtime.add_stages_inspection_hook is None
