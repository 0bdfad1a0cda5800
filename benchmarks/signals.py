"""What memory operations, copies and signals cost in CUDA graphs, on 2 GPUs.

    python benchmarks/signals.py --json out.json

Each row is a graph that does one thing several times in a row, and what it takes each time, us: the median of 6
bursts of 4 replays, on rank 0. Rank 1 does the same at the same time.

* Batches of memory operations: writes of this rank's words ("own") and of the other's ("peer"), waits that are
  satisfied.
* A kernel of next to nothing, alone and with a batch of writes behind it.
* Copies to the peer; "2D": rows of 8 KiB, 16 KiB apart. Behind each copy nothing, or what could be its signal: a write
  at the peer by memory operation ("memop"; "memop2": and one here, in a batch), a copy of 4 bytes to the peer
  ("memcpy"), a kernel (which writes here: it shows what a kernel between copies costs), or a memory operation on
  another stream, put there at once, or only behind the next copy.
* A fork to kernels on two streams, joined in a third kernel.
* The exchange of a word: each rank writes it at the other, waits until its own has come, and resets that.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)
import typer
from cuda.bindings import runtime

from distgemm.runtime.cuda.memops import mem_ops, raise_on, wait_for, write
from distgemm.runtime.launch import launch

MIB = 1 << 20
MANY, COPIES = 20, 6
"""Times that a graph does something small; copies in a graph."""
BURSTS, REPLAYS = 6, 4
ROW = 8 << 10
"""Bytes of a row of a 2D copy; rows are twice as far apart."""

# Bytes from the start of a rank's symmetric memory. FlagOps begin as 0.
WRITTEN, SIGNALLED, EXCHANGED, ZERO, DATA = 0, 1 << 10, 2 << 10, 4 << 10, 64 * MIB

Case = tuple[str, int, Callable[[], None]]
"""Name, how often it is done, and what puts that on the streams."""


class Rank:
    """This rank's memory, the peer's, and streams."""

    def __init__(self) -> None:
        rank, group = dist.get_rank(), dist.group.WORLD
        assert group is not None  # launch has made it
        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = symmetric_memory.empty(128 * MIB, dtype=torch.uint8, device=device)
        self.handle = symmetric_memory.rendezvous(self.memory, group)
        self.own, self.peer = self.handle.buffer_ptrs[rank], self.handle.buffer_ptrs[1 - rank]
        self.memory.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        self.source = torch.zeros(64 * MIB, dtype=torch.uint8, device=device)
        self.one = torch.ones(1, dtype=torch.int32, device=device)
        self.tiny, self.other = torch.zeros(32, device=device), torch.zeros(32, device=device)
        self.main, self.side, self.third = (torch.cuda.Stream() for _ in range(3))  # type: ignore[no-untyped-call]

    def measure(self, times: int, body: Callable[[], None]) -> float:
        """us of one of the things that ``body`` puts on the main stream so many times."""
        with torch.cuda.stream(self.main):
            self.tiny.add_(1)  # a capture may not load kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=self.main, capture_error_mode="thread_local"):
            body()
        graph.instantiate()
        found = []
        for _ in range(BURSTS):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self.main):
                graph.replay()
                begin.record()
                for _ in range(REPLAYS):
                    graph.replay()
                end.record()
            end.synchronize()
            found.append(float(begin.elapsed_time(end)) * 1e3 / REPLAYS / times)
        return statistics.median_high(found)

    # --- what is measured -----------------------------------------------------------------------------

    def cases(self) -> list[Case]:
        found: list[Case] = []
        for count in (1, 2, 4, 8, 16):
            for name, base in (("own", self.own), ("peer", self.peer)):
                found.append((f"batch of {count} writes {name}", MANY, self.batches(base, count)))
        found.append(("batch of 8 waits (own, satisfied)", MANY, self.satisfied_waits))
        found.append(("tiny kernel", MANY, self.kernels(0)))
        found.append(("tiny kernel, 1 write", MANY, self.kernels(1)))
        found.append(("tiny kernel, 8 writes", MANY, self.kernels(8)))
        for size in (1, 4, 16):
            for signal in ("none", "memop", "memop2", "memcpy", "kernel"):
                found.append((f"copy {size} MiB, {signal}", COPIES, self.copies(size * MIB, signal)))
            aside = f"copy {size} MiB, memop on a side stream"
            found.append((aside, COPIES, self.copies_signalled_aside(size * MIB, late=False)))
            found.append((f"{aside}, put later", COPIES, self.copies_signalled_aside(size * MIB, late=True)))
        for name, size, rows in (("2D 16 MiB (pitch)", 16, True), ("32 MiB", 32, False)):
            for signal in ("none", "memop", "memcpy"):
                found.append((f"copy {name}, {signal}", COPIES, self.copies(size * MIB, signal, rows)))
        found.append(("fork to two kernels, join in a kernel", MANY, self.forks))
        found.append(("exchange of a word, both ways, memops", MANY, self.exchanges(batches=2)))
        found.append(("exchange of a word in one batch", MANY, self.exchanges(batches=1)))
        return found

    def batches(self, base: int, count: int) -> Callable[[], None]:
        def body() -> None:
            for _ in range(MANY):
                mem_ops([write(base + WRITTEN + 4 * at) for at in range(count)], self.main.cuda_stream)

        return body

    def satisfied_waits(self) -> None:
        for _ in range(MANY):
            mem_ops([wait_for(self.own + ZERO + 4 * at, 0) for at in range(8)], self.main.cuda_stream)

    def kernels(self, writes: int) -> Callable[[], None]:
        def body() -> None:
            for _ in range(MANY):
                self.tiny.add_(1)
                mem_ops([write(self.own + WRITTEN + 4 * at) for at in range(writes)], self.main.cuda_stream)

        return body

    def copies(self, size: int, signal: str, rows: bool = False) -> Callable[[], None]:
        def body() -> None:
            for number in range(COPIES):
                self.copy(number, size, rows)
                at_peer = self.peer + SIGNALLED + 4 * number
                if signal == "memop":
                    mem_ops([write(at_peer)], self.main.cuda_stream)
                elif signal == "memop2":
                    mem_ops([write(at_peer), write(self.own + WRITTEN + 4 * number)], self.main.cuda_stream)
                elif signal == "memcpy":
                    self.memcpy(at_peer, self.one.data_ptr(), 4)
                elif signal == "kernel":
                    self.tiny.add_(1)

        return body

    def copies_signalled_aside(self, size: int, late: bool) -> Callable[[], None]:
        """Signals on a stream of their own; late: each is put there only once the next copy is on its stream."""

        def signal(copied: torch.cuda.Event, number: int) -> None:
            self.side.wait_event(copied)
            mem_ops([write(self.peer + SIGNALLED + 4 * number)], self.side.cuda_stream)

        def body() -> None:
            pending: list[tuple[torch.cuda.Event, int]] = []
            for number in range(COPIES):
                self.copy(number, size)
                pending.append((self.main.record_event(), number))
                if len(pending) > int(late):
                    signal(*pending.pop(0))
            for each in pending:
                signal(*each)
            self.main.wait_stream(self.side)

        return body

    def forks(self) -> None:
        for _ in range(MANY):
            self.side.wait_stream(self.main)
            self.third.wait_stream(self.main)
            with torch.cuda.stream(self.side):
                self.tiny.add_(1)
            with torch.cuda.stream(self.third):
                self.other.add_(1)
            self.main.wait_stream(self.side)
            self.main.wait_stream(self.third)
            self.tiny.add_(1)

    def exchanges(self, batches: int) -> Callable[[], None]:
        def body() -> None:
            for number in range(MANY):
                # In turn: a word is reset long before it is written again.
                at = EXCHANGED + 4 * (number % 8)
                sent, come = [write(self.peer + at)], [wait_for(self.own + at), write(self.own + at, 0)]
                for ops in [sent, come] if batches == 2 else [sent + come]:
                    mem_ops(ops, self.main.cuda_stream)

        return body

    # --- copies ---------------------------------------------------------------------------------------

    def copy(self, number: int, size: int, rows: bool = False) -> None:
        """A copy to the peer, on the main stream. Small ones that follow each other have places of their own."""
        offset = number % 3 * 20 * MIB if size <= 16 * MIB and not rows else 0
        target, source = self.peer + DATA + offset, self.source.data_ptr() + offset
        if rows:
            kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
            stream = self.main.cuda_stream
            raise_on(runtime.cudaMemcpy2DAsync(target, ROW, source, 2 * ROW, ROW, size // ROW, kind, stream))
        else:
            self.memcpy(target, source, size)

    def memcpy(self, target: int, source: int, size: int) -> None:
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        raise_on(runtime.cudaMemcpyAsync(target, source, size, kind, self.main.cuda_stream))


def rank_main() -> dict[str, object]:
    """Measures on this rank; what was found, for JSON. Rank 0 prints."""
    rank = Rank()
    rows = []
    for name, times, body in rank.cases():
        us = rank.measure(times, body)
        rows.append({"what": name, "us": round(us, 3)})
        if dist.get_rank() == 0:
            print(f"{name:60s} {us:8.2f} us", flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {"benchmark": "signals", **machine, "rows": rows}


def main(output: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None) -> None:
    """Print what memory operations, copies and signals cost, on 2 GPUs."""
    if output is not None and not output.resolve().parent.is_dir():
        raise typer.BadParameter(f"{output}: there is no folder {output.parent}", param_hint="--json")
    found = launch(rank_main, 2, backend="nccl")[0]
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
