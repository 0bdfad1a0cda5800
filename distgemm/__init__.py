"""Tensor-parallel GEMMs over the GPUs of an NVLink domain: schedules, verified plans and runtimes."""

import importlib
from typing import TYPE_CHECKING, Any

from distgemm.plan.derive import make_plan
from distgemm.plan.plan import Plan, PlanError
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.reference import run_reference
from distgemm.schedulers import (
    DistributedTileScheduler,
    TileCoord,
    get_schedule,
    list_schedules,
    register_schedule,
)

if TYPE_CHECKING:
    from distgemm import fp8, nn, tune
    from distgemm.api import compile
    from distgemm.runtime.collective.executable import CollectiveExecutable, run_collective
    from distgemm.runtime.cuda import CudaExecutable, ReplayTimeoutError
    from distgemm.torch_ops import (
        all_gather_matmul,
        all_to_all_matmul,
        gather,
        last_call,
        matmul_all_reduce,
        matmul_all_to_all,
        matmul_reduce_scatter,
        record_calls,
    )
    from distgemm.torch_ops.install import install, uninstall
    from distgemm.torch_ops.report import report
    from distgemm.torch_ops.warmup import warmup


def _repr_html_(shown: Plan | DistributedTileScheduler) -> str:
    from distgemm.viz.page import notebook_html

    return notebook_html(shown)


# What notebooks show. It is set here because plans and schedules are layers below the pages.
for _shown in (Plan, DistributedTileScheduler):
    _shown._repr_html_ = _repr_html_  # type: ignore[union-attr]

__all__ = [
    # schedules
    "DistributedTileScheduler",
    "TileCoord",
    "get_schedule",
    "list_schedules",
    "register_schedule",
    # plans
    "GemmProblem",
    "Plan",
    "PlanError",
    "make_plan",
    # runtimes
    "CollectiveExecutable",
    "CudaExecutable",
    "ReplayTimeoutError",
    "compile",
    "run_collective",
    "run_reference",
    # torch
    "all_gather_matmul",
    "all_to_all_matmul",
    "fp8",
    "gather",
    "install",
    "last_call",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "nn",
    "record_calls",
    "report",
    "uninstall",
    "warmup",
    # tuned configurations
    "tune",
]


def __getattr__(name: str) -> Any:
    """The public names whose modules import torch. They are imported at their first use: planning needs no torch."""
    if name in ("CollectiveExecutable", "run_collective"):
        from distgemm.runtime.collective import executable as collective

        return getattr(collective, name)
    if name in ("CudaExecutable", "ReplayTimeoutError"):
        from distgemm.runtime import cuda

        return getattr(cuda, name)
    if name == "compile":
        from distgemm import api

        return api.compile
    if name in (
        "all_gather_matmul",
        "all_to_all_matmul",
        "gather",
        "last_call",
        "matmul_all_reduce",
        "matmul_all_to_all",
        "matmul_reduce_scatter",
        "record_calls",
    ):
        from distgemm import torch_ops

        return getattr(torch_ops, name)
    if name in ("install", "uninstall"):
        from distgemm.torch_ops import install as installation

        return getattr(installation, name)
    if name == "report":
        from distgemm.torch_ops.report import report

        return report
    if name == "warmup":
        from distgemm.torch_ops.warmup import warmup

        return warmup
    if name in ("fp8", "nn", "tune"):
        return importlib.import_module(f"distgemm.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
