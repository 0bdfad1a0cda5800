"""A kernel of one warp that waits for flags and writes them, faster than memory operations of the stream.

A memory operation occupies no SM. But a wait takes some microseconds longer than in a kernel that spins, and each write
takes 0.7 us. The kernel needs a free SM, so it is for plans whose GEMMs run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from distgemm.gemm.cubins import open_cubin
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.flags import OPERATIONS, PHASES, FlagOps, MemOp, flag_ops
from distgemm.gemm.launches import StructsLaunch
from distgemm.gemm.nvcc import KernelSource

__all__ = ["bind_flag_ops", "flag_source"]


def flag_source() -> KernelSource:
    """What the kernel is compiled from."""
    return KernelSource("flags", (), CutlassProvider().arch, "flags.cu", ("flags.cuh", "facts.cuh"))


def split_launches(phases: Sequence[Sequence[MemOp]]) -> list[list[list[MemOp]]]:
    """The phases of each launch: as many as fit, and longer phases in several parts."""
    launches: list[list[list[MemOp]]] = []
    for phase in phases:
        for start in range(0, len(phase), OPERATIONS):
            part = list(phase[start : start + OPERATIONS])
            last = launches[-1] if launches else []
            if last and len(last) < PHASES and sum(map(len, last)) + len(part) <= OPERATIONS:
                last.append(part)
            else:
                launches.append([part])
    return launches


def bind_flag_ops(phases: Sequence[Sequence[MemOp]], device: int) -> StructsLaunch:
    """A launch of the kernel: all operations of a phase at once, the phases one after the other."""
    structs = [flag_ops(part) for part in split_launches(phases)]
    return StructsLaunch(open_cubin(flag_source(), FlagOps), structs, 1, device)
