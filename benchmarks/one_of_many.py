"""What one of many ranks takes, measured on two GPUs.

    python benchmarks/one_of_many.py --ranks 4 --ranks 8 --model llama-3-8b --m 2048 --json FILE

Each of the two GPUs does what rank 0 of so many ranks does, and plays all peers of the other GPU. What a rank sends to
any peer goes to the other GPU, and what comes from any peer comes from there. In schedules of one dimension all ranks
do the same except for a rotation. So the same GEMMs run in the same order, the same bytes leave and arrive over the
same link, and a chain has all its hops. Two things are missing: how far more than two GPUs drift apart, and what a
switch makes of more of them.

Times are those of the plans among the candidates of ``schedule="auto"``, in the tuner's own two rounds, beside the GEMM
alone and the copies alone. The unfused program is not among them, because its collectives know two ranks only. Results
are checked against what the two GPUs' shards make if they are taken for those of all ranks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)
import typer

import distgemm
from distgemm import tune
from distgemm.bench.cases import LAYERS, Case, cases
from distgemm.gemm.flags import MemOp
from distgemm.gemm.nvcc import build
from distgemm.measure.models import MODELS
from distgemm.measure.operation import ROW_TOLERANCE, Method, WrongResultError
from distgemm.measure.timing import sample
from distgemm.plan.ops import Signal, View, Wait
from distgemm.runtime.cuda import executable, workspace
from distgemm.runtime.cuda.binding import Binder, Binding, Bound, CallTensors
from distgemm.runtime.cuda.executable import CudaExecutable
from distgemm.runtime.cuda.memops import wait_for, write
from distgemm.runtime.cuda.workspace import Workspace, WorkspaceBuffer
from distgemm.runtime.executable import ExecutionConfig
from distgemm.runtime.launch import launch
from distgemm.tune.search import FINALISTS

SLOT_BYTES, PLAN_FLAGS = 3 << 30, 4096
"""Size of the one workspace that all executables share."""
REPLAY_TIMEOUT_S = 20.0
TP = 8
"""Number of ranks that share a layer."""

FlagKey = tuple[int, int]
"""Rank and number of a flag, or of a slot."""


class RotatedBuffer(WorkspaceBuffer):
    """Flags by the distance from their rank to the one that sets them.

    What rank 0 sets at peer p, the other GPU finds as set by its own peer -p.
    """

    def left(self, at: int, by: int) -> int:
        return super().left(at, (by - at) % self.world_size)

    def entered(self, at: int, by: int) -> int:
        return super().entered(at, (by - at) % self.world_size)


class Handle:
    """Symmetric memory of two ranks as that of many: rank 0 is this GPU, all others are the other GPU."""

    def __init__(self, handle: Any, ranks: int) -> None:
        self._handle, mine = handle, handle.rank
        self._gpu_of = [mine, *[1 - mine] * (ranks - 1)]
        self.buffer_ptrs = [handle.buffer_ptrs[gpu] for gpu in self._gpu_of]

    def get_buffer(self, rank: int, *args: Any) -> torch.Tensor:
        return self._handle.get_buffer(self._gpu_of[rank], *args)  # type: ignore[no-any-return]


def counterparts(plan: distgemm.Plan) -> tuple[dict[FlagKey, int], dict[FlagKey, int]]:
    """Flags and slots of peers that rank 0 writes, with those of rank 0 that peers write in the same way.

    Peer p writes at rank 0 what rank 0 writes at peer -p.

    Returns:
        The numbers of flags, and of slots, of rank 0, by peer and number there.

    Raises:
        ValueError: for a plan in which ranks wait for one another differently.
    """
    flags: dict[FlagKey, int] = {}
    slots: dict[FlagKey, int] = {}
    waits = [[op for op in ops if isinstance(op, Wait)] for ops in plan.rank_ops]
    for peer in range(1, plan.world_size):
        mine = [op for op in waits[0] if op.peer == -peer % plan.world_size]
        theirs = [op for op in waits[peer] if op.peer == 0]
        for own, other in zip(mine, theirs, strict=True):
            flags[peer, other.flag.number] = own.flag.number
            slots[peer, other.slot] = own.slot
    return flags, slots


class BinderOfMany(Binder):
    """Rank 0's part of a plan. What it does to a flag or a slot of a peer is done to its counterpart."""

    def __init__(self, plan: distgemm.Plan, device: torch.device, execution: ExecutionConfig) -> None:
        self.peer_flags, self.peer_slots = counterparts(plan)
        super().__init__(plan, 0, device, execution)

    def bind(self, call: CallTensors, buffer: int) -> Bound:
        return BindingOfMany(self, call, buffer).bound()


class BindingOfMany(Binding):
    """A call of :class:`BinderOfMany`."""

    binder: BinderOfMany

    def memop(self, op: Wait | Signal) -> MemOp:
        rank, number = op.flag[:2]
        if rank:  # flags of slices belong to gathers, and have the same numbers on all ranks
            number = self.binder.peer_flags.get((rank, number), number)
        address = self.binder.workspace.buffers[self.buffer].plan_flag(rank, number)
        return wait_for(address) if isinstance(op, Wait) else write(address)

    def tensor(self, view: View) -> torch.Tensor:
        slot = view.slot
        if view.buffer == "slot" and view.rank:
            slot = self.binder.peer_slots[view.rank, view.slot]
        return super().tensor(view._replace(slot=slot))


def one_of_many(plan: distgemm.Plan, group: dist.ProcessGroup, device: torch.device, execution: ExecutionConfig) -> Any:
    """The executable of rank 0, whose peers are all on the other GPU."""
    made = CudaExecutable(plan, group, device, execution, timeout=REPLAY_TIMEOUT_S)
    binder = BinderOfMany(plan, device, execution)
    binder.attach(made.workspace, made.number)
    made.binder = binder
    return made


WorkspaceFor = Callable[[dist.ProcessGroup, torch.device, int, int], Workspace]


def play_rank_0(ranks: int) -> WorkspaceFor:
    """Make executables and workspaces of this process those of rank 0 of so many ranks, from here on.

    Returns:
        The function that takes the place of ``workspace_for``.
    """
    of_many = SimpleNamespace(
        get_rank=lambda group: 0,
        get_world_size=lambda group: ranks,
        barrier=dist.barrier,
        get_backend=dist.get_backend,
        ProcessGroup=dist.ProcessGroup,
    )
    shared: list[Workspace] = []

    def check_agreement(plan: Any, arguments: str, group: Any, device: Any, problem: Exception | None = None) -> None:
        if problem is not None:
            raise problem

    def workspace_for(group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int) -> Workspace:
        if slot_bytes > SLOT_BYTES or flags > PLAN_FLAGS:
            raise RuntimeError(
                f"the workspace has {SLOT_BYTES >> 20} MiB of slots and {PLAN_FLAGS} flags, the plan needs "
                f"{slot_bytes >> 20} MiB and {flags} flags"
            )
        if not shared:
            shared.append(Workspace(group, device, SLOT_BYTES, PLAN_FLAGS))
        return shared[0]

    def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> Handle:
        return Handle(symmetric_memory.rendezvous(memory, group), ranks)

    replacements: dict[Any, dict[str, Any]] = {
        executable: {
            "dist": of_many,
            "check_agreement": check_agreement,
            "agree_on_kernels": lambda *_: None,
            "build_together": lambda sources, rank, size: build(sources, progress=False),
            "workspace_for": workspace_for,
        },
        workspace: {
            "dist": of_many,
            "WorkspaceBuffer": RotatedBuffer,
            "symmetric_memory": SimpleNamespace(empty=symmetric_memory.empty, rendezvous=rendezvous),
        },
    }
    for module, values in replacements.items():
        for name, value in values.items():
            setattr(module, name, value)
    return workspace_for


class PartOfMany:
    """One operation, as :class:`distgemm.measure.operation.Operation` is one: shards, and the expected D."""

    def __init__(self, case: Case, group: dist.ProcessGroup, memory: Workspace) -> None:
        self.case, self.problem, self.group, self.memory = case, case.problem, group, memory
        self.device = device = memory.device
        self.rank, size, p = dist.get_rank(group), case.ranks, case.problem
        self.gathers = case.pattern == "ag+gemm"
        m, n, k = p.m // size, p.n // size, p.k // size
        shapes = [(m, p.k), (n, p.k)] if self.gathers else [(p.m, k), (p.n, k)]
        self.drawn = []
        for gpu in range(2):
            generator = torch.Generator(device).manual_seed(gpu)
            self.drawn.append([torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes])
        self.a, self.b = self.drawn[self.rank]
        self.local_a = torch.cat([self.a, *[self.drawn[1 - self.rank][0]] * (size - 1)]) if self.gathers else self.a
        self.references = {chain: self._reference(chain) for chain in ((False,) if self.gathers else (False, True))}

    def _reference(self, chain: bool) -> torch.Tensor:
        if self.gathers:
            return self.local_a @ self.b.T
        finished = [self._sum(gpu, chain) for gpu in range(2)]
        if self.case.pattern == "gemm+rs":
            return finished[self.rank]
        return torch.cat([finished[self.rank], *[finished[1 - self.rank]] * (self.case.ranks - 1)])

    def _sum(self, gpu: int, chain: bool) -> torch.Tensor:
        """The sum for rank 0's rows. Terms of a chain come from both GPUs alternately; else all but one from a peer."""
        rows = self.problem.m // self.case.ranks
        total = torch.zeros(rows, self.problem.n, device=self.device)
        for shard in range(self.case.ranks):
            a, b = self.drawn[gpu if (shard % 2 == 0 if chain else shard == 0) else 1 - gpu]
            total += (a[shard * rows : (shard + 1) * rows] @ b.T).float()
        return total

    def negate(self) -> None:
        """Negate A and the expected D, so that results of earlier calls are wrong."""
        for a, _ in self.drawn:
            a.neg_()
        if self.gathers:
            self.local_a.neg_()
        for reference in self.references.values():
            reference.neg_()

    def check(self, name: str, found: torch.Tensor) -> None:
        """Raises WrongResultError where D is not what the two GPUs' shards make."""
        wanted = self.references[not self.gathers and "rotating_c" in name].float()
        error = float((found.float() - wanted).norm() / wanted.norm())
        if not error < ROW_TOLERANCE:
            raise WrongResultError(f"{name}: relative error {error:.3g}")

    def parts(self) -> list[Method]:
        """The GEMM alone, and the copies alone."""
        out = torch.empty(self.local_a.shape[0], self.b.shape[0], dtype=torch.bfloat16, device=self.device)
        p, size = self.problem, self.case.ranks
        moved = p.m // size * (p.k if self.gathers else p.n) * (2 if self.case.pattern == "gemm+ar" else 1)
        source = torch.empty(moved, dtype=torch.bfloat16, device=self.device)
        slots = [self.memory.slot(0, 1, at * 2 * moved, 2 * moved).view(torch.bfloat16) for at in range(size - 1)]

        def multiply() -> None:
            torch.mm(self.local_a, self.b.T, out=out)

        def copy() -> None:
            for slot in slots:
                slot.copy_(source, non_blocking=True)

        return [Method("cuBLAS alone", multiply), Method("copies alone", copy)]

    def methods(self, configs: Sequence[tune.TunedConfig], refused: dict[str, str]) -> list[Method]:
        """A method for each plan; ``refused`` gets the reasons of those that cannot be made."""
        found = []
        for config in configs:
            if config.method == "unfused":
                continue
            try:
                plan = config.plan(self.problem, self.case.ranks)
                exe = one_of_many(plan, self.group, self.device, config.execution)
            except Exception as error:  # noted, the others are measured
                refused[str(config)] = f"{type(error).__name__}: {error}"
                continue
            out = torch.empty(exe.plan.shard_shape("D", 0), dtype=torch.bfloat16, device=self.device)
            run = lambda exe=exe, out=out: exe(self.a, self.b, out=out)  # noqa: E731
            found.append(Method(str(config), run, release=exe.release))
        return found


class Selection(NamedTuple):
    """Which candidates are measured.

    Attributes:
        words: the text of a candidate has all of these.
        tiles: configurations of GEMMs in which each candidate with the fused kernel is measured, too.
        quick: whether the fastest are measured in no other tiles.
    """

    words: Sequence[str]
    tiles: Sequence[str]
    quick: bool


def measure(case: Case, selection: Selection, workspace_for: WorkspaceFor) -> dict[str, Any]:
    """The times of the tuner's candidates for a case."""
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    part = PartOfMany(case, group, workspace_for(group, device, 0, 0))
    refused: dict[str, str] = {}

    def times_of(configs: Sequence[tune.TunedConfig], **options: Any) -> dict[str, float]:
        methods = [*part.methods(configs, refused), *part.parts()]
        try:
            found = sample(part, methods, **options)  # type: ignore[arg-type]
        finally:
            for method in methods:
                method.release()
        refused.update({name: one.error for name, one in found.items() if one.error})
        return {name: round(one.ms, 5) for name, one in found.items() if not one.error}

    configs = tune.shortlist(case.problem, case.pattern, case.ranks)
    configs += [
        replace(config, execution=replace(config.execution, config=tiles))
        for tiles in selection.tiles
        for config in configs
        if config.execution.single_kernel
    ]
    configs = [config for config in configs if all(word in str(config) for word in selection.words)]
    by_name = {str(config): config for config in configs}
    times = times_of(configs, rounds=3, burst_ms=2.0)
    ran = sorted((by_name[name] for name in times if name in by_name), key=lambda config: times[str(config)])
    finalists = ran[:FINALISTS]
    if not selection.quick:
        finalists = tune.finalists(case.problem, case.pattern, case.ranks, ran, times)
    times |= times_of(finalists, rounds=7, burst_ms=3.0, rest=1.0)
    best = min((str(config) for config in finalists if str(config) in times), key=times.__getitem__)
    alone, copies = times["cuBLAS alone"], times["copies alone"]
    roof = max(alone, copies)
    return {
        "case": case._asdict(),
        "best": best,
        "ms": times[best],
        "efficiency": round(roof / times[best], 4),
        "pipeline": round((roof + min(alone, copies) / case.ranks) / times[best], 4),
        "times": times,
        "refused": refused,
    }


def run(
    ranks: int,
    todo: list[Case],
    selection: Selection,
    deadline: float,
    path: Path,
    about: str,
    before: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The rows of these cases. Once a case is measured, the file has its row behind those before."""
    workspace_for = play_rank_0(ranks)
    rows = []
    for case in todo:
        late = torch.tensor([float(time.time() > deadline)], device="cuda")
        dist.all_reduce(late)
        if late.item():
            break
        rows.append(measure(case, selection, workspace_for))
        if dist.get_rank() == 0:
            row = rows[-1]
            alone, copies = row["times"]["cuBLAS alone"], row["times"]["copies alone"]
            print(
                f"{ranks} ranks, {case}: {row['ms']:.4f} ms, GEMM {alone:.4f}, copies {copies:.4f}, efficiency "
                f"{row['efficiency']:.3f}, of the pipeline's {row['pipeline']:.3f}: {row['best']}",
                flush=True,
            )
            path.write_text(json.dumps({"about": about, "rows": [*before, *rows]}, indent=1) + "\n")
    return rows


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Number of ranks to play; may be repeated.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Name of a model; may be repeated.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="Name of a layer; may be repeated.")] = None,
    pattern: Annotated[list[str] | None, typer.Option(help="What the ranks do; may be repeated.")] = None,
    m: Annotated[list[int] | None, typer.Option(help="Number of tokens; may be repeated.")] = None,
    word: Annotated[list[str] | None, typer.Option(help="Only candidates with this word; may be repeated.")] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="Candidates with the fused kernel in these tiles too; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The fastest in no other tiles.")] = False,
    seconds: Annotated[float, typer.Option(help="Begin no row later than this.")] = 500.0,
    json_file: Annotated[Path, typer.Option("--json", help="Write the rows to this file.")] = Path("one_of_many.json"),
) -> None:
    """Print what one of many ranks takes, measured on 2 GPUs."""
    deadline = time.time() + seconds
    patterns: list[Any] = pattern or ["ag+gemm", "gemm+rs"]
    selection = Selection(word or (), config or (), quick)
    rows: list[dict[str, Any]] = []
    for count in ranks or [4]:
        todo = cases(model or list(MODELS), layer or LAYERS, patterns, m or [2048], count, TP)
        arguments = (count, todo, selection, deadline, json_file, " ".join(sys.argv), rows)
        rows += launch(run, 2, *arguments, backend="nccl", timeout=seconds + 120)[0]


if __name__ == "__main__":
    typer.run(main)
