"""Recorded calls go on with other tensors: every address that a launch holds follows the tensor that it belongs to."""

from __future__ import annotations

import ctypes
import weakref
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distgemm
from distgemm.gemm import GemmTensors
from distgemm.gemm.cutlass import as_matrix
from distgemm.gemm.launches import FixedLaunch, KernelLaunch, address_cells
from distgemm.gemm.parameters import Arguments, Terms
from distgemm.gemm.sums import _Arguments as SumArguments  # noqa: PLC2701  (its addresses are checked)
from distgemm.gemm.tensors import matrix_spec
from distgemm.runtime.cuda import binding, recording
from distgemm.runtime.cuda.memops import RowsCopy
from distgemm.runtime.cuda.recording import Recording, captured_node, layout_of
from tests.unit.cuda_emulation import (
    ALL_REDUCES,
    CHAINS,
    GATHERS,
    PAIRWISE,
    Data,
    Emulated,
    machine_of,
    record_launches,
)


class StructLaunch(KernelLaunch):
    """A launch of a kernel with this parameter. It notes what its node goes on with."""

    def __init__(self, struct: ctypes.Structure) -> None:
        self.struct, self.updates = struct, list[bytes]()

    def __call__(self, stream: int | None = None) -> None: ...

    def cells(self) -> list[ctypes.c_uint64]:
        return address_cells(self.struct)

    @property
    def parameter(self) -> int:
        return ctypes.addressof(self.struct)

    def update(self, graph: int, node: int) -> None:
        self.updates.append(ctypes.string_at(self.parameter, ctypes.sizeof(self.struct)))


@pytest.fixture
def structs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches with the structs that real kernels get, and graphs that nobody launches."""
    record_launches(monkeypatch)

    def bind_gemm(t: GemmTensors, *, begins_early: bool, **_: Any) -> StructLaunch:
        assert not begins_early, "sums and signals of other streams need SMs between two GEMMs"
        found = Arguments(terms=Terms(t.alpha, aux_scale=t.beta))
        for name, tensor in {"a": t.a, "b": t.b, "d": t.d, "source": t.partial, "aux": t.c}.items():
            place = found.terms if name == "aux" else found
            setattr(place, name, as_matrix(tensor, None if tensor is None else matrix_spec(name, tensor)))
        found.terms.bias = None if t.bias is None else t.bias.data_ptr()
        return StructLaunch(found)

    def bind_sum(sources: Any, d: torch.Tensor, *, c: Any = None, beta: float = 0.0, bias: Any = None) -> StructLaunch:
        found = SumArguments(*d.shape[-2:], 1, len(sources))
        for number, source in enumerate(sources):
            found.sources[number] = as_matrix(source, matrix_spec("a source", source))
        found.d, found.c = (as_matrix(x, None if x is None else matrix_spec("D", x)) for x in (d, c))
        found.bias = None if bias is None else bias.data_ptr()
        return StructLaunch(found)

    for name, value in {"bind_gemm": bind_gemm, "bind_sum": bind_sum}.items():
        monkeypatch.setattr(binding, name, value)
    done = recording.runtime.cudaError_t.cudaSuccess
    pretended = SimpleNamespace(
        cudaGraphInstantiate=lambda graph, flags: (done, 5), cudaGraphExecDestroy=lambda executable: (done,)
    )
    monkeypatch.setattr(recording, "runtime", pretended)


def bytes_of(launches: list[Any]) -> list[bytes]:
    """The parameters of all kernels, and the places of all copies."""
    return [
        ctypes.string_at(ctypes.addressof(struct), ctypes.sizeof(struct))
        for launch in launches
        if (struct := getattr(launch, "struct", None) or getattr(launch, "_places", None)) is not None
    ]


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (GATHERS[0], {"chunks": 2}, {}),
    (GATHERS[0], {"mechanism": "pull"}, {}),
    (GATHERS[1], {"chunks": 2}, {"merge_copies": True}),
    (CHAINS[0], {"chunks": 2, "mechanism": "store"}, {}),
    (PAIRWISE, {"chunks": 2}, {}),
    (PAIRWISE, {"mechanism": "store", "final_add": "epilogue"}, {}),
    (ALL_REDUCES[0], {"chunks": 2, "mechanism": "store"}, {}),
]


@pytest.mark.parametrize(("schedule", "options", "execution"), CASES)
@pytest.mark.parametrize("terms", [False, True])
def test_a_moved_recording_is_that_of_the_other_tensors(
    schedule: str,
    options: dict[str, Any],
    execution: dict[str, Any],
    terms: bool,
    structs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that kernels and copies get is equal, byte by byte, to what they get in a call on those tensors."""
    from distgemm.runtime.cuda import memops

    monkeypatch.setattr(binding, "copies_of", memops.copies_of)
    plan = distgemm.make_plan(
        distgemm.GemmProblem(48, 48, 1152, dtype="float32"), schedule, 3, sync="barrier", **options
    )
    workspace = machine_of([plan]).workspaces[1]
    binder = Emulated(plan, 1, workspace, **execution).binder
    first, second = (Data(plan, seed, 2.0, float(terms), bias=terms).calls[1] for seed in (0, 1))

    def given(call: Any) -> list[torch.Tensor | None]:
        names = ("A", "B", "C", "D", "gathered")
        return [*(call.shards.get(name) for name in names), call.bias]

    def launches(call: Any) -> list[Any]:
        bound = binder.bind(call, 1)
        return [*chain(*bound.launches, bound.leave)]

    found, wanted = launches(first), launches(second)
    layouts = [layout_of(given(call), 2.0, float(terms)) for call in (first, second)]
    assert layouts[0].key == layouts[1].key and layouts[0].addresses != layouts[1].addresses
    nodes = [(launch, number) for number, launch in enumerate(found) if launch.cells()]
    graph: Any = SimpleNamespace(raw_cuda_graph=lambda: 3)
    made = Recording(graph, nodes, layouts[0])
    if not made.movable:
        assert any(isinstance(launch, RowsCopy) and not launch.movable for launch in found)
        with pytest.raises(RuntimeError, match="serves one set of tensors"):
            made.move(layouts[1].addresses)
        return
    monkeypatch.setattr(RowsCopy, "update", lambda self, graph, node: None)
    assert bytes_of(found) != bytes_of(wanted)
    made.move(layouts[1].addresses)
    assert bytes_of(found) == bytes_of(wanted) and made.addresses == layouts[1].addresses
    updated = [launch.updates[-1] for launch in found if isinstance(launch, StructLaunch) and launch.updates]
    assert updated and set(updated) <= set(bytes_of(wanted))


def test_most_cases_move(structs: None) -> None:
    """Copies of rows with gaps do not. Here all rows of shards follow each other."""
    shard = torch.zeros(4, 8)
    assert RowsCopy(shard, shard.clone()).movable
    assert RowsCopy(shard[:1, :4], shard[:1, :4]).movable
    assert not RowsCopy(shard, torch.zeros(4, 16)[:, :8]).movable


def test_a_recording_keeps_no_tensors_alive(structs: None) -> None:
    """Also one that serves only these tensors: an executable keeps many recordings."""
    x = torch.zeros(4, 4)
    layout, given = layout_of([x], 1.0, 0.0), weakref.ref(x)
    launch = FixedLaunch(lambda stream, x=x: None, GemmTensors(x, x, x))
    graph: Any = SimpleNamespace(raw_cuda_graph=lambda: 3)
    made = Recording(graph, [(launch, 0)], layout)
    del x, launch
    assert not made.movable and given() is None


def test_launches_of_which_nothing_is_known_stay() -> None:
    x = torch.zeros(4, 4)
    ran: list[Any] = []
    launch = FixedLaunch(ran.append, GemmTensors(x, x, x, bias=x[0]))
    launch(7)
    assert not launch.movable and ran == [7]
    assert [cell.value for cell in launch.cells()] == [x.data_ptr()] * 4
    with pytest.raises(NotImplementedError, match="FixedLaunch has no addresses that change"):
        launch.update(1, 2)


def test_a_launch_captures_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    done = recording.runtime.cudaError_t.cudaSuccess
    nodes: list[int] = [9]
    monkeypatch.setattr(
        recording,
        "runtime",
        SimpleNamespace(cudaStreamGetCaptureInfo=lambda stream: (done, 1, 2, 3, nodes, len(nodes))),
    )
    assert captured_node(0) == 9
    nodes.append(10)
    with pytest.raises(RuntimeError, match="one node behind all others, got 2"):
        captured_node(0)
