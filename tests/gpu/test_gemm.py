"""Kernels on one GPU against float64: poisoned outputs, guarded surroundings, graphs, host time."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch

from distgemm.gemm import GemmConfig, GemmTensors, bind, gemm
from distgemm.gemm.nvcc import build
from tests.gpu.gemm_cases import Case, Made, bound, cases, fp8_cases, kernels, make

pytestmark = pytest.mark.gpu(1)
CASES = list(cases())


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of all selected cases on all cores. One after the other would take an hour."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    selected = {
        item.callspec.params["case"] for item in items if hasattr(item, "callspec") and "case" in item.callspec.params
    }
    build(kernels(sorted(selected, key=str)))


def run(case: Case, made: Made) -> None:
    before = {name: buffer.clone() for name, buffer in made.buffers.items()}
    bind(made.tensors, config=case.config or None)()
    torch.cuda.synchronize()
    for name, buffer in made.buffers.items():
        changed = _bits(buffer) != _bits(before[name])
        if name == "d":
            inside = torch.zeros_like(changed)
            view = made.tensors.d
            inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
            changed &= ~inside
        assert not changed.any(), f"{int(changed.sum())} elements changed in or around {name}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_integers_are_exact(case: Case) -> None:
    made = make(case, integers=True)
    run(case, made)
    assert torch.equal(made.tensors.d, made.reference.to(made.tensors.d.dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_stays_within_what_the_types_allow(case: Case) -> None:
    made = make(case, integers=False, seed=1)
    run(case, made)
    excess = ((made.tensors.d.double() - made.reference).abs() / bound(case, made)).max().item()
    assert excess <= 1


@pytest.mark.parametrize("case", list(fp8_cases()), ids=str)
def test_a_second_run_has_the_same_bits(case: Case) -> None:
    made = make(case, integers=False, seed=2)
    added = {name: x.clone() for name in ("c", "partial") if (x := getattr(made.tensors, name)) is not None}
    launch, found = bind(made.tensors, config=case.config or None), []
    for _ in range(3):
        made.tensors.d.fill_(float("nan"))
        for name, values in added.items():
            getattr(made.tensors, name).copy_(values)
        launch()
        found.append(made.tensors.d.clone())
    assert not found[0].isnan().any()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_tf32_is_only_used_if_requested() -> None:
    errors = {}
    for dtype in ("float32", "tfloat32"):
        made = make(Case(dtype, m=256, n=256, k=256, pad=0), integers=False)
        gemm(made.tensors.a, made.tensors.b, made.tensors.d, dtype=made.tensors.dtype)
        errors[dtype] = ((made.tensors.d.double() - made.reference).abs() / made.magnitude).max().item()
    assert errors["float32"] < 1e-6 < 1e-5 < errors["tfloat32"]


@pytest.mark.parametrize("provider", ["cutlass", "cublas"])
@pytest.mark.parametrize("terms", [(), ("alpha", "c"), ("partial",), ("bias",)], ids=str)
def test_replays_see_changed_inputs(provider: str, terms: tuple[str, ...]) -> None:
    case = Case("bfloat16", "rr", terms, m=264, n=328, k=144, pad=16)
    captured, eager = make(case, integers=False), make(case, integers=False)
    launch = bind(captured.tensors, provider=provider)
    launch()  # cuBLAS takes its workspace now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for seed in range(5):
        drawn = make(case, integers=False, seed=seed).tensors
        for name in ("a", "b", "c", "partial", "bias"):
            for made in (captured, eager):
                target = getattr(made.tensors, name)
                if target is not None:
                    target.copy_(getattr(drawn, name))
        captured.tensors.d.fill_(float("nan"))
        graph.replay()
        bind(eager.tensors, provider=provider)()
        torch.cuda.synchronize()
        assert torch.equal(captured.tensors.d, eager.tensors.d)


def nodes_of(graph: torch.cuda.CUDAGraph) -> list[str]:
    """The types of the nodes of a graph."""
    from cuda.bindings import runtime

    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    error, _, count = runtime.cudaGraphGetNodes(handle)
    assert error == 0
    if not count:
        return []
    error, nodes, count = runtime.cudaGraphGetNodes(handle, count)
    assert error == 0
    return [runtime.cudaGraphNodeGetType(node)[1].name for node in nodes]


def test_runs_on_the_stream_it_is_given() -> None:
    made = make(Case(m=264, n=328, k=144, pad=16), integers=True)
    launch = bind(made.tensors)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
    launch(stream.cuda_stream)
    assert not stream.query()
    torch.cuda.synchronize()
    assert torch.equal(made.tensors.d.double(), made.reference)


def test_empty_results_launch_nothing() -> None:
    a = torch.empty(0, 64, device="cuda", dtype=torch.bfloat16)
    b = torch.empty(32, 64, device="cuda", dtype=torch.bfloat16)
    d = torch.empty(0, 32, device="cuda", dtype=torch.bfloat16)
    gemm(a, b, d)
    launch = bind(GemmTensors(a, b, d))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of graphs without nodes
        with torch.cuda.graph(graph):
            launch()
            gemm(a, b, d)
    assert nodes_of(graph) == []


def test_a_descriptor_that_cannot_be_encoded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of B are 2**40 bytes apart. No tensor is that large, so the arguments are changed behind the checks."""
    from distgemm.gemm import cutlass, parameters
    from distgemm.gemm.cutlass import CutlassProvider, arguments_of
    from distgemm.gemm.parameters import DescriptorError
    from distgemm.gemm.tensors import spec_of

    made = make(Case(m=256, n=256, k=128, pad=0), integers=True)
    spec = spec_of(made.tensors)
    if CutlassProvider().configs(spec)[0].kernel_schedule == "plain":
        pytest.skip("kernels of this GPU have no TMA")
    kernel = CutlassProvider().compile(spec)
    reason = (
        r"TMA cannot describe B: extents \(128, 256, 1\), .* strides \(1099511627776, "
        r".* (bfloat16|uint16) at .*INVALID_VALUE"
    )

    def far_apart(*given: Any) -> parameters.Arguments:
        arguments = arguments_of(*given)
        arguments.b.stride = 1 << 39
        return arguments

    with monkeypatch.context() as patch:
        patch.setattr(cutlass, "arguments_of", far_apart)
        with pytest.raises(DescriptorError, match=reason):
            kernel.bind(made.tensors)
    run(Case(m=256, n=256, k=128, pad=0), made)
    assert torch.equal(made.tensors.d.double(), made.reference)


def test_the_most_batches_of_a_plain_kernel() -> None:
    """float32 has plain kernels only, on all GPUs."""
    a, b = (torch.randint(-8, 8, (65536, 8, 8), device="cuda").float() for _ in range(2))
    d = torch.full_like(a, float("nan"))
    gemm(a[1:], b[1:], d[1:], provider="cutlass")
    assert torch.equal(d[1:], a[1:] @ b[1:].mT)
    assert d[0].isnan().all()
    with pytest.raises(ValueError, match=r"plain kernels compute at most 65535 batches .*, got 65536 of 8"):
        gemm(a, b, d, provider="cutlass")


def test_a_kernel_refuses_other_tensors() -> None:
    from distgemm.gemm.cutlass import CutlassProvider
    from distgemm.gemm.tensors import spec_of

    made = make(Case(m=264, n=328, k=144, pad=16), integers=True)
    kernel = CutlassProvider().compile(spec_of(made.tensors))
    with pytest.raises(ValueError, match="compiled for other"):
        kernel.bind(make(Case("bfloat16", "rr", ("partial",), m=264, n=328, k=144, pad=16), True).tensors)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        kernel.bind(make(Case("bfloat16", "rr", m=137, n=75, k=61, pad=1), True).tensors)


def test_host_time_per_launch() -> None:
    made = make(Case(m=128, n=256, k=64, pad=0), integers=True)
    launch = bind(made.tensors)
    stream = torch.cuda.current_stream().cuda_stream
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            launch(stream)
        best = min(best, (time.perf_counter() - start) / 200)
    print(f"{best * 1e6:.2f} us per launch")
    assert best < 8e-6


def test_captured_launches_are_one_kernel_node_each() -> None:
    made = make(Case("bfloat16", "rr", ("partial", "c"), m=264, n=328, k=144, pad=16), integers=True)
    launch = bind(made.tensors)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            launch()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert nodes_of(graph) == ["cudaGraphNodeTypeKernel"] * 3


def test_config_is_part_of_the_launch() -> None:
    tensors: GemmTensors = make(Case(m=264, n=328, k=144, pad=16), integers=True).tensors
    config = GemmConfig((128, 128, 64), (2, 1), "pingpong")
    assert str(config) in bind(tensors, config=config).name  # type: ignore[attr-defined]


def test_specs_that_do_not_fit_raise() -> None:
    made = make(Case(m=264, n=328, k=144, pad=16), integers=True).tensors
    with pytest.raises(ValueError, match=r"differ in k"):
        gemm(made.a, made.b[:, :-8], made.d)
    with pytest.raises(ValueError, match="no C"):
        gemm(made.a, made.b, made.d, beta=1.0)
    with pytest.raises(ValueError, match="one device"):
        gemm(made.a.cpu(), made.b, made.d)
    with pytest.raises(ValueError, match="contiguous"):
        gemm(made.a[:, ::2], made.b[:, ::2], made.d)
