"""The collective runtime: a plan over torch.distributed, with gloo on CPUs and NCCL on GPUs."""

from distgemm.runtime.collective.executable import CollectiveExecutable, run_collective

__all__ = ["CollectiveExecutable", "run_collective"]
