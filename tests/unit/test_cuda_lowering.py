"""Lowering: the streams, batches, slices and groups of a rank's actions, and the plans that it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import distgemm
from distgemm.plan.ops import Barrier, Copy, Gemm, Op, Signal, Wait
from distgemm.plan.plan import PlanError
from distgemm.runtime.cuda.lowering import most_flags, single_kernel
from distgemm.runtime.cuda.lowering.actions import COMM, GEMM_STREAM, Action, waits_of
from distgemm.runtime.cuda.workspace import Step
from distgemm.runtime.executable import ExecutionConfig
from tests.unit.cuda_emulation import (
    ALL_REDUCES,
    CHAINS,
    GATHER_B,
    GATHERS,
    PAIRWISE,
    PAIRWISE_ALL_REDUCE,
    actions_of,
    kernel_of,
    plans,
)

SMALL = distgemm.GemmProblem(64, 64, 64)


def rows_of(op: Gemm | Copy) -> int:
    """Rows of A that an op multiplies, or rows that it copies."""
    start, stop = (op.a if isinstance(op, Gemm) else op.src).box[1]
    return stop - start


def width_of(copy: Copy) -> int:
    """Elements along k that an op copies."""
    start, stop = copy.src.box[2]
    return stop - start


def copies_in(actions: list[Action]) -> list[Copy]:
    """Copies that are actions of their own."""
    return [op for action in actions for op in action.ops if isinstance(op, Copy)]


# --- streams and batches --------------------------------------------------------------------------------


def test_copies_between_ranks_are_on_one_stream() -> None:
    for schedule in distgemm.list_schedules():
        for plan in plans(schedule, 4):
            for action in actions_of(plan, 1, 2):
                crosses = [op for op in action.ops if isinstance(op, Copy) and op.dst.rank != op.rank]
                assert not crosses or action.stream == COMM


def test_gemms_do_not_stand_behind_sums() -> None:
    """Sums have a stream of their own where GEMMs of a later chunk follow, and none where they come last."""
    for chunks, streams in (
        (1, {COMM, GEMM_STREAM, GEMM_STREAM + 1}),
        (2, {COMM, GEMM_STREAM, GEMM_STREAM + 1, GEMM_STREAM + 2}),
    ):
        plan = distgemm.make_plan(distgemm.GemmProblem(64, 16, 16), PAIRWISE, 4, chunks=chunks, sync="barrier")
        actions = actions_of(plan, 1, 2)
        assert {action.stream for action in actions} == streams
        waiting = {action.stream for action in actions if action.ops and isinstance(action.ops[0], Wait)}
        multiplying = {action.stream for action in actions if action.ops and isinstance(action.ops[0], Gemm)}
        assert multiplying == {GEMM_STREAM, GEMM_STREAM + 1} and (chunks == 1 or not waiting & multiplying)


def test_a_fused_chain_takes_one_stream() -> None:
    plan = distgemm.make_plan(SMALL, CHAINS[0], 4, chunks=2, sync="barrier", mechanism="store")
    actions = actions_of(plan, 1, 2, fused=True)
    assert {action.stream for action in actions} == {GEMM_STREAM}
    assert [action.step for action in actions] == [Step.ENTRY, Step.ENTERED, None, Step.FINISH]
    _, kernel = kernel_of(actions)
    assert [len(waits) for waits in kernel.wait_flags] == [0] * 2 + [1] * 6
    assert [op is not None for op in kernel.done_flags] == [True] * 6 + [False] * 2


def test_the_last_signal_and_the_entry_are_one_batch() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 4, sync="barrier")
    for fused in (False, True):
        steps = [action for action in actions_of(plan, 1, fused=fused) if action.step is Step.ENTERED]
        assert [type(op) for action in steps for op in action.ops] == [Signal]


# --- merged copies --------------------------------------------------------------------------------------


def test_all_shards_but_the_last_are_merged() -> None:
    problem = distgemm.GemmProblem(m=64, n=16, k=64, dtype="float32")

    def rows(ranks: int, merge_copies: bool, schedule: str = GATHERS[0]) -> dict[str, list[int]]:
        """Rows of each GEMM and copy, and sizes of the batches of Waits and Signals."""
        plan = distgemm.make_plan(problem, schedule, ranks, chunks=4, sync="barrier")
        actions = actions_of(plan, 1, merge_copies=merge_copies)
        ops = [op for action in actions for op in action.ops]
        found = {kind.__name__: [rows_of(op) for op in ops if isinstance(op, kind)] for kind in (Gemm, Copy)}
        batches = [action.ops for action in actions if action.ops and isinstance(action.ops[0], (Wait, Signal))]
        return found | {"batches": [len(batch) for batch in batches]}

    assert rows(4, False)["Gemm"] == [4] * 16
    found = rows(4, True)
    assert found["Gemm"] == [16, 16, 16, 4, 4, 4, 4] and sorted(found["Copy"]) == [4, 4, 4, 4, 16, 16]
    assert sorted(found["batches"]) == [1] * 8 + [4] * 4  # all Signals of a copy, and all Waits of a GEMM
    assert rows(2, True)["Gemm"] == [32, 8, 8, 8, 8]
    ring = rows(4, True, GATHERS[1])
    assert ring["Gemm"] == [16, 16, 16, 4, 4, 4, 4] and set(ring["Copy"]) == {4, 16}
    scatter = rows(4, True, CHAINS[0])
    assert set(scatter["Gemm"]) == {4}  # other ops wait for them
    odd = distgemm.make_plan(distgemm.GemmProblem(64, 16, 24), GATHERS[0], 4, chunks=4, sync="barrier")
    gemms = [op for action in actions_of(odd, 1, merge_copies=True) for op in action.ops if isinstance(op, Gemm)]
    assert [op.a.buffer for op in gemms] == ["A"] + ["slot"] * 12  # there are gaps between slots


def test_the_last_shard_is_copied_in_halves_of_halves() -> None:
    def rows(fused: bool, ranks: int = 3, chunks: int = 8) -> list[list[int]]:
        """Rows of the copies to each peer."""
        problem = distgemm.GemmProblem(8 * ranks * chunks, 16, 64)
        plan = distgemm.make_plan(problem, GATHERS[0], ranks, chunks=chunks, sync="barrier")
        sent: dict[int, list[int]] = {}
        for copy in copies_in(actions_of(plan, 1, merge_copies=True, fused=fused)):
            sent.setdefault(copy.dst.rank, []).append(rows_of(copy))
        return sorted(sent.values())

    # The peer that multiplies the shard last, and the peer that multiplies it first.
    assert rows(fused=True) == [[32, 16, 8, 8], [64]]
    assert rows(fused=False) == [[8] * 8, [64]]
    assert rows(fused=True, ranks=2, chunks=3) == [[8, 8, 8]]
    assert rows(fused=True, ranks=2, chunks=1) == [[8]]


# --- slices and sends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "dtype", "widths"),
    [
        (65536, "bfloat16", [4096] * 16),
        (4096, "bfloat16", [1024] * 4),
        (2056, "bfloat16", [1152, 904]),
        (2040, "bfloat16", [2040]),
        (5000, "float8_e4m3fn", [2560, 2440]),
    ],
)
def test_a_kernel_sends_shards_in_slices_on_one_stream(k: int, dtype: str, widths: list[int]) -> None:
    """There are sixteen slices at most, of 2 KiB at least. Without a fused kernel, streams copy the same slices."""
    problem = distgemm.GemmProblem(64, 64, k, dtype=dtype, out_dtype="bfloat16")
    plan = distgemm.make_plan(problem, GATHERS[0], 4, sync="barrier", chunks=2)
    actions = actions_of(plan, 1, fused=True, transport="sm")
    assert {action.stream for action in actions} == {GEMM_STREAM}
    _, kernel = kernel_of(actions)
    assert [[width_of(copy) for copy in send.copies] for send in kernel.sends] == [widths] * 6
    assert [len(waits) for waits in kernel.wait_flags] == [0] * 2 + [len(widths)] * 6
    on_streams = copies_in(actions_of(plan, 1, separate_gemms=True, transport="sm"))
    assert on_streams == [copy for send in kernel.sends for copy in send.copies]
    flags = [wait.flag for waits in kernel.wait_flags for wait in waits]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("k", "dtype", "widths"),
    [(1160, "bfloat16", [640, 520]), (500, "bfloat16", [500]), (3000, "float8_e4m3fn", [1536, 1464]),
     (65536, "bfloat16", [16384] * 4)],
)  # fmt: skip
def test_copy_engines_send_few_slices(k: int, dtype: str, widths: list[int]) -> None:
    """There are four at most, of 1 KiB at least."""
    problem = distgemm.GemmProblem(64, 64, k, dtype=dtype, out_dtype="bfloat16")
    plan = distgemm.make_plan(problem, GATHERS[0], 4, sync="barrier")
    copies = copies_in(actions_of(plan, 1, fused=True, transport="copy_engine_slices"))
    assert sorted(map(width_of, copies)) == sorted([*widths, k, k])


@pytest.mark.parametrize("schedule", [GATHERS[0], GATHER_B])
@pytest.mark.parametrize("chunks", [1, 2])
def test_copy_engines_send_the_last_chunk_in_slices(schedule: str, chunks: int) -> None:
    """Each slice has its signal behind it. Every other chunk is whole, with one signal."""
    plan = distgemm.make_plan(distgemm.GemmProblem(64, 64, 4096), schedule, 4, sync="barrier", chunks=chunks)
    every = [actions_of(plan, rank, fused=True, transport="copy_engine_slices") for rank in range(4)]
    action, kernel = kernel_of(every[1])
    waits = [waits for waits in kernel.wait_flags if waits]
    assert [len(each) for each in waits] == [1] * (3 * chunks - 1) + [4]
    sent = [copies_in(actions) for actions in every]
    for copies in sent:
        assert sorted(map(width_of, copies)) == [1024] * 4 + [4096] * (3 * chunks - 1)
    brought = {copy.dst.slot: copy for copies in sent for copy in copies if copy.dst.rank == 1}
    last = next(op for op in reversed(action.ops) if isinstance(op, Gemm))
    slot = (last.a if schedule.endswith("_a") else last.b).slot
    for number, copy in brought.items():
        assert (width_of(copy) < 4096) == (number == slot)
    for actions in every:
        on_stream = [action for action in actions if action.stream == COMM and action.ops]
        for copy_action, signals in zip(on_stream[::2], on_stream[1::2], strict=True):
            (one,) = copy_action.ops
            assert {signal.deps for signal in signals.ops} == {(one.id,)}
            assert len(signals.ops) == 1
    awaited = {wait.flag for each in waits for wait in each}
    signalled = [op.flag for actions in every for action in actions for op in action.ops if isinstance(op, Signal)]
    assert awaited == {flag for flag in signalled if flag.rank == 1} and len(set(signalled)) == len(signalled)


def test_a_kernel_sends_the_results_of_an_all_reduce() -> None:
    """Each finished tile goes to every peer as a whole, once the kernel has stored it. What peers have finished goes
    from slots to D. Nothing else is put on streams.
    """
    plan = distgemm.make_plan(SMALL, ALL_REDUCES[0], 4, sync="barrier", mechanism="store", chunks=2)
    actions = actions_of(plan, 1, fused=True, transport="sm")
    assert {action.stream for action in actions} == {GEMM_STREAM}
    assert [action.step for action in actions] == [Step.ENTRY, Step.ENTERED, None, Step.FINISH]
    action, kernel = kernel_of(actions)
    remote = [send for send in kernel.sends if send.copies[0].dst.rank != 1]
    local = [send for send in kernel.sends if send not in remote]
    assert [send.copies[0].dst.rank for send in remote] == [0, 3, 2, 0, 3, 2]
    finished = {
        op.out.box: done.flag
        for op, done in zip(action.ops, kernel.done_flags, strict=True)
        if isinstance(op, Gemm) and done and op.out.rank == 1
    }
    for send in remote:
        (copy,), (signal,) = send.copies, send.signals
        assert send.wait is not None and send.wait.flag == finished[copy.src.box] and send.wait.peer == 1
        assert signal.flag.rank == copy.dst.rank
    assert sorted(send.copies[0].dst.box[1] for send in local) == [(at, at + 8) for at in (0, 8, 32, 40, 48, 56)]
    for send in local:
        assert send.wait is not None and send.wait.peer != 1 and not send.signals
    assert {wait.flag for wait in waits_of(actions)} >= {send.wait.flag for send in kernel.sends if send.wait}
    on_streams = copies_in(actions_of(plan, 1, separate_gemms=True, transport="sm"))
    assert [(op.src, op.dst) for op in on_streams] == [
        (copy.src, copy.dst)
        for send in sorted(kernel.sends, key=lambda send: send.copies[0].id)
        for copy in send.copies
    ]


@pytest.mark.parametrize(
    ("schedule", "fused", "transport"),
    [
        (GATHERS[0], False, "copy_engine"),
        (GATHERS[0], True, "copy_engine_slices"),
        (GATHERS[0], True, "sm"),
        (CHAINS[0], True, "copy_engine"),
        (ALL_REDUCES[0], True, "copy_engine"),
        (ALL_REDUCES[0], True, "sm"),
    ],
)
def test_most_flags_counts_every_flag(schedule: str, fused: bool, transport: Any) -> None:
    problem = distgemm.GemmProblem(64, 64, 65536)  # has the most slices
    options = {"mechanism": "store"} if schedule in ALL_REDUCES and transport == "sm" else {}
    plan = distgemm.make_plan(problem, schedule, 4, sync="barrier", chunks=2, send_slots=2, **options)
    most = most_flags(
        plan, ExecutionConfig(execution="single_kernel" if fused else "multi_kernel", transport=transport)
    )
    for rank in range(4):
        actions = actions_of(plan, rank, fused=fused, transport=transport)
        ops: list[Op | None] = [op for action in actions for op in action.ops]
        for kernel in (action.kernel for action in actions if action.kernel):
            ops += kernel.done_flags
            ops += [signal for send in kernel.sends for signal in send.signals]
        signals = [op for op in ops if isinstance(op, Signal)]
        numbers = [op.flag.number for op in (*signals, *waits_of(actions))]
        assert len(set(numbers)) > 2 and max(numbers) < most
    if schedule in ALL_REDUCES and transport == "sm":  # no slices: a flag for each arrival, and one for each GEMM
        assert most == (2 * 3 + 2 * 3) + 2 * 4


# --- interleaved GEMMs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "mode"),
    [
        *((name, {}) for name in (*CHAINS, ALL_REDUCES[0])),
        *((name, {"chunk_mode": mode}) for name in (PAIRWISE, PAIRWISE_ALL_REDUCE) for mode in "mn"),
    ],
    ids=str,
)
@pytest.mark.parametrize("narrow", [False, True], ids=["", "narrow"])
def test_interleaved_gemms_do_not_wait_for_one_another(
    schedule: str, mode: dict[str, str], ranks: int, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for later ones, on any rank, whether for a sum or for room.

    Without a stagger GEMMs are not interleaved, except narrow ones that wait for nothing.
    """
    if narrow:
        monkeypatch.setattr(single_kernel, "BALANCE_EXTENT", 1)
    pairwise = "pairwise" in schedule
    together = narrow and pairwise and ranks > 2

    def kernels(chunks: int, **options: Any) -> list[Any]:
        options |= mode | ({"final_add": "epilogue"} if pairwise else {})
        problem = distgemm.GemmProblem(288, 288, 48)
        plan = distgemm.make_plan(problem, schedule, ranks, chunks=chunks, sync="barrier", mechanism="store", **options)
        return [kernel_of(actions_of(plan, rank, fused=True))[1] for rank in range(ranks)]

    def groups(kernel: Any) -> list[int]:
        """The number of the group of each GEMM."""
        sizes = kernel.tile_interleave or (1,) * len(kernel.wait_flags)
        assert sum(sizes) == len(kernel.wait_flags) == len(kernel.done_flags)
        return [number for number, size in enumerate(sizes) for _ in range(size)]

    def check(found: list[Any]) -> None:
        group_of = {
            done.flag: number
            for kernel in found
            for number, done in zip(groups(kernel), kernel.done_flags, strict=True)
            if done is not None
        }
        waits = 0
        for kernel in found:
            for number, wait_flags in zip(groups(kernel), kernel.wait_flags, strict=True):
                assert all(group_of[wait.flag] < number for wait in wait_flags)
                waits += len(wait_flags)
        assert waits

    for chunks in (2, 3, 4, 8):
        for stagger in range(1, chunks + 1):
            found = kernels(chunks, stagger=stagger)
            check(found)
            for kernel in found:
                if together:  # chunk by chunk, those for all peers; and the rank's own one alone
                    by_chunk = stagger < chunks or mode.get("chunk_mode") == "n"
                    sizes = [ranks - 1] * chunks if by_chunk else [(ranks - 1) * chunks]
                    assert sorted(kernel.tile_interleave, reverse=True) == [*sizes, *[1] * chunks]
                    continue
                most = 2 if pairwise else min(ranks, -(-chunks // stagger))
                assert max(kernel.tile_interleave, default=1) == (most if stagger < chunks else 1)
        if together:
            check(kernels(chunks))
            if schedule == PAIRWISE and (chunks, ranks) == (2, 3):  # one waits for room, and is alone
                found = kernels(chunks, stagger=1, workspace="bounded")
                check(found)
                assert all(kernel.tile_interleave == (2, 1, 1, 1, 1) for kernel in found)
        else:
            assert not any(kernel.tile_interleave for kernel in kernels(chunks))
        if ranks == 2 and schedule in CHAINS:  # room that is used again within a replay
            check(kernels(chunks, stagger=chunks - 1, workspace="bounded"))


@pytest.mark.parametrize(
    ("schedule", "ranks", "columns", "depth", "options", "sizes"),
    [
        (GATHERS[0], 8, 7168, 16, {}, (1, 1, 2, 4)),
        (GATHERS[0], 8, 7168, 512, {"transport": "sm"}, (1, 3, 4)),
        (GATHERS[0], 8, 13312, 16, {}, (1, 3, 4)),
        (GATHERS[0], 8, 13312, 512, {"transport": "sm"}, (1, 7)),
        (GATHERS[0], 6, 7168, 16, {"chunks": 2, "m": 1536}, (2, 3, 6, 1)),
        (GATHERS[0], 4, 7168, 16, {"chunks": 4}, (4, 7, 5)),
        # Chunks that are copied together arrive together.
        (GATHERS[0], 4, 7168, 16, {"chunks": 4, "merge_copies": True}, (4, 4, 8)),
        (GATHER_B, 8, 7168, 16, {}, (1, 1, 2, 4)),
        (GATHERS[0], 16, 13312, 16, {}, (1, 3, 11, 1)),
        (GATHERS[0], 8, 3584, 16, {}, ()),  # a shard takes as long to arrive as two GEMMs
        (GATHERS[0], 8, 3584, 512, {"transport": "sm"}, (1, 1, 2, 4)),
        (GATHERS[0], 8, 3584, 512, {"transport": "copy_engine_slices"}, ()),
        (GATHERS[0], 8, 1280, 512, {"transport": "sm"}, ()),
        (GATHERS[0], 4, 13312, 16, {}, (1, 3)),
        (GATHERS[0], 8, 13312, 512, {"transport": "sm", "m": 4096}, (1, 4, 3)),  # 2048 rows at most
        (GATHERS[0], 8, 13312, 16, {"m": 8192}, ()),  # 1024 rows each
        (PAIRWISE, 8, 16, 3584, {}, (7, 1)),
        (PAIRWISE, 8, 16, 1792, {}, ()),
        (PAIRWISE, 4, 16, 3584, {"chunks": 2}, (6, 1, 1)),
        (PAIRWISE, 4, 16, 3584, {"chunks": 4, "stagger": 1}, (3, 1, 3, 1, 3, 1, 3, 1)),
        (PAIRWISE, 4, 16, 3584, {"chunks": 4, "stagger": 2, "chunk_mode": "n"}, (3, 3, 1, 3, 1, 3, 1, 1)),
        (PAIRWISE, 4, 16, 3584, {"chunks": 2, "chunk_mode": "n"}, ()),  # each shard has another part of B
        (PAIRWISE, 16, 16, 3584, {"chunks": 2, "stagger": 1, "chunk_mode": "n"}, (15, 1, 15, 1)),
        (PAIRWISE, 8, 16, 3584, {"chunks": 2, "stagger": 1, "chunk_mode": "n", "m": 4096}, (4, 3, 1, 4, 3, 1)),
        (PAIRWISE, 4, 16, 3584, {"partial_dtype": "float32"}, ()),
        (CHAINS[0], 8, 16, 3584, {}, ()),  # a peer waits for each
    ],
)
def test_narrow_gemms_are_interleaved(
    schedule: str, ranks: int, columns: int, depth: int, options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    gathers = "all_gather" in schedule
    m, n = options.get("m", 2048), columns * (ranks if gathers else 1)
    m, n = (n, m) if schedule.endswith("_b") else (m, n)
    problem = distgemm.GemmProblem(m, n, depth * ranks, partial_dtype=options.get("partial_dtype"))
    planning = {name: options[name] for name in ("chunks", "stagger", "chunk_mode") if name in options}
    if not gathers:
        planning |= {"mechanism": "store"} | ({"final_add": "epilogue"} if schedule == PAIRWISE else {})
    execution = {name: options[name] for name in ("transport", "merge_copies") if name in options}
    plan = distgemm.make_plan(problem, schedule, ranks, sync="barrier", **planning)
    for rank in (0, ranks // 2, ranks - 1):
        action, kernel = kernel_of(actions_of(plan, rank, fused=True, **execution))
        assert kernel.tile_interleave == sizes
        outs = [op.out for op in action.ops if isinstance(op, Gemm)]
        assert outs == [op.out for op in plan.ops(rank) if isinstance(op, Gemm)]


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "schedule", "options"),
    [
        (r"multiplies 15x16x64x1.* 17x16x64x1.*takes equal chunks", GATHERS[0], {"m": 66}),
        ("wait for one signal of a peer, for none", GATHERS[0], {"mechanism": "pull"}),
        ("a plan with more send_slots has room", PAIRWISE, {}),
        ("a plan with more send_slots has room", CHAINS[0], {"chunks": 4}),
        ("without sums and copies beside it", PAIRWISE, {"send_slots": 3}),
        ("without sums and copies beside it", PAIRWISE_ALL_REDUCE, {"send_slots": 3}),
        ("without sums and copies beside it", PAIRWISE, {"mechanism": "store"}),
        ("for sums that GEMMs add, and here GEMMs add no sums", GATHERS[1], {"workspace": "bounded"}),
        *(
            ("copied in slices, and this plan passes on", name, {"transport": transport})
            for name in GATHERS[1:]
            for transport in ("copy_engine_slices", "sm")
        ),
        (
            "wait for one signal of a peer, for none",
            "all_gather_1d_bidirectional_split_a",
            {"transport": "sm", "ranks": 2},
        ),
        ("pushed to peers, and this plan pushes none", GATHERS[0], {"transport": "sm", "mechanism": "pull"}),
        ("pushed to peers, and this plan pushes none", CHAINS[0], {"transport": "sm", "mechanism": "store"}),
        ("none; of all-reduces, for those with mechanism='store'", ALL_REDUCES[0], {"transport": "sm"}),
        (
            "pushed to peers, and this plan pushes none$",
            ALL_REDUCES[0],
            {"transport": "copy_engine_slices", "mechanism": "store"},
        ),
    ],
)
def test_plans_that_cannot_be_fused_are_refused(message: str, schedule: str, options: dict[str, Any]) -> None:
    options = {"sync": "barrier", "m": 64, "ranks": 4, "transport": "copy_engine"} | options
    m, ranks, transport = (options.pop(name) for name in ("m", "ranks", "transport"))
    plan = distgemm.make_plan(distgemm.GemmProblem(m, 64, 64), schedule, ranks, **options)
    with pytest.raises(PlanError, match=message):
        actions_of(plan, 1, fused=True, transport=transport)


def test_a_fused_gemm_that_adds_an_own_sum_is_refused() -> None:
    """There is no signal for the sum that the rank itself has made."""
    plan = distgemm.make_plan(SMALL, "tensor_parallel_3d", mesh=(2, 2, 2), sync="barrier", mechanism="store")
    with pytest.raises(PlanError, match="or for one signal of each sum that they add"):
        actions_of(plan, 0, fused=True)


def test_the_fused_kernel_waits_for_operands_or_for_sums() -> None:
    """GEMMs of a kernel that adds sums may differ in both operands, and no others may."""
    options: dict[str, Any] = {"mechanism": "store", "final_add": "epilogue", "sync": "barrier"}
    plan = distgemm.make_plan(SMALL, PAIRWISE, 4, chunks=2, stagger=1, chunk_mode="n", **options)
    actions_of(plan, 1, fused=True)
    first = next(op for op in plan.ops(1) if isinstance(op, Gemm))
    from_slot = dataclasses.replace(first, a=first.a._replace(buffer="slot", slot=0))
    others = [op for op in plan.ops(1) if op is not first]
    with pytest.raises(PlanError, match="share A or B"):
        actions_of(plan.replace_ops(1, [from_slot, *others]), 1, fused=True)
    plan = distgemm.make_plan(SMALL, PAIRWISE, 4, **options)
    barrier, gemm, *others = plan.ops(1)
    assert isinstance(barrier, Barrier) and isinstance(gemm, Gemm)
    from_slot = dataclasses.replace(gemm, a=gemm.a._replace(buffer="slot", slot=0))
    with pytest.raises(PlanError, match="waits for operands or for sums, not for both"):
        actions_of(plan.replace_ops(1, [barrier, from_slot, *others]), 1, fused=True)


def test_a_kernel_does_not_send_results_that_wait_for_room() -> None:
    options = {"mechanism": "store", "workspace": "bounded", "chunks": 2}
    plan = distgemm.make_plan(distgemm.GemmProblem(1, 64, 64), ALL_REDUCES[0], 4, sync="barrier", **options)
    with pytest.raises(PlanError, match=r"copies what waits for one signal.*workspace='full'"):
        actions_of(plan, 0, fused=True, transport="sm")


def test_the_fused_kernel_sets_one_flag_for_each_gemm() -> None:
    """For a peer, or for this rank's own copies."""
    plan = distgemm.make_plan(SMALL, ALL_REDUCES[0], 4, chunks=2, mechanism="store", sync="barrier")
    actions_of(plan, 1, fused=True)
    signal = next(op for op in plan.ops(1) if isinstance(op, Signal))  # behind the first GEMM
    copy = next(op for op in plan.ops(1) if isinstance(op, Copy))
    more = [dataclasses.replace(op, deps=(*op.deps, *signal.deps)) if op is copy else op for op in plan.ops(1)]
    with pytest.raises(PlanError, match="the fused kernel sets one flag for each GEMM"):
        actions_of(plan.replace_ops(1, more), 1, fused=True)


def test_a_barrier_in_the_middle_is_refused() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 2, sync="barrier")
    barrier, *others = plan.ops(0)
    moved = dataclasses.replace(barrier, id=99, deps=(others[0].id,))
    with pytest.raises(PlanError, match="at the start"):
        actions_of(plan.replace_ops(0, [*others, moved]), 0)


def test_a_second_wait_for_a_flag_is_refused() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 2)
    actions_of(plan, 0)
    ops = plan.ops(0)
    for wait in (op for op in ops if isinstance(op, Wait)):
        with pytest.raises(PlanError, match="waits for a flag once in a replay"):
            actions_of(plan.replace_ops(0, [*ops, dataclasses.replace(wait, id=99)]), 0)


def test_a_late_wait_for_the_last_replay_is_refused() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 2)
    gemm = next(op for op in plan.ops(0) if isinstance(op, Gemm))
    late = [
        dataclasses.replace(op, deps=(gemm.id,)) if isinstance(op, Wait) and op.flag.initial else op
        for op in plan.ops(0)
    ]
    with pytest.raises(PlanError, match="waits for the last replay at the start, after no other op"):
        actions_of(plan.replace_ops(0, late), 0)


def test_ops_that_need_a_signal_for_the_next_replay_are_refused() -> None:
    plan = distgemm.make_plan(SMALL, GATHERS[0], 2)
    signal = next(op for op in plan.ops(0) if isinstance(op, Signal) and op.flag.initial)
    *others, last = [op for op in plan.ops(0) if not isinstance(op, Signal)]
    assert others
    late = dataclasses.replace(last, deps=(*last.deps, signal.id))
    with pytest.raises(PlanError, match="Signal for the next replay"):
        actions_of(plan.replace_ops(0, [*(op for op in plan.ops(0) if op.id != last.id), late]), 0)
