"""Replays of per-tile kernels by ranks that are streams of one process on one GPU.

    python -m tests.gpu.per_tile_streams --replays 100000 --json FILE     with 2, 3, 4, 5 and 8 ranks each
    python -m tests.gpu.per_tile_streams --control                  nobody waits for peers: something must be wrong
    python -m tests.gpu.per_tile_streams --build                    compile the kernels, and end; it needs no GPU

All ranks replay the same GEMMs in the same random order, on one workspace: direct launches, and captured graphs of one
to five calls. Before each call A gets other elements and D becomes NaN; behind it each element is compared. All numbers
are integers that every type has, so each D is right to the last bit. Ranks are issued in random order and are late at
random, on the GPU and on the host. Some epochs pass 2^32 and 2^40, and some wrap around. Between segments, ranks have
the same epoch, counters are 0, and slots become NaN.

The last line of the output is one JSON object. The exit status is 0 where all replays were made and right, 1 where an
element was wrong or something was left over, 2 where replays are missing, and 3 where nothing moved. With ``--control``
it is 0 where something was wrong, and 5 where nothing was.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # each rank's stream has a hardware queue

import torch
import typer

from distgemm.gemm.nvcc import build
from distgemm.gemm.per_tile.bind import RankGemm
from distgemm.gemm.per_tile.epochs import EPOCHS, TICKET_BITS
from distgemm.gemm.per_tile.kernel import GATHERING, KernelTraits
from distgemm.gemm.per_tile.local import LocalRanks

FIRST_EPOCHS = {2: EPOCHS - 5000, 3: 1, 4: 2**32 - 5000, 5: 2**40 - 5000, 8: EPOCHS - 1000}
"""By number of ranks."""
SETS, DRAWS, GRAPHS, MAX_CALLS = 2, 3, 24, 5
"""Of each GEMM: sets of tensors, and elements that are copied into them. Graphs, and calls of one."""
SEGMENT, AHEAD = 4000, 8
"""Replays from one look at counters to the next. Units that the host is ahead of the GPU."""
SMS = 96
"""SMs that the ranks share. The others are for what is done between calls."""
SHORT_CYCLES, LONG_CYCLES = 60_000, 2_000_000
"""GPU cycles for which a rank is late at most: often, and rarely."""
STUCK_AFTER_S = 20.0
WRONG, MISSING, STUCK, NOTHING_FOUND = 1, 2, 3, 5


def gemms(ranks: int) -> list[RankGemm]:
    """All patterns, both kernel schedules, tiles that lie partly outside, and numbers of slots that differ."""
    distances = tuple(range(1, ranks))
    pingpong, wide, high = ((128, 128), (2, 1), True), ((128, 256), (1, 2), False), ((256, 128), (2, 1), False)
    split = ((64, 64), (2, 1), True)

    def gemm(
        pattern: Any, kind: tuple[Any, ...], m: int, n: int, k: int, *, one_shot: bool = False, **more: bool
    ) -> RankGemm:
        of_kind = {"split": 2, "epilogue_stages": 1} if kind == split else {}
        traits = KernelTraits(pattern, *kind, sends=pattern in GATHERING, one_shot=one_shot, **of_kind)
        return RankGemm(traits, distances, m, n, k, **more)

    return [
        gemm("ag+gemm", pingpong, 200, 328, 136),
        gemm("ag+gemm", wide, 136, 264, 328),
        gemm("gemm+rs", pingpong, 200, 328, 136),
        gemm("gemm+rs", high, 264, 136, 64),
        gemm("gemm+ar", pingpong, 200, 328, 136),
        gemm("gemm+ar", wide, 72, 520, 64),
        gemm("gemm+ar", pingpong, 200, 72, 64, by_columns=True),
        gemm("gemm+rs", pingpong, 72, 200, 64),
        gemm("ag+gemm", pingpong, 264, 136, 64),
        gemm("gemm+a2a", pingpong, 200, 328, 136),
        gemm("gemm+a2a", wide, 72, 264, 64),
        gemm("gemm+ar", pingpong, 40, 328, 64, one_shot=True),
        gemm("gemm+ar", wide, 200, 264, 64, one_shot=True),
        gemm("ag+gemm", ((128, 160), (2, 1), False), 136, 264, 328),
        gemm("a2a+gemm", pingpong, 200, 328, 72),
        gemm("a2a+gemm", wide, 72, 520, 64),
        gemm("ag+gemm", pingpong, 40 * ranks, 328, 136, spans=True),
        gemm("gemm+rs", wide, 16 * ranks, 264, 64, spans=True),
        gemm("gemm+rs", pingpong, 48 * ranks, 328, 136, spans=True),
        gemm("ag+gemm", split, 40 * ranks, 328, 136, spans=True),
        gemm("gemm+rs", split, 48 * ranks, 328, 136, spans=True),
        gemm("gemm+ar", split, 72, 328, 136, one_shot=True),
    ]


class Call(NamedTuple):
    """A call: the number of the GEMM, of the set of tensors, and of the elements."""

    job: int
    set: int
    draw: int


class Job:
    """A GEMM on all ranks, with its tensors and launches.

    Attributes:
        a: by draw and rank, the elements of A.
        wanted: by draw and rank, the elements of D.
    """

    def __init__(self, gemm: RankGemm, there: LocalRanks, seed: int, epochs_a_replay: int) -> None:
        pattern = gemm.traits.pattern
        chance = torch.Generator("cuda").manual_seed(seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, device="cuda", generator=chance, dtype=torch.int8).bfloat16()

        b = [numbers(*gemm.matrices["b"].shape) for _ in range(gemm.ranks)]
        self.a = [[numbers(*gemm.matrices["a"].shape) for _ in range(gemm.ranks)] for _ in range(DRAWS)]
        self.wanted = []
        for drawn in self.a:
            if pattern == "ag+gemm":
                whole = torch.cat(drawn).float()
                products = [whole @ x.float().T for x in b]
            elif pattern == "gemm+a2a":
                by_rows = [(x.float() @ y.float().T).chunk(gemm.ranks, 1) for x, y in zip(drawn, b, strict=True)]
                products = [torch.cat(columns) for columns in zip(*by_rows, strict=True)]
            elif pattern == "a2a+gemm":
                own = torch.cat(drawn, 1).float().chunk(gemm.ranks)
                products = [x @ y.float().T for x, y in zip(own, b, strict=True)]
            else:
                total = torch.stack([x.float() @ y.float().T for x, y in zip(drawn, b, strict=True)]).sum(0)
                products = list(total.chunk(gemm.ranks)) if pattern == "gemm+rs" else [total] * gemm.ranks
            assert max(x.abs().max().item() for x in products) <= 256, "bfloat16 has these integers"
            self.wanted.append([x.bfloat16() for x in products])
        self._sets = []
        for _ in range(SETS):
            tensors = [
                {"a": x.clone(), "b": y, "d": torch.empty_like(z)}
                for x, y, z in zip(self.a[0], b, self.wanted[0], strict=True)
            ]
            launches = there.launches(tensors, gemm, epochs_a_replay=epochs_a_replay)
            self._sets.append((tensors, launches))
        self._wrong = [torch.zeros_like(x, dtype=torch.bool) for x in self.wanted[0]]
        self._differs = [torch.empty_like(x) for x in self._wrong]

    def put(self, rank: int, call: Call) -> None:
        """Put a call on the current stream, with what comes before and behind it."""
        self._prepare(rank, call)
        self._sets[call.set][1][rank](torch.cuda.current_stream().cuda_stream)
        self._compare(rank, call)

    def _prepare(self, rank: int, call: Call) -> None:
        given = self._sets[call.set][0][rank]
        given["a"].copy_(self.a[call.draw][rank])
        given["d"].fill_(float("nan"))

    def _compare(self, rank: int, call: Call) -> None:
        d = self._sets[call.set][0][rank]["d"]
        torch.ne(d, self.wanted[call.draw][rank], out=self._differs[rank])
        self._wrong[rank].logical_or_(self._differs[rank])

    def load(self) -> None:
        """Let CUDA load what is between calls: later it might wait for kernels that wait for other ranks."""
        call = Call(0, 0, 0)
        self._prepare(0, call)
        self._compare(0, call)
        self._wrong[0].zero_()
        torch.cuda._sleep(1)

    def wrong(self) -> list[int]:
        """By rank, elements of D that were wrong in any call."""
        return [int(x.sum().item()) for x in self._wrong]


@dataclass
class Row:
    """What so many ranks did.

    Attributes:
        ranks: how many.
        replays: of each rank.
        wanted: replays to be made.
        graphs: replays that were parts of graphs.
        wrong: elements, by GEMM.
        left_over: counters that were wrong between segments.
        first_epoch: where they began.
        seconds: time.
    """

    ranks: int
    replays: int
    wanted: int
    graphs: int
    wrong: list[int]
    left_over: list[str]
    first_epoch: int
    seconds: float


class Streams:
    """Ranks of one process, and what they replay."""

    def __init__(self, ranks: int, seed: int, control: bool) -> None:
        self.ranks, self.control, self.first = ranks, control, FIRST_EPOCHS.get(ranks, 1)
        self.chance, self.made, self.in_graphs = random.Random(seed), 0, 0
        every = gemms(ranks)
        self.there = LocalRanks(every[0], 1, self.first, every[1:], SMS)
        self.jobs = [Job(gemm, self.there, seed * 100 + n, 1 - control) for n, gemm in enumerate(every)]
        self.events: deque[list[torch.cuda.Event]] = deque()
        self._side = torch.cuda.Stream()
        self._seen = torch.empty(len(self.there.memory), 512, dtype=torch.uint8, pin_memory=True)
        self._warm_up()
        self.graphs = [self._graph() for _ in range(GRAPHS)]

    def _calls(self) -> list[Call]:
        choose = self.chance.randrange
        return [Call(choose(len(self.jobs)), choose(SETS), choose(DRAWS)) for _ in range(choose(MAX_CALLS) + 1)]

    def _warm_up(self) -> None:
        for job in self.jobs:
            job.load()
        torch.cuda.synchronize()
        for number in range(len(self.jobs)):
            self._issue([Call(number, 0, 0)])
        self.wait(0)

    def _graph(self) -> tuple[list[Call], list[torch.cuda.CUDAGraph]]:
        calls, found = self._calls(), []
        for rank, stream in enumerate(self.there.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                for call in calls:
                    self.jobs[call.job].put(rank, call)
                graph.capture_end()
            found.append(graph)
        return calls, found

    def _issue(self, calls: list[Call], graphs: list[torch.cuda.CUDAGraph] | None = None) -> None:
        events = []
        for rank in self.chance.sample(range(self.ranks), self.ranks):
            with torch.cuda.stream(self.there.streams[rank]):
                late = self.chance.random()
                if self.made and late < 0.2:
                    torch.cuda._sleep(self.chance.randrange(LONG_CYCLES if late < 0.01 else SHORT_CYCLES))
                elif late > 0.998:
                    time.sleep(self.chance.random() * 1e-3)
                if graphs is None:
                    for call in calls:
                        self.jobs[call.job].put(rank, call)
                else:
                    graphs[rank].replay()
                event = torch.cuda.Event()
                event.record()
                events.append(event)
        self.events.append(events)
        self.made += len(calls)
        self.in_graphs += len(calls) * (graphs is not None)
        self.wait(AHEAD)

    def wait(self, units: int) -> None:
        """Wait until at most so many units are under way. If nothing moves, say how far ranks are, and end."""
        deadline = time.monotonic() + STUCK_AFTER_S
        while len(self.events) > units:
            while not all(event.query() for event in self.events[0]):
                if time.monotonic() > deadline:
                    self._give_up()
            self.events.popleft()

    def _give_up(self) -> None:
        with torch.cuda.stream(self._side):
            for seen, memory in zip(self._seen, self.there.memory, strict=True):
                seen.copy_(memory[: len(seen)], non_blocking=True)
        time.sleep(1.0)
        for rank, seen in enumerate(self._seen):
            words = seen.view(torch.int64).tolist()
            ticket, epoch = words[0] & ((1 << 18) - 1), (words[0] >> 20) % EPOCHS
            print(
                f"rank {rank}: epoch {epoch}, ticket {ticket}, words {words[:6]}, begun {words[16 : 16 + self.ranks]}"
            )
        print(f"nothing has moved for {STUCK_AFTER_S} s after {self.made} replays of {self.ranks} ranks", flush=True)
        os._exit(STUCK)

    def run(self, replays: int, deadline: float) -> Row:
        """Make so many replays, or as many as there is time for."""
        start, left_over = time.monotonic(), list[str]()
        while self.made < replays and time.monotonic() < deadline:
            end = min(self.made + SEGMENT, replays)
            while self.made < end:
                if self.chance.random() < 0.8:
                    self._issue(*self.graphs[self.chance.randrange(GRAPHS)])
                else:
                    self._issue(self._calls())
            self.wait(0)
            left_over += self._left_over()
            for memory, space in zip(self.there.memory, self.there.spaces, strict=True):
                memory[space.slots_at :].fill_(0xFF)
            torch.cuda.synchronize()
        wrong = [sum(job.wrong()) for job in self.jobs]
        seconds = round(time.monotonic() - start, 2)
        return Row(self.ranks, self.made, replays, self.in_graphs, wrong, left_over, self.first, seconds)

    def _left_over(self) -> list[str]:
        torch.cuda.synchronize()
        last, found = (self.first + self.made - 1) % EPOCHS, []
        for rank, control in enumerate(self.there.controls()):
            epoch, ticket = divmod(control.clock, 1 << TICKET_BITS)
            counters = control.counter, control.dead, control.running, ticket
            begun = list(control.begun[: self.ranks])
            if not self.control and ((epoch - 1) % EPOCHS != last or begun != [last] * self.ranks or any(counters)):
                found.append(f"rank {rank}: epoch {epoch}, begun {begun}, {counters}, and {last} was the last epoch")
        return found


def main(
    replays: Annotated[int, typer.Option(min=1, help="Replays, for each number of ranks.")] = 100_000,
    ranks: Annotated[list[int] | None, typer.Option(help="Number of ranks; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for everything.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Of the order and of the elements.")] = 0,
    control: Annotated[bool, typer.Option("--control", help="All flags count as set.")] = False,
    only_build: Annotated[bool, typer.Option("--build", help="Compile the kernels, and end.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Make the replays."""
    start = time.monotonic()
    build(list(dict.fromkeys(gemm.traits.source() for gemm in gemms(2))))
    if only_build:
        return
    counts = ranks or ([2] if control else list(FIRST_EPOCHS))
    rows = []
    for number, count in enumerate(counts):
        now = time.monotonic()
        deadline = now + (start + seconds - now) / (len(counts) - number)
        rows.append(Streams(count, seed + number, control).run(replays, deadline))
        print(rows[-1], flush=True)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(),
        "gemms": len(gemms(2)),
        "control": control,
        "seconds": round(time.monotonic() - start, 1),
        "rows": [asdict(row) for row in rows],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    wrong = any(any(row.wrong) or row.left_over for row in rows)
    if control:
        sys.exit(0 if wrong else NOTHING_FOUND)
    sys.exit(WRONG if wrong else MISSING * any(row.replays < row.wanted for row in rows))


if __name__ == "__main__":
    typer.run(main)
