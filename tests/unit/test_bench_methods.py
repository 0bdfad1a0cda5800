"""Copies alone, and quack, with stand-ins for memory of peers and for the library: what is copied and called."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distgemm.bench import peers
from distgemm.measure.timing import Sample

SIZE, M, N, K = 4, 1024, 48, 32


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same, whichever ran before."""
    torch.manual_seed(0)


def operation(op: str, rows: int = M // SIZE) -> Any:
    a = torch.randn(rows, K) if op == "ag+gemm" else torch.randn(M, K // SIZE)
    problem = SimpleNamespace(m=rows * SIZE if op == "ag+gemm" else M, n=N, k=K)
    return SimpleNamespace(op=op, problem=problem, a=a, b=torch.randn(N // SIZE, K), group="g", device=a.device)


@pytest.mark.parametrize("op", ["ag+gemm", "gemm+rs", "gemm+ar"])
def test_copies_go_round_and_fill_the_slots_of_all_peers(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: list[torch.Tensor] = []  # of each rank
    order: dict[int, list[int]] = {}

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    class Handle:
        def __init__(self, rank: int) -> None:
            self.rank, self.barriers = rank, 0

        def barrier(self, channel: int) -> None:
            self.barriers += 1

        def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
            order.setdefault(self.rank, []).append(peer)
            size = shape[0] * shape[1] * shape[2]
            return memory[peer].view(-1)[offset : offset + size].view(shape)

    columns = K if op == "ag+gemm" else N
    memory += [torch.full((SIZE, M // SIZE, columns), float("nan")) for _ in range(SIZE)]
    moved = 0

    def copy(target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        nonlocal moved
        moved += target.copy_(source).numel()

    monkeypatch.setattr(peers, "copy_box", copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    sent = 0
    for rank in range(SIZE):
        monkeypatch.setattr(
            peers, "dist", SimpleNamespace(get_rank=lambda group, at=rank: at, get_world_size=lambda group: SIZE)
        )
        handle = Handle(rank)
        memories = SimpleNamespace(empty=empty, rendezvous=lambda slots, group, handle=handle: handle)
        monkeypatch.setattr(peers, "symmetric_memory", memories)
        given = operation(op)
        copies, barrier = peers.copies_alone(given)
        assert copies.run() is None and handle.barriers == 1
        assert barrier.run() is None and handle.barriers == 2
        if op == "ag+gemm":
            assert all(torch.equal(memory[peer][rank], given.a) for peer in range(SIZE) if peer != rank)
    for rank in range(SIZE):
        assert order[rank] == [(rank - step) % SIZE for step in range(1, SIZE)]
        filled = [bool(slot.isfinite().all()) for slot in memory[rank]]
        assert filled == [sender != rank for sender in range(SIZE)]  # whole, and no other
        sent += sum(filled) * memory[rank][0].numel()
    assert sent // SIZE == M * columns * (SIZE - 1) // SIZE
    assert moved == sent * (2 if op == "gemm+ar" else 1)


def test_copies_take_what_they_take_more_than_the_barrier() -> None:
    found = {"x": Sample((9.0,)), peers.COPIES: Sample((5.0, 6.0)), peers.BARRIER: Sample((1.0, 2.5))}
    assert peers.without_barrier(found) == {"x": Sample((9.0,)), peers.COPIES: Sample((4.0, 3.5))}
    failed = found | {peers.BARRIER: Sample(error="no")}
    assert peers.without_barrier(failed)[peers.COPIES] == Sample(error="no")


class Runner:
    """Of quack: gathers by itself."""

    def __init__(self, rows: int, k: int, dtype: torch.dtype, group: str, device: torch.device, **how: Any) -> None:
        assert (k, group, how) == (K, "g", {"capture_lockstep": True})
        self.rows, self.warm = rows, 0
        self.push_stream = self.barrier_stream = "of the pool"
        self.handle = SimpleNamespace(barrier=self._barrier)

    def _barrier(self, channel: int) -> None:
        self.warm += 1

    @contextlib.contextmanager
    def gather(self, a: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
        assert self.warm and (self.push_stream, self.barrier_stream) == ("of its own", "of its own")
        assert a.shape == (self.rows, K)
        yield torch.cat([a] * SIZE), "arrivals"


def test_quack(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def gemm(a: Any, b: Any, d: Any, c: None, semaphore: None, *tile: int, pingpong: bool, ag_args: str) -> None:
        assert ag_args == "arrivals"
        called.append((tile, pingpong))
        torch.mm(a, b.T, out=d)

    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.distributed", SimpleNamespace(AllGatherRunner=Runner))
    monkeypatch.setitem(sys.modules, "quack.gemm", SimpleNamespace(gemm=gemm))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peers, "new_stream", lambda device: "of its own")
    given = operation("ag+gemm")
    methods = peers.quack_methods(given)
    assert [method.name for method in methods] == ["quack 128x256 2x1", "quack 128x192 2x1 pingpong"]
    for method in methods:
        assert torch.equal(method.run(), torch.cat([given.a] * SIZE) @ given.b.T)  # type: ignore[arg-type]
    assert called == [((128, 256, 2, 1), False), ((128, 192, 2, 1), True)]
    # A shard of one tile is not shared by a cluster along m.
    assert [method.name[-3:] for method in peers.quack_methods(operation("ag+gemm", rows=128))[:1]] == ["1x2"]
    with pytest.raises(ValueError, match="tiles have 128 rows, which do not divide shards of 32"):
        peers.quack_methods(operation("ag+gemm", rows=32))


def test_quack_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.quack_version() is None
