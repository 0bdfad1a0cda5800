"""Wrong arguments of everything that takes tensors, groups and processes, on a group of one rank."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import distgemm
from distgemm import tune
from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec, get_provider
from distgemm.measure.models import get_model
from distgemm.runtime.collective.executable import CollectiveExecutable, run_collective
from distgemm.runtime.executable import ExecutionConfig
from distgemm.runtime.launch import init_from_env, launch
from distgemm.torch_ops import select_schedule
from tests.unit.bad_inputs import (
    NAN,
    ODD,
    Case,
    Wrong,
    booleans,
    check_refused,
    integers,
    names,
    numbers,
    objects,
    table,
    tuples,
    unique,
)

PROBLEM = distgemm.GemmProblem(4, 6, 8, dtype="float32")
PLAN = distgemm.make_plan(PROBLEM, "gemm+rs", 1)

Lazy = Callable[[], Any]


class Later:
    """A value that can be made only in a process group."""

    def __init__(self, text: str, make: Lazy) -> None:
        self.text, self.make = text, make

    def __repr__(self) -> str:
        return self.text


def now(value: Any) -> Any:
    return value.make() if isinstance(value, Later) else value


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """All ranks: this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def dtensor(*shape: int) -> torch.Tensor:
    return distribute_tensor(torch.ones(shape), init_device_mesh("cpu", (1,)), [Replicate()])


def nested(x: torch.Tensor) -> torch.Tensor:
    """A nested tensor that says its layout is torch.strided."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([x, x[:1]])


def call(function: Any, /, *order: str, **right: Any) -> Any:
    """Makes calls of a function with these arguments, unless others are given; the first ones by their order."""

    def made(**given: Any) -> Any:
        values = {name: now(value) for name, value in {**right, **given}.items()}
        return function(*(values.pop(name) for name in order), **values)

    return made


def tensors(rows: int, columns: int, optional: bool = False) -> Wrong:
    """Wrong values of a float32 matrix of this shape."""
    ones = torch.ones(rows, columns)
    found = [
        *(3, 1.5, "x", [[1.0]], {}, ODD, np.ones((rows, columns)), ones.numpy().tolist()),
        *(ones.to(dtype) for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64)),
        *(ones.to("meta"), ones.to_sparse(), torch.ones(()), torch.ones(rows + 1, columns + 1)),
        torch.nested.nested_tensor([ones, ones[:1]], layout=torch.jagged),
        Later("a Tensor", lambda: nested(ones)),
        Later("DTensor", lambda: dtensor(rows, columns)),
        *([] if optional else [None]),
    ]
    return Wrong(tuple(found), r"\b(is|has|on|are|would do)\b")


GROUPS = Wrong(
    (
        "nope",
        "",
        3,
        1.5,
        True,
        [],
        {},
        ODD,
        dist.ProcessGroup,
        Later("mesh", lambda: init_device_mesh("cpu", (1, 1))),
    ),
    "group",
)
AHEAD = Wrong(
    tuple(each for each in names("ag+gemm").values if not (isinstance(each, str) and each[:1] == " ")),
    r"one of|Known|is .* or |name|such as|collective|mesh|as in|integer|its options",
) + [
    *("gemm chunks=2", "ag+gemm chunks", "ag+gemm provider=x", "unfused x=1", "unfused collective=x"),
    "ag+gemm gemm_streams=3",
]
"""Wrong schedules, which are refused when a layer is made."""
SCHEDULES = AHEAD + ["ag+gemm chunks=0", "ag+gemm chunks=x", "ag+gemm x=1", "ag+gemm mesh=x", "tensor_parallel_2d"]
BIASES = (3, "x", [1.0], np.ones(6), torch.ones(5), torch.ones(6, 1), torch.ones(6, dtype=torch.int64))
BIAS = Wrong((*BIASES, torch.ones(6, device="meta"), ODD), r"\b(is|has|on|are)\b")
TEXT = "128x256x64_1x2_cooperative"
CONFIGURATIONS = Wrong(names(TEXT, optional=True).values, "written like")
UNKNOWN_NAMES = Wrong((3, 1.5, True, [], {}, b"x", ODD, str, np.ones(2), ""), "name")
"""Names of providers and configurations are looked up later."""
WORDS = {
    "schedule": (
        "configuration",
        "schedule",
        "option",
        "chunks",
        "provider",
        "mesh",
        "streams",
        "collective",
        "unfused",
    ),
    "group": ("mesh",),
    "names": ("Linear", "names"),
}
CHUNKS = integers(1, 4096, optional=True)


# --- functions and layers -------------------------------------------------------------------------------


def functions() -> Iterator[Case]:
    group: Any = Later("WORLD", lambda: dist.group.WORLD)
    shared = {"group": GROUPS + [None], "chunks": CHUNKS}
    rows = tuples(0, optional=True, empty=False) + [(4, 4), (5,), (0,)]
    extent = Wrong((*integers(1, optional=True).values, 7), "integer|is split")
    right = {"b": torch.ones(6, 8), "group": group}
    words = WORDS
    yield from table(
        "all_gather_matmul",
        call(distgemm.all_gather_matmul, a_shard=torch.ones(4, 8), **right),
        {
            **shared,
            "a_shard": tensors(4, 8),
            "b": tensors(6, 8) + [[], [None], [3], {}, ""],
            "bias": BIAS + [[torch.ones(6)] * 2, [3]],
            "schedule": SCHEDULES,
            "m_per_rank": rows,
            "out_features": extent + [[6, 6], [7], "6"],
            "keep_gathered": booleans(),
            "return_gathered": booleans(),
        },
        words | {"a_shard": ("a is", "a has", "a_shard")},
    )
    scattered = SCHEDULES
    yield from table(
        "matmul_reduce_scatter",
        call(distgemm.matmul_reduce_scatter, a=torch.ones(4, 8), **right),
        {
            **shared,
            "a": tensors(4, 8),
            "b": tensors(6, 8),
            "bias": BIAS,
            "schedule": scattered,
            "m_per_rank": rows,
            "in_features": extent,
        },
        words,
    )
    yield from table(
        "matmul_all_reduce",
        call(distgemm.matmul_all_reduce, a=torch.ones(4, 8), **right),
        {**shared, "a": tensors(4, 8), "b": tensors(6, 8), "bias": BIAS, "schedule": scattered, "in_features": extent},
        words,
    )
    yield from table(
        "select_schedule",
        call(select_schedule, pattern="ag+gemm", problem=PROBLEM),
        {"pattern": names("ag+gemm"), "problem": objects()},
    )


def styled(style: Any, module: nn.Module, name: str) -> None:
    plan = style() if name == "SharedColwiseParallel" else {"q": style()}
    parallelize_module(nn.ModuleDict({"q": module}), init_device_mesh("cpu", (1,)), plan)


def layers() -> Iterator[Case]:
    group: Any = Later("WORLD", lambda: dist.group.WORLD)
    words = WORDS
    options = {"schedule": AHEAD, "chunks": CHUNKS}
    for layer in (distgemm.nn.ColumnParallelLinear, distgemm.nn.RowParallelLinear):
        own = {"keep_gathered": booleans()} if layer is distgemm.nn.ColumnParallelLinear else {}
        yield from table(
            layer.__name__,
            call(layer, in_features=8, out_features=6, group=group),
            {
                **dict.fromkeys(("in_features", "out_features"), integers()),
                "group": GROUPS + [None],
                **options,
                **own,
                "bias": booleans(),
                "device": Wrong(("nope", 1.5, [], {}, ODD, "cuda:x", "cpu:0:0", True), "device"),
                "dtype": Wrong(("float32", 3, [], ODD, torch.int64, torch.complex64, torch.bool), "dtype"),
            },
            words,
        )
        module: Any = Later("layer", lambda layer=layer: layer(8, 6, group=dist.group.WORLD))
        yield from table(
            f"{layer.__name__}.forward",
            call(lambda module, x, m_per_rank=None: module(x, m_per_rank), module=module, x=torch.ones(4, 8)),
            {"x": tensors(4, 8), "m_per_rank": tuples(0, optional=True) + [(4, 4), (5,)]},
            {"x": ("a is", "a has", "a_shard", "a:", "the input", "sequence_dim")},
        )
        yield from table(
            f"{layer.__name__}.from_linear",
            call(layer.from_linear, linear=nn.Linear(8, 6), group=group),
            {
                "linear": Wrong((None, 3, "x", [], ODD, nn.LayerNorm(8), nn.Linear, nn.Conv1d(8, 6, 1)), "Linear"),
                "group": GROUPS,
            },
            words,
        )
    for style in (
        distgemm.nn.ColwiseParallel,
        distgemm.nn.RowwiseParallel,
        partial(distgemm.nn.SharedColwiseParallel, "q"),
    ):
        name = getattr(style, "__name__", "SharedColwiseParallel")
        own = {} if name == "RowwiseParallel" else {"keep_gathered": booleans()}
        own |= {"use_local_output": booleans()} if name == "ColwiseParallel" else {}
        yield from table(name, call(style), {**options, **own}, words)
        for module in (nn.LayerNorm(8), nn.Conv1d(8, 6, 1)):
            yield Case(
                f"parallelize-{name}-{type(module).__name__}",
                partial(styled, style, module, name),
                ("Linear",),
                module,
                "nn.Linear",
                rendering=type(module).__name__,
            )
    yield from table(
        "SharedColwiseParallel",
        lambda names: distgemm.nn.SharedColwiseParallel(names),
        {"names": Wrong((3, None, "", [], ODD, ("q", "k")), "names")},
        words,
    )
    yield from table("full_state_dict", call(distgemm.nn.full_state_dict), {"model": objects(nn.Linear)})
    yield from table(
        "load_full_state_dict",
        call(distgemm.nn.load_full_state_dict, model=nn.Linear(8, 6), state_dict=nn.Linear(8, 6).state_dict()),
        {
            "model": objects(nn.Linear),
            "state_dict": Wrong(
                (None, 3, "x", [], ODD, {"weight": 3, "bias": 3}, {3: torch.ones(2)}), "state_dict|tensor"
            ),
        },
    )


# --- executables ----------------------------------------------------------------------------------------


def executables() -> Iterator[Case]:
    devices = Wrong(("nope", 1.5, [], {}, ODD, "cuda:x", "meta", True, "xpu"), "device|group sends")
    group = Wrong(GROUPS.values, "group")
    plans = objects()
    words = {"device": ("group sends",), "group": ("mesh",)}
    for function, right in (
        (CollectiveExecutable, {}),
        (run_collective, {"a_shard": torch.ones(4, 8), "b_shard": torch.ones(6, 8)}),
    ):
        yield from table(
            function.__name__,
            call(function, plan=PLAN, **right),
            {"plan": plans, "group": group, **({} if right else {"device": devices})},
            words,
        )
    made: Any = Later("executable", lambda: CollectiveExecutable(PLAN))
    shapes = {"a_shard": (4, 8), "b_shard": (6, 8), "c_shard": (4, 6), "out": (4, 6)}
    right = {name: torch.ones(shapes[name]) for name in ("a_shard", "b_shard", "c_shard")}
    yield from table(
        "CollectiveExecutable.call",
        call(lambda made, **given: made(**given), made=made, **right, beta=1.0),
        {
            **{name: tensors(*shape, optional=name == "out") for name, shape in shapes.items()},
            "alpha": numbers(),
            "beta": numbers(),
            "bias": BIAS,
            "scale_a": Wrong((3, torch.ones(1), "x"), "without a scaling"),
            "scale_b": Wrong((3, torch.ones(1), "x"), "without a scaling"),
            "gathered": tensors(4, 8, optional=True),
        },
        {
            "a_shard": ("A's shard",),
            "b_shard": ("B's shard",),
            "c_shard": ("C's shard", "c_shard"),
        },
    )
    yield from table(
        "ExecutionConfig",
        ExecutionConfig,
        {
            **dict.fromkeys(("provider", "config"), UNKNOWN_NAMES),
            "gemm_streams": integers(1, 2),
            "execution": names("multi_kernel"),
            "wait_by": names("memory_op"),
            "merge_copies": booleans(),
        },
        {"config": ("config",)},
    )
    yield from table(
        "compile",
        call(distgemm.compile, plan=PROBLEM, schedule="ag+gemm"),
        {
            "plan": objects(),
            "schedule": names("ag+gemm"),
            "group": group,
            "device": Wrong(("nope", 1.5, [], {}, ODD, "cuda:x", "meta", "cpu", True, -2), "device|GPU"),
            "provider": names("cutlass", optional=True),
            "config": CONFIGURATIONS,
            "gemm_streams": integers(1, 2),
            "execution": names("multi_kernel"),
            "wait_by": names("memory_op"),
            "merge_copies": booleans(),
            "timeout": numbers(zero=False, negative=False, optional=True),
            "on_timeout": names("raise", "abort"),
            "pattern": names("ag+gemm", optional=True),
            "tune": booleans().without(None),
            "chunks": integers(1, 4096),
            "mesh": tuples(optional=True),
            "x": Wrong(("x",), "options"),
        },
        {
            "schedule": ("schedule", "problem needs"),
            "group": ("mesh",),
            "mesh": ("world_size",),
            "x": ("no option",),
            "tune": ("tune",),
            "pattern": ("pattern",),
        },
    )


# --- providers and tuned configurations -----------------------------------------------------------------


def tuning() -> Iterator[Case]:
    yield from table("get_provider", call(get_provider), {"name": names("cutlass")}, {"name": ("provider",)})
    yield from table("get_model", call(get_model), {"name": names("llama-3-8b")}, {"name": ("model",)})
    yield from table(
        "GemmConfig.parse",
        call(GemmConfig.parse),
        {"text": CONFIGURATIONS + [None]},
        {"text": ("configuration",)},
    )
    matrix = {
        "dtype": names("float32"),
        **dict.fromkeys(("rows", "columns"), integers(0, None)),
        "row_major": booleans(),
    }
    yield from table("MatrixSpec", call(MatrixSpec, dtype="float32", rows=8, columns=8), matrix)
    spec = MatrixSpec("float32", 8, 8)
    yield from table(
        "GemmSpec",
        call(GemmSpec, a=spec, b=spec, d=spec),
        {**dict.fromkeys("abd", objects()), "scale_a": names("none", "row"), "scale_b": names("none", "row")},
    )
    yield from table(
        "TunedConfig",
        call(tune.TunedConfig, schedule="ag+gemm"),
        {
            "method": names("plan", "unfused"),
            "schedule": Wrong((3, None, [], {}, ODD, b"x", True, ""), "schedule"),
            "options": Wrong((3, None, "x", [3], ODD, ((1, 2),), (("chunks",),), {"chunks": []}), "options"),
            "execution": objects(),
            "collective": names("nccl"),
            "source": names("measured").without(""),
            "fallback": objects().without(None),
        },
    )
    yield from table(
        "TunedConfig.parse",
        call(tune.TunedConfig.parse),
        {
            "text": Wrong(
                (
                    None,
                    3,
                    [],
                    {},
                    ODD,
                    b"x",
                    "",
                    " ",
                    "=",
                    "a=1",
                    "gemm+rs chunks",
                    "gemm+rs provider=x",
                    "gemm+rs gemm_streams=5",
                    "unfused collective=x",
                    "unfused x=1",
                    "gemm+rs config=x",
                ),
                "as in|one of|integer|such as|collective|written",
            )
        },
        {"text": ("configuration", "option", "provider", "gemm_streams", "collective")},
    )
    right = tune.TunedConfig.parse("gemm+rs").to_dict()
    for key in right:
        for value in (None, 3, 1.5, "x", [], {"x": []}, True, NAN):
            if value == right[key] or (key, value) in (
                ("schedule", "x"),
                ("provider", None),
                ("config", None),
                ("options", {}),
                ("merge_copies", True),
            ):
                continue
            fields = {**right, key: value}
            yield Case(
                f"TunedConfig.from_dict-{key}-{value!r}",
                lambda fields=fields: tune.TunedConfig.from_dict(fields),
                (key,),
                value,
                ".",
                rendering="",
            )  # type: ignore[misc]
    yield from table(
        "TunedConfig.from_dict",
        call(tune.TunedConfig.from_dict),
        {"fields": Wrong((None, 3, "x", [], {}, ODD, {"method": "plan"}), "method|fields")},
    )
    yield from table(
        "tune.select",
        call(tune.select, problem=PROBLEM, pattern="ag+gemm"),
        {
            "problem": objects(),
            "pattern": names("ag+gemm"),
            "group": GROUPS,
            "tune": booleans().without(None),
            "device": Wrong(("nope", 1.5, [], ODD), "device|GPU"),
        },
        {"group": ("mesh",)},
    )


# --- processes ------------------------------------------------------------------------------------------


def main_of_rank() -> None:
    raise AssertionError("never called")


def launching(function: Any = main_of_rank, ranks: Any = 1, **options: Any) -> Any:
    return launch(function, options.pop("world_size", ranks), **options)


def processes() -> Iterator[Case]:
    yield from table(
        "launch",
        call(launching, ranks=1),
        {
            "function": Wrong((None, 3, "x", [], ODD, lambda: 1), "function"),
            "world_size": integers(1, 8192),
            "backend": names("gloo", "nccl"),
            "timeout": numbers(zero=False, negative=False),
            "share": booleans(),
        },
    )
    for text, value in {
        "a lock": threading.Lock(),
        "a function of a function": lambda: 1,
        "a generator": (i for i in "x"),
    }.items():
        yield Case(
            f"launch-args-{text}",
            partial(launch, main_of_rank, 1, 3, value),
            ("args[1]",),
            value,
            "pickle",
            rendering=type(value).__name__,
        )
    yield from table(
        "init_from_env",
        init_from_env,
        {"backend": names("gloo", "nccl"), "timeout": numbers(zero=False, negative=False)},
    )


GROUPS_OF_CASES = (functions, layers, executables, tuning, processes)
CASES = unique([case for cases in GROUPS_OF_CASES for case in cases()])


@pytest.mark.sample(200)
@pytest.mark.parametrize("case", CASES)
def test_refused(case: Case) -> None:
    check_refused(case)


RIGHT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234", "LOCAL_RANK": "0"}
VARIABLES = [
    *(
        (name, value)
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK")
        for value in ("x", "1.5", "-1", "1e3", "9" * 400, "9" * 5000, "None")
    ),
    *(
        ("RANK", "1"),
        ("WORLD_SIZE", "0"),
        ("MASTER_PORT", "99999"),
        ("RANK", ""),
        ("WORLD_SIZE", ""),
        ("MASTER_PORT", ""),
        ("MASTER_ADDR", ""),
    ),
]


@pytest.mark.parametrize(("name", "value"), VARIABLES)
def test_variables_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for variable, right in RIGHT.items():
        monkeypatch.setenv(variable, value if variable == name else right)
    check_refused(
        Case(
            name, init_from_env, (name,), value, "integer|environment|name", rendering="" if len(value) > 100 else None
        )
    )
