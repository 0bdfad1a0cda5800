"""Fused kernels: the structs that describe their GEMMs, and the GEMMs that are refused. On GPUs: tests/gpu."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distgemm
from distgemm.gemm import GemmConfig, GemmTensors
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.flags import OPERATIONS, PHASES, WAIT, WRITE_DOUBLE, FlagOps, MemOp
from distgemm.gemm.fused import arguments as structs
from distgemm.gemm.fused import kernel as fused_kernel
from distgemm.gemm.fused.arguments import Batches, FusedArguments, place, send_groups
from distgemm.gemm.fused.gemms import COUNTERS, PRODUCTS, RESERVED, SENDS, Addend, FusedGemms, FusedSend
from distgemm.gemm.fused.kernel import fused_arguments, fused_source
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.parameters import Arguments, Matrix, Terms
from distgemm.plan.plan import STORED_ALIGNMENT

M, N, K = 64, 48, 32


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def gather(order: Sequence[int] = (2, 0, 1), **how: Any) -> FusedGemms:
    """The first of three chunks is there, the others arrive in another allocation. The D's have another order."""
    own, received, b, d, c = bfloat16(M, K), bfloat16(2, M, K), bfloat16(N, K), bfloat16(3 * M, N), bfloat16(3 * M, N)
    products = [
        GemmTensors(a, b, d[at * M : (at + 1) * M], c=c[at * M : (at + 1) * M], beta=1.0)
        for a, at in zip((own, received[1], received[0]), order, strict=True)
    ]
    given = {"moving": "a", "wait_flags": [0, 8, 16], "done_flags": [0] * 3, "remote": [False] * 3} | how
    return FusedGemms(products, **given)


def reduce(**how: Any) -> FusedGemms:
    """Two results for a peer, and two that add partial sums from there, a bias and C."""
    a, b, d, bias = bfloat16(4, M, K), bfloat16(N, K), bfloat16(2, M, N + 8)[..., :N], bfloat16(N)
    remote, partial, c = bfloat16(2, M, N), bfloat16(2, M, N), bfloat16(2, M, N)
    products = [GemmTensors(a[i], b, remote[i], padded=True) for i in range(2)]
    products += [GemmTensors(a[2 + i], b, d[i], c=c[i], partial=partial[1 - i], bias=bias, beta=2.0) for i in range(2)]
    given: dict[str, Any] = {"moving": "a", "wait_flags": [0, 0, 8, 16], "done_flags": [24, 32, 0, 0]}
    given |= {"remote": [True, True, False, False], "counters": torch.zeros(PRODUCTS, dtype=torch.int32)}
    return FusedGemms(products, **(given | how))


def reduce_several(**how: Any) -> FusedGemms:
    """Two results for each of two peers, and two that add partial sums from both, in another order."""
    a, b, d = bfloat16(6, M, K), bfloat16(N, K), bfloat16(2, M, N)
    peers, slots = [bfloat16(3, M, N), bfloat16(3, M, N)], bfloat16(4, M, N)
    products = [GemmTensors(a[i], b, peers[i // 2][i % 2], padded=True) for i in range(4)]
    products += [GemmTensors(a[4 + i], b, d[i], partial=slots[2 + i]) for i in range(2)]
    given: dict[str, Any] = {"moving": "a", "wait_flags": [0, 0, 0, 0, 40, 48], "done_flags": [8, 16, 24, 32, 0, 0]}
    given |= {"addends": [[], [], [], [], [Addend(slots[1], 56)], [Addend(slots[0], 64)]]}
    given |= {"remote": [True] * 4 + [False] * 2, "counters": torch.zeros(PRODUCTS, dtype=torch.int32)}
    return FusedGemms(products, **(given | how))


def address(tensors: tuple[Matrix, Matrix], number: int) -> int:
    """The address of a batch: of the second tensor if the number is negative."""
    tensor, batch = (tensors[0], number) if number >= 0 else (tensors[1], ~number)
    return int(tensor.data + 2 * batch * tensor.batch_stride)


@pytest.mark.parametrize("make", [gather, reduce, reduce_several])
def test_every_product_finds_its_matrices(make: Any) -> None:
    gemms, arguments = make(), FusedArguments()
    place(arguments, gemms)
    base = arguments.base
    assert (base.l, arguments.moving) == (len(gemms.products), 0)
    for number, product in enumerate(gemms.products):
        operand, result = arguments.operands[number], arguments.results[number]
        assert address((base.a, arguments.received_operand), operand.batch) == product.a.data_ptr()
        assert address((base.d, arguments.remote_d), result.batch) == product.d.data_ptr()
        assert (result.batch < 0) == gemms.remote[number]
        assert result.done_flag == gemms.done_flags[number]
        flags = (gemms.wait_flags[number], 0) if make is gather else (0, gemms.wait_flags[number])
        assert (operand.flag, result.source_flag) == flags
        if product.partial is not None:
            assert address((base.source, base.source), result.source_batch) == product.partial.data_ptr()
        elif make is not gather:
            assert result.source_batch == arguments.sources  # behind the last: TMA reads zeros
        if product.c is not None:
            c = base.terms.aux if make is reduce else base.source
            assert address((c, c), result.batch) == product.c.data_ptr()
        addends = gemms.addends[number] if gemms.addends else ()
        table = arguments.addends
        assert table.count[number] == len(addends)
        for at, addend in enumerate(addends, table.first[number]):
            assert address((base.source, base.source), table.addends[at].batch) == addend.matrix.data_ptr()
            assert table.addends[at].flag == addend.wait_flag
    assert bool(arguments.addends.any) == (make is reduce_several)
    if make is reduce:
        assert (base.d.stride, arguments.remote_d.stride) == (N + 8, N)
        assert (base.terms.bias, base.terms.bias_stride) == (gemms.products[2].bias.data_ptr(), 0)
        assert arguments.handshake.counters == arguments.pacing.counters == gemms.counters.data_ptr()


def test_columns_of_d_move_with_b() -> None:
    """Each has its part of the bias."""
    a, b, d, bias = bfloat16(M, K), bfloat16(2 * N, K), bfloat16(M, 2 * N), bfloat16(2 * N)
    parts = [slice(0, N), slice(N, 2 * N)]
    products = [GemmTensors(a, b[part], d[:, part], bias=bias[part]) for part in parts]
    arguments = FusedArguments()
    place(arguments, FusedGemms(products, "b", [0, 8], [0, 0], [False, False]))
    base = arguments.base
    assert (arguments.moving, base.d.stride, base.d.batch_stride, base.terms.bias_stride) == (1, 2 * N, N, N)
    assert address((base.b, arguments.received_operand), arguments.operands[1].batch) == b[N:].data_ptr()


def chunks_of_columns(parts: Sequence[int] = (0, 2, 1)) -> FusedGemms:
    """For each part of B, a result for a peer, and one that adds a partial sum from there, C and its part of a bias."""
    a, b, d = bfloat16(2, M, K), bfloat16(3 * N, K), bfloat16(M, 3 * N)
    remote, slots, c, bias = bfloat16(3, M, N), bfloat16(3, M, N), bfloat16(M, 3 * N), bfloat16(3 * N)
    columns = [slice(part * N, (part + 1) * N) for part in parts]
    products = [GemmTensors(a[0], b[of], remote[i], padded=True) for i, of in enumerate(columns)]
    products += [
        GemmTensors(a[1], b[of], d[:, of], c=c[:, of], bias=bias[of], partial=slots[i], beta=1.0)
        for i, of in enumerate(columns)
    ]
    count = len(parts)
    none, flags = [0] * count, [8 * number for number in range(1, count + 1)]
    counters = torch.zeros(PRODUCTS, dtype=torch.int32)
    return FusedGemms(products, "a", none + flags, flags + none, [True] * count + [False] * count, counters)


def test_gemms_with_partial_sums_may_differ_in_both_operands() -> None:
    arguments, gemms = FusedArguments(), chunks_of_columns()
    place(arguments, gemms)
    base = arguments.base
    assert (arguments.moving, arguments.other_operands, arguments.local_operands) == (0, 3, 2)
    assert (base.b.stride, base.b.batch_stride, base.terms.bias_stride) == (K, N * K, N)
    for product, operand, result in zip(gemms.products, arguments.operands, arguments.results, strict=False):
        batch = result.batch
        assert address((base.a, base.a), operand.batch) == product.a.data_ptr()
        assert address((base.b, base.b), operand.other_batch) == product.b.data_ptr()
        assert address((base.d, arguments.remote_d), batch) == product.d.data_ptr()
        if product.c is not None:
            terms = base.terms
            assert address((terms.aux, terms.aux), batch) == product.c.data_ptr()
            assert terms.bias + 2 * batch * terms.bias_stride == product.bias.data_ptr()


def test_the_operand_that_does_not_move_has_few_places() -> None:
    far = bfloat16((PRODUCTS + 1) * N, K)

    def by_parts(gemms: FusedGemms, *parts: int) -> FusedGemms:
        pairs = zip(gemms.products, parts, strict=True)
        return replace(gemms, products=[replace(one, b=far[at * N : (at + 1) * N]) for one, at in pairs])

    arguments = FusedArguments()
    place(arguments, by_parts(reduce(), 0, 0, PRODUCTS - 1, 1))
    assert arguments.other_operands == PRODUCTS
    with pytest.raises(
        ValueError, match=r"share B, or use at most 128 at equal distances; .* the last has number 128$"
    ):
        place(arguments, by_parts(reduce(), 0, 0, PRODUCTS, 1))
    with pytest.raises(ValueError, match=r"GEMMs of one kernel share B$"):
        place(arguments, by_parts(gather(), 0, 0, 1))


def test_matrices_are_not_too_far_apart() -> None:
    """The number of a batch and their count are each an int32."""
    far = Batches([64, 64 + 16 * (2**31 - 2), 80])
    assert (far.first, far.distance, far.numbers, far.count) == (64, 16, [0, 2**31 - 2, 1], 2**31 - 1)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 of them, and these, of 16 bytes, span 34359738352"):
        Batches([64, 64 + 16 * (2**31 - 1), 80])


def test_two_matrices_may_be_far_apart() -> None:
    """Their distance is too long for TMA, so the tensor has more batches at a shorter distance."""
    far = 2**47 - 2**21
    found = Batches([2**21, 2**21 + far])
    assert found.distance < 2**40 and found.distance * found.numbers[1] == far and found.count == found.numbers[1] + 1
    assert Batches([0, 2**40 - 2**21]).numbers == [0, 1]
    with pytest.raises(ValueError, match=r"of less than 2\*\*40 bytes"):
        Batches([0, 2**40 + 16])


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 3])
def test_slots_in_which_several_store_are_found_wherever_they_lie(ranks: int, chunks: int) -> None:
    """Of memories that are as far apart as memory goes, and start at multiples of 2 MiB."""
    problem = distgemm.GemmProblem(8 * ranks * chunks, 40, 16 * ranks)
    for mechanism in ("store", "push"):
        plan = distgemm.make_plan(problem, "reduce_scatter_1d_pairwise_a", ranks, chunks=chunks, mechanism=mechanism)
        bases = [rank * ((2**47 // ranks) // 2**21 | 1) * 2**21 for rank in range(ranks)]
        slots = [bases[rank] + slot.offset for rank in range(1, ranks) for slot in plan.slots[rank]]
        several = ranks > 2 and (ranks, chunks) != (3, 1)
        if mechanism == "store":
            assert ranks == 2 or all(slot.bytes % STORED_ALIGNMENT == 0 for each in plan.slots for slot in each)
            assert Batches(slots).count < 2**31
        elif several:  # what the alignment is for
            with pytest.raises(ValueError, match="fewer than"):
                Batches(slots)


def test_structs_lie_as_in_c() -> None:
    """The sizes are those of the C structs, counted by hand, and each field has the name of its C field."""
    flag_ops = 40 + OPERATIONS * 16  # int32 for the phases and their ends, then operations
    send = 4 * 8 + 2 * 8 + 4 * 4 + 2 * 2 + 4  # padded to a multiple of 8
    sizes = {
        FlagOps: flag_ops,
        structs.Operand: 8 + 4 + 2 * 2,
        structs.Result: 2 * 8 + 2 * 4,
        structs.Group: 2 * 2,
        structs.Addend: 8 + 8,
        structs.Addends: 8 + 2 * 8 + PRODUCTS * 2 * 2 + PRODUCTS * 16,
        structs.Send: send,
        structs.Sender: 2 * 12 + 4 + SENDS * 2 * 4 + 4 + SENDS * send,
        structs.Handshake: 2 * flag_ops + 8,
        structs.LinkPacing: 8 + 8,
        Terms: 5 * 4 + 4 + 3 * 8 + 3 * 8 + 3 * 8,
    }
    assert {struct: ctypes.sizeof(struct) for struct in sizes} == sizes
    folder = KernelSource("", (), "90a").path.parent
    text = "".join(folder.joinpath(f"{name}.cuh").read_text() for name in ("fused", "flags"))
    names = ("Operand", "Result", "Group", "Addend", "Send", "Queue", "LinkPacing", "Handshake")
    for struct in (*(getattr(structs, name) for name in names), FlagOps):
        found = re.search(rf"struct {struct.__name__} {{(.*?)(?:CUTLASS_DEVICE|\n *}};)", text, re.DOTALL)
        assert found
        fields = re.sub(r"//.*|static .*", "", found.group(1))
        assert [field[0] for field in struct._fields_] == re.findall(r"\b(\w+)(?:\[\w+\])?\s*[,;]", fields)
    constants = {"kProducts": PRODUCTS, "kSends": SENDS, "kCounters": COUNTERS, "kOperations": OPERATIONS}
    for name, value in (constants | {"kPhases": PHASES, "kReserved": RESERVED}).items():
        assert f"constexpr int {name} = {value};" in text


def test_tiles_of_a_group_are_interleaved() -> None:
    def groups(arguments: FusedArguments, count: int) -> list[tuple[int, int]]:
        return [(group.first, group.size) for group in arguments.groups[:count]]

    for sizes, wanted in (
        ((), [(0, 1), (1, 1), (2, 1), (3, 1)]),
        ((1, 2, 1), [(0, 1), (1, 2), (1, 2), (3, 1)]),
        ((4,), [(0, 4)] * 4),
    ):
        arguments = FusedArguments()
        place(arguments, reduce(tile_interleave=sizes))
        assert groups(arguments, 4) == wanted
    arguments = FusedArguments()
    place(arguments, gather(tile_interleave=(1, 2)))
    assert groups(arguments, 3) == [(0, 1), (1, 2), (1, 2)]


def test_the_arguments_have_the_operations_of_entry_and_exit() -> None:
    entry = [[MemOp(True, 8, 1)], [MemOp(False, 16, 0, double=True), MemOp(False, 24, 5)]]
    for make in (gather, reduce):
        counters = torch.zeros(COUNTERS, dtype=torch.int32)
        arguments = FusedArguments()
        order: dict[str, Any] = {"order": (0, 2, 1)} if make is gather else {}
        place(arguments, make(**order, counters=counters, entry=entry, exit=entry[::-1]))
        for flag_ops, phases in ((arguments.handshake.entry, entry), (arguments.handshake.exit, entry[::-1])):
            ops = [op for phase in phases for op in phase]
            assert list(flag_ops.ends)[: flag_ops.phases] == [len(phases[0]), len(ops)]
            found = [(op.kind == WAIT, op.address, op.value, op.kind == WRITE_DOUBLE) for op in flag_ops.operations[:3]]
            assert found == ops
        assert arguments.handshake.counters == counters.data_ptr()
    place(arguments, reduce())
    assert (arguments.handshake.entry.phases, arguments.handshake.exit.phases) == (0, 0)


def test_sends_are_rows_in_slices() -> None:
    source, target = bfloat16(M, 2 * K)[:, :K], bfloat16(M, K)
    sends = [FusedSend(source, target, 8), FusedSend(target, source, 24)]
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    arguments = FusedArguments()
    place(arguments, gather((0, 2, 1), sends=sends, slice_k=24, counters=counters, link_rate=320.0))
    sender = arguments.sender
    assert sender.picoseconds_per_kib == arguments.pacing.picoseconds_per_kib == 3200
    assert (arguments.slice_k, sender.queues[0].end, arguments.handshake.counters) == (24, 2, counters.data_ptr())
    first, second = sender.sends[:2]
    assert (first.source, first.target, first.flag) == (source.data_ptr(), target.data_ptr(), 8)
    assert (first.source_pitch, first.target_pitch) == (second.target_pitch, second.source_pitch) == (4 * K, 2 * K)
    assert (first.rows, first.row_bytes, first.slice_bytes) == (M, 2 * K, 48)
    assert (first.counter, second.counter) == (0, 2)
    assert groups_of_sends(arguments, 2) == [(0, 1), (1, 1)]
    assert [operand.sliced for operand in arguments.operands[:3]] == [1, 1, 1]
    place(arguments, gather((0, 2, 1), sends=sends, counters=counters, whole_operands=[False, True, False]))
    assert [operand.sliced for operand in arguments.operands[:3]] == [1, 0, 1]
    assert sender.picoseconds_per_kib == 0
    assert (arguments.slice_k, sender.sends[0].slice_bytes, sender.sends[1].counter) == (K, 2 * K, 1)
    place(arguments, gather((0, 2, 1), sends=sends, counters=counters), [2])
    assert groups_of_sends(arguments, 2) == [(0, 2), (0, 2)]


def groups_of_sends(arguments: FusedArguments, count: int) -> list[tuple[int, int]]:
    return [(send.group.first, send.group.size) for send in arguments.sender.sends[:count]]


@pytest.mark.parametrize(
    ("blocks", "config", "wanted"),
    [
        (132, "64x128x64_1x1_pingpong", [3]),  # four GEMMs of 4x8 tiles: one wave
        (128, "64x128x64_1x1_pingpong", [3]),
        (96, "64x128x64_1x1_pingpong", [2, 1]),  # three at once, one of them with this rank's own shard
        (80, "64x128x64_1x1_pingpong", [1, 2]),  # most of the third in the second wave
        (64, "64x128x64_1x1_pingpong", [1, 2]),
        (32, "64x128x64_1x1_pingpong", [1, 1, 1]),
        (3, "64x128x64_1x1_pingpong", [1, 1, 1]),
        (81, "64x128x64_2x1_pingpong", [1, 2]),  # 80 in clusters; with one more it would be [2, 1]
        (1, "64x128x64_2x1_pingpong", [1, 1, 1]),
        (96, "64x192x64_1x4_pingpong", [2, 1]),  # 4x8 tiles, a quarter of them outside of D
    ],
)
def test_slices_for_gemms_of_one_wave_alternate(blocks: int, config: str, wanted: list[int]) -> None:
    a, b, d, slots = bfloat16(256, K), bfloat16(1024, K), bfloat16(4, 256, 1024), bfloat16(3, 256, K)
    products = [GemmTensors(x, b, d[i]) for i, x in enumerate((a, *slots))]
    sends = [FusedSend(a, slots[i], 8 * i) for i in range(3)]
    gemms = FusedGemms(products, "a", [0, 0, 8, 16], [0] * 4, [False] * 4, sends=sends)
    assert send_groups(gemms, GemmConfig.parse(config), blocks) == wanted
    one = FusedGemms(products, "a", [0, 0, 8, 16], [0] * 4, [False] * 4, sends=sends[2:])
    assert send_groups(one, GemmConfig.parse(config), blocks) == [1]
    assert send_groups(gather(), GemmConfig.parse(config), blocks) == []


def test_the_arguments_have_the_groups_of_sends() -> None:
    """They depend on the number of SMs. Sends of finished results leave one by one."""
    a, b, d, slots = bfloat16(256, K), bfloat16(1024, K), bfloat16(4, 256, 1024), bfloat16(3, 256, K)
    products = [GemmTensors(x, b, d[i]) for i, x in enumerate((a, *slots))]
    sends = [FusedSend(a, slots[i], 8 * i) for i in range(3)]
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    gathered = FusedGemms(products, "a", [0, 0, 8, 16], [0] * 4, [False] * 4, counters, sends)
    for blocks, gemms, wanted in (
        (132, gathered, [(0, 3)] * 3),
        (96, gathered, [(0, 2), (0, 2), (2, 1)]),
        (132, reduce_send(), [(0, 1), (1, 1)]),
    ):
        config = GemmConfig.parse("64x128x64_1x1_pingpong")
        arguments = fused_arguments(gemms, config, Arguments(sm_count=blocks))
        assert groups_of_sends(arguments, len(gemms.sends)) == wanted
        assert arguments.base.l == len(gemms.products)


@pytest.mark.parametrize(
    ("tile_interleave", "wanted"),
    [((), [1, 1, 1]), ((1, 1, 2), [1, 2]), ((1, 3), [3]), ((2, 2), [1, 2]), ((3, 1), [2, 1])],
)
def test_slices_for_interleaved_gemms_alternate(tile_interleave: tuple[int, ...], wanted: list[int]) -> None:
    """Here one GEMM fills the GPU."""
    a, b, d, slots = bfloat16(256, K), bfloat16(1024, K), bfloat16(4, 256, 1024), bfloat16(3, 256, K)
    products = [GemmTensors(x, b, d[i]) for i, x in enumerate((a, *slots))]
    sends = [FusedSend(a, slots[i], 8 * i) for i in range(3)]
    gemms = FusedGemms(products, "a", [0, 0, 8, 16], [0] * 4, [False] * 4, sends=sends, tile_interleave=tile_interleave)
    assert send_groups(gemms, GemmConfig.parse("64x128x64_1x1_pingpong"), 32) == wanted


def test_a_rank_sends_to_peers_that_have_no_rows() -> None:
    a, b, d, slots = bfloat16(256, K), bfloat16(1024, K), bfloat16(256, 1024), bfloat16(3, 256, K)
    sends = [FusedSend(a, slots[i], 8 * i) for i in range(3)]
    gemms = FusedGemms([GemmTensors(a, b, d)], "a", [0], [0], [False], sends=sends)
    for blocks, wanted in ((132, [3]), (64, [2, 1]), (32, [1, 1, 1])):
        assert send_groups(gemms, GemmConfig.parse("64x128x64_1x1_pingpong"), blocks) == wanted


def test_the_combined_spec_is_as_large_as_all_gemms() -> None:
    combined = gather().combined_spec
    assert (combined.m, combined.n, combined.k) == (3 * M, N, K)
    assert (combined.d.rows, combined.c and combined.c.rows) == (3 * M, 3 * M)


def reduce_send() -> FusedGemms:
    """One finished sum is sent to a peer, and another one, which a peer has sent, is copied from its slot to D."""
    d, slots = bfloat16(2, M, N), bfloat16(2, M, N)
    sends = [FusedSend(slots[1], d[1], 0, wait_flag=24, remote=False), FusedSend(d[0], slots[0], 8, wait_flag=16)]
    return reduce(sends=sends, link_rate=360.0)


def test_remote_sends_come_before_local_ones() -> None:
    arguments, gemms = FusedArguments(), reduce_send()
    place(arguments, gemms)
    sender = arguments.sender
    assert [(queue.begin, queue.end) for queue in sender.queues] == [(0, 1), (1, 2)]
    assert sender.picoseconds_per_kib == 2844
    assert groups_of_sends(arguments, 2) == [(0, 1), (1, 1)]
    found = [(send.flag, send.wait_flag, send.counter) for send in sender.sends[:2]]
    assert found == [(8, 16, 0), (0, 24, 1)]
    assert [send.slice_bytes for send in sender.sends[:2]] == [2 * N, 2 * N]


@pytest.mark.parametrize(
    ("make", "kind"), [(gather, "DG_GATHER"), (reduce, "DG_REDUCE"), (reduce_send, "DG_REDUCE_SEND")]
)
def test_the_source_has_the_kind(make: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    source = fused_source(make(), GemmConfig.parse("128x128x64_2x1_pingpong"))
    assert dict(source.macros)["DG_KIND"] == kind
    assert source.name.endswith(f", fused, {make().kind}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: FusedGemms([], "a", [], [], []), "1 to 128 GEMMs, got 0"),
        (lambda: gather(moving="b"), "GEMMs of one kernel share A"),
        (lambda: gather((0, 2, 1), done_flags=[8, 0, 0]), "have no done flags"),
        (lambda: gather((0, 2, 1), remote=[True, False, False]), "1 of them remote"),
        (lambda: reduce(counters=None), "takes counters"),
        (
            lambda: gather((0, 2, 1), sends=[FusedSend(bfloat16(M, K), bfloat16(M, K), 8)]),
            "sends or an entry takes counters",
        ),
        (lambda: gather((0, 2, 1), entry=[[]], exit=[[]]), "sends or an entry takes counters"),
        (lambda: reduce(entry=[[]]), "both an entry and an exit, or neither"),
        (
            lambda: reduce(entry=[[]], exit=[[MemOp(True, 8, 1)] * 200]),
            "at most 192 operations in 8 phases, got 200 in 1",
        ),
        (
            lambda: gather(sends=[FusedSend(bfloat16(M, K), bfloat16(M, K), 8, remote=False)]),
            "sends to other GPUs only, got a send within this GPU",
        ),
        (lambda: reduce(slice_k=64), "partial sums do not; got slices of 64"),
        (
            lambda: reduce_several(addends=[[Addend(bfloat16(M, N), 8)], [], [], [], [], []]),
            "a GEMM with addends has a partial sum, and its D is not remote",
        ),
        (lambda: reduce_several(remote=[True] * 6), "a GEMM with addends has a partial sum, and its D is not remote"),
        (
            lambda: gather(addends=[[Addend(bfloat16(M, N), 8)], [], []]),
            "a GEMM with addends has a partial sum, and its D is not remote",
        ),
        *(
            (
                lambda wrong=wrong: reduce_several(addends=[[]] * 5 + [[Addend(wrong, 8)]]),
                "has the layout of the partial sum",
            )
            for wrong in (
                bfloat16(N, M),
                torch.zeros(M, N),
                bfloat16(M, N + 8)[:, :N],
                bfloat16(M * N + 1)[1:].view(M, N),
            )
        ),
        (lambda: reduce_several(addends=[[]] * 5 + [[Addend(bfloat16(M, N), 0)]]), "has a wait flag, got 0"),
        (
            lambda: reduce_several(addends=[[]] * 5 + [[Addend(bfloat16(M, N), 8)] * 129]),
            "at most 128 addends, got 129",
        ),
        (lambda: reduce(tile_interleave=(1, 2)), r"got \[1, 2\] for 4 GEMMs"),
        (lambda: reduce(tile_interleave=(5, -1)), r"got \[5, -1\] for 4 GEMMs"),
        (lambda: gather(tile_interleave=(2,)), r"got \[2\] for 3 GEMMs"),
        (lambda: reduce(sends=[FusedSend(bfloat16(M, K), bfloat16(M, K), 8)] * 129), "128 matrices in 1911 slices"),
        (lambda: gather(sends=[FusedSend(bfloat16(M, K), bfloat16(M, K), 8)] * 129), "128 matrices in 2040 slices"),
        (
            lambda: gather(sends=[FusedSend(bfloat16(M, k), bfloat16(M, k), 8) for k in (K, 2 * K)]),
            r"rows of one length, got \[32, 64\]",
        ),
    ],
)
def test_what_one_kernel_cannot_do_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(FusedArguments(), change())


@pytest.mark.parametrize(
    ("rows", "slice_k", "message"),
    [
        (bfloat16(M, K + 4)[:, :K], 0, "a send has addresses, strides and rows in multiples of 16 bytes"),
        (bfloat16(M, K), 24, "slices of 24 elements are no multiple of the depth of tiles, 64"),
        (bfloat16(K, 1).t(), 0, None),  # a single row has no pitch
    ],
)
def test_what_no_warp_can_send_is_refused(
    rows: torch.Tensor, slice_k: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    send = FusedSend(rows, bfloat16(*rows.shape), 8)
    gemms = gather((0, 2, 1), sends=[send], slice_k=slice_k, counters=torch.zeros(COUNTERS, dtype=torch.int32))
    if message is None:
        fused_source(gemms)
    else:
        with pytest.raises(ValueError, match=message):
            fused_source(gemms)
    arguments = FusedArguments()
    place(arguments, gemms)
    assert (arguments.sender.sends[0].source_pitch == 0) == (rows.shape[0] == 1)


@pytest.mark.parametrize("which", ["source", "target"])
@pytest.mark.parametrize(
    "rows", [bfloat16(M, K + 4)[:, :K], bfloat16(M * K + 1)[1:].view(M, K)], ids=["pitch", "address"]
)
def test_sources_and_targets_of_sends_are_aligned(
    which: str, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    send = replace(FusedSend(bfloat16(M, K), bfloat16(M, K), 8), **{which: rows})
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    with pytest.raises(ValueError, match="a send has addresses, strides and rows in multiples of 16 bytes"):
        fused_source(gather(sends=[send], counters=counters))


def test_one_slice_of_all_of_k_has_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    config = GemmConfig.parse("64x128x64_1x1_pingpong")
    assert K % config.tile[2]
    fused_source(gather(slice_k=K), config)
    with pytest.raises(ValueError, match=f"slices of {K - 8} elements are no multiple"):
        fused_source(gather(slice_k=K - 8), config)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same strides at an address that TMA cannot take."""
    shape, strides = tensor.shape, tensor.stride()
    return bfloat16(1 + sum(size * stride for size, stride in zip(shape, strides, strict=True)))[1:].as_strided(
        shape, strides
    )


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["a", "b"])
def test_one_misaligned_operand_is_refused(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All GEMMs have the alignment of the least aligned one."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    gemms = gather()
    products = [*gemms.products]
    products[number] = replace(products[number], **{name: unaligned(getattr(products[number], name))})
    with pytest.raises(ValueError, match="strides of A and B in multiples of 16 bytes"):
        fused_source(replace(gemms, products=products))


@pytest.mark.parametrize(("number", "name"), [(0, "d"), (1, "d"), (2, "d"), (3, "partial")])
def test_partial_sums_and_results_are_aligned_for_tma(number: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C need not be. Without partial sums, results may be stored directly."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    gemms, direct = reduce(), GemmConfig.parse("64x128x64_1x1_pingpong_direct")
    products = [*gemms.products]
    products[number] = replace(products[number], **{name: unaligned(getattr(products[number], name))})
    with pytest.raises(ValueError, match="rows of D, C and the partial sum in multiples of 16 bytes"):
        fused_source(replace(gemms, products=products))
    fused_source(
        replace(gemms, products=[*gemms.products[:3], replace(gemms.products[3], c=unaligned(bfloat16(M, N)))])
    )
    fused_source(gather(), direct)
    with pytest.raises(ValueError, match=r"pingpong_direct.* only warps that load through TMA wait for flags"):
        fused_source(gemms, direct)


def test_gemms_with_partial_sums_have_one_scale_for_all_rows() -> None:
    def scaled(gemms: FusedGemms, length: int) -> FusedGemms:
        return replace(gemms, products=[replace(one, scale_a=torch.ones(length)) for one in gemms.products])

    for gemms in (gather(), reduce()):
        assert scaled(gemms, 1).spec.scale_a == "tensor"
    assert scaled(gather(), M).spec.scale_a == "row"
    with pytest.raises(ValueError, match="partial sums have one scale for all rows, got one for each"):
        _ = scaled(reduce(), M).spec


def test_fused_kernels_take_no_scales_of_blocks() -> None:
    for gemms in (gather(), reduce()):
        products = []
        for one in gemms.products:
            a, b = (x.to(torch.float8_e4m3fn) for x in (one.a, one.b))
            scales = [torch.ones(-(-x.shape[0] // 128), -(-x.shape[1] // 128)) for x in (a, b)]
            scaled = replace(one, a=a, b=b, scale_a=scales[0], scale_b=scales[1], block_rows=(128, 128))
            products.append(scaled)
        with pytest.raises(ValueError, match="fused kernels take scales of tensors and rows, got 128x128 and 128x128"):
            _ = replace(gemms, products=products).spec


def test_terms_lie_as_d_does() -> None:
    """Or they are the same for all."""
    gemms = gather()
    swapped = [replace(one, c=gemms.products[at].c) for one, at in zip(gemms.products, (1, 0, 2), strict=True)]
    with pytest.raises(ValueError, match="c of each GEMM lies as D does, or is the same for all"):
        place(FusedArguments(), replace(gemms, products=swapped))
    arguments = FusedArguments()
    place(arguments, replace(gemms, products=[replace(one, c=gemms.products[0].c) for one in gemms.products]))
    assert arguments.base.source.batch_stride == 0
    columns = chunks_of_columns()
    swapped = [*columns.products[:3]] + [
        replace(one, bias=columns.products[at].bias) for one, at in zip(columns.products[3:], (4, 3, 5), strict=True)
    ]
    with pytest.raises(ValueError, match="bias of each GEMM lies as D does"):
        place(FusedArguments(), replace(columns, products=swapped))


@pytest.mark.parametrize(("last", "refused"), [(2, False), (3, False), (4, True), (5, True)])
def test_there_are_no_more_places_for_d_than_gemms(last: int, refused: bool) -> None:
    a, b, d, slots = bfloat16(4, M, K), bfloat16(N, K), bfloat16(6, M, N), bfloat16(4, M, N)
    products = [GemmTensors(a[0], b, bfloat16(M, N))]
    products += [GemmTensors(a[i], b, d[at], partial=slots[i]) for i, at in ((1, 0), (2, 1), (3, last))]
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    gemms = FusedGemms(products, "a", [0, 8, 8, 8], [8, 0, 0, 0], [True, False, False, False], counters)
    arguments = FusedArguments()
    if refused:
        with pytest.raises(ValueError, match=f"equal distances, got {last + 1} places for 4 GEMMs"):
            place(arguments, gemms)
    else:
        place(arguments, gemms)
        assert arguments.local_results == last + 1


def test_d_at_unequal_distances_is_refused() -> None:
    a, b, d = bfloat16(3, M, K), bfloat16(N, K), bfloat16(5, M, N)
    products = [GemmTensors(a[i], b, d[at]) for i, at in enumerate((0, 1, 4))]
    with pytest.raises(ValueError, match="got 5 places for 3 D's"):
        place(FusedArguments(), FusedGemms(products, "a", [0] * 3, [0] * 3, [False] * 3))


def test_paced_stores_take_a_pingpong_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless another configuration is given."""
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path))  # kernels that are compiled already are preferred
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    m, n, k = 256, 16384, 2048
    a, b, d = bfloat16(4, m, k), bfloat16(n, k), bfloat16(4, m, n)
    products = [GemmTensors(a[i], b, d[i], partial=d[i - 1] if i else None, padded=True) for i in range(4)]
    for link_rate, wanted in ((0.0, "cooperative"), (360.0, "pingpong")):
        gemms = FusedGemms(products, "a", [0, 8, 8, 8], [8, 8, 8, 0], [True, True, True, False], link_rate=link_rate)
        assert wanted in fused_source(gemms).name
        assert "cooperative" in fused_source(gemms, GemmConfig.parse("128x256x64_2x1_cooperative")).name


@pytest.mark.parametrize("rows", [64, 128, 256, 384])
def test_tiles_lie_within_gemms_of_few_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a given configuration; also if a large tile was measured for a GEMM as large as all of them."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    count, n, k = 4096 // rows, 4096, 512
    a, b, d = bfloat16(count, rows, k), bfloat16(n, k), bfloat16(count, rows, n)
    products = [GemmTensors(a[i], b, d[i], partial=d[i - 1] if i else None, padded=True) for i in range(count)]
    given: list[Any] = [[0] + [8] * (count - 1), [8] * (count - 1) + [0], [True] * (count - 1) + [False]]
    large = GemmConfig.parse("256x128x64_2x1_cooperative")
    for measured in (None, large):
        if measured is not None:
            monkeypatch.setattr(fused_kernel, "recorded_config", lambda provider, spec: large)
        macros = dict(fused_source(FusedGemms(products, "a", *given)).macros)
        assert rows % (int(macros["DG_TILE_M"]) * int(macros["DG_CLUSTER_M"])) == 0


def test_gemms_of_different_layouts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    b, d = bfloat16(N, K), bfloat16(2, M, N)
    products = [GemmTensors(bfloat16(M, K), b, d[0]), GemmTensors(bfloat16(K, M).t(), b, d[1])]
    gemms = FusedGemms(products, "a", [0, 8], [0, 0], [False, False])
    with pytest.raises(ValueError, match="the GEMMs of one kernel have the same types and shapes"):
        fused_source(gemms)
    odd = bfloat16(2, M, K + 1)[..., :K]
    gemms = FusedGemms([GemmTensors(odd[i], b, d[i]) for i in range(2)], "a", [0, 8], [0, 0], [False, False])
    with pytest.raises(ValueError, match="provider cutlass, fused kernel, any configuration: TMA wants"):
        fused_source(gemms)
    with pytest.raises(ValueError, match=r"128x128x32_1x1_plain.*take a configuration with TMA"):
        fused_source(gather(), GemmConfig.parse("128x128x32_1x1_plain"))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, M, K), torch.bfloat16, "single matrices, got 2 batches"),
        ((M, K), torch.float64, "fused kernel: A and B are of .*, not float64"),
    ],
)
def test_what_no_kernel_multiplies_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    a = torch.zeros(2, *shape, dtype=dtype)
    d, partial = torch.zeros(2, *shape[:-1], K, dtype=dtype), torch.zeros(*shape[:-1], K, dtype=dtype)
    b = torch.zeros(*shape[:-2], K, K, dtype=dtype)
    for second in (GemmTensors(a[1], b, d[1]), GemmTensors(a[1], b, d[1], partial=partial)):
        gemms = FusedGemms([GemmTensors(a[0], b, d[0]), second], "a", [0, 8], [0, 0], [False, False])
        with pytest.raises(ValueError, match=message):
            fused_source(gemms)
