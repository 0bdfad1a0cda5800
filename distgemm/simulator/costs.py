"""What ops cost on a machine, and the roofs of a plan: the whole GEMM alone, the copies alone, the unfused program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from distgemm.arguments import instance, integer, member
from distgemm.plan.ops import Copy, Gemm, View, box_extents, box_size, link_of
from distgemm.plan.patterns import COLLECTIVES, Collective
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES, GemmProblem
from distgemm.schedulers import PATTERNS, Pattern, check_pattern
from distgemm.schedulers.registry import MAX_RANKS
from distgemm.simulator.machine import Link, Machine

__all__ = [
    "Port",
    "copies_alone_us",
    "copy_bandwidth",
    "copy_bytes",
    "copy_ports",
    "gemm_alone_us",
    "is_staging",
    "ports_of",
    "predict_unfused",
    "stored_us",
    "view_bytes",
]


def predict_unfused(
    problem: GemmProblem, machine: Machine, pattern: Pattern, world_size: int, collective: Collective = "nccl"
) -> float:
    """The predicted time of the unfused program, us: a library's collective, and one GEMM before or after it.

    Args:
        problem: the product over all ranks.
        machine: of the ranks.
        pattern: "ag+gemm" gathers A, with B and D sharded along N; "gemm+rs" shards K and scatters D; "gemm+ar" shards
            K and leaves all of D on every rank.
        world_size: number of ranks.
        collective: "nccl"; for "gemm+ar" also "two-shot" or "one-shot" of torch's symmetric memory.

    Raises:
        ValueError: for an unknown pattern or collective, a world_size out of range, and objects of other classes.
    """
    instance("problem", problem, GemmProblem, "a distgemm.GemmProblem")
    instance("machine", machine, Machine, "a distgemm.simulator.Machine")
    check_pattern(pattern, PATTERNS)
    member("collective", collective, COLLECTIVES if pattern == "gemm+ar" else COLLECTIVES[:1])
    world_size = integer("world_size", world_size, 1, MAX_RANKS)
    out = DTYPE_BYTES[str(problem.out_dtype)]
    m, n, k = problem.m, problem.n, problem.k
    if pattern == "ag+gemm":
        n = -(-n // world_size)
        size, passes = problem.m * problem.k * problem.l * DTYPE_BYTES[problem.dtype], 1
        size += _gathered_scales(problem, world_size)
    else:
        k = -(-k // world_size)
        size, passes = problem.m * problem.n * problem.l * out, 1 if pattern == "gemm+rs" else 2
    gemm = whole_gemm_us(machine, m, n, k, problem.l, problem.dtype, out)
    if world_size == 1:
        return machine.replay + gemm
    moved = size * (world_size - 1) * (1 if collective == "one-shot" else passes / world_size)
    links = [machine.collective, machine.small_collective]
    if collective != "nccl":
        links = [machine.symmetric or machine.collective]
    spent = min(link.latency + moved / (link.bandwidth * 1e3) for link in links if link is not None)
    if not machine.same_host(0, world_size - 1):
        # The library divides what it moves into rings, each over an adapter of its own.
        rings = min(machine.adapters_per_host or machine.ranks_per_host or 1, machine.ranks_per_host or 1, world_size)
        across = machine.network.latency + moved / rings / (machine.network.bandwidth * 1e3)
        spent = max(spent, across)
    return machine.replay + gemm + spent


def _gathered_scales(problem: GemmProblem, world_size: int) -> int:
    """The bytes of all scales of A, if its rows are gathered; 0: every rank has them already."""
    if problem.scaling is None:
        return 0
    scaling = problem.scaling.a
    if scaling.rows is None and scaling.scope == "global":
        return 0
    (_, rows), (_, columns) = (
        scaling.scales(0, (0, problem.m), (0, world_size)),
        scaling.scales(1, (0, problem.k), (0, 1)),
    )
    return rows * columns * problem.l * DTYPE_BYTES[scaling.dtype]


def whole_gemm_us(machine: Machine, m: int, n: int, k: int, batches: int, dtype: str, out: int) -> float:
    """Time of one GEMM that has the GPU to itself, us, at the clock to which its power draw lowers the GPU."""
    cost = machine.gemm(m, n, k, batches, dtype=dtype, out_bytes=out)
    at_limit = cost.flop / (machine.rate(dtype).power * 1e6 * machine.clock(dtype, cost.flop))
    return max(cost.alone, machine.gemm_launch + at_limit)


def view_bytes(plan: Plan, view: View) -> int:
    return box_size(view.box) * DTYPE_BYTES[plan.dtype(view)]


def copy_bytes(plan: Plan, op: Copy) -> int:
    return view_bytes(plan, op.dst)


def is_staging(op: Copy) -> bool:
    """Whether a copy puts a tile of the rank's shard, or its scales, into a slot, from which other ranks pull it."""
    return op.src.buffer not in ("D", "slot") and link_of(op) is None


def copy_bandwidth(machine: Machine, op: Copy, link: Link) -> float:
    """Rate of a copy engine with a single copy between ranks, GB/s; a shared port may carry less."""
    pulled = op.rank != op.src.rank and link is machine.nvlink
    return machine.pull_bandwidth if pulled else link.bandwidth


def stored_us(plan: Plan, machine: Machine, op: Gemm, bandwidth: float) -> float:
    """Time for which a link or port of a bandwidth carries what a GEMM stores over it, us."""
    return view_bytes(plan, op.out) / (min(bandwidth, machine.store_bandwidth or bandwidth) * 1e3)


class Port(NamedTuple):
    """One direction of a rank's link, or of the adapters that the ranks of a host share.

    Attributes:
        place: the rank, or -1 - host.
        receives: whether transfers arrive at it.
        link: the link.
        bandwidth: GB/s.
    """

    place: int
    receives: bool
    link: Link
    bandwidth: float


def ports_of(machine: Machine, ends: tuple[int, int]) -> tuple[Port, Port]:
    """The port at which a transfer leaves its source, and the port at which it arrives."""
    link, adapters = machine.link(*ends), machine.adapters_per_host
    if adapters is None or machine.same_host(*ends):
        return Port(ends[0], False, link, link.bandwidth), Port(ends[1], True, link, link.bandwidth)
    src, dst = (-1 - rank // (machine.ranks_per_host or 1) for rank in ends)
    return Port(src, False, link, adapters * link.bandwidth), Port(dst, True, link, adapters * link.bandwidth)


def copy_ports(machine: Machine, op: Copy, ends: tuple[int, int]) -> tuple[Port, ...]:
    """The ports that a copy shares with copies of other ranks: not the one that belongs to its own copy engine."""
    leaves, arrives = ports_of(machine, ends)
    if leaves.place < 0:
        return leaves, arrives
    return (arrives,) if op.rank == leaves.place else (leaves,)


def gemm_alone_us(plan: Plan, machine: Machine, rank: int) -> float:
    """Time of a replay that is one GEMM, the whole local product of a rank, us."""
    gemms = [op for op in plan.rank_ops[rank] if isinstance(op, Gemm)]
    if not gemms:
        return 0.0
    m = _union(op.out.box[1] for op in gemms)
    n = _union(op.out.box[2] for op in gemms)
    k = _union(op.a.box[2] for op in gemms)
    batches = _union(op.out.box[0] for op in gemms)
    volume = sum(box_size(op.out.box) * box_extents(op.a.box)[2] for op in gemms)
    if volume != m * n * k * batches:  # the tiles do not form a box: take a box of the same width and volume
        m = max(1, round(volume / (n * k * batches)))
    out = DTYPE_BYTES[str(plan.problem.out_dtype)]
    return machine.replay + whole_gemm_us(machine, m, n, k, batches, plan.problem.dtype, out)


def copies_alone_us(plan: Plan, machine: Machine) -> float:
    """Time of a replay that only moves data between ranks, us; no engine and no port pauses.

    What GEMMs store occupies the ports of both ends, and no engine.
    """
    engines: dict[tuple[int, Link], float] = defaultdict(float)
    ports: dict[Port, float] = defaultdict(float)
    launch = machine.gemm_launch
    for ops in plan.rank_ops:
        for op in ops:
            ends = link_of(op)
            if ends is None:
                continue
            link = machine.link(*ends)
            if isinstance(op, Copy):
                launch, size = machine.copy_launch, copy_bytes(plan, op)
                engines[op.rank, link] += link.gap + size / (copy_bandwidth(machine, op, link) * 1e3)
                for port in copy_ports(machine, op, ends):
                    ports[port] += size / (port.bandwidth * 1e3)
            elif isinstance(op, Gemm):
                for port in ports_of(machine, ends):
                    ports[port] += stored_us(plan, machine, op, port.bandwidth)
    found = [busy + link.latency for (_, link), busy in engines.items()]
    found += [busy + port.link.latency for port, busy in ports.items()]
    return machine.replay + machine.entry + launch + max(found) if found else 0.0


def _union(ranges: Iterable[tuple[int, int]]) -> int:
    """How many integers lie in any of the ranges."""
    found, reached = 0, None
    for start, end in sorted(ranges):
        start = start if reached is None else max(start, reached)
        found += max(0, end - start)
        reached = end if reached is None else max(reached, end)
    return found
