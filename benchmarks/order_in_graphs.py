"""Time calls in a CUDA graph, with and without the nodes that keep the order of calls.

    python benchmarks/order_in_graphs.py --ranks 2 --json FILE

The calls are all-reduces of few tokens: unfused programs, and a per-tile kernel. They have no nodes for their order
("none"), those of :class:`distgemm.runtime.cuda.order.CallOrder` ("in line"), or one record for the whole graph, for
which no kernel waits ("leaf"). A graph has several calls, one behind the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
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


class LastCall(NamedTuple):
    """Of a capture: the node that records the end of its last call, and the nodes that this call ends with."""

    record: Any
    ends: list[Any]


class LeafOrder(CallOrder):
    """A graph has one node that records the end of its last call, and no other node waits for it.

    During a capture, CUDA lets a program change the dependencies of the graph, and add nodes that no stream waits for.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.last: dict[int, LastCall] = {}  # by the id of a capture

    def begin_captured(self, stream: int) -> None:
        number, _, before = capture_of(stream)
        if number in self.last:
            behind = [end for end in self.last[number].ends if end not in before]
            if behind:
                raise_on(with_edges("cudaStreamUpdateCaptureDependencies")(stream, behind, None, len(behind), 0))
        else:
            raise_on(orders.runtime.cudaStreamWaitEvent(stream, self._ended, orders.runtime.cudaEventWaitExternal))

    def end_captured(self, stream: int) -> None:
        number, graph, ends = capture_of(stream)
        last = self.last.get(number)
        if last is None:
            (record,) = raise_on(orders.runtime.cudaGraphAddEventRecordNode(graph, ends, len(ends), self._ended))
        else:  # its ends are behind those of the last call
            record = last.record
            for name, of in (("cudaGraphRemoveDependencies", last.ends), ("cudaGraphAddDependencies", ends)):
                raise_on(with_edges(name)(graph, of, [record] * len(of), None, len(of)))
        self.last[number] = LastCall(record, ends)
        self._in_graphs = True


def capture_of(stream: int) -> tuple[int, Any, list[Any]]:
    """The capture of a stream: its id, its graph, and the nodes behind which the stream's next node comes."""
    _, number, graph, ends, *_ = raise_on(orders.runtime.cudaStreamGetCaptureInfo(stream))
    return int(number), graph, list(ends)


def with_edges(name: str) -> Any:
    """The function of the runtime that takes data of edges. Before CUDA 13 it has _v2 in its name."""
    return getattr(orders.runtime, f"{name}_v2", None) or getattr(orders.runtime, name)


ORDERS: dict[str, type[CallOrder]] = {"none": NoOrder, "in line": CallOrder, "leaf": LeafOrder}


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
