"""Kernels of every module compile for sm_90 without a GPU, and attention of a 7B model for sm_80 too; it keeps its
registers.

Among the slow tests all of them compile for both.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

from shared_results import found_once
from specimens.attention import of_attention
from specimens.registry import SPECIMENS
from thinned import thinned

import stand.gpu.kernels
from stand.gpu.packets.step_size import SUPPORT_SIZES
from stand.gpu.tuning.attention_tiles import (
    BLOCKS_16_BIT,
    BLOCKS_FLOAT32,
    LATENT_16_BIT,
    LATENT_FLOAT32,
    NARROW_VALUES_16_BIT,
    Blocks,
    Limits,
)
from stand.gpu.tuning.product_tiles import TILES

pytestmark = pytest.mark.long

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
OTHERS = [module for module in SPECIMENS if module != "attention"]
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # what one block may have
SINGLE = """
import json
from compile_kernels import compile_specimen, describe
import triton, triton.language as tl
from specimens.modules import of_product
from specimens.specimen import Specimen

@triton.jit
def plus(numbers, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(numbers + places, tl.load(numbers + places) + 1)

@triton.jit
def shifted(numbers, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(numbers + places, tl.load(numbers + places) << 1)

def line(kernel):
    return describe("one", Specimen("one", kernel, {"numbers": "*fp32"}, {"SIZE": 64}), 90)

ptx = compile_specimen(of_product()[0], 90)[0].asm["ptx"]
print(json.dumps({"plus": line(plus), "shifted": line(shifted), "ptx": ptx}))
"""


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPTS)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, **options)


def compiled(*options: str) -> list[dict]:
    result = run(str(SCRIPTS / "compile_kernels.py"), *options)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "removed in Triton" not in result.stderr, result.stderr[-4000:]  # what it warns of, from 3.9 on
    return json.loads(result.stdout.splitlines()[-1])["kernels"]


def check_all(kernels: list[dict], target: str, *, every: int) -> None:
    """There are kernels of every module, or of the N-th part, each within the shared memory that one block may have."""
    sources = Path(stand.gpu.kernels.__file__).parent.rglob("*.py")
    modules = {path.stem for path in sources} - {"__init__", "cut", "key_blocks", "launch", "proxy_fence"}
    chosen = [kernel for kernel in kernels if kernel["target"] == target]
    found = {kernel["module"] for kernel in chosen}
    assert modules == {"attention", *OTHERS} and found <= modules
    least = len(modules) if every == 1 or target != "sm_90" else 1 + -(-len(OTHERS) // every)
    assert len(found) >= least
    for kernel in chosen:
        assert kernel["shared_bytes"] <= SHARED_BYTES[target], kernel


@pytest.fixture(scope="module", params=["7B", pytest.param("", marks=pytest.mark.slow)], ids=["some", "all"])
def kernels(request, tmp_path_factory) -> list[dict]:
    """Of attention and of sm_80 those with this in their names; of the filters, which compile longest, one way. With
    `--every` the N-th part of the other modules."""
    if not request.param:
        return compiled()
    every, turn = (request.config.getoption(f"--{name}") for name in ("every", "turn"))
    others = sorted(thinned((("module", name) for name in OTHERS), every=every, turn=turn))
    return found_once(tmp_path_factory, "kernels", partial(compiled_of, others, request.param))


def compiled_of(others: list[str], of_attention: str) -> list[dict]:
    names = ["find_cut_top_k" if name == "filter" else name for name in others]
    of_hopper = compiled("--targets", "90", "--only", ",".join([of_attention, *names]))
    return of_hopper + compiled("--targets", "80", "--only", of_attention)


def of_module(kernels: list[dict], module: str) -> list[dict]:
    """Skips where it is none of those of this turn."""
    found = [kernel for kernel in kernels if kernel["module"] == module]
    return found or pytest.skip(f"{module} is none of the modules of this turn")


def test_everything_compiles_within_shared_memory(kernels, request):
    """For sm_80 too among the slow tests."""
    targets = {kernel["target"] for kernel in kernels if kernel["module"] != "attention"}
    assert "sm_90" in targets
    for target in targets:
        check_all(kernels, target, every=request.config.getoption("--every"))


SPILLED = {  # bytes
    ("7B small tiles", "sm_80"): 16,
    ("7B large tiles sm_80", "sm_80"): 16,
    ("7B float32", "sm_90"): 72,
    ("MLA latents", "sm_80"): 32,
    ("MLA latents", "sm_90"): 24,
    ("MLA latents sm_89", "sm_80"): 8,  # used on sm_86 and sm_89
}


def test_attention_keeps_its_registers(kernels):
    """No more than known where a choice of blocks is in use: "... sm_80" replaces its namesake there, and
    the rooms that pages are compared with have Hopper's blocks."""
    attention = [kernel for kernel in kernels if kernel["module"] == "attention"]
    named = {kernel["specimen"] for kernel in attention}
    for kernel in attention:
        for_hopper = kernel["specimen"] == "7B rooms" or f"{kernel['specimen']} sm_80" in named
        is_replaced = kernel["target"] == "sm_80" and for_hopper
        assert is_replaced or kernel["spill_bytes"] <= SPILLED.get((kernel["specimen"], kernel["target"]), 0), kernel


def test_residual_draws_spill_nothing(kernels):
    """Supports of up to 64 ids: compared with a chunk all at once they would cost kilobytes per thread."""
    residual = [kernel for kernel in of_module(kernels, "draw") if kernel["specimen"].startswith("residual")]
    targets = {kernel["target"] for kernel in residual}
    assert len(residual) == len(targets) * (1 + len(SUPPORT_SIZES)) > 0
    assert not any(kernel["spill_bytes"] for kernel in residual)


def test_pages_keep_the_buffers_of_rooms(kernels):
    """A page is looked up a block ahead; looked up in its own block, it would take a stage of the pipeline.

    Where Triton does not see that 16 bytes lie together, nothing is copied ahead: 3.8 and 3.9, through `tl.where`.
    """
    for target in ("sm_80", "sm_90"):
        own = {kernel["specimen"]: kernel["shared_bytes"] for kernel in kernels if kernel["target"] == target}
        assert own["7B large tiles"] == own["7B rooms"] > 100_000


def test_tiles_ask_for_the_shared_memory_that_their_table_says(kernels):
    assert num_as_in_the_table(kernels) >= 8


@pytest.mark.parametrize("only", ["MLA latents sm_89", pytest.param("attention", marks=pytest.mark.slow)])
def test_tiles_of_sm_100_ask_for_what_their_table_says(only):
    """Its own instructions keep operands otherwise than those of sm_90."""
    kernels = [kernel for kernel in compiled("--targets", "100", "--only", only) if kernel["module"] == "attention"]
    assert num_as_in_the_table(kernels) >= max(len(kernels) - 4, 1)  # four are not used there
    for kernel in kernels:
        assert kernel["matrix"] == ("-" if "float32" in kernel["specimen"] else "tcgen05"), kernel


def num_as_in_the_table(kernels: list[dict]) -> int:
    """How many kernels of attention are in use on their target, each of which asks for what the tables say."""
    constants = {specimen.name: specimen for specimen in of_attention() if "BLOCK_M" in specimen.constants}
    compared = 0
    for kernel in kernels:
        if kernel["module"] == "attention" and kernel["specimen"] in constants:
            specimen = constants[kernel["specimen"]]
            tiles = [tile for tile in offered_to(specimen) if is_tile(specimen, tile)]
            (asked,) = {Limits(int(kernel["target"][3:]), 0).needs(tile) for tile in tiles}
            assert asked in (0, kernel["shared_bytes"]), kernel  # 0: not used on this target
            compared += asked > 0
    return compared


def offered_to(specimen) -> tuple[Blocks, ...]:
    """All choices of its row of the tables."""
    sizes = specimen.constants["HEAD_SIZE"], specimen.constants["VALUE_SIZE"]
    tables = (LATENT_FLOAT32, LATENT_16_BIT) if specimen.constants["IS_LATENT"] else (BLOCKS_FLOAT32, BLOCKS_16_BIT)
    table = tables[specimen.signature["query"] != "*fp32"]
    return sum(NARROW_VALUES_16_BIT if sizes == (192, 128) else table[sizes[0]], ())


def is_tile(specimen, tile) -> bool:
    blocks = (specimen.constants["BLOCK_M"], specimen.constants["BLOCK_N"])
    return (*blocks, specimen.num_stages) == (tile.rows, tile.keys, tile.num_stages)


def test_attention_uses_the_tensor_cores(kernels):
    for kernel in kernels:
        if kernel["module"] == "attention":
            expected = {"sm_80": "mma", "sm_90": "wgmma"}[kernel["target"]]
            assert kernel["matrix"] == ("-" if "float32" in kernel["specimen"] else expected), kernel


def test_no_operand_in_registers_is_overwritten_while_it_may_be_read(kernels):
    """What assemblers before CUDA 13.3 can do (triton #11781)."""
    products = [kernel for kernel in kernels if kernel.get("register_products")]
    assert len(products) >= 3 and all(kernel["module"] == "attention" for kernel in products)
    assert not any(kernel["overwritten"] for kernel in products)


LOOP = """
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR4], R88, gsb0 ;
        /*0020*/                   {first} ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/                   FADD R128, R114, R111 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, R128, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0060*/                   {second} ;
        /*0070*/              @P3 BRA `(.L_x_1) ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0090*/                   MOV R129, R3 ;
"""


@pytest.mark.parametrize(
    ("first", "second", "is_wrong"),
    [
        ("NOP", "STS.128 [R130], R128", False),
        ("NOP", "IMAD.MOV.U32 R131, RZ, RZ, R4", True),
        ("NOP", "@!P1 LDS.128 R125, [R2]", True),
        ("NOP", "SHFL.BFLY PT, R127, R118, 0x2, 0x1f", False),
        ("IMAD.WIDE R127, R2, 0x4, R6", "NOP", True),  # around the loop
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "LDG.E.64 R132, [R4]", False),
    ],
)
def test_overwritten_operands_are_found(first, second, is_wrong):
    from gpu_parts.wgmma_inputs import num_register_products, overwritten_inputs

    machine_code = LOOP.format(first=first, second=second)
    assert num_register_products(machine_code) == 1
    assert bool(overwritten_inputs(machine_code)) == is_wrong


def test_products_fit_every_gpu_and_use_its_matrix_instructions(kernels):
    products = of_module(kernels, "product")
    assert len(products) > len(TILES)
    for kernel in products:
        assert kernel["spill_bytes"] == 0, kernel
        if "fp32" not in kernel["specimen"]:
            assert kernel["shared_bytes"] <= 65536 and kernel["matrix"] == "mma", kernel


def test_products_of_experts_spill_nothing_and_use_the_matrix_instructions(kernels):
    """They fit every GPU; where Hopper's own instructions are used they may ask for more."""
    products = [kernel for kernel in of_module(kernels, "experts") if "tokens" in kernel["specimen"]]
    assert {kernel["matrix"] for kernel in products if kernel["target"] == "sm_90"} == {"-", "mma", "wgmma"}
    for kernel in products:
        assert kernel["spill_bytes"] <= (40 if "fp32" in kernel["specimen"] else 0), kernel  # 36 by Triton 3.6
        assert kernel["shared_bytes"] <= (73728 if kernel["matrix"] == "wgmma" else 65536), kernel
        assert (kernel["matrix"] == "-") == ("fp32" in kernel["specimen"]), kernel


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> dict:
    """Kernels that are compiled one by one, all by one process: what is told of them, and PTX."""
    source = tmp_path_factory.mktemp("single") / "single.py"
    source.write_text(SINGLE, encoding="utf-8")
    result = run(str(source), timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def is_released(ptx: str) -> bool:
    """Whether every counter is raised by an atomic operation that acquires and releases, right behind a barrier."""
    instructions = [line.strip() for line in ptx.splitlines() if re.match(r"\s+(bar|st|ld|@%p\d+ (st|atom))[. ]", line)]
    places = [place for place, line in enumerate(instructions) if " atom." in line]
    return bool(places) and all(
        "acq_rel" in instructions[place] and "gpu" in instructions[place] and "bar.sync" in instructions[place - 1]
        for place in places
    )


def test_results_are_stored_before_they_are_counted(single):
    ptx = single["ptx"]
    assert is_released(ptx)
    assert not is_released(ptx.replace("acq_rel", "relaxed")) and not is_released(ptx.replace("bar.sync", "bar.warp"))


@pytest.mark.parametrize(("kernel", "is_error"), [("plus", False), ("shifted", True)])
def test_what_does_not_compile_is_reported(single, kernel, is_error):
    """Numbers of floating point have no shift."""
    assert single[kernel]["module"] == "one" and ("error" in single[kernel]) == is_error
