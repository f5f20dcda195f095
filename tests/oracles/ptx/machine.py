"""Runs a PTX program block by block; the threads of a block go side by side, diverging where branches make them.

Blocks run one after another, in an order that the caller may choose. Within a block the threads that are furthest back
in the program go first, so that they meet again behind a branch; at a barrier they wait for all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ptx.instructions import compile_step
from ptx.ledger import Clock, PtxError
from ptx.memory import Allocation, CopyGroups, Space, shared_memory
from ptx.program import Instruction, Program
from ptx.registers import Registers
from ptx.state import State, Step

MOST_BLOCKS_OF_CODE = 2_000_000  # that one block may enter: more is an endless loop


@dataclass(slots=True)
class Block:
    """Instructions between two places where control may turn. `end`: the one that it ends with, if it is special."""

    instructions: list[Instruction] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    end: Instruction | None = None


class Machine:
    """A compiled kernel for blocks of `num_threads` threads with `shared_bytes` of shared memory."""

    def __init__(self, program: Program, num_threads: int, shared_bytes: int) -> None:
        self.program, self.shared_bytes = program, shared_bytes
        self.registers = Registers(program, num_threads)
        self.state = State(num_threads)
        self._starts = self._find_starts()
        self._blocks = [Block() for _ in self._starts]
        for number, (start, end) in enumerate(itertools.pairwise([*self._starts, len(program.instructions)])):
            for instruction in program.instructions[start:end]:
                if _turns(instruction):
                    self._blocks[number].end = instruction
                else:
                    self._blocks[number].instructions.append(instruction)
                    self._blocks[number].steps.append(self._compile(instruction))
        self._number_at = {start: number for number, start in enumerate(self._starts)}

    def _compile(self, instruction: Instruction) -> Step:
        try:
            return compile_step(instruction, self.registers, self.state)
        except Exception as error:
            error.add_note(str(instruction))
            raise

    def _find_starts(self) -> list[int]:
        instructions = self.program.instructions
        turns = (place + 1 for place, instruction in enumerate(instructions) if _turns(instruction))
        return sorted({0, *self.program.labels.values(), *turns} - {len(instructions)})

    def launch(
        self,
        grid: tuple[int, int, int],
        arguments: Iterable[object],
        allocations: Iterable[Allocation],
        *,
        may_collide: bool = False,
        order: Callable[[int], Iterable[int]] = range,
    ) -> None:
        """Run all blocks of the grid. may_collide: as in `Clock`. order: gives the order of so many blocks."""
        self.state.memory = Space(list(allocations))
        values = dict(zip(self.program.parameters, arguments, strict=True))
        released: dict = {}
        sizes = grid[0] * grid[1] * grid[2]
        for number in order(sizes):
            at = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
            self.state.clock = Clock(number, self.state.num_threads, released, may_collide)
            with np.errstate(all="ignore"):
                self._run_block(at, grid, values)

    def _run_block(self, at: tuple, grid: tuple, values: Mapping[str, object]) -> None:
        state = self.state
        self.registers.begin(at, grid, values)
        state.shared = Space([shared_memory(self.shared_bytes)])
        state.copies = CopyGroups()
        waiting: dict[int, np.ndarray] = {}
        ready = {0: np.ones(state.num_threads, dtype=bool)}
        for _ in range(MOST_BLOCKS_OF_CODE):
            if not ready and waiting:  # all threads that have not ended are at a barrier
                if len(waiting) > 1:
                    raise PtxError("threads of a block wait at different barriers")
                state.clock.barrier()
                ready, waiting = waiting, {}
            if not ready:
                return
            number = min(ready)
            self._enter(number, ready.pop(number), ready, waiting)
        raise PtxError("a block does not end")

    def _enter(self, number: int, mask: np.ndarray, ready: dict, waiting: dict) -> None:
        block = self._blocks[number]
        for place, step in enumerate(block.steps):
            try:
                step(mask)
            except Exception as error:
                error.add_note(str(block.instructions[place]))
                raise
        end = block.end
        if end is None:
            return self._go(ready, number + 1, mask)
        taken = mask if not end.predicate else mask & (self.registers.array(end.predicate) ^ end.is_negated)
        rest = mask & ~taken
        if end.parts[0] == "bra":
            self._go(ready, self._number_at[self.program.labels[end.operands[0]]], taken)
        elif end.parts[0] == "bar":
            self._go(waiting, number + 1, taken)
        self._go(ready, number + 1, rest)

    @staticmethod
    def _go(places: dict[int, np.ndarray], number: int, mask: np.ndarray) -> None:
        if mask.any():
            places[number] = places[number] | mask if number in places else mask


def _turns(instruction: Instruction) -> bool:
    parts = instruction.parts
    return parts[0] in ("bra", "ret", "exit") or parts[:2] == ["bar", "sync"]
