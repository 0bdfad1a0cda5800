"""Schedules: pure data that says which rank holds and multiplies which tiles of a GEMM.

Import this package as ``distgemm.schedulers``. It imports neither torch nor CUDA. A schedule contains no slots, signals
or streams: the plan adds them.
"""

if __name__ != "distgemm.schedulers":
    raise ImportError(f"import distgemm.schedulers, not {__name__}")

from distgemm.schedulers import all_reduce, all_to_all, mesh, one_d  # noqa: F401  (each registers its schedules)
from distgemm.schedulers.nested import NestedGather, NestedReduce, nest
from distgemm.schedulers.registry import (
    PATTERNS,
    Pattern,
    check_pattern,
    get_schedule,
    list_patterns,
    list_schedules,
    register_schedule,
    schedule_aliases,
    schedule_doc,
    schedule_mesh_rank,
    schedule_options,
)
from distgemm.schedulers.routes import (
    AddPlace,
    BidirectionalFull,
    BidirectionalSplit,
    Chain,
    Direct,
    GatherRoute,
    Hop,
    Pairwise,
    ReduceRoute,
    Ring,
    ring_of,
)
from distgemm.schedulers.scheduler import WHOLE, DistributedTileScheduler, Partition, Route, TileCoord
from distgemm.schedulers.symmetry import MODES, NotSymmetricError, Symmetry, find_symmetry

__all__ = [
    # a schedule: partition, work, route
    "MODES",
    "WHOLE",
    "DistributedTileScheduler",
    "Partition",
    "Route",
    "TileCoord",
    # routes
    "AddPlace",
    "BidirectionalFull",
    "BidirectionalSplit",
    "Chain",
    "Direct",
    "GatherRoute",
    "Hop",
    "NestedGather",
    "NestedReduce",
    "Pairwise",
    "ReduceRoute",
    "Ring",
    "ring_of",
    # schedules from schedules
    "nest",
    # rotations that keep a schedule
    "NotSymmetricError",
    "Symmetry",
    "find_symmetry",
    # schedules by name
    "PATTERNS",
    "Pattern",
    "check_pattern",
    "get_schedule",
    "list_patterns",
    "list_schedules",
    "register_schedule",
    "schedule_aliases",
    "schedule_doc",
    "schedule_mesh_rank",
    "schedule_options",
]
