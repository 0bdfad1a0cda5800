"""The CUDA runtime: a plan on GPUs with symmetric memory, as one CUDA graph for each rank."""

from distgemm.runtime.cuda.compile import compile_plan
from distgemm.runtime.cuda.executable import CudaExecutable, Replay
from distgemm.runtime.cuda.per_tile import PerTileExecutable
from distgemm.runtime.cuda.watchdog import ReplayTimeoutError, close_workspace
from distgemm.runtime.cuda.workspace import Workspace

__all__ = [
    "CudaExecutable",
    "PerTileExecutable",
    "Replay",
    "ReplayTimeoutError",
    "Workspace",
    "close_workspace",
    "compile_plan",
]
