"""One operation on all ranks, what its result must be, and the ways to compute it that torch offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)

from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import TORCH_DTYPES, raise_together
from distgemm.runtime.executable import Executable
from distgemm.schedulers import Pattern

__all__ = ["Method", "Operation", "WrongResultError", "eager", "executable_method", "torch_methods"]

ROW_TOLERANCE = 2e-2
"""Largest relative error of a row of D. Rounding to bfloat16 gives 3e-3; a missing element gives more than this."""


class WrongResultError(RuntimeError):
    """A method did not compute the operation."""


@dataclass
class Operation:
    """One operation on all ranks: its problem, this rank's shards, and the expected shard of D.

    Attributes:
        problem: the product over all ranks.
        pattern: what is done over the ranks.
        group: the ranks.
        device: of this rank.
        a, b: this rank's shards, random.
        local_a: what this rank multiplies by B: the gathered A, its shard, or its rows of A.
        reference: the expected shard of D.

    Raises:
        ValueError: if the ranks do not divide m and the other sharded extent.
        RuntimeError: for a reduction on all ranks where one has no memory.
    """

    problem: GemmProblem
    pattern: Pattern
    group: dist.ProcessGroup
    device: torch.device
    a: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)
    local_a: torch.Tensor = field(init=False)
    reference: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        p, rank, size = self.problem, dist.get_rank(self.group), dist.get_world_size(self.group)
        other = "n" if self.pattern in {"ag+gemm", "gemm+a2a"} else "k"
        if p.m % size or getattr(p, other) % size:
            raise ValueError(f"{size} ranks must divide m and {other}, got m, n, k = {p.m}, {p.n}, {p.k}")
        dtype = TORCH_DTYPES[p.dtype]

        def draw(seed: int, rows: int, columns: int) -> torch.Tensor:
            generator = torch.Generator(self.device).manual_seed(seed)
            return torch.randn(rows, columns, generator=generator, device=self.device).to(dtype)

        m, n, k = p.m // size, p.n // size, p.k // size
        if self.pattern == "ag+gemm":
            self.a, self.b = draw(rank, m, p.k), draw(1000 + rank, n, p.k)
            self.local_a = torch.cat([draw(peer, m, p.k) for peer in range(size)])
            self.reference = self.local_a @ self.b.T
        elif self.pattern == "gemm+a2a":
            self.a, self.b = draw(rank, m, p.k), draw(1000, p.n, p.k)  # every rank has all of B
            self.local_a = self.a
            columns = self.b[rank * n : (rank + 1) * n]
            self.reference = torch.cat([draw(peer, m, p.k) @ columns.T for peer in range(size)])
        elif self.pattern == "a2a+gemm":
            self.a, self.b = draw(rank, p.m, k), draw(1000, p.n, p.k)
            self.local_a = torch.cat([draw(peer, p.m, k)[rank * m : (rank + 1) * m] for peer in range(size)], 1)
            self.reference = self.local_a @ self.b.T
        else:
            problem: Exception | None = None
            try:
                self.a, self.b = draw(rank, p.m, k), draw(1000 + rank, p.n, k)
                self.local_a = self.a
                partial = (self.a @ self.b.T).float()
            except Exception as error:  # raised below, once all ranks know of it
                problem = error
            raise_together(problem, "cannot draw their shards and multiply them", self.group, self.device)
            dist.all_reduce(partial, group=self.group)
            rows = slice(rank * m, (rank + 1) * m) if self.pattern == "gemm+rs" else slice(None)
            self.reference = partial[rows]

    def negate(self) -> None:
        """Negate A and the expected D, so that results of earlier calls are wrong."""
        self.a.neg_()
        self.reference.neg_()

    def check(self, name: str, found: torch.Tensor) -> None:
        """Compare D with the reference, row by row.

        The error of a row is relative to its norm, or to the root mean square of all norms if that is larger: the terms
        of a short row may cancel.

        Raises:
            WrongResultError: naming the method and the first wrong row.
        """
        if found.shape != self.reference.shape:
            raise WrongResultError(f"{name}: D is {tuple(found.shape)}, not {tuple(self.reference.shape)}")
        wanted = self.reference.float()
        norms = wanted.norm(dim=1)
        errors = (found.float() - wanted).norm(dim=1) / norms.clamp_min(norms.square().mean().sqrt())
        worst = float(errors.max())  # NaN where there is one
        if not worst < ROW_TOLERANCE:
            row = int((~(errors < ROW_TOLERANCE)).nonzero()[0])
            wrong = int((~(errors < ROW_TOLERANCE)).sum())
            raise WrongResultError(
                f"{name}: wrong in {wrong} of {len(errors)} rows, relative error up to {worst:.3g}, first in row {row}"
            )


@dataclass
class Method:
    """A way to compute an operation.

    Attributes:
        name: its name in tables.
        run: what is timed and captured; returns D's shard, or None if it is only a part of the operation.
        capture: whether it is timed as a CUDA graph, or as calls of the host.
        detail: further facts, for reports.
        release: to be called once its graphs are gone.
    """

    name: str
    run: Callable[[], torch.Tensor | None]
    capture: bool = True
    detail: str = ""
    release: Callable[[], None] = field(default=lambda: None)


def eager(method: Method) -> Method:
    """The same method without a graph: the host's time counts if it is longer than the GPU's."""
    return Method(f"{method.name}, eager", method.run, capture=False, detail=method.detail)


def executable_method(operation: Operation, name: str, exe: Executable) -> Method:
    """A method that calls an executable on the operation's shards, into a D of its own."""
    out = torch.empty(
        exe.plan.shard_shape("D", exe.rank),
        dtype=TORCH_DTYPES[str(exe.plan.problem.out_dtype)],
        device=operation.device,
    )
    return Method(name, lambda: exe(operation.a, operation.b, out=out), release=exe.release)


def torch_methods(operation: Operation) -> list[Method]:
    """What torch offers: NCCL and cuBLAS, the fused ops, and as parts cuBLAS and NCCL alone.

    For "gemm+ar" the fused ops are cuBLAS and the all-reduces of symmetric memory. With an all-to-all there are none.
    """
    a, b, whole_a, group = operation.a, operation.b, operation.local_a, operation.group
    p, size = operation.problem, dist.get_world_size(group)
    dtype = a.dtype
    name = group.group_name
    if operation.pattern == "ag+gemm":
        gathered = torch.empty(p.m, p.k, dtype=dtype, device=a.device)
        d = torch.empty(p.m, b.shape[0], dtype=dtype, device=a.device)

        def unfused() -> torch.Tensor:
            dist.all_gather_into_tensor(gathered, a, group)
            return torch.mm(gathered, b.T, out=d)

        def fused() -> torch.Tensor:
            found = torch.ops.symm_mem.fused_all_gather_matmul(a, [b.T], 0, name, return_A=False)
            return torch.as_tensor(found[1][0])

        return [
            Method("NCCL + cuBLAS", unfused),
            Method("torch fused", fused),
            Method("cuBLAS alone", lambda: (torch.mm(whole_a, b.T, out=d), None)[1]),
            Method("NCCL alone", lambda: (dist.all_gather_into_tensor(gathered, a, group), None)[1]),
        ]
    if operation.pattern in {"gemm+a2a", "a2a+gemm"}:
        return _all_to_all_methods(operation)
    partial = torch.empty(p.m, p.n, dtype=dtype, device=a.device)
    alone = Method("cuBLAS alone", lambda: (torch.mm(a, b.T, out=partial), None)[1])
    if operation.pattern == "gemm+ar":
        return [*_all_reduce_methods(operation, partial), alone]
    scattered = torch.empty(p.m // size, p.n, dtype=dtype, device=a.device)

    def reduce_scatter() -> torch.Tensor:
        torch.mm(a, b.T, out=partial)
        dist.reduce_scatter_tensor(scattered, partial, group=group)
        return scattered

    return [
        Method("NCCL + cuBLAS", reduce_scatter),
        Method(
            "torch fused",
            lambda: torch.as_tensor(torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b.T, "sum", 0, name)),
        ),
        alone,
        Method("NCCL alone", lambda: (dist.reduce_scatter_tensor(scattered, partial, group=group), None)[1]),
    ]


def _all_to_all_methods(operation: Operation) -> list[Method]:
    """The program of DeepSpeed Ulysses, which copies to or from the blocks of ranks, and where it can, one without."""
    a, b, local_a, group = operation.a, operation.b, operation.local_a, operation.group
    p, size = operation.problem, dist.get_world_size(group)
    to_owners = operation.pattern == "gemm+a2a"
    rows, columns = p.m // size, (p.n if to_owners else p.k) // size
    sent, received = (torch.empty(size, rows, columns, dtype=a.dtype, device=a.device) for _ in range(2))
    gathered, product = torch.empty_like(local_a), torch.empty(rows, p.n, dtype=a.dtype, device=a.device)

    def to_heads() -> torch.Tensor:
        torch.mm(a, b.T, out=product)
        sent.copy_(product.view(rows, size, columns).transpose(0, 1))
        dist.all_to_all_single(received, sent, group=group)
        return received.view(p.m, columns)

    def a_product_for_each_rank() -> torch.Tensor:
        for block, shard in zip(sent, b.chunk(size), strict=True):
            torch.mm(a, shard.T, out=block)
        dist.all_to_all_single(received, sent, group=group)
        return received.view(p.m, columns)

    def from_heads() -> torch.Tensor:
        dist.all_to_all_single(received, a.view(size, rows, columns), group=group)
        gathered.view(rows, size, columns).copy_(received.transpose(0, 1))
        return torch.mm(gathered, b.T, out=product)

    found = [Method("NCCL + cuBLAS", to_heads if to_owners else from_heads)]
    if to_owners:
        found.append(Method("NCCL + cuBLAS, a product for each rank", a_product_for_each_rank))
    return [
        *found,
        Method("cuBLAS alone", lambda: (torch.mm(local_a, b.T, out=product), None)[1]),
        Method("NCCL alone", lambda: (dist.all_to_all_single(received, sent, group=group), None)[1]),
    ]


def _all_reduce_methods(operation: Operation, partial: torch.Tensor) -> list[Method]:
    a, b, group = operation.a, operation.b, operation.group
    name = group.group_name
    added = torch.zeros_like(partial)  # sums of zeros stay finite, however often they are added

    @cache
    def symmetric() -> torch.Tensor:  # at the first call: if there is none, only methods that use it fail
        found = symmetric_memory.empty(*partial.shape, dtype=partial.dtype, device=partial.device)
        symmetric_memory.rendezvous(found, group)
        return found

    def nccl() -> torch.Tensor:
        torch.mm(a, b.T, out=partial)
        dist.all_reduce(partial, group=group)
        return partial

    def two_shot() -> torch.Tensor:
        torch.mm(a, b.T, out=symmetric())
        torch.ops.symm_mem.two_shot_all_reduce_(symmetric(), "sum", name)
        return symmetric()

    def one_shot() -> torch.Tensor:
        torch.mm(a, b.T, out=symmetric())
        return torch.as_tensor(torch.ops.symm_mem.one_shot_all_reduce(symmetric(), "sum", name))

    return [
        Method("NCCL + cuBLAS", nccl),
        Method("torch two-shot + cuBLAS", two_shot),
        Method("torch two-shot + cuBLAS, copied", lambda: partial.copy_(two_shot())),
        Method("torch one-shot + cuBLAS", one_shot),
        Method("NCCL alone", lambda: (dist.all_reduce(added, group=group), None)[1]),
    ]
