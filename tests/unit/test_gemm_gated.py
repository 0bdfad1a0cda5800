"""Several products by one kernel: what it is told of where they lie, and what is refused. On GPUs: tests/gpu."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distgemm
from distgemm.gemm import GemmConfig, GemmTensors
from distgemm.gemm.cutlass import Arguments, CutlassProvider, Matrix
from distgemm.gemm.flags import OPERATIONS, PHASES, WAIT, WRITE_DOUBLE, FlagOps, MemOp
from distgemm.gemm.fused import gemms as gated
from distgemm.gemm.fused.gemms import (
    COUNTERS,
    PRODUCTS,
    RESERVED,
    SENDS,
    Further,
    FusedGemms,
    FusedSend,
    _Arguments,
    _Batches,
    _Further,
    _place,
    _Product,
    _Send,
    fused_source,
    sent_in_turn,
)
from distgemm.gemm.nvcc import KernelSource
from distgemm.plan.plan import STORED_ALIGNMENT

M, N, K = 64, 48, 32


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def operands(order: Sequence[int] = (2, 0, 1), **how: Any) -> FusedGemms:
    """The first of three chunks is there, the others come into another memory; D's in another order."""
    here, there, b, d, c = bfloat16(M, K), bfloat16(2, M, K), bfloat16(N, K), bfloat16(3 * M, N), bfloat16(3 * M, N)
    products = [
        GemmTensors(a, b, d[at * M : (at + 1) * M], c=c[at * M : (at + 1) * M], beta=1.0)
        for a, at in zip((here, there[1], there[0]), order, strict=True)
    ]
    given = {"moving": "a", "waits": [0, 8, 16], "done_flags": [0] * 3, "away": [False] * 3} | how
    return FusedGemms(products, **given)


def sums(**how: Any) -> FusedGemms:
    """Two results for a peer, two that add what comes from there, with a bias and C."""
    a, b, d, bias = bfloat16(4, M, K), bfloat16(N, K), bfloat16(2, M, N + 8)[..., :N], bfloat16(N)
    away, partial, c = bfloat16(2, M, N), bfloat16(2, M, N), bfloat16(2, M, N)
    products = [GemmTensors(a[i], b, away[i], padded=True) for i in range(2)]
    products += [GemmTensors(a[2 + i], b, d[i], c=c[i], partial=partial[1 - i], bias=bias, beta=2.0) for i in range(2)]
    given: dict[str, Any] = {"moving": "a", "waits": [0, 0, 8, 16], "done_flags": [24, 32, 0, 0]}
    given |= {"away": [True, True, False, False], "counters": torch.zeros(PRODUCTS, dtype=torch.int32)}
    return FusedGemms(products, **(given | how))


def several(**how: Any) -> FusedGemms:
    """Two results for each of two peers, two that add what comes from both, in another order."""
    a, b, d = bfloat16(6, M, K), bfloat16(N, K), bfloat16(2, M, N)
    peers, slots = [bfloat16(3, M, N), bfloat16(3, M, N)], bfloat16(4, M, N)
    products = [GemmTensors(a[i], b, peers[i // 2][i % 2], padded=True) for i in range(4)]
    products += [GemmTensors(a[4 + i], b, d[i], partial=slots[2 + i]) for i in range(2)]
    given: dict[str, Any] = {"moving": "a", "waits": [0, 0, 0, 0, 40, 48], "done_flags": [8, 16, 24, 32, 0, 0]}
    given |= {"further": [[], [], [], [], [Further(slots[1], 56)], [Further(slots[0], 64)]]}
    given |= {"away": [True] * 4 + [False] * 2, "counters": torch.zeros(PRODUCTS, dtype=torch.int32)}
    return FusedGemms(products, **(given | how))


def address(memories: tuple[Matrix, Matrix], number: int) -> int:
    """Of a batch: of the other memory where it is negative."""
    memory, batch = (memories[0], number) if number >= 0 else (memories[1], ~number)
    return int(memory.data + 2 * batch * memory.batch_stride)


@pytest.mark.parametrize("make", [operands, sums, several])
def test_every_product_finds_its_matrices(make: Any) -> None:
    gemms, arguments = make(), _Arguments()
    _place(arguments, gemms)
    base, found = arguments.base, arguments.products
    assert (base.l, arguments.moving) == (len(gemms.products), 0)
    for number, product in enumerate(gemms.products):
        told = found[number]
        assert address((base.a, arguments.operand_elsewhere), told.operand) == product.a.data_ptr()
        assert address((base.d, arguments.d_elsewhere), told.result) == product.d.data_ptr()
        assert (told.result < 0) == gemms.away[number]
        assert told.result_word == gemms.done_flags[number]
        waits = (gemms.waits[number], 0) if make is operands else (0, gemms.waits[number])
        assert (told.operand_word, told.source_word) == waits
        if product.partial is not None:
            assert address((base.source, base.source), told.source) == product.partial.data_ptr()
        elif make is not operands:
            assert told.source == arguments.sources  # behind the last: TMA reads zeros
        if product.c is not None:
            c = base.aux if make is sums else base.source
            assert address((c, c), told.result) == product.c.data_ptr()
        more = gemms.further[number] if gemms.further else ()
        assert told.sources == len(more)
        for at, one in enumerate(more, told.further):
            assert address((base.source, base.source), arguments.further[at].batch) == one.matrix.data_ptr()
            assert arguments.further[at].word == one.waits
    assert bool(arguments.adds) == (make is several)
    if make is sums:
        assert (base.d.stride, arguments.d_elsewhere.stride) == (N + 8, N)
        assert (base.bias, base.bias_stride) == (gemms.products[2].bias.data_ptr(), 0)
        assert arguments.counters == gemms.counters.data_ptr()


def test_columns_of_d_move_with_b() -> None:
    """With their part of a bias."""
    a, b, d, bias = bfloat16(M, K), bfloat16(2 * N, K), bfloat16(M, 2 * N), bfloat16(2 * N)
    parts = [slice(0, N), slice(N, 2 * N)]
    products = [GemmTensors(a, b[part], d[:, part], bias=bias[part]) for part in parts]
    arguments = _Arguments()
    _place(arguments, FusedGemms(products, "b", [0, 8], [0, 0], [False, False]))
    base = arguments.base
    assert (arguments.moving, base.d.stride, base.d.batch_stride, base.bias_stride) == (1, 2 * N, N, N)
    assert address((base.b, arguments.operand_elsewhere), arguments.products[1].operand) == b[N:].data_ptr()


def chunks_of_columns(parts: Sequence[int] = (0, 2, 1)) -> FusedGemms:
    """Two results for a peer of each part of B, and two that add what comes from there, with C and their part of a
    bias."""
    a, b, d = bfloat16(2, M, K), bfloat16(3 * N, K), bfloat16(M, 3 * N)
    away, slots, c, bias = bfloat16(3, M, N), bfloat16(3, M, N), bfloat16(M, 3 * N), bfloat16(3 * N)
    columns = [slice(part * N, (part + 1) * N) for part in parts]
    products = [GemmTensors(a[0], b[of], away[i], padded=True) for i, of in enumerate(columns)]
    products += [
        GemmTensors(a[1], b[of], d[:, of], c=c[:, of], bias=bias[of], partial=slots[i], beta=1.0)
        for i, of in enumerate(columns)
    ]
    count = len(parts)
    words = [0] * count, [8 * number for number in range(1, count + 1)]
    counts = torch.zeros(PRODUCTS, dtype=torch.int32)
    return FusedGemms(products, "a", words[0] + words[1], words[1] + words[0], [True] * count + [False] * count, counts)


def test_products_with_sums_may_differ_in_both_operands() -> None:
    arguments, gemms = _Arguments(), chunks_of_columns()
    _place(arguments, gemms)
    base = arguments.base
    assert (arguments.moving, arguments.others, arguments.operands_here) == (0, 3, 2)
    assert (base.b.stride, base.b.batch_stride, base.bias_stride) == (K, N * K, N)
    for product, told in zip(gemms.products, arguments.products, strict=False):
        assert address((base.a, base.a), told.operand) == product.a.data_ptr()
        assert address((base.b, base.b), told.other) == product.b.data_ptr()
        assert address((base.d, arguments.d_elsewhere), told.result) == product.d.data_ptr()
        if product.c is not None:
            assert address((base.aux, base.aux), told.result) == product.c.data_ptr()
            assert base.bias + 2 * told.result * base.bias_stride == product.bias.data_ptr()


def test_the_operand_that_does_not_move_has_few_places() -> None:
    far = bfloat16((PRODUCTS + 1) * N, K)

    def by_parts(gemms: FusedGemms, *parts: int) -> FusedGemms:
        pairs = zip(gemms.products, parts, strict=True)
        return replace(gemms, products=[replace(one, b=far[at * N : (at + 1) * N]) for one, at in pairs])

    arguments = _Arguments()
    _place(arguments, by_parts(sums(), 0, 0, PRODUCTS - 1, 1))
    assert arguments.others == PRODUCTS
    with pytest.raises(ValueError, match=r"share B, or it is one of 128 at equal distances, .* the last is 128$"):
        _place(arguments, by_parts(sums(), 0, 0, PRODUCTS, 1))
    with pytest.raises(ValueError, match=r"products of one kernel share B$"):
        _place(arguments, by_parts(operands(), 0, 0, 1))


def test_memories_are_not_too_far_apart() -> None:
    """Batches of one tensor are numbered by an int32, and their count is one, too."""
    far = _Batches([64, 64 + 16 * (2**31 - 2), 80])
    assert (far.first, far.distance, far.numbers, far.count) == (64, 16, [0, 2**31 - 2, 1], 2**31 - 1)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 of them, and these, of 16 bytes, span 34359738352"):
        _Batches([64, 64 + 16 * (2**31 - 1), 80])


def test_two_memories_may_be_far_apart() -> None:
    """Of their only distance, too long for TMA, a part is taken."""
    far = 2**47 - 2**21
    found = _Batches([2**21, 2**21 + far])
    assert found.distance < 2**40 and found.distance * found.numbers[1] == far and found.count == found.numbers[1] + 1
    assert _Batches([0, 2**40 - 2**21]).numbers == [0, 1]
    with pytest.raises(ValueError, match=r"of less than 2\*\*40 bytes"):
        _Batches([0, 2**40 + 16])


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
            assert _Batches(slots).count < 2**31
        elif several:  # what the alignment is for
            with pytest.raises(ValueError, match="fewer than"):
                _Batches(slots)


def test_arguments_lie_as_in_c() -> None:
    """struct Product: an Operand, a uint64, an int32 and two int16, a Result, two uint64 and two int32, and four int16;
    Further: a uint64 and an int32; Send: six uint64, four int32, two int16; FlagOps: int32 for the phases and their ends,
    operations of 16 bytes; FusedArguments: Arguments, two Matrix, eight int32, a pointer, a uint32, two FlagOps,
    products, an int32, further sources, a uint64, two int32, sends."""
    sizes = [ctypes.sizeof(struct) for struct in (_Product, _Further, _Send)]
    assert sizes == [16 + 24 + 8, 8 + 8, 6 * 8 + 4 * 4 + 8]
    assert ctypes.sizeof(FlagOps) == 40 + OPERATIONS * 16
    numbers = 2 * 24 + 8 * 4 + 8 + 8 + 2 * ctypes.sizeof(FlagOps) + PRODUCTS * 48 + 8 + PRODUCTS * 16 + 16 + SENDS * 72
    assert ctypes.sizeof(_Arguments) == ctypes.sizeof(Arguments) + numbers
    folder = KernelSource("", (), "90a").path.parent
    text = "".join(folder.joinpath(f"{name}.cuh").read_text() for name in ("fused", "flags"))
    for struct, fields in (
        ("Operand", [("word",), ("batch",), ("other",), ("sliced",)]),
        ("Result", [("source_word",), ("word",), ("source",), ("batch",)]),
        ("Product", [("operand",), ("result",), *_Product._fields_[8:]]),
        ("Further", _Further._fields_),
        ("Send", _Send._fields_),
        ("FusedArguments", _Arguments._fields_),
        ("FlagOps", FlagOps._fields_),
    ):
        found = re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL)
        assert found
        declared = re.findall(r"\b(\w+)(?:\[\w+\])?\s*[,;]", re.sub(r"//.*", "", found.group(1)))
        assert [field[0] for field in fields] == declared
    constants = {"kProducts": PRODUCTS, "kSends": SENDS, "kCounters": COUNTERS, "kOperations": OPERATIONS}
    for name, value in (constants | {"kPhases": PHASES, "kTurns": f"kCounters - {RESERVED}"}).items():
        assert f"{name} = {value}" in text


def test_tiles_of_products_abreast_are_computed_in_turn() -> None:
    for tile_interleave, wanted in (
        ((), [(0, 1), (1, 1), (2, 1), (3, 1)]),
        ((1, 2, 1), [(0, 1), (1, 2), (1, 2), (3, 1)]),
        ((4,), [(0, 4)] * 4),
    ):
        arguments = _Arguments()
        _place(arguments, sums(tile_interleave=tile_interleave))
        assert [(one.first, one.tile_interleave) for one in arguments.products[:4]] == wanted
    arguments = _Arguments()
    _place(arguments, operands(tile_interleave=(1, 2)))
    assert [(one.first, one.tile_interleave) for one in arguments.products[:3]] == [(0, 1), (1, 2), (1, 2)]


def test_a_kernel_is_told_how_to_enter_and_leave() -> None:
    entry = [[MemOp(True, 8, 1)], [MemOp(False, 16, 0, double=True), MemOp(False, 24, 5)]]
    for make in (operands, sums):
        counters = torch.zeros(COUNTERS, dtype=torch.int32)
        arguments = _Arguments()
        _place(
            arguments,
            make(
                **({"order": (0, 2, 1)} if make is operands else {}), counters=counters, entry=entry, exit=entry[::-1]
            ),
        )
        for words, phases in ((arguments.entry, entry), (arguments.exit, entry[::-1])):
            ops = [op for phase in phases for op in phase]
            assert list(words.ends)[: words.phases] == [len(phases[0]), len(ops)]
            found = [(op.kind == WAIT, op.address, op.value, op.kind == WRITE_DOUBLE) for op in words.operations[:3]]
            assert found == ops
        assert arguments.counters == counters.data_ptr()
    _place(arguments, sums())
    assert (arguments.entry.phases, arguments.exit.phases) == (0, 0)


def test_what_is_sent_is_told_row_by_row_and_slice_by_slice() -> None:
    source, target = bfloat16(M, 2 * K)[:, :K], bfloat16(M, K)
    sends = [FusedSend(source, target, 8), FusedSend(target, source, 24)]
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    arguments = _Arguments()
    _place(arguments, operands((0, 2, 1), sends=sends, slice=24, counters=counters, rate=320.0, opens=40))
    assert (arguments.pace, arguments.opens) == (3200, 40)  # ps for each KiB
    assert (arguments.slice, arguments.sent, arguments.counters) == (24, 2, counters.data_ptr())
    first, second = arguments.sends[:2]
    assert (first.source, first.target, first.word) == (source.data_ptr(), target.data_ptr(), 8)
    assert (first.source_pitch, first.target_pitch) == (second.target_pitch, second.source_pitch) == (4 * K, 2 * K)
    assert (first.rows, first.row_bytes, first.slice_bytes) == (M, 2 * K, 48)
    assert (first.counter, second.counter) == (0, 2)
    assert (first.first, first.tile_interleave, second.first, second.tile_interleave) == (0, 1, 1, 1)
    assert [product.sliced for product in arguments.products[:3]] == [1, 1, 1]
    _place(arguments, operands((0, 2, 1), sends=sends, counters=counters, entire=[False, True, False]))
    assert [product.sliced for product in arguments.products[:3]] == [1, 0, 1]
    assert (arguments.pace, arguments.opens) == (0, 0)
    assert (arguments.slice, arguments.sends[0].slice_bytes, arguments.sends[1].counter) == (K, 2 * K, 1)
    _place(arguments, operands((0, 2, 1), sends=sends, counters=counters), [2])
    assert [(one.first, one.tile_interleave) for one in arguments.sends[:2]] == [(0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("blocks", "config", "wanted"),
    [
        (132, "64x128x64_1x1_pingpong", [3]),  # four products of 4x8 tiles: one wave
        (128, "64x128x64_1x1_pingpong", [3]),
        (96, "64x128x64_1x1_pingpong", [2, 1]),  # three at once, this rank's own among them
        (80, "64x128x64_1x1_pingpong", [1, 2]),  # most of the third in the second wave
        (64, "64x128x64_1x1_pingpong", [1, 2]),
        (32, "64x128x64_1x1_pingpong", [1, 1, 1]),
        (3, "64x128x64_1x1_pingpong", [1, 1, 1]),
        (81, "64x128x64_2x1_pingpong", [1, 2]),  # 80 in clusters; with one more it would be [2, 1]
        (1, "64x128x64_2x1_pingpong", [1, 1, 1]),
        (96, "64x192x64_1x4_pingpong", [2, 1]),  # 4x8 tiles, a quarter of them outside of D
    ],
)
def test_slices_for_products_that_run_at_once_leave_in_turn(blocks: int, config: str, wanted: list[int]) -> None:
    a, b, d, slots = bfloat16(256, K), bfloat16(1024, K), bfloat16(4, 256, 1024), bfloat16(3, 256, K)
    products = [GemmTensors(x, b, d[i]) for i, x in enumerate((a, *slots))]
    sends = [FusedSend(a, slots[i], 8 * i) for i in range(3)]
    gemms = FusedGemms(products, "a", [0, 0, 8, 16], [0] * 4, [False] * 4, sends=sends)
    assert sent_in_turn(gemms, GemmConfig.parse(config), blocks) == wanted
    one = FusedGemms(products, "a", [0, 0, 8, 16], [0] * 4, [False] * 4, sends=sends[2:])
    assert sent_in_turn(one, GemmConfig.parse(config), blocks) == [1]
    assert sent_in_turn(operands(), GemmConfig.parse(config), blocks) == []


def test_a_kernel_is_told_in_which_turns_slices_leave() -> None:
    """By the SMs of its GPU; what sums send leaves one by one."""
    a, b, d, slots = bfloat16(256, K), bfloat16(1024, K), bfloat16(4, 256, 1024), bfloat16(3, 256, K)
    products = [GemmTensors(x, b, d[i]) for i, x in enumerate((a, *slots))]
    sends = [FusedSend(a, slots[i], 8 * i) for i in range(3)]
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    gathered = FusedGemms(products, "a", [0, 0, 8, 16], [0] * 4, [False] * 4, counters, sends)
    for blocks, gemms, wanted in (
        (132, gathered, [(0, 3)] * 3),
        (96, gathered, [(0, 2), (0, 2), (2, 1)]),
        (132, deliveries(), [(0, 1), (1, 1)]),
    ):
        kernel: Any = SimpleNamespace(
            config=GemmConfig.parse("64x128x64_1x1_pingpong"),
            encoded=lambda *given, blocks=blocks: Arguments(sm_count=blocks),
            launch=lambda products, arguments: arguments,
        )
        arguments: Any = gated._FusedKernel.bind_fused(kernel, gemms)
        found = [(one.first, one.tile_interleave) for one in arguments.sends[: len(gemms.sends)]]
        assert (found, arguments.base.l) == (wanted, len(gemms.products))


@pytest.mark.parametrize(
    ("tile_interleave", "wanted"),
    [((), [1, 1, 1]), ((1, 1, 2), [1, 2]), ((1, 3), [3]), ((2, 2), [1, 2]), ((3, 1), [2, 1])],
)
def test_slices_for_products_that_are_abreast_leave_in_turn(
    tile_interleave: tuple[int, ...], wanted: list[int]
) -> None:
    """Where one product fills the GPU."""
    a, b, d, slots = bfloat16(256, K), bfloat16(1024, K), bfloat16(4, 256, 1024), bfloat16(3, 256, K)
    products = [GemmTensors(x, b, d[i]) for i, x in enumerate((a, *slots))]
    sends = [FusedSend(a, slots[i], 8 * i) for i in range(3)]
    gemms = FusedGemms(products, "a", [0, 0, 8, 16], [0] * 4, [False] * 4, sends=sends, tile_interleave=tile_interleave)
    assert sent_in_turn(gemms, GemmConfig.parse("64x128x64_1x1_pingpong"), 32) == wanted


def test_more_is_sent_than_comes_where_peers_have_no_rows() -> None:
    a, b, d, slots = bfloat16(256, K), bfloat16(1024, K), bfloat16(256, 1024), bfloat16(3, 256, K)
    sends = [FusedSend(a, slots[i], 8 * i) for i in range(3)]
    gemms = FusedGemms([GemmTensors(a, b, d)], "a", [0], [0], [False], sends=sends)
    for blocks, wanted in ((132, [3]), (64, [2, 1]), (32, [1, 1, 1])):
        assert sent_in_turn(gemms, GemmConfig.parse("64x128x64_1x1_pingpong"), blocks) == wanted


def test_a_kernel_as_large_as_all_is_asked_for() -> None:
    whole = operands().whole
    assert (whole.m, whole.n, whole.k) == (3 * M, N, K)
    assert (whole.d.rows, whole.c and whole.c.rows) == (3 * M, 3 * M)


def deliveries() -> FusedGemms:
    """Sums of which one is sent on, and what another rank has finished is taken from where it comes."""
    d, slots = bfloat16(2, M, N), bfloat16(2, M, N)
    sends = [FusedSend(slots[1], d[1], 0, waits=24, away=False), FusedSend(d[0], slots[0], 8, waits=16)]
    return sums(sends=sends, rate=360.0)


def test_what_is_finished_is_sent_on() -> None:
    arguments, gemms = _Arguments(), deliveries()
    _place(arguments, gemms)
    assert (arguments.sent, arguments.taken, arguments.opens, arguments.pace) == (1, 1, 0, 2844)
    found = [(one.word, one.awaited, one.tile_interleave, one.counter) for one in arguments.sends[:2]]
    assert found == [(8, 16, 1, 0), (0, 24, 1, 1)]
    assert [one.slice_bytes for one in arguments.sends[:2]] == [2 * N, 2 * N]


@pytest.mark.parametrize(
    ("make", "kind"), [(operands, "DG_OPERANDS"), (sums, "DG_RESULTS"), (deliveries, "DG_DELIVERIES")]
)
def test_the_source_says_what_is_waited_for(make: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    source = fused_source(make(), GemmConfig.parse("128x128x64_2x1_pingpong"))
    macros = dict(source.macros)
    assert (macros["DG_FUSED"], macros["DG_AUX"] != "void") == (kind, make is not operands)
    assert "waiting for" in source.name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: FusedGemms([], "a", [], [], []), "1 to 128 products, got 0"),
        (lambda: operands(moving="b"), "products of one kernel share A"),
        (lambda: operands((0, 2, 1), done_flags=[8, 0, 0]), "nobody is told of them"),
        (lambda: operands((0, 2, 1), away=[True, False, False]), "1 lie away"),
        (lambda: sums(counters=None), "take counters"),
        (
            lambda: operands((0, 2, 1), sends=[FusedSend(bfloat16(M, K), bfloat16(M, K), 8)]),
            "sends or an entry take counters",
        ),
        (lambda: operands((0, 2, 1), entry=[[]], exit=[[]]), "sends or an entry take counters"),
        (lambda: operands((0, 2, 1), entry=[[]], exit=[[]], opens=8), "behind an entry that is the entry's"),
        (lambda: sums(entry=[[]]), "enters a replay also leaves it"),
        (
            lambda: sums(entry=[[]], exit=[[MemOp(True, 8, 1)] * 200]),
            "at most 192 operations in 8 phases, got 200 in 1",
        ),
        (
            lambda: operands(sends=[FusedSend(bfloat16(M, K), bfloat16(M, K), 8, away=False)]),
            "sends to other GPUs, and copies nothing here",
        ),
        (lambda: sums(slice=64), "are operands, not partial sums; got slices of 64"),
        (
            lambda: several(further=[[Further(bfloat16(M, N), 8)], [], [], [], [], []]),
            "added to a product beside its partial sum is added where its D stays",
        ),
        (lambda: several(away=[True] * 6), "added to a product beside its partial sum is added where its D stays"),
        (
            lambda: operands(further=[[Further(bfloat16(M, N), 8)], [], []]),
            "added to a product beside its partial sum is added where its D stays",
        ),
        *(
            (lambda wrong=wrong: several(further=[[]] * 5 + [[Further(wrong, 8)]]), "lies as its partial sum does")
            for wrong in (
                bfloat16(N, M),
                torch.zeros(M, N),
                bfloat16(M, N + 8)[:, :N],
                bfloat16(M * N + 1)[1:].view(M, N),
            )
        ),
        (lambda: several(further=[[]] * 5 + [[Further(bfloat16(M, N), 0)]]), "has a word that says so, got 0"),
        (lambda: several(further=[[]] * 5 + [[Further(bfloat16(M, N), 8)] * 129]), "at most 128 further sums, got 129"),
        (lambda: sums(tile_interleave=(1, 2)), r"got \[1, 2\] of 4 products"),
        (lambda: sums(tile_interleave=(5, -1)), r"got \[5, -1\] of 4 products"),
        (lambda: operands(tile_interleave=(2,)), r"got \[2\] of 3 products"),
        (lambda: sums(sends=[FusedSend(bfloat16(M, K), bfloat16(M, K), 8)] * 129), "128 chunks in 1911 slices"),
        (lambda: operands(sends=[FusedSend(bfloat16(M, K), bfloat16(M, K), 8)] * 129), "128 chunks in 2040 slices"),
        (
            lambda: operands(sends=[FusedSend(bfloat16(M, k), bfloat16(M, k), 8) for k in (K, 2 * K)]),
            r"rows of one length, got \[32, 64\]",
        ),
    ],
)
def test_what_lies_otherwise_is_refused(change: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _place(_Arguments(), change())


@pytest.mark.parametrize(
    ("rows", "along", "said"),
    [
        (bfloat16(M, K + 4)[:, :K], 0, "what is sent has addresses, strides and rows in multiples of 16 bytes"),
        (bfloat16(M, K), 24, "slices of 24 elements are no multiple of the depth of tiles, 64"),
        (bfloat16(K, 1).t(), 0, None),  # a single row has no distance to the next
    ],
)
def test_what_no_warp_sends_is_refused(
    rows: torch.Tensor, along: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    send = FusedSend(rows, bfloat16(*rows.shape), 8)
    gemms = operands((0, 2, 1), sends=[send], slice=along, counters=torch.zeros(COUNTERS, dtype=torch.int32))
    if said is None:
        fused_source(gemms)
    else:
        with pytest.raises(ValueError, match=said):
            fused_source(gemms)
    arguments = _Arguments()
    _place(arguments, gemms)
    assert (arguments.sends[0].source_pitch == 0) == (rows.shape[0] == 1)


@pytest.mark.parametrize("which", ["source", "target"])
@pytest.mark.parametrize(
    "rows", [bfloat16(M, K + 4)[:, :K], bfloat16(M * K + 1)[1:].view(M, K)], ids=["pitch", "address"]
)
def test_what_is_sent_lies_at_multiples_of_16_bytes_on_both_sides(
    which: str, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    send = replace(FusedSend(bfloat16(M, K), bfloat16(M, K), 8), **{which: rows})
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    with pytest.raises(ValueError, match="what is sent has addresses, strides and rows in multiples of 16 bytes"):
        fused_source(operands(sends=[send], counters=counters))


def test_one_slice_of_all_of_k_has_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    config = GemmConfig.parse("64x128x64_1x1_pingpong")
    assert K % config.tile[2]
    fused_source(operands(slice=K), config)
    with pytest.raises(ValueError, match=f"slices of {K - 8} elements are no multiple"):
        fused_source(operands(slice=K - 8), config)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Another one with the same strides, an element further."""
    shape, strides = tensor.shape, tensor.stride()
    return bfloat16(1 + sum(size * stride for size, stride in zip(shape, strides, strict=True)))[1:].as_strided(
        shape, strides
    )


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["a", "b"])
def test_one_operand_at_an_odd_address_is_one_too_many(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is as aligned as the least aligned product."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    gemms = operands()
    products = [*gemms.products]
    products[number] = replace(products[number], **{name: unaligned(getattr(products[number], name))})
    with pytest.raises(ValueError, match="strides of A and B in multiples of 16 bytes"):
        fused_source(replace(gemms, products=products))


@pytest.mark.parametrize(("number", "name"), [(0, "d"), (1, "d"), (2, "d"), (3, "partial")])
def test_what_sums_are_made_of_is_loaded_and_stored_by_tma(
    number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C beside them is not. Where no sums are passed on, threads may store."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    gemms, direct = sums(), GemmConfig.parse("64x128x64_1x1_pingpong_direct")
    products = [*gemms.products]
    products[number] = replace(products[number], **{name: unaligned(getattr(products[number], name))})
    with pytest.raises(ValueError, match="rows of D, C and the partial sum in multiples of 16 bytes"):
        fused_source(replace(gemms, products=products))
    fused_source(
        replace(gemms, products=[*gemms.products[:3], replace(gemms.products[3], c=unaligned(bfloat16(M, N)))])
    )
    fused_source(operands(), direct)
    with pytest.raises(ValueError, match=r"pingpong_direct.* what no warp loads through TMA, none can wait for"):
        fused_source(gemms, direct)


def test_scales_of_sums_are_the_same_for_all_rows() -> None:
    def scaled(gemms: FusedGemms, length: int) -> FusedGemms:
        return replace(gemms, products=[replace(one, scale_a=torch.ones(length)) for one in gemms.products])

    for gemms in (operands(), sums()):
        assert scaled(gemms, 1).spec.scale_a == "tensor"
    assert scaled(operands(), M).spec.scale_a == "row"
    with pytest.raises(ValueError, match="partial sums and one scale for all rows, got one for each"):
        _ = scaled(sums(), M).spec


def test_terms_lie_as_d_does() -> None:
    """Or are the same for all."""
    gemms = operands()
    swapped = [replace(one, c=gemms.products[at].c) for one, at in zip(gemms.products, (1, 0, 2), strict=True)]
    with pytest.raises(ValueError, match="c of each product lies as D does, or is the same for all"):
        _place(_Arguments(), replace(gemms, products=swapped))
    arguments = _Arguments()
    _place(arguments, replace(gemms, products=[replace(one, c=gemms.products[0].c) for one in gemms.products]))
    assert arguments.base.source.batch_stride == 0
    columns = chunks_of_columns()
    swapped = [*columns.products[:3]] + [
        replace(one, bias=columns.products[at].bias) for one, at in zip(columns.products[3:], (4, 3, 5), strict=True)
    ]
    with pytest.raises(ValueError, match="bias of each product lies as D does"):
        _place(_Arguments(), replace(columns, products=swapped))


@pytest.mark.parametrize(("last", "refused"), [(2, False), (3, False), (4, True), (5, True)])
def test_sums_have_as_many_places_as_there_are_products(last: int, refused: bool) -> None:
    a, b, d, slots = bfloat16(4, M, K), bfloat16(N, K), bfloat16(6, M, N), bfloat16(4, M, N)
    products = [GemmTensors(a[0], b, bfloat16(M, N))]
    products += [GemmTensors(a[i], b, d[at], partial=slots[i]) for i, at in ((1, 0), (2, 1), (3, last))]
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    gemms = FusedGemms(products, "a", [0, 8, 8, 8], [8, 0, 0, 0], [True, False, False, False], counters)
    arguments = _Arguments()
    if refused:
        with pytest.raises(ValueError, match=f"equal distances, 4 products have {last + 1} places"):
            _place(arguments, gemms)
    else:
        _place(arguments, gemms)
        assert arguments.results_here == last + 1


def test_d_at_unequal_distances_is_refused() -> None:
    a, b, d = bfloat16(3, M, K), bfloat16(N, K), bfloat16(5, M, N)
    products = [GemmTensors(a[i], b, d[at]) for i, at in enumerate((0, 1, 4))]
    with pytest.raises(ValueError, match="3 of them have 5 places"):
        _place(_Arguments(), FusedGemms(products, "a", [0] * 3, [0] * 3, [False] * 3))


def test_what_takes_turns_is_stored_while_another_group_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another configuration is asked for."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    m, n, k = 256, 16384, 2048
    a, b, d = bfloat16(4, m, k), bfloat16(n, k), bfloat16(4, m, n)
    products = [GemmTensors(a[i], b, d[i], partial=d[i - 1] if i else None, padded=True) for i in range(4)]
    for rate, wanted in ((0.0, "cooperative"), (360.0, "pingpong")):
        gemms = FusedGemms(products, "a", [0, 8, 8, 8], [8, 8, 8, 0], [True, True, True, False], rate=rate)
        assert wanted in fused_source(gemms).name
        assert "cooperative" in fused_source(gemms, GemmConfig.parse("128x256x64_2x1_cooperative")).name


@pytest.mark.parametrize("rows", [64, 128, 256, 384])
def test_tiles_lie_within_products_of_few_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no configuration is named, also with that measured for a product as large as all of them."""
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    count, n, k = 4096 // rows, 4096, 512
    a, b, d = bfloat16(count, rows, k), bfloat16(n, k), bfloat16(count, rows, n)
    products = [GemmTensors(a[i], b, d[i], partial=d[i - 1] if i else None, padded=True) for i in range(count)]
    given: list[Any] = [[0] + [8] * (count - 1), [8] * (count - 1) + [0], [True] * (count - 1) + [False]]
    large = GemmConfig.parse("256x128x64_2x1_cooperative")
    for chosen in (None, large):
        if chosen is not None:
            monkeypatch.setattr(gated, "choose", lambda provider, spec: large)
        macros = dict(fused_source(FusedGemms(products, "a", *given)).macros)
        assert rows % (int(macros["DG_TILE_M"]) * int(macros["DG_CLUSTER_M"])) == 0


def test_products_of_several_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    b, d = bfloat16(N, K), bfloat16(2, M, N)
    products = [GemmTensors(bfloat16(M, K), b, d[0]), GemmTensors(bfloat16(K, M).t(), b, d[1])]
    gemms = FusedGemms(products, "a", [0, 8], [0, 0], [False, False])
    with pytest.raises(ValueError, match="products of one kind"):
        fused_source(gemms)
    odd = bfloat16(2, M, K + 1)[..., :K]
    gemms = FusedGemms([GemmTensors(odd[i], b, d[i]) for i in range(2)], "a", [0, 8], [0, 0], [False, False])
    with pytest.raises(ValueError, match="any configuration, products by one kernel that waits: TMA wants"):
        fused_source(gemms)
    with pytest.raises(ValueError, match=r"128x128x32_1x1_plain.*take a configuration with TMA"):
        fused_source(operands(), GemmConfig.parse("128x128x32_1x1_plain"))


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((2, M, K), torch.bfloat16, "single matrices, got 2 batches"),
        ((M, K), torch.float64, "by one kernel that waits: A and B are of .*, not float64"),
    ],
)
def test_what_no_kernel_multiplies_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    a = torch.zeros(2, *shape, dtype=dtype)
    d, partial = torch.zeros(2, *shape[:-1], K, dtype=dtype), torch.zeros(*shape[:-1], K, dtype=dtype)
    b = torch.zeros(*shape[:-2], K, K, dtype=dtype)
    for second in (GemmTensors(a[1], b, d[1]), GemmTensors(a[1], b, d[1], partial=partial)):
        gemms = FusedGemms([GemmTensors(a[0], b, d[0]), second], "a", [0, 8], [0, 0], [False, False])
        with pytest.raises(ValueError, match=said):
            fused_source(gemms)
