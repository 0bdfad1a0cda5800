"""Methods of the benchmark, with stand-ins for the memory of peers and for quack: what they copy and call."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distgemm import GemmProblem, make_plan
from distgemm.bench import methods as module
from distgemm.measure.timing import Sample
from distgemm.schedulers import list_patterns
from distgemm.tune import TunedConfig

SIZE, M, N, K = 4, 1024, 48, 32


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same, whichever ran before."""
    torch.manual_seed(0)


def operation(pattern: str, rows: int = M // SIZE) -> Any:
    a = torch.randn(rows, K) if pattern in {"ag+gemm", "gemm+a2a"} else torch.randn(M, K // SIZE)
    problem = SimpleNamespace(m=rows * SIZE if pattern == "ag+gemm" else M, n=N, k=K)
    return SimpleNamespace(
        pattern=pattern, problem=problem, a=a, b=torch.randn(N // SIZE, K), group="g", device=a.device
    )


@pytest.mark.parametrize("pattern", list_patterns())
def test_copies_go_round_and_fill_the_slots_of_all_peers(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
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

    columns = {"ag+gemm": K, "gemm+a2a": N // SIZE, "a2a+gemm": K // SIZE}.get(pattern, N)
    memory += [torch.full((SIZE, M // SIZE, columns), float("nan")) for _ in range(SIZE)]
    moved = 0

    def copy(target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        nonlocal moved
        moved += target.copy_(source).numel()

    monkeypatch.setattr(module, "copy_box", copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    sent = 0
    for rank in range(SIZE):
        monkeypatch.setattr(
            module, "dist", SimpleNamespace(get_rank=lambda group, at=rank: at, get_world_size=lambda group: SIZE)
        )
        handle = Handle(rank)
        memories = SimpleNamespace(empty=empty, rendezvous=lambda slots, group, handle=handle: handle)
        monkeypatch.setattr(module, "symmetric_memory", memories)
        given = operation(pattern)
        copies, barrier = module.copies_alone(given)
        assert copies.run() is None and handle.barriers == 1
        assert barrier.run() is None and handle.barriers == 2
        if pattern == "ag+gemm":
            assert all(torch.equal(memory[peer][rank], given.a) for peer in range(SIZE) if peer != rank)
    for rank in range(SIZE):
        assert order[rank] == [(rank - step) % SIZE for step in range(1, SIZE)]
        filled = [bool(slot.isfinite().all()) for slot in memory[rank]]
        assert filled == [sender != rank for sender in range(SIZE)]  # whole, and no other
        sent += sum(filled) * memory[rank][0].numel()
    assert sent // SIZE == M * columns * (SIZE - 1) // SIZE
    assert moved == sent * (2 if pattern == "gemm+ar" else 1)


def test_the_time_of_the_barrier_is_subtracted_from_the_copies() -> None:
    found = {"x": Sample((9.0,)), module.COPIES: Sample((5.0, 6.0)), module.BARRIER: Sample((1.0, 2.5))}
    assert module.without_barrier(found) == {"x": Sample((9.0,)), module.COPIES: Sample((4.0, 3.5))}
    failed = found | {module.BARRIER: Sample(error="no")}
    assert module.without_barrier(failed)[module.COPIES] == Sample(error="no")


class Runner:
    """Of quack: gathers by itself."""

    def __init__(
        self, rows: int, k: int, dtype: torch.dtype, group: str, device: torch.device, **keywords: Any
    ) -> None:
        assert (k, group, keywords) == (K, "g", {"capture_lockstep": True})
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
    monkeypatch.setattr(module, "new_stream", lambda device: "of its own")
    given = operation("ag+gemm")
    methods = module.quack_methods(given)
    assert [method.name for method in methods] == ["quack 128x256 2x1", "quack 128x192 2x1 pingpong"]
    for method in methods:
        assert torch.equal(method.run(), torch.cat([given.a] * SIZE) @ given.b.T)  # type: ignore[arg-type]
    assert called == [((128, 256, 2, 1), False), ((128, 192, 2, 1), True)]
    # A shard of one tile is not shared by a cluster along m.
    assert [method.name[-3:] for method in module.quack_methods(operation("ag+gemm", rows=128))[:1]] == ["1x2"]
    with pytest.raises(ValueError, match="tiles have 128 rows, which do not divide shards of 32"):
        module.quack_methods(operation("ag+gemm", rows=32))


def test_a_schedule_is_compiled_from_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(module, "compile", lambda plan, **arguments: compiled.append((plan, arguments)))
    monkeypatch.setattr(module, "executable_method", lambda operation, name, exe: name)
    monkeypatch.setattr(module, "dist", SimpleNamespace(get_world_size=lambda group: SIZE))
    given = SimpleNamespace(problem=GemmProblem(64, 48, 32), group="g")
    config = TunedConfig.parse("tensor_parallel_2d mesh=2x2 provider=cublas")
    assert module.schedule_method(given, config) == "tensor_parallel_2d mesh=2x2 provider=cublas"  # type: ignore[arg-type, comparison-overlap]
    ((plan, arguments),) = compiled
    assert plan == make_plan(given.problem, "tensor_parallel_2d", mesh=(2, 2), sync="barrier")
    assert (arguments["group"], arguments["provider"]) == ("g", "cublas")


def test_quack_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert module.quack_version() is None
