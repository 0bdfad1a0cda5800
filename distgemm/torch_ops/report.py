"""What became of torch's fused operations, and which collectives beside GEMMs were not fused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from distgemm.torch_ops.dispatch import KEPT_BYTES, PREPARED, CallRecord

__all__ = ["REPORT", "CallSite", "FusionReport", "Kept", "NotFusedError", "report"]


class NotFusedError(RuntimeError):
    """With ``distgemm.install(strict=True)``: a collective beside a GEMM that distgemm does not compute."""


class Kept(NamedTuple):
    """The executables that are kept for a group, one for each number of tokens and each weight's shape.

    Attributes:
        executables: their number.
        bytes: host memory that they take, estimated.
        most_bytes: above this, those that were used least recently are dropped.
    """

    executables: int
    bytes: int
    most_bytes: int


class CallSite(NamedTuple):
    """Calls that are alike.

    Attributes:
        op: name of the op, such as "fused_all_gather_matmul".
        shapes: of its operands. Extents that vary in a compiled graph have names.
        dtype: of the first one.
        details: such as the dimension that is gathered.
        ranks: size of the group.
    """

    op: str
    shapes: tuple[tuple[int | str, ...], ...]
    dtype: torch.dtype
    details: tuple[str | int, ...]
    ranks: int

    def __str__(self) -> str:
        operands = " x ".join(map(str, self.shapes))
        facts = [operands, *map(str, self.details), str(self.dtype).removeprefix("torch."), f"{self.ranks} ranks"]
        return f"{self.op} {', '.join(facts)}"


@dataclass
class FusionReport:
    """What :func:`report` returns. ``print`` shows it.

    Attributes:
        served: calls that distgemm computed, by call site and by what ran.
        not_served: calls of fused ops that distgemm did not compute, by call site and reason.
        not_fused: collectives beside a GEMM in graphs that inductor compiled, by call site and reason. A graph counts
            when it is compiled, not when it runs.
    """

    served: Counter[tuple[CallSite, str]] = field(default_factory=Counter)
    not_served: Counter[tuple[CallSite, str]] = field(default_factory=Counter)
    not_fused: Counter[tuple[CallSite, str]] = field(default_factory=Counter)
    _texts: dict[Any, str] = field(default_factory=dict, repr=False)

    @property
    def kept(self) -> dict[str, Kept]:
        """What is kept for the next calls, by the names of groups."""
        return {group.group_name: Kept(len(calls), calls.size, KEPT_BYTES) for group, calls in PREPARED.items()}

    def clear(self) -> None:
        """Forget all calls."""
        for rows in (self.served, self.not_served, self.not_fused, self._texts):
            rows.clear()

    def add_served(self, site: CallSite, call: CallRecord) -> None:
        """Count a call that distgemm computed. Its text is made once: that takes longer than the call may."""
        key = (
            site,
            call.plan.schedule,
            call.options,
            call.transfers,
            call.provider,
            call.tuned,
            call.note,
            call.kernels,
        )
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = call.what_ran
        self.served[site, text] += 1

    def __str__(self) -> str:
        found = []
        for what, rows in (
            ("computed by distgemm", self.served),
            ("fused, not computed by distgemm", self.not_served),
            ("not fused, in compiled graphs", self.not_fused),
        ):
            found.append(f"{what}: {sum(rows.values())}")
            for (site, text), count in rows.items():
                found += [f"  {count} x {site}", f"      {text}"]
        for group, kept in self.kept.items():
            size, most = (f"{each / (1 << 20):.1f} MiB" for each in kept[1:])
            found.append(f"kept for group {group}: {kept.executables} executables of {size}, at most {most}")
        return "\n".join(found)


REPORT = FusionReport()
"""That of this process."""


def report() -> FusionReport:
    """What ran since :func:`distgemm.install` was called, on this rank: ``print(distgemm.report())``.

    For each call site of torch's fused ops it has the shapes, what ran and how often. Where distgemm did not compute
    the call, it says why. It also has the collectives beside GEMMs that inductor did not fuse. Those are found when a
    graph is compiled, so graphs that come from inductor's cache are not among them.
    """
    return REPORT
