"""PTX instructions as functions of the threads that run them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ptx import matrix
from ptx.arithmetic import DTYPES, operation
from ptx.ledger import WARP, PtxError
from ptx.program import Instruction
from ptx.registers import Registers
from ptx.state import State, Step

REDUCTIONS = {"add": np.sum, "max": np.max, "min": np.min, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce}


def compile_step(instruction: Instruction, registers: Registers, state: State) -> Step:
    """A function of the mask of threads, with the instruction's own predicate in it."""
    parts = instruction.parts
    maker = _MAKERS.get(parts[0]) or _MAKERS.get(".".join(parts[:2])) or _arithmetic
    run = maker(parts, instruction.operands, registers, state)
    if not instruction.predicate:
        return run
    predicate, is_negated = registers.array(instruction.predicate), instruction.is_negated
    return lambda mask: run(mask & (predicate ^ is_negated))


def _names(operand: str) -> list[str]:
    """Of a vector or a single operand."""
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _arithmetic(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    kinds, result, function = operation(parts)
    target = registers.target(operands[0], result)
    sources = [registers.source(text, kind) for text, kind in zip(operands[1:], kinds, strict=True)]
    pairs = len(target) // state.num_threads
    if isinstance(function, np.ufunc) and pairs == 1:
        return lambda mask: function(*sources, out=target, where=mask, casting="unsafe")
    if pairs == 1:
        return lambda mask: np.copyto(target, function(*sources), where=mask, casting="unsafe")
    return lambda mask: np.copyto(target, function(*sources), where=np.repeat(mask, pairs), casting="unsafe")


def _mov(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    kind, (to, source) = parts[-1], operands
    if to.startswith("{"):
        return _unpack(_names(to), registers.array(source), registers)
    if source.startswith("{"):
        return _pack(to, _names(source), registers)
    target, value = registers.target(to, kind), registers.source(source, kind)
    return lambda mask: np.copyto(target, value, where=mask)


def _unpack(names: list[str], whole: np.ndarray, registers: Registers) -> Step:
    part = np.dtype(f"u{whole.dtype.itemsize // len(names)}")
    targets = [(number, registers.array(name)) for number, name in enumerate(names) if name != "_"]

    def run(mask: np.ndarray) -> None:
        values = whole.view(part).reshape(-1, len(names)).copy()
        for number, target in targets:
            np.copyto(target, values[:, number], where=mask)

    return run


def _pack(to: str, names: list[str], registers: Registers) -> Step:
    target = registers.array(to)
    part = np.dtype(f"u{target.dtype.itemsize // len(names)}")
    kind = f"b{8 * part.itemsize}"
    sources, places = [registers.source(name, kind) for name in names], target.view(part).reshape(-1, len(names))

    def run(mask: np.ndarray) -> None:
        values = [np.array(source) for source in sources]
        for number, value in enumerate(values):
            np.copyto(places[:, number], value, where=mask)

    return run


class Address:
    """`[register + number]`, `[name]`; of each of some threads."""

    def __init__(self, text: str, registers: Registers) -> None:
        base, offset = re.fullmatch(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text).groups()
        kind = "b64" if base.startswith("%") and registers.array(base).dtype == np.uint64 else "b32"
        self.base = np.atleast_1d(registers.source(base, kind))
        self.offset = int(offset or "0", 0)
        self.num_threads = registers.num_threads

    def of(self, threads: np.ndarray) -> np.ndarray:
        """uint64 [n]"""
        base = np.broadcast_to(self.base, self.num_threads)[threads]
        return (base.astype(np.int64) + self.offset).astype(np.uint64)


def _widening(target: np.ndarray, value: np.ndarray, kind: str) -> Step:
    """A value into a register that may be wider: with its sign if it has one."""
    wide = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{target.dtype.itemsize}")
    bits = value.view(np.dtype(f"{wide.kind}{value.dtype.itemsize}"))
    return lambda mask: np.copyto(target, bits.astype(wide).view(target.dtype), where=mask)


def _width(kind: str) -> int:
    return np.dtype(DTYPES[kind]).itemsize


def _ld(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    kind, (to, source) = parts[-1], operands
    if parts[1] == "param":
        return _widening(registers.array(to), registers.source(source.strip("[] "), kind), kind)
    targets, address, size = [registers.array(name) for name in _names(to)], Address(source, registers), _width(kind)
    is_shared, is_signed = parts[1].startswith("shared"), kind[0] == "s"

    def run(mask: np.ndarray) -> None:
        threads = np.flatnonzero(mask)
        if len(threads):
            space = state.shared if is_shared else state.memory
            values = space.load(address.of(threads), threads, size, len(targets), state.clock)
            for target, value in zip(targets, values, strict=True):
                wide = value.view(f"i{size}").astype(f"i{target.dtype.itemsize}") if is_signed else value
                target[threads] = wide.astype(target.dtype)

    return run


def _st(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    kind, (to, source) = parts[-1], operands
    address, size, is_shared = Address(to, registers), _width(kind), parts[1].startswith("shared")
    values = [np.atleast_1d(registers.source(name, f"b{8 * size}")) for name in _names(source)]

    def run(mask: np.ndarray) -> None:
        threads = np.flatnonzero(mask)
        if len(threads):
            space = state.shared if is_shared else state.memory
            chosen = [np.broadcast_to(value, len(mask))[threads] for value in values]
            space.store(address.of(threads), threads, chosen, size, state.clock)

    return run


def _atom(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    """`atom.global.gpu.acq_rel.add`: threads one after another. No race is looked for: it is what orders others."""
    if parts[1:5] != ["global", "gpu", "acq_rel", "add"]:
        raise NotImplementedError(f"the PTX machine has no {'.'.join(parts)}")
    kind, (to, place, amount) = parts[-1], operands
    target, address, size = registers.target(to, kind), Address(place, registers), _width(kind)
    amounts = np.atleast_1d(registers.source(amount, kind))

    def run(mask: np.ndarray) -> None:
        for thread in np.flatnonzero(mask):
            one = np.array([thread])
            where = address.of(one)
            state.clock.release_and_acquire(int(thread), int(where[0]))
            target[thread] = state.memory.add(where, np.broadcast_to(amounts, len(mask))[one], size)

    return run


def _whole_warps(mask: np.ndarray) -> np.ndarray:
    """Numbers of the warps that run; a part of one must not."""
    lanes = mask.reshape(-1, WARP)
    is_running = lanes.any(axis=1)
    if (is_running != lanes.all(axis=1)).any():
        raise PtxError("a warp's threads must run this instruction together, got some of them")
    return np.flatnonzero(is_running)


def _check_all_lanes(members: np.ndarray | np.generic) -> None:
    if (members != np.uint32(0xFFFFFFFF)).any():
        raise NotImplementedError("an instruction on some lanes of a warp")


def _shfl(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    mode, (to, source, other, limits, members) = parts[2], operands
    _check_all_lanes(registers.source(members, "b32"))
    target = registers.array(to).reshape(-1, WARP)
    values = registers.source(source, "b32").reshape(-1, WARP)
    others, code = registers.source(other, "b32"), int(limits, 0)
    segment, clamp, lanes = code >> 8 & 31, code & 31, np.arange(WARP)
    highest = (lanes & segment) | (clamp & ~segment & 31)

    def sources_of(step: np.ndarray) -> np.ndarray:
        sources = {
            "bfly": lambda: lanes ^ step,
            "up": lambda: lanes - step,
            "down": lambda: lanes + step,
            "idx": lambda: (lanes & segment) | (step & ~segment),
        }[mode]()
        is_inside = sources >= highest if mode == "up" else sources <= highest
        return np.where(is_inside, sources, lanes)

    by_all = sources_of(np.int64(int(others) & 31)) if np.ndim(others) == 0 else None

    def run(mask: np.ndarray) -> None:
        warps = _whole_warps(mask)
        if by_all is not None:
            target[warps] = values[warps][:, by_all]
            return
        step = np.broadcast_to(others, state.num_threads).reshape(-1, WARP)[warps].astype(np.int64) & 31
        target[warps] = np.take_along_axis(values[warps], sources_of(step), axis=1)

    return run


def _redux(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    reduce, kind, (to, source, members) = REDUCTIONS[parts[2]], parts[-1], operands
    target = registers.target(to, kind).reshape(-1, WARP)
    values = registers.source(source, kind).reshape(-1, WARP)
    lanes = registers.source(members, "b32")

    def run(mask: np.ndarray) -> None:
        warps = _whole_warps(mask)
        _check_all_lanes(np.broadcast_to(lanes, state.num_threads)[mask])
        target[warps] = reduce(values[warps], axis=1)[:, None].astype(target.dtype)

    return run


def _warp_barrier(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    return lambda mask: state.clock.warp_barrier(_whole_warps(mask))


def _cp(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    if parts[2] == "commit_group":
        return lambda mask: state.copies.commit()
    if parts[2] == "wait_group":
        most_left = int(operands[0], 0)
        return lambda mask: [_arrive(copy, state) for copy in state.copies.take(most_left)] and None
    to, source, size = Address(operands[0], registers), Address(operands[1], registers), int(operands[2], 0)
    read = np.atleast_1d(registers.source(operands[3], "b32")) if len(operands) > 3 else np.array([size])

    def run(mask: np.ndarray) -> None:
        threads = np.flatnonzero(mask)
        if not len(threads):
            return
        copy = to.of(threads), source.of(threads), threads, size, np.broadcast_to(read, len(mask))[threads].copy()
        allocation = state.shared_allocation
        places = state.shared.note_write(allocation, copy[0], threads, size, state.clock)
        allocation.ledger.is_in_flight[places] = True
        state.copies.add(copy)

    return run


def _arrive(copy: tuple, state: State) -> None:
    """An asynchronous copy's bytes come, zeros where fewer are read than written."""
    to, source, threads, size, read = copy
    if not np.isin(read, (0, size)).all():
        raise NotImplementedError("an asynchronous copy that reads a part")
    allocation = state.shared_allocation
    places = allocation.places(to, size)  # before its array is looked up: the ledger may part it anew
    allocation.ledger.is_in_flight[places] = False
    is_read, words = read > 0, [np.zeros(len(threads), dtype=np.uint32) for _ in range(size // 4)]
    if is_read.any():
        loaded = state.memory.load(source[is_read], threads[is_read], 4, size // 4, state.clock)
        for word, value in zip(words, loaded, strict=True):
            word[is_read] = value
    state.shared.store(to, threads, words, 4, state.clock)


def _matrices(names: list[str], address: Address, registers: Registers):
    """Registers [x, W, 32] of x matrices, and a function of warps: threads and addresses of the matrices' 8 rows."""
    stack = [registers.array(name).reshape(-1, WARP) for name in names]

    def rows(warps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        threads = warps[:, None] * WARP + np.arange(8 * len(names))
        return threads.ravel(), address.of(threads.ravel())

    return stack, rows


def _ldmatrix(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    stack, rows = _matrices(_names(operands[0]), Address(operands[1], registers), registers)
    row, pair, is_transposed = matrix.ROW, matrix.PAIR, "trans" in parts

    def run(mask: np.ndarray) -> None:
        warps = _whole_warps(mask)
        threads, addresses = rows(warps)
        words = np.stack(state.shared.load(addresses, threads, 4, 4, state.clock), axis=-1)
        tiles = words.astype(np.uint32).view(np.uint16).reshape(len(warps), len(stack), 8, 8)
        if is_transposed:
            tiles = tiles.swapaxes(2, 3)
        for number, target in enumerate(stack):
            low, high = tiles[:, number, row, pair], tiles[:, number, row, pair + 1]
            target[warps] = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

    return run


def _stmatrix(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    stack, rows = _matrices(_names(operands[1]), Address(operands[0], registers), registers)
    is_transposed = "trans" in parts

    def run(mask: np.ndarray) -> None:
        warps = _whole_warps(mask)
        threads, addresses = rows(warps)
        tiles = np.zeros((len(warps), len(stack), 8, 8), dtype=np.uint16)
        for number, source in enumerate(stack):
            values = matrix.halves(source[warps])
            tiles[:, number, matrix.ROW, matrix.PAIR] = values[..., 0]
            tiles[:, number, matrix.ROW, matrix.PAIR + 1] = values[..., 1]
        if is_transposed:
            tiles = tiles.swapaxes(2, 3)
        words = np.ascontiguousarray(tiles).view(np.uint32).reshape(-1, 4)
        state.shared.store(addresses, threads, list(words.T), 4, state.clock)

    return run


def _mma(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    if parts[1:7] != ["sync", "aligned", "m16n8k16", "row", "col", "f32"] or parts[7] != parts[8]:
        raise NotImplementedError(f"the PTX machine has no {'.'.join(parts)}")
    d, a, b, c = ([registers.array(name) for name in _names(operand)] for operand in operands)

    def run(mask: np.ndarray) -> None:
        warps = _whole_warps(mask)
        words = [np.stack([one.reshape(-1, WARP)[warps] for one in group]) for group in (a, b, c)]
        result = matrix.multiply_fragments(words[0], words[1], words[2].view(np.float32), parts[7])
        for target, value in zip(d, result, strict=True):
            target.view(np.float32).reshape(-1, WARP)[warps] = value

    return run


def _fence(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    if parts[1:3] != ["proxy", "async"]:
        raise NotImplementedError(f"the PTX machine has no {'.'.join(parts)}")
    return lambda mask: state.shared_allocation.fence(np.flatnonzero(mask), state.clock)


def _wgmma(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    """The product is taken at once; the assembler sees to registers that are read before a wait."""
    if parts[1] in ("fence", "commit_group", "wait_group"):
        return _no_effect(parts, operands, registers, state)
    width, kind = int(re.fullmatch(r"m64n(\d+)k16", parts[4]).group(1)), parts[-1]
    results = [registers.array(name).view(np.float32) for name in _names(operands[0])]
    flags = [int(text, 0) for text in operands[4:]]
    if flags[:2] != [1, 1]:
        raise NotImplementedError("wgmma with a negated operand")
    is_added = registers.source(operands[3], "pred")
    holds_a = operands[1].startswith("{")
    a = [registers.array(name) for name in _names(operands[1])]
    b, transposed = registers.array(operands[2]), [bool(flag) for flag in flags[2:]]

    def run(mask: np.ndarray) -> None:
        for first in np.flatnonzero(_whole_groups(mask)) * 4 * WARP:
            group = slice(first, first + 4 * WARP)
            right = _operand(b[group], width, transposed[-1], kind, state, first)
            if holds_a:
                words = np.stack([one[group].reshape(4, WARP) for one in a])
                left = matrix.numbers_of(matrix.fragment_a(words), kind)
            else:
                left = _operand(a[0][group], 64, transposed[0], kind, state, first).reshape(4, 16, 16)
            total = left @ right.T
            if np.broadcast_to(is_added, len(mask))[first]:
                total += matrix.gather_accumulator(np.stack([one[group].reshape(4, WARP) for one in results]))
            for target, value in zip(results, matrix.scatter_accumulator(total.astype(np.float32)), strict=True):
                target[group] = value.ravel()

    return run


def _whole_groups(mask: np.ndarray) -> np.ndarray:
    groups = mask.reshape(-1, 4 * WARP)
    if (groups.any(axis=1) != groups.all(axis=1)).any():
        raise PtxError("four warps must run wgmma together, got some of their threads")
    return groups.any(axis=1)


def _operand(words: np.ndarray, rows: int, is_transposed: bool, kind: str, state: State, thread: int) -> np.ndarray:
    """float64 [rows, 16] of the matrix that a descriptor tells of; the asynchronous proxy reads it."""
    if (words != words[0]).any():
        raise PtxError("the threads of four warps must give wgmma one descriptor")
    pieces = matrix.pieces(int(words[0]), rows, is_transposed)
    state.shared_allocation.check_fenced(pieces, 16)
    halves = np.stack(state.shared.load(pieces, np.full(len(pieces), thread), 8, 2, state.clock), axis=-1)
    return matrix.numbers_of(matrix.from_pieces(halves.view(np.uint16), is_transposed), kind)


def _no_effect(parts: list[str], operands: tuple[str, ...], registers: Registers, state: State) -> Step:
    return lambda mask: None


_MAKERS: dict[str, Callable[..., Step]] = {
    "createpolicy": _no_effect,  # a hint to caches
    "mov": _mov,
    "ld": _ld,
    "st": _st,
    "atom": _atom,
    "shfl": _shfl,
    "redux": _redux,
    "bar.warp": _warp_barrier,
    "cp": _cp,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "mma": _mma,
    "fence": _fence,
    "wgmma": _wgmma,
}
