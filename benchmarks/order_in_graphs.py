"""Time calls in a CUDA graph, with and without the nodes that keep the order of calls.

    python benchmarks/order_in_graphs.py --json FILE

It needs one GPU. A call is a GEMM by torch, and an elementwise kernel of torch stands between two calls, as in a step
of decode. The calls have no nodes for their order ("none"), those of
:class:`distgemm.runtime.cuda.order.CallOrder` ("in line"), or the same ones where the next kernel does not wait for the
record ("leaf"). Graphs are replayed in a random order in each round, and the times are medians. The command also checks
that calls on two streams, eager and replayed, follow one another.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

import torch
from cuda.bindings import runtime

from distgemm.gemm.cuda_errors import raise_on
from distgemm.runtime.cuda.order import CallOrder

SHAPES = [(1, 4096, 4096), (16, 8192, 8192), (64, 8192, 28672)]
"""Rows, n and k of a GEMM."""
CALLS, ROUNDS = 40, 30


class NoOrder(CallOrder):
    """No nodes."""

    def begin_captured(self, stream: int) -> None: ...

    def end_captured(self, stream: int) -> None: ...


class LeafOrder(CallOrder):
    """What follows a captured call does not wait for the node that records its end."""

    _record: tuple[int, object] = -1, None

    def end_captured(self, stream: int) -> None:
        _, number, graph, ends, *_ = raise_on(runtime.cudaStreamGetCaptureInfo(stream))
        before = [self._record[1]] if self._record[0] == number else []
        (node,) = raise_on(
            runtime.cudaGraphAddEventRecordNode(graph, [*ends, *before], len(ends) + len(before), self._ended)
        )
        self._record = number, node
        (inner,) = raise_on(runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming))
        raise_on(runtime.cudaEventRecord(inner, stream))
        if self._captured is not None:
            raise_on(runtime.cudaEventDestroy(self._captured[1]))
        self._captured = number, inner
        self._in_graphs = True


ORDERS: dict[str, type[CallOrder]] = {"none": NoOrder, "in line": CallOrder, "leaf": LeafOrder}


def graph_of(order: CallOrder, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of calls."""
    graph = torch.cuda.CUDAGraph()
    torch.mm(a, b.t(), out=d)  # cuBLAS takes its memory
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(CALLS):
            order.begin_captured(stream)
            torch.mm(a, b.t(), out=d)
            order.end_captured(stream)
            a.mul_(1.0)
    return graph


def times_of(m: int, n: int, k: int) -> dict[str, float]:
    """Microseconds of a call and of the kernel behind it, by order."""
    device = torch.device("cuda", torch.cuda.current_device())
    a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
    d = a.new_empty(m, n)
    graphs = {name: graph_of(order(device), a, b, d) for name, order in ORDERS.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    rng = random.Random(m)
    for _ in range(ROUNDS):
        for name in rng.sample(list(graphs), len(graphs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[name].replay()
            start.record()
            graphs[name].replay()
            graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / CALLS / 2)
    return {name: statistics.median(each) for name, each in found.items()}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to this file")
    args = parser.parse_args()
    rows = [{"m": m, "n": n, "k": k, "us": times_of(m, n, k)} for m, n, k in SHAPES]
    for row in rows:
        print(*(f"{row[name]:>6}" for name in "mnk"), {name: round(us, 2) for name, us in row["us"].items()})
    wrong = {name: out_of_order(order) for name, order in ORDERS.items()}
    print("rounds out of order:", wrong)
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps(about | {"rows": rows, "out_of_order": wrong}, indent=1) + "\n")


if __name__ == "__main__":
    main()
