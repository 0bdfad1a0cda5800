"""Time calls in a CUDA graph, with and without the nodes that keep the order of calls.

    python benchmarks/order_in_graphs.py --ranks 2 --json FILE

The calls are all-reduces of few tokens: unfused programs, and a per-tile kernel. They have no nodes for their order
("none"), those of :class:`distgemm.runtime.cuda.order.CallOrder` ("in line"), or the same ones where the next kernel
does not wait for the record ("leaf"). A graph has several calls, one behind the other. Each rank also checks that calls
on two streams, eager and replayed, follow one another.
"""

from __future__ import annotations

import argparse
import json
import random
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


class LeafOrder(CallOrder):
    """What follows a captured call does not wait for the node that records its end."""

    _record: tuple[int, Any] = -1, None

    def end_captured(self, stream: int) -> None:
        _, number, graph, ends, *_ = raise_on(runtime.cudaStreamGetCaptureInfo(stream))
        before = [self._record[1]] if self._record[0] == number else []
        behind = [*ends, *before]
        (node,) = raise_on(runtime.cudaGraphAddEventRecordNode(graph, behind, len(behind), self._ended))
        self._record = number, node
        (inner,) = raise_on(runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming))
        raise_on(runtime.cudaEventRecord(inner, stream))
        if self._captured is not None:
            raise_on(runtime.cudaEventDestroy(self._captured[1]))
        self._captured = number, inner
        self._in_graphs = True


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


def out_of_order(made: type[CallOrder], rounds: int = 200) -> int:
    """In how many rounds calls on two streams, eager and replayed, did not follow one another."""
    device = torch.device("cuda", torch.cuda.current_device())
    order, x = made(device), torch.zeros((), dtype=torch.float64, device=device)
    streams = [torch.cuda.Stream() for _ in range(2)]

    def call(value: float, captured: bool = False) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        (order.begin_captured if captured else order.begin)(stream)
        torch.cuda._sleep(200_000)  # about 0.1 ms
        x.mul_(10).add_(value)
        (order.end_captured if captured else order.end)(stream)

    graphs = {}
    for value in (1, 12, 121):  # one, two and three calls
        graphs[value] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[value]):
            for digit in str(value):
                call(float(digit), captured=True)
    rng, wrong = random.Random(0), 0
    for _ in range(rounds):
        x.zero_()
        torch.cuda.synchronize()
        wanted = ""
        for _ in range(5):
            value = rng.choice([1, 12, 121, 3])
            with torch.cuda.stream(rng.choice(streams)):
                if value == 3:
                    call(3.0)
                else:
                    graphs[value].replay()
            wanted += str(value)
        torch.cuda.synchronize()
        wrong += x.item() != float(wanted)
    return wrong


def rank_main() -> dict[str, Any]:
    """The times of calls in us, by shape and method; and the rounds out of order, by order."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for m, n, k in SHAPES:
        operation = Operation(distgemm.GemmProblem(m, n, k), "gemm+ar", group, device)
        methods = [method for name in ORDERS for method in methods_of(operation, name)]
        ms = measure(operation, methods, ROUNDS)
        rows.append({"m": m, "n": n, "k": k, "us": {name: round(each * 1e3, 2) for name, each in ms.items()}})
    return {"rows": rows, "out_of_order": {name: out_of_order(made) for name, made in ORDERS.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to run, one on each GPU [default: %(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to this file")
    args = parser.parse_args()
    found = launch(rank_main, args.ranks, backend="nccl", timeout=300)[0]
    table = Table("program", *(f"{row['m']} x {row['n']} x {row['k']}" for row in found["rows"]), title="us of a call")
    for name in found["rows"][0]["us"]:
        table.add_row(name, *(f"{row['us'][name]:.1f}" for row in found["rows"]))
    console = Console(width=120)
    console.print(table)
    console.print("rounds out of order:", found["out_of_order"])
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": args.ranks}
        args.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
