"""Tensor-parallel GEMMs over all GPUs of an NVLink domain: schedules, plans, proofs and runtimes."""

from distgemm.derive import make_plan
from distgemm.plan import Plan, PlanError
from distgemm.problem import GemmProblem
from distgemm.runtime.reference import run_reference
from distgemm.schedulers import (
    DistributedTileScheduler,
    TileCoord,
    get_schedule,
    list_schedules,
    register_schedule,
)

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
    "run_reference",
]
