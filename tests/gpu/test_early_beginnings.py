"""Kernels that begin while the kernel before them ends give the bits of kernels that run one after the other.

Each GEMM reads what the one before it wrote (A, the partial sum, the bias), and writes what that one read. The GEMMs
are small, so the blocks of the next one find free SMs as soon as it may begin.
"""

from __future__ import annotations

import pytest
import torch

from distgemm.gemm import GemmTensors, bind
from distgemm.gemm.launches import KernelLaunch
from distgemm.gemm.streams import new_stream
from distgemm.runtime.cuda.memops import mem_ops, wait_for, write

pytestmark = pytest.mark.gpu(1)

SIZE, GEMMS, ROUNDS = 512, 24, 20
CONFIGS = (
    "128x128x64_2x1_pingpong",
    "128x64x64_2x4_pingpong",
    "64x128x64_1x1_pingpong",
    "128x80x64_4x2_cooperative",
    "256x128x64_2x1_cooperative",
    "128x128x64_2x1_pingpong_direct",
)


class Chain:
    """GEMMs in a row on three matrices, with other work between some of them.

    Args:
        config: of the GEMMs.
        early: whether they begin early.
        added: whether they add a partial sum and a bias.
    """

    def __init__(self, config: str, early: bool, added: bool) -> None:
        chance = torch.Generator("cuda").manual_seed(0)
        made = (torch.randn(SIZE, SIZE, device="cuda", generator=chance) for _ in range(4))
        self.first, self.second, self.third, weight = (one.bfloat16() for one in made)
        self.weight = weight / SIZE**0.5
        self.matrices = [torch.empty_like(self.first) for _ in range(3)]
        self.seen = torch.zeros(SIZE, SIZE, device="cuda")
        self.flags = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.other = new_stream(torch.device("cuda", torch.cuda.current_device()))
        self.launches = []
        for number in range(3):
            a, before, d = (self.matrices[(number + offset) % 3] for offset in range(3))
            terms = {"partial": before, "bias": before[0], "alpha": 0.5} if added else {}
            tensors = GemmTensors(before if not added else a, self.weight, d, **terms)
            self.launches.append(bind(tensors, config=config, begins_early=early))
        assert all(isinstance(launch, KernelLaunch) for launch in self.launches)

    def start(self) -> None:
        for matrix, value in zip(self.matrices, (self.first, self.second, self.third), strict=True):
            matrix.copy_(value)
        self.seen.zero_()
        self.flags.zero_()

    def put(self, wait: bool) -> None:
        """Put all on the current stream; with ``wait``, the host waits after each step."""
        here = torch.cuda.current_stream()
        flag = self.flags.data_ptr()
        for number in range(GEMMS):
            stream, last = here, self.matrices[(number + 1) % 3]
            if number % 8 == 2:
                self.seen.add_(last)  # a kernel that begins late reads the result
            elif number % 8 == 3:
                last.mul_(0.75)  # a kernel without the attribute writes what the GEMM reads
            elif number % 8 == 4:
                last.copy_(self.matrices[number % 3])  # a memcpy does
            elif number % 8 == 5:
                mem_ops([write(flag), wait_for(flag), write(flag, 0)], here.cuda_stream)
            elif number % 8 == 6:
                self.other.wait_stream(here)
                stream = self.other  # behind a kernel of another stream
            elif number % 8 == 7:
                self.other.wait_stream(here)
                with torch.cuda.stream(self.other):
                    self.seen.add_(last)
            if wait:
                torch.cuda.synchronize()
            self.launches[number % 3](stream.cuda_stream)
            if number % 8 == 6:
                here.wait_stream(self.other)
            elif number % 8 == 7:
                here.wait_stream(self.other)  # the next GEMM is behind a GEMM and a kernel of another stream
            if wait:
                torch.cuda.synchronize()

    def results(self) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        return [one.clone() for one in (*self.matrices, self.seen)]


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("config", CONFIGS)
def test_early_beginnings_change_no_bit(config: str, added: bool) -> None:
    """On streams and in a graph."""
    late, early = (Chain(config, early, added) for early in (False, True))
    late.start()
    late.put(wait=True)
    wanted = late.results()
    assert all(one.isfinite().all() and one.float().abs().mean() > 1e-3 for one in wanted)
    graph = torch.cuda.CUDAGraph()
    early.start()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        early.put(wait=False)
    for number in range(ROUNDS):
        early.start()
        if number % 2:
            graph.replay()
        else:
            early.put(wait=False)
        assert all(torch.equal(one, other) for one, other in zip(early.results(), wanted, strict=True)), number
