"""The CUDA runtime: symmetric memory, CUTLASS, copy engines, one CUDA graph per rank."""

from distgemm.runtime.cuda.executable import CudaExecutable, Replay, compile_plan
from distgemm.runtime.cuda.watchdog import ReplayTimeoutError
from distgemm.runtime.cuda.workspace import Workspace, close_workspace

__all__ = ["CudaExecutable", "Replay", "ReplayTimeoutError", "Workspace", "close_workspace", "compile_plan"]
