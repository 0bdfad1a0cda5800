"""Time calls in a CUDA graph, with and without the nodes that keep the order of calls.

    python benchmarks/order_in_graphs.py --ranks 2 --json FILE

The calls are all-reduces of few tokens: unfused programs, and a per-tile kernel. They have no nodes for their order
("none"), a wait before and a record behind each call, for which the next one waits ("in line"), or those of
:class:`distgemm.runtime.cuda.order.CallOrder` ("present"). A graph has several calls, one behind the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cuda.bindings import runtime
from rich.console import Console
from rich.table import Table

import distgemm
from distgemm.gemm.cuda_errors import raise_on
from distgemm.measure.operation import Method, Operation, executable_method
from distgemm.measure.timing import measure
from distgemm.runtime.cuda import order as orders
from distgemm.runtime.cuda.order import CallOrder
from distgemm.runtime.launch import launch
from distgemm.runtime.unfused import COLLECTIVES, UnfusedExecutable

SHAPES = [(4, 4096, 4096), (16, 8192, 8192), (64, 8192, 28672)]
"""m, n and k of the products over all ranks."""
ROUNDS = 7


class NoOrder(CallOrder):
    """No nodes."""

    def begin_captured(self, stream: int) -> None: ...

    def end_captured(self, stream: int) -> None: ...


class InLineOrder(CallOrder):
    """Each call begins with a node that waits for the last record, and ends with one that records.

    What follows on the stream waits for that record.
    """

    def end_captured(self, stream: int) -> None:
        raise_on(runtime.cudaEventRecordWithFlags(self._ended, stream, runtime.cudaEventRecordExternal))


ORDERS: dict[str, type[CallOrder]] = {"none": NoOrder, "in line": InLineOrder, "present": CallOrder}


def methods_of(operation: Operation, name: str) -> list[Method]:
    """All programs, with an order of their own."""
    problem, group = operation.problem, operation.group
    with mock.patch.object(orders, "CallOrder", ORDERS[name]), mock.patch.dict(orders._ORDERS, clear=True):
        made: dict[str, Any] = {
            one: UnfusedExecutable(problem, "gemm+ar", group, collective=one) for one in COLLECTIVES
        }
        made["per-tile"] = distgemm.compile(problem, "all_reduce_1d_one_shot_a", group=group, execution="per_tile")
    return [executable_method(operation, f"{program}, {name}", exe) for program, exe in made.items()]


def rank_main() -> list[dict[str, Any]]:
    """The times of calls in us, by shape and method."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for m, n, k in SHAPES:
        operation = Operation(distgemm.GemmProblem(m, n, k), "gemm+ar", group, device)
        methods = [method for name in ORDERS for method in methods_of(operation, name)]
        ms = measure(operation, methods, ROUNDS)
        rows.append({"m": m, "n": n, "k": k, "us": {name: round(each * 1e3, 2) for name, each in ms.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to run, one on each GPU [default: %(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to this file")
    args = parser.parse_args()
    rows = launch(rank_main, args.ranks, backend="nccl", timeout=300)[0]
    table = Table("program", *(f"{row['m']} x {row['n']} x {row['k']}" for row in rows), title="us of a call")
    for name in rows[0]["us"]:
        table.add_row(name, *(f"{row['us'][name]:.1f}" for row in rows))
    Console(width=120).print(table)
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": args.ranks}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
