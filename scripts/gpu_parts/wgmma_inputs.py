"""Does machine code write a register that an asynchronous matrix product (wgmma) may still be reading?

Assemblers before CUDA 13.3 can do so where the left operand lies in registers (triton #11781, which shows a wrong
product by CUDA 12.9), and Triton 3.6 and 3.7 bring CUDA 12.8 for Hopper. So the machine code itself is looked at: from
every such product on, along every branch, up to the wait for all products.
"""

from __future__ import annotations

import re
import subprocess
import tempfile

from triton import knobs

LEFT_OPERAND = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b")
BRANCH = re.compile(r"BRA\S*\s.*`\((\.L_x_\d+)\)")
LEFT_REGISTERS = 4  # of a 16-bit operand with a depth of 16
WIDTHS = {".128": 4, ".64": 2, "WIDE": 2, "CS2R": 2}  # registers of a result, by a part of the opcode
WITHOUT_RESULT = (
    "ST", "RED", "BAR", "BRA", "EXIT", "LDGSTS", "WARP", "NOP", "BSSY", "BSYNC", "CCTL", "MEMBAR", "ERRBAR", "DEPBAR",
    "LDGDEPBAR", "ISETP", "FSETP", "DSETP", "HSETP2", "PLOP3", "U", "R2UR", "FENCE",
)  # fmt: skip


def disassembled(cubin: bytes) -> str:
    """Text of the machine code, by the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def overwritten_inputs(machine_code: str) -> list[str]:
    """Every product whose left operand is written before its wait, with the instruction that does."""
    instructions, labels = _parsed(machine_code)
    found = []
    for place, instruction in enumerate(instructions):
        if left := LEFT_OPERAND.search(instruction):
            first = int(left.group(1))
            writer = _first_writer(instructions, labels, place + 1, range(first, first + LEFT_REGISTERS))
            found += [f"{instruction} | {writer}"] if writer else []
    return found


def num_register_products(machine_code: str) -> int:
    """Products whose left operand lies in registers."""
    return len(LEFT_OPERAND.findall(machine_code))


def _parsed(machine_code: str) -> tuple[list[str], dict[str, int]]:
    """Instructions, and the place of the one behind each label."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in machine_code.split("\n"):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            instructions.append(instruction.group(1))
    return instructions, labels


def _first_writer(instructions: list[str], labels: dict[str, int], start: int, registers: range) -> str:
    """The first instruction on some way from `start` to a wait that writes one of the registers; "" if none does."""
    seen, starts = set(), [start]
    while starts:
        place = starts.pop()
        while place < len(instructions) and place not in seen:
            seen.add(place)
            instruction = instructions[place]
            if WAIT.search(instruction) or instruction.startswith("EXIT"):
                break
            if not _written(instruction).isdisjoint(registers):
                return instruction
            if branch := BRANCH.search(instruction):
                starts.append(labels[branch.group(1)])
                if not instruction.startswith("@"):
                    break
            place += 1
    return ""


def _written(instruction: str) -> set[int]:
    """Numbers of the registers that an instruction writes."""
    opcode, _, rest = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
    if opcode.startswith(WITHOUT_RESULT):
        return set()
    result = re.match(r"\s*(?:!?U?P\w+,\s*)*R(\d+)\b", rest)
    if result is None:
        return set()
    width = max((size for part, size in WIDTHS.items() if part in opcode), default=1)
    if product := re.match(r"HGMMA\.64x(\d+)x", opcode):
        width = int(product.group(1)) // 2
    elif opcode.startswith(("DADD", "DMUL", "DFMA", "LDSM")):
        width = 4 if opcode.startswith("LDSM") else 2
    return set(range(int(result.group(1)), int(result.group(1)) + width))
