"""What one of many ranks takes, measured on two GPUs.

    python benchmarks/one_of_many.py --ranks 4,8 --model llama-3-8b,llama-3-70b --m 2048 --json out.json

Each of the two GPUs does what rank 0 of so many does, and takes the part of all of the other one's peers: what a rank
sends to any of them goes to the other GPU, and what comes from any of them comes from there. Schedules in one dimension
are alike on all ranks but for a rotation, so the same products are multiplied in the same order, the same bytes leave
and arrive over the same link, and a chain has all its hops. What is missed: how far more than two GPUs fall apart, and
what a switch makes of more of them.

Times are those of the plans among the candidates of ``schedule="auto"``, by the tuner's own two rounds, beside the GEMM
and the copies alone; the unfused program, whose collectives know of two ranks only, is not among them. Results are
checked: against what the two GPUs' shards make, taken for those of all ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)

import distgemm
from distgemm import tune
from distgemm.bench.cases import Case
from distgemm.gemm.flags import MemOp
from distgemm.gemm.nvcc import build
from distgemm.measure import timing as bench
from distgemm.measure.models import MODELS, get_model
from distgemm.plan.ops import Signal, View, Wait
from distgemm.runtime.cuda import executable as executable_module
from distgemm.runtime.cuda import workspace as workspace_module
from distgemm.runtime.cuda.binding import Binder, Binding
from distgemm.runtime.cuda.executable import CudaExecutable
from distgemm.runtime.cuda.memops import wait_for, write
from distgemm.runtime.cuda.workspace import Half, Workspace
from distgemm.runtime.launch import launch
from distgemm.tune import search as measuring

SLOT_BYTES = 3 << 30


class RotatedHalf(Half):
    """FlagOps of a rank by how far it is from the one in whose memory they lie: what rank 0 writes at peer p, the other
    GPU finds as written by its own peer -p."""

    def left(self, at: int, by: int) -> int:
        return super().left(at, (by - at) % self.world_size)

    def entered(self, at: int, by: int) -> int:
        return super().entered(at, (by - at) % self.world_size)


class Handle:
    """Symmetric memory of two as that of many: rank 0 is this one, all others are the other one."""

    def __init__(self, handle: Any, ranks: int) -> None:
        self._handle, mine = handle, handle.rank
        self._of = [mine, *[1 - mine] * (ranks - 1)]
        self.buffer_ptrs = [handle.buffer_ptrs[real] for real in self._of]

    def get_buffer(self, rank: int, *args: Any) -> torch.Tensor:
        return self._handle.get_buffer(self._of[rank], *args)  # type: ignore[no-any-return]


def counterparts(plan: distgemm.Plan) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """By peer p and number of a flag, or a slot, of p's that rank 0 writes: rank 0's own that rank -p writes so.

    Raises ValueError for a plan in which ranks wait for one another differently.
    """
    flags: dict[tuple[int, int], int] = {}
    slots: dict[tuple[int, int], int] = {}
    waits = [[op for op in ops if isinstance(op, Wait)] for ops in plan.rank_ops]
    for peer in range(1, plan.world_size):
        mine = [op for op in waits[0] if op.peer == -peer % plan.world_size]
        theirs = [op for op in waits[peer] if op.peer == 0]
        for own, other in zip(mine, theirs, strict=True):
            flags[peer, other.flag.number] = own.flag.number
            slots[peer, other.slot] = own.slot
    return flags, slots


class BindingOfMany(Binding):
    """What rank 0 does to a flag or a slot of a peer is done to its counterpart."""

    binder: BinderOfMany

    def memop(self, op: Wait | Signal) -> MemOp:
        rank, number = op.flag[:2]
        if rank:  # flags of slices are those of gathers, which are alike on all ranks
            number = self.binder.flags.get((rank, number), number)
        address = self.binder.workspace.halves[self.half].flag(rank, number)
        return wait_for(address) if isinstance(op, Wait) else write(address)

    def tensor(self, view: View) -> torch.Tensor:
        slot = self.binder.slots[view.rank, view.slot] if view.buffer == "slot" and view.rank else view.slot
        return super().tensor(view._replace(slot=slot))


class BinderOfMany(Binder):
    """Rank 0's part."""

    binding = BindingOfMany

    def __init__(self, plan: distgemm.Plan, *args: Any, **how: Any) -> None:
        self.flags, self.slots = counterparts(plan)
        super().__init__(plan, *args, **how)


class OneOfMany(CudaExecutable):
    binders = BinderOfMany


def take_part(ranks: int) -> None:
    """From here on, executables and workspaces of this process are those of rank 0 of so many."""
    of_many = SimpleNamespace(
        get_rank=lambda group: 0,
        get_world_size=lambda group: ranks,
        barrier=dist.barrier,
        all_gather=dist.all_gather,
        get_backend=dist.get_backend,
        ProcessGroup=dist.ProcessGroup,
    )
    shared: dict[int, Workspace] = {}

    def agree(plan: distgemm.Plan, further: str, group: Any, device: Any, problem: Exception | None = None) -> None:
        if problem is not None:
            raise problem

    def workspace_for(group: dist.ProcessGroup, device: torch.device, slot_bytes: int, flags: int) -> Workspace:
        if slot_bytes > SLOT_BYTES:
            raise RuntimeError(f"{slot_bytes >> 20} MiB of slots are needed, {SLOT_BYTES >> 20} MiB are there")
        if not shared:
            shared[0] = Workspace(group, device, SLOT_BYTES, max(flags, 4096))
        return shared[0]

    def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> Handle:
        return Handle(symmetric_memory.rendezvous(memory, group), ranks)

    names: dict[Any, dict[str, Any]] = {
        executable_module: {
            "dist": of_many,
            "agree": agree,
            "build_together": lambda sources, rank, size: build(sources, progress=False),
            "workspace_for": workspace_for,
        },
        workspace_module: {
            "dist": of_many,
            "Half": RotatedHalf,
            "symmetric_memory": SimpleNamespace(empty=symmetric_memory.empty, rendezvous=rendezvous),
        },
    }
    for module, replaced in names.items():
        for name, value in replaced.items():
            setattr(module, name, value)


class PartOfMany:
    """One operation, as :class:`distgemm.measure.timing.Operation` is one: shards, and what D's is to be, by schedule."""

    def __init__(self, case: Case, group: dist.ProcessGroup, device: torch.device) -> None:
        self.case, self.problem, self.group, self.device = case, case.problem, group, device
        self.rank, size, p = dist.get_rank(group), case.ranks, case.problem
        self.gathers = case.op == "ag+gemm"
        m, n, k = p.m // size, p.n // size, p.k // size
        shapes = [(m, p.k), (n, p.k)] if self.gathers else [(p.m, k), (p.n, k)]
        self.drawn = []
        for real in range(2):
            generator = torch.Generator(device).manual_seed(real)
            self.drawn.append([torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes])
        self.a, self.b = self.drawn[self.rank]
        self.local_a = torch.cat([self.a, *[self.drawn[1 - self.rank][0]] * (size - 1)]) if self.gathers else self.a
        self.wanted = {chain: self._wanted(chain) for chain in ((False,) if self.gathers else (False, True))}

    def _wanted(self, chain: bool) -> torch.Tensor:
        if self.gathers:
            return self.local_a @ self.b.T
        finished = [self._sum(real, chain) for real in range(2)]
        if self.case.op == "gemm+rs":
            return finished[self.rank]
        return torch.cat([finished[self.rank], *[finished[1 - self.rank]] * (self.case.ranks - 1)])

    def _sum(self, real: int, chain: bool) -> torch.Tensor:
        """Of rank 0's rows: along a chain the two GPUs take turns, else all but its own come from the other one."""
        rows = self.problem.m // self.case.ranks
        total = torch.zeros(rows, self.problem.n, device=self.device)
        for shard in range(self.case.ranks):
            a, b = self.drawn[real if (shard % 2 == 0 if chain else shard == 0) else 1 - real]
            total += (a[shard * rows : (shard + 1) * rows] @ b.T).float()
        return total

    def check(self, name: str, found: torch.Tensor) -> None:
        """Raises WrongResultError where D is not what the two GPUs' shards make."""
        wanted = self.wanted["rotating_c" in name].float()
        error = float((found.float() - wanted).norm() / wanted.norm())
        if not error < bench.TOLERANCE:
            raise bench.WrongResultError(f"{name}: relative error {error:.3g}")

    def parts(self) -> list[bench.Method]:
        """The GEMM alone, and the copies alone."""
        out = torch.empty(self.local_a.shape[0], self.b.shape[0], dtype=torch.bfloat16, device=self.device)
        p, size = self.problem, self.case.ranks
        moved = p.m // size * (p.k if self.gathers else p.n) * (2 if self.case.op == "gemm+ar" else 1)
        source = torch.empty(moved, dtype=torch.bfloat16, device=self.device)
        memory = executable_module.workspace_for(self.group, self.device, 0, 0)
        slots = [memory.slot(0, 1, at * 2 * moved, 2 * moved).view(torch.bfloat16) for at in range(size - 1)]

        def multiply() -> None:
            torch.mm(self.local_a, self.b.T, out=out)

        def copy() -> None:
            for slot in slots:
                slot.copy_(source, non_blocking=True)

        return [bench.Method("cuBLAS alone", multiply), bench.Method("copies alone", copy)]


def executables(part: PartOfMany, choices: Sequence[tune.TunedConfig], refused: dict[str, str]) -> list[bench.Method]:
    methods = []
    for choice in choices:
        if choice.method == "unfused":
            continue
        try:
            plan = choice.plan(part.problem, part.case.ranks)
            exe = OneOfMany(plan, part.group, part.device, choice.execution, timeout=20.0)
        except Exception as error:  # noted, the others are measured
            refused[str(choice)] = f"{type(error).__name__}: {error}"
            continue
        out = torch.empty(exe.plan.shard_shape("D", 0), dtype=torch.bfloat16, device=part.device)
        method = bench.Method(str(choice), lambda exe=exe, out=out: exe(part.a, part.b, out=out))  # type: ignore[misc]
        method.release = lambda exe=exe: exe.workspace.release(exe)  # type: ignore[misc]
        methods.append(method)
    return methods


class How(NamedTuple):
    """What is measured.

    words:   which the text of a candidate has
    configs: those in which each candidate by one kernel is measured, too
    quick:   whether the fastest ones are measured in no other configurations
    """

    words: Sequence[str]
    configs: Sequence[str]
    quick: bool


def measure(case: Case, how: How) -> dict[str, Any]:
    """Times of a case: of the tuner's candidates."""
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    part = PartOfMany(case, group, device)
    refused: dict[str, str] = {}

    def sample(choices: Sequence[tune.TunedConfig], **how: Any) -> dict[str, float]:
        methods = [*executables(part, choices, refused), *part.parts()]
        try:
            found = bench.sample(part, methods, **how)  # type: ignore[arg-type]
        finally:
            for method in methods:
                method.release()
        refused.update({name: one.error for name, one in found.items() if one.error})
        return {name: round(one.ms, 5) for name, one in found.items() if not one.error}

    choices = tune.shortlist(case.problem, case.op, case.ranks)
    choices += [
        replace(choice, execution=replace(choice.execution, config=config))
        for config in how.configs
        for choice in choices
        if choice.by_one_kernel
    ]
    choices = [choice for choice in choices if all(word in str(choice) for word in how.words)]
    by_name = {str(choice): choice for choice in choices}
    times = sample(choices, rounds=3, burst_ms=2.0)
    ran = sorted((by_name[name] for name in times if name in by_name), key=lambda choice: times[str(choice)])
    finalists = ran[: measuring.FINALISTS]
    if not how.quick:
        finalists = tune.finalists(case.problem, case.op, case.ranks, ran, times)
    times |= sample(finalists, rounds=7, burst_ms=3.0, rest=1.0)
    best = min((str(choice) for choice in finalists if str(choice) in times), key=times.__getitem__)
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
    cases: list[Case],
    how: How,
    deadline: float,
    path: str,
    about: str,
    before: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The rows of these cases; the file has them, behind those before, once each is measured."""
    take_part(ranks)
    rows = []
    for case in cases:
        late = torch.tensor([float(time.time() > deadline)], device="cuda")
        dist.all_reduce(late)
        if late.item():
            break
        rows.append(measure(case, how))
        if dist.get_rank() == 0:
            row = rows[-1]
            alone, copies = row["times"]["cuBLAS alone"], row["times"]["copies alone"]
            print(
                f"{ranks} ranks, {case}: {row['ms']:.4f} ms, GEMM {alone:.4f}, copies {copies:.4f}, efficiency "
                f"{row['efficiency']:.3f}, of the pipeline's {row['pipeline']:.3f}: {row['best']}",
                flush=True,
            )
            Path(path).write_text(json.dumps({"about": about, "rows": [*before, *rows]}, indent=1) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4")
    parser.add_argument("--model", default=",".join(MODELS))
    parser.add_argument("--layers", default="qkv,out,fc1,fc2")
    parser.add_argument("--ops", default="ag+gemm,gemm+rs")
    parser.add_argument("--m", default="2048")
    parser.add_argument("--words", default="", help="only candidates with all of these words, separated by commas")
    parser.add_argument("--configs", default="", help="candidates by one kernel in these configurations, too")
    parser.add_argument("--quick", action="store_true", help="kernels in the tiles chosen by shape only")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no row later than this")
    parser.add_argument("--json", default="one_of_many.json")
    given = parser.parse_args()
    deadline = time.time() + given.seconds
    rows = []
    for ranks in map(int, given.ranks.split(",")):
        cases = []
        for m in map(int, given.m.split(",")):
            for model in given.model.split(","):
                for layer in get_model(model).layers:
                    for op in set(layer.ops) & set(given.ops.split(",")):
                        if layer.name in given.layers.split(","):
                            n, k = layer.among(ranks, 8)
                            cases.append(Case(model, layer.name, op, m, n, k, ranks, 8))
        words, configs = (text.split(",") if text else [] for text in (given.words, given.configs))
        how = How(words, configs, given.quick)
        arguments = (ranks, cases, how, deadline, given.json, " ".join(sys.argv), rows)
        rows += launch(run, 2, *arguments, backend="nccl", timeout=given.seconds + 120)[0]


if __name__ == "__main__":
    main()
