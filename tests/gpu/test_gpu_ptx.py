"""The machine that runs compiled kernels: what it computes, and that it sees what a GPU would leave to chance.

Small PTX programs of our own, so that it needs no compiler; at the end production kernels, with STAND_PTX set.
"""

import os

import numpy as np
import pytest
import torch
from ptx.arithmetic import exact_fma, from_bfloat16, operation, to_bfloat16
from ptx.ledger import PtxError
from ptx.machine import Machine
from ptx.matrix import Descriptor, fragment_a, fragment_b, gather_accumulator, multiply_fragments, scatter_accumulator
from ptx.memory import tensor_allocations
from ptx.program import parse

FRAME = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<24>;
    .reg .b64 %rd<16>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    mov.u32 %r1, %tid.x;       // thread
    mov.u32 %r2, %ctaid.x;     // block
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;  // input[thread]
    add.s64 %rd5, %rd2, %rd3;  // output[thread]
    shl.b32 %r3, %r1, 2;
    mov.b32 %r4, global_smem;
    add.s32 %r5, %r4, %r3;     // shared[thread]
{body}
    ret;
}}
"""


def run(body: str, given: torch.Tensor, result: torch.Tensor, *, threads=64, blocks=1, **options) -> torch.Tensor:
    machine = Machine(parse(FRAME.format(threads=threads, body=body)), threads, 1024)
    pointers = [given.data_ptr(), result.data_ptr()]
    machine.launch((blocks, 1, 1), pointers, tensor_allocations([given, result]), **options)
    return result


def integers(count: int = 64) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


READ, WRITE = "ld.global.b32 %r6, [%rd4];", "st.global.b32 [%rd5], %r7;"
TO_SHARED, BARRIER = "st.shared.b32 [%r5], %r6;", "bar.sync 0;"
MIRRORED = "sub.s32 %r8, 252, %r3; add.s32 %r9, %r4, %r8; ld.shared.b32 %r7, [%r9];"  # shared[63 - thread]


def test_threads_exchange_numbers_across_a_barrier():
    got = run(READ + TO_SHARED + BARRIER + MIRRORED + WRITE, integers(), torch.zeros(64, dtype=torch.int32))
    assert torch.equal(got, integers().flip(0))


def test_a_missing_barrier_is_a_race():
    with pytest.raises(PtxError, match="race: thread 0 of block 0 reads what thread 63 wrote"):
        run(READ + TO_SHARED + MIRRORED + WRITE, integers(), torch.zeros(64, dtype=torch.int32))


def test_what_others_still_read_must_not_be_written():
    body = READ + TO_SHARED + BARRIER + MIRRORED + "{} st.shared.b32 [%r5], %r7;" + WRITE
    with pytest.raises(PtxError, match="writes what thread 63 reads"):
        run(body.format(""), integers(), torch.zeros(64, dtype=torch.int32))
    run(body.format(BARRIER), integers(), torch.zeros(64, dtype=torch.int32))


def test_the_barrier_of_a_warp_orders_its_threads_alone():
    body = READ + TO_SHARED + "bar.warp.sync -1;" + MIRRORED.replace("252", "124") + WRITE
    given, result = integers(32), torch.zeros(32, dtype=torch.int32)
    assert torch.equal(run(body, given, result, threads=32), given.flip(0))
    with pytest.raises(PtxError, match="race"):
        run(READ + TO_SHARED + "bar.warp.sync -1;" + MIRRORED + WRITE, integers(), torch.zeros(64, dtype=torch.int32))


COUNT = "atom.global.gpu.acq_rel.add.u32 %r10, [%rd2], 1;"
LAST = """
    mul.wide.u32 %rd6, %r2, 4; add.s64 %rd7, %rd1, %rd6; add.s32 %r11, %r2, 5; {lead} st.global.b32 [%rd7], %r11;
    {barrier}
    setp.eq.b32 %p1, %r1, 0;
    @%p1 {count}
    setp.eq.b32 %p2, %r2, 2;
    @!%p2 bra $L_end;
    {after}
    setp.lt.u32 %p3, %r1, 3;
    @%p3 ld.global.b32 %r7, [%rd4];
    @%p3 st.global.b32 [%rd5+64], %r7;
$L_end:
"""


def summed_by_the_last(**parts: str) -> torch.Tensor:
    parts = {"lead": "setp.eq.b32 %p4, %r1, 0; @%p4", "barrier": BARRIER, "count": COUNT, "after": BARRIER} | parts
    given, result = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    return run(LAST.format(**parts), given, result, blocks=3)[16:19]


def test_blocks_hand_results_over_by_an_atomic_operation():
    assert summed_by_the_last().tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": "mov.b32 %r10, 0;"},  # nothing is released
        {"lead": "setp.eq.b32 %p4, %r1, 9; @%p4", "barrier": ""},  # another thread's store, not before the release
        {"after": ""},  # other threads read, not behind the acquire
    ],
)
def test_results_that_are_not_handed_over_are_a_race(wrong):
    with pytest.raises(PtxError, match="race: .* of block [01] wrote"):
        summed_by_the_last(**wrong)


def test_blocks_may_collide_only_where_that_is_said():
    given, result = integers(), torch.zeros(64, dtype=torch.int32)
    body = "mov.b32 %r7, %r2;" + WRITE
    with pytest.raises(PtxError, match="of block 0 wrote"):
        run(body, given, result, blocks=2)
    assert run(body, given, result, blocks=2, may_collide=True).unique().tolist() == [1]
    with pytest.raises(PtxError, match="of block 0 wrote"):
        run("setp.eq.b32 %p1, %r2, 0; @%p1 st.global.b32 [%rd5], %r1; ld.global.b32 %r7, [%rd5];",
            given, result, blocks=2, may_collide=True)  # fmt: skip


def test_the_order_of_blocks_is_the_callers():
    given, result = integers(), torch.zeros(64, dtype=torch.int32)
    run("mov.b32 %r7, %r2;" + WRITE, given, result, blocks=3, may_collide=True, order=lambda n: reversed(range(n)))
    assert result.unique().tolist() == [0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r7, [%rd4+4];", "256 of 256 bytes"),
        ("ld.global.b32 %r7, [%rd4+-4];", "bytes are touched|bytes of the tensor before"),
        ("ld.global.b32 %r7, [%rd4+2];", "multiples of 4"),
        ("ld.shared.b32 %r7, [%r5+1024];", "of 1040 bytes"),
        ("st.shared.b32 [%r4], %r1;", "different values to one place"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 shfl.sync.bfly.b32 %r7, %r1, 1, 31, -1;", "threads must run this"),
        ("$L_loop: bra $L_loop;", "does not end"),
    ],
)
def test_what_a_gpu_fails_at_is_an_error(body, message, monkeypatch):
    monkeypatch.setattr("ptx.machine.MOST_BLOCKS_OF_CODE", 1000)
    whole = torch.zeros(192, dtype=torch.int32)  # a tensor's neighbours are not its own
    given = torch.frombuffer(bytearray(whole[64:128].numpy().tobytes()), dtype=torch.int32)
    with pytest.raises(PtxError, match=message):
        run(body.replace(": bra", ":\n bra"), given, torch.zeros(64, dtype=torch.int32))


def test_unknown_instructions_are_refused_with_their_line():
    with pytest.raises(NotImplementedError, match="brev") as failure:
        run("brev.b32 %r7, %r1;", integers(), integers())
    assert "brev.b32 %r7, %r1" in failure.value.__notes__[0]


def test_threads_part_and_meet_again():
    """Odd threads take a branch, every thread loops as often as its number modulo 4; then all are at one barrier."""
    body = """
    mov.b32 %r7, 0;
    and.b32 %r8, %r1, 3;
    and.b32 %r9, %r1, 1;
    setp.eq.b32 %p1, %r9, 0;
    @%p1 bra $L_even;
    add.s32 %r7, %r7, 100;
$L_even:
    setp.ge.s32 %p2, 0, %r8;
    @%p2 bra $L_done;
    add.s32 %r7, %r7, 1;
    sub.s32 %r8, %r8, 1;
    bra.uni $L_even;
$L_done:
    bar.sync 0;
    """
    got = run(body + WRITE, integers(), torch.zeros(64, dtype=torch.int32))
    threads = np.arange(64)
    assert got.tolist() == (threads % 2 * 100 + threads % 4).tolist()


COPY = "cp.async.ca.shared.global [%r5], [%rd4], 4, %r12; cp.async.commit_group;"
WAIT, OWN = "cp.async.wait_group 0;", "ld.shared.b32 %r7, [%r5];"


def test_asynchronous_copies_come_when_they_are_waited_for():
    body = "setp.lt.u32 %p1, %r1, 40; selp.b32 %r12, 4, 0, %p1;" + COPY
    given, result = integers() + 1, torch.zeros(64, dtype=torch.int32)
    got = run(body + WAIT + OWN + WRITE, given, result)
    expected = torch.where(integers() < 40, given, 0)
    assert torch.equal(got, expected)
    assert torch.equal(run(body + WAIT + BARRIER + MIRRORED + WRITE, given, result), expected.flip(0))
    with pytest.raises(PtxError, match="copy to it is under way"):
        run(body + OWN + WRITE, given, result)
    with pytest.raises(PtxError, match="copy to it is under way"):
        run(body + WAIT.replace("0", "1") + OWN + WRITE, given, result)
    with pytest.raises(PtxError, match="race"):
        run(body + WAIT + MIRRORED + WRITE, given, result)


def result_of(opcode: str, *operands) -> np.ndarray:
    with np.errstate(all="ignore"):
        return operation(opcode.split("."))[2](*operands)


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("div.s32", (np.int32([-7, 7, -7]), np.int32([2, -2, -2])), [-3, -3, 3]),  # C's division, not Python's
        ("rem.s32", (np.int32([-7, 7]), np.int32([2, -2])), [-1, 1]),
        ("shl.b32", (np.uint32([3, 3]), np.uint32([31, 32])), [1 << 31, 0]),
        ("shr.s32", (np.int32([-8, -8]), np.uint32([1, 40])), [-4, -1]),
        ("shr.u64", (np.uint64([8, 8]), np.uint32([3, 64])), [1, 0]),
        ("mul.wide.s32", (np.int32([-3]), np.int32([1 << 30])), [-3 << 30]),
        ("mul.hi.u16", (np.uint16([40000]), np.uint16([40000])), [40000 * 40000 >> 16]),
        ("mad.lo.s32", (np.int32([7]), np.int32([6]), np.int32([-2])), [40]),
        ("max.f32", (np.float32([np.nan, 1]), np.float32([2, np.nan])), [2, 1]),
        ("setp.gtu.f32", (np.float32([np.nan, 1]), np.float32([2, 2])), [True, False]),
        ("setp.ne.f32", (np.float32([np.nan, 1]), np.float32([2, 2])), [False, True]),
        ("setp.nan.f64", (np.array([np.nan, 1.0]), np.array([1.0, 1.0])), [True, False]),
        ("cvt.rzi.s32.f64", (np.array([-2.7, np.nan, 1e12]),), [-2, 0, 2**31 - 1]),
        ("cvt.rpi.f64.f64", (np.array([2.1]),), [3.0]),
        ("cvt.s64.s32", (np.int32([-5]),), [-5]),
        ("cvt.rn.bf16x2.f32", (np.float32([2.0]), np.float32([1.0])), [0x40003F80]),
        ("bfe.u32", (np.uint32([0xABCD]), np.uint32(4), np.uint32(8)), [0xBC]),
        ("prmt.b32", (np.uint32([0x44332211]), np.uint32([0x88776655]), np.uint32(0x7410)), [0x88552211]),
        ("popc.b32", (np.uint32([0xF0F0]),), [8]),
        ("selp.b32", (np.uint32([1, 1]), np.uint32([2, 2]), np.array([True, False])), [1, 2]),
        ("ex2.approx.ftz.f32", (np.float32([-140.0, 3.0]),), [0.0, 8.0]),
    ],
)  # fmt: skip
def test_arithmetic(opcode, operands, expected):
    got = result_of(opcode, *operands)
    assert np.asarray(got).tolist() == expected


def test_bfloat16_is_torchs():
    numbers = torch.randn(5000) * 10.0 ** torch.randint(-30, 30, (5000,))
    bits = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (to_bfloat16(numbers.numpy()) == bits).all()
    assert (from_bfloat16(bits) == numbers.bfloat16().float().numpy()).all()


def test_fused_products_are_rounded_once():
    one = np.array([1 + 2.0**-30, 3.0, np.inf])
    other = np.array([1 - 2.0**-30, 5.0, 1.0])
    addend = np.array([-1.0, 1.0, 1.0])
    with np.errstate(all="ignore"):
        assert exact_fma(one, other, addend).tolist() == [-(2.0**-60), 16.0, np.inf]
    bits = to_bfloat16(np.float32([1.0078125, -1.015625]))  # the square, rounded to bfloat16, less what it rounds to
    once = result_of("fma.rn.bf16", bits[:1], bits[:1], bits[1:])
    assert from_bfloat16(once) == np.float32(1.0078125) ** 2 - np.float32(1.015625) != 0


def test_matrix_fragments_are_a_product():
    generator = np.random.default_rng(0)
    left, right = generator.standard_normal((2, 16, 16)), generator.standard_normal((2, 16, 8))
    left, right = (to_bfloat16(one.astype(np.float32)) for one in (left, right))
    a, b = np.zeros((4, 2, 32), dtype=np.uint32), np.zeros((2, 2, 32), dtype=np.uint32)
    for lane in range(32):
        row, pair = lane // 4, lane % 4 * 2
        for number, (down, along) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            low, high = left[:, row + down, pair + along], left[:, row + down, pair + along + 1]
            a[number, :, lane] = low.astype(np.uint32) | high.astype(np.uint32) << 16
        for number in range(2):
            low, high = right[:, pair + 8 * number, row], right[:, pair + 8 * number + 1, row]
            b[number, :, lane] = low.astype(np.uint32) | high.astype(np.uint32) << 16
    assert (fragment_a(a) == left).all() and (fragment_b(b) == right).all()
    c = generator.standard_normal((4, 2, 32)).astype(np.float32)
    expected = from_bfloat16(left).astype(np.float64) @ from_bfloat16(right) + gather_accumulator(c)
    got = gather_accumulator(multiply_fragments(a, b, c, "bf16"))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    assert (scatter_accumulator(gather_accumulator(c)) == c).all()


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_swizzled_matrices_use_every_place_once(row_bytes, is_transposed):
    """An operand that fills whole swizzled rows: 128 rows of K, or K rows that are as long as the swizzle."""
    descriptor = Descriptor(1024, 4096, 8 * row_bytes, row_bytes)
    rows, depth = (row_bytes // 2, 16) if is_transposed else (16, row_bytes // 2)
    addresses = descriptor.addresses(rows, depth, is_transposed=is_transposed)
    assert sorted(addresses.ravel()) == list(range(1024, 1024 + 16 * row_bytes, 2))
    assert not is_transposed or (addresses[1] - addresses[0] == 2).mean() > 0.9  # rows are contiguous


BARRIER_TEXT = "bar.sync \t0;"


def without_barrier(number: int, kernel: str = ""):
    """PTX whose barrier of that number is gone; of one kernel alone, if it is named."""

    def edit(ptx: str) -> str:
        if f".entry {kernel}" not in ptx:
            return ptx
        pieces = ptx.split(BARRIER_TEXT)
        joined = [BARRIER_TEXT.join(part) for part in (pieces[: number + 1], pieces[number + 1 :])]
        return "".join(joined)

    return edit


@pytest.mark.skipif("STAND_PTX" not in os.environ, reason="needs compiled kernels: STAND_PTX=90")
def test_barriers_of_production_kernels_are_needed(compiled):
    """A draw per law: its sums go through shared memory. Each of its first barriers, taken out, is a race."""
    from stand.gpu.kernels.verification.draw import draw_nodes

    laws, uniforms = torch.softmax(torch.randn(2, 3000), dim=1), torch.rand(2, dtype=torch.float64)
    expected = draw_nodes(laws, uniforms)
    with compiled.edited(str):
        assert torch.equal(draw_nodes(laws, uniforms), expected)
    for number in range(3):
        with compiled.edited(without_barrier(number)), pytest.raises(PtxError, match="race"):
            draw_nodes(laws, uniforms)


@pytest.mark.skipif("STAND_PTX" not in os.environ, reason="needs compiled kernels: STAND_PTX=90")
def test_every_barrier_of_the_traversal_is_needed(compiled):
    """Turns read what earlier turns have stored; with one barrier less any of them races."""
    from gpu_parts.kernel_bench import heap_parents
    from traversal_arrays import traversal_arrays
    from workloads.random_draft import random_draft

    from stand.gpu.kernels.verification.traverse import traverse
    from stand.trees import DraftBatch

    batch = DraftBatch.concatenate([random_draft(heap_parents(40), 60, np.random.default_rng(0))])
    laws, arrays = torch.full((40, 60), 1 / 60), traversal_arrays(batch, np.full(40, 0.5))
    texts = []
    with compiled.edited(lambda ptx: texts.append(ptx) or ptx):
        traverse(laws, *arrays)
    number_of_them = next(ptx for ptx in texts if ".entry _traverse" in ptx).count(BARRIER_TEXT)
    assert number_of_them > 4
    for number in range(number_of_them):
        with compiled.edited(without_barrier(number, "_traverse")), pytest.raises(PtxError, match="race"):
            traverse(laws, *arrays)
