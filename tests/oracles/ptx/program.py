"""PTX text to instructions and labels; what Triton's compiler writes, not the whole language (PTX ISA 8.x)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One PTX instruction. `operands` are texts; vectors keep their braces, addresses their brackets."""

    opcode: str
    operands: tuple[str, ...]
    predicate: str = ""  # a register, "" where the instruction is always run
    is_negated: bool = False
    line: int = 0  # of the PTX text

    def __str__(self) -> str:
        condition = f"@{'!' * self.is_negated}{self.predicate} " if self.predicate else ""
        return f"line {self.line}: {condition}{self.opcode} {', '.join(self.operands)}"

    @property
    def parts(self) -> list[str]:
        """Of the opcode, without hints to caches."""
        return [part for part in self.opcode.split(".") if not part.startswith(("L1::", "L2::"))]


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel. registers: declared type and count per prefix, such as {"%r": ("b32", 441)}, count 0 for a single one
    of that name. parameters: type per name. labels: place of the instruction that follows."""

    name: str
    parameters: dict[str, str]
    registers: dict[str, tuple[str, int]]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str) -> Program:
    """The one kernel of a PTX text. Raises ValueError for what the parser does not know."""
    head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", text, re.DOTALL)
    if head is None:
        raise ValueError("a PTX text must have an .entry, got none")
    parameters = {name: kind for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", head.group(2))}
    body, first_line = _body(text, head.end())
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, tuple[str, int]] = {}
    for line, statement in _statements(body, first_line):
        if statement.endswith(":"):
            labels[statement[:-1]] = len(instructions)
        elif statement.startswith(".reg"):
            kind, name, count = re.fullmatch(r"\.reg\s+\.(\w+)\s+([%\w]+)(?:<(\d+)>)?", statement).groups()
            registers[name] = kind, int(count or 0)
        elif not statement.startswith((".loc", ".pragma")):
            instructions.append(_instruction(statement, line))
    return Program(head.group(1), parameters, registers, tuple(instructions), labels)


def _body(text: str, start: int) -> tuple[str, int]:
    """The text between the kernel's braces, and the line on which it begins."""
    begin = text.index("\n{", start) + 2
    end = text.index("\n}", begin)
    return text[begin:end], text.count("\n", 0, begin) + 1


def _statements(body: str, first_line: int):
    """(line, statement) without comments; labels keep their colon, the rest loses its semicolon."""
    kept = ""
    for line, text in enumerate(body.split("\n"), first_line):
        text = text.split("//")[0].strip()
        if re.fullmatch(r"[$\w]+:", text) or text.startswith(".loc"):
            yield line, text
            continue
        kept = f"{kept} {text}".strip()
        *whole, kept = kept.split(";")
        for statement in whole:
            yield line, statement.lstrip("{} ")  # a scope of inline assembly; no instruction begins with a brace
    if kept.strip("{} "):
        raise ValueError(f"a PTX statement must end, got {kept[:80]!r}")


def _instruction(statement: str, line: int) -> Instruction:
    found = _INSTRUCTION.fullmatch(statement)
    if found is None:
        raise ValueError(f"line {line}: not a PTX instruction: {statement[:80]!r}")
    negation, predicate, opcode, text = found.groups()
    operands = _split(text)
    if "L2::cache_hint" in opcode:
        operands = operands[:-1]  # the hint
    return Instruction(opcode, operands, predicate or "", negation == "!", line)


def _split(text: str) -> tuple[str, ...]:
    """Operands at the commas outside braces and brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return tuple(part.strip() for part in parts if part.strip())
