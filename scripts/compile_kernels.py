"""Compile every Triton kernel ahead of time; no GPU is needed, and no kernel runs.

Usage: python scripts/compile_kernels.py [--targets 80,90] [--only WORD,WORD]

Each specimen of scripts/specimens is compiled for each compute capability. `--only` keeps specimens whose module or
name contains a WORD. Columns: registers per thread, bytes of spilled registers (stores and loads), shared memory in
bytes, matrix instructions (wgmma, tcgen05, mma or -), products whose operand in registers is overwritten while it may
still be read (gpu_parts/wgmma_inputs.py; none should be). Progress goes to stderr. Ends with exit status 1 when
something does not compile. Last line: JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys

os.environ["TRITON_INTERPRET"] = "0"  # the compiler, not the interpreter; read when the kernels are imported

import measuring.interruption  # noqa: F401  (before what loads slowly)
import triton
from gpu_parts.wgmma_inputs import disassembled, num_register_products, overwritten_inputs
from measuring.option_types import count_list
from measuring.progress import Progress
from measuring.text_table import format_table
from specimens.registry import SPECIMENS
from specimens.specimen import Specimen
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from stand.gpu.kernels.proxy_fence import fences_added

WARP_SIZE = 32
CAPABILITIES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)  # at others LLVM may end the whole process
ALIGNMENT = 16  # bytes of a pointer, as torch allocates; a type "i32:16" promises a multiple of 16 too


def compile_specimen(specimen: Specimen, capability: int) -> tuple[CompiledKernel, str]:
    """One specimen for one compute capability (80, 90, ...), and what the assembler printed about it."""
    names = specimen.kernel.arg_names
    types = {name: kind.split(":")[0] for name, kind in specimen.signature.items()}
    aligned = {name for name, kind in specimen.signature.items() if kind.startswith("*") or kind.endswith(":16")}
    source = ASTSource(
        specimen.kernel,
        {name: "constexpr" if name in specimen.constants else types[name] for name in names},
        dict(specimen.constants),
        {(place,): [["tt.divisibility", ALIGNMENT]] for place, name in enumerate(names) if name in aligned},
    )
    options = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages}
    knobs.compilation.always_compile = True  # the assembler is silent about what comes from the cache
    knobs.nvidia.dump_ptxas_log = True
    with fences_added(), contextlib.redirect_stdout(io.StringIO()) as printed:
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, WARP_SIZE), options=options)
    return kernel, printed.getvalue()


def matrix_instructions(ptx: str, report: str) -> str:
    """Which tensor core instructions are used; "serial" when the assembler had to wait after each."""
    if "wgmma.mma_async" in ptx:
        return "wgmma serial" if "wgmma.mma_async instructions are serialized" in report else "wgmma"
    return "tcgen05" if "tcgen05.mma" in ptx else "mma" if "mma.sync" in ptx else "-"


def describe(module: str, specimen: Specimen, capability: int) -> dict[str, object]:
    """One line of the table; `error` is set when the specimen does not compile."""
    line: dict[str, object] = {"module": module, "specimen": specimen.name, "target": f"sm_{capability}"}
    try:
        kernel, report = compile_specimen(specimen, capability)
    except Exception as error:  # whatever the compiler raises is this line's result
        return line | {"error": f"{type(error).__name__}: {error}"}
    ptx = kernel.asm["ptx"]
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return line | {
        "registers": max(int(count) for count in re.findall(r"Used (\d+) registers", report)),
        "spill_bytes": sum(map(int, spills)),
        "shared_bytes": kernel.metadata.shared,
        "matrix": matrix_instructions(ptx, report),
        "num_warps": specimen.num_warps,
        **_register_products(kernel, ptx),
    }


def _register_products(kernel: CompiledKernel, ptx: str) -> dict[str, int]:
    """Of wgmma with an operand in registers: how many there are, and of how many the operand is overwritten."""
    if "wgmma" not in ptx:
        return {}
    machine_code = disassembled(kernel.asm["cubin"])
    return {
        "register_products": num_register_products(machine_code), "overwritten": len(overwritten_inputs(machine_code))
    }  # fmt: skip


def capabilities(text: str) -> list[int]:
    """As 80,90."""
    found = count_list(text)
    if set(found) - set(CAPABILITIES):
        raise argparse.ArgumentTypeError(f"must be among {', '.join(map(str, CAPABILITIES))}, got {text!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--targets", type=capabilities, default="80,90", help="compute capabilities, comma-separated (%(default)s)"
    )
    parser.add_argument("--only", default="", help="parts of modules' or specimens' names, comma-separated")
    options = parser.parse_args()
    words, lines = options.only.split(","), []
    asked = [
        (module, specimen)
        for module, specimens in SPECIMENS.items()
        for specimen in specimens()
        if any(word in module or word in specimen.name for word in words)
    ]
    if not asked:
        parser.error(f"--only must be parts of modules' or specimens' names, got {options.only!r}")
    progress = Progress(len(asked))
    for module, specimen in asked:
        lines += [describe(module, specimen, capability) for capability in options.targets]
        progress.add(1, f"{module}, {specimen.name}")
    columns = ("module", "specimen", "target", "registers", "spill_bytes", "shared_bytes", "matrix", "overwritten")
    print(format_table(columns, [[line.get(column) for column in columns] for line in lines]))
    failures = [line for line in lines if "error" in line]
    for line in failures:
        print(f"{line['module']}, {line['specimen']}, {line['target']}: {line['error']}", file=sys.stderr)
    print(json.dumps({"kernels": lines, "triton": triton.__version__}))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
