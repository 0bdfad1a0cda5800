"""Choices by what they depend on, and the files that hold them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distgemm.gemm.cache import Choices, file_name, own_file, read_choices, record_choices
from distgemm.plan.problem import GemmProblem
from distgemm.tune.candidates import check_op
from distgemm.tune.config import Choice

__all__ = ["bucket", "bucketed", "choices_file", "gpu_name", "key_of", "look_up", "record"]

SHIPPED = Path(__file__).parent / "tuned"
COMMAND = "distgemm tune"

LEAST_BUCKET = 64
"""Below so many rows all take one choice."""


def bucket(m: int) -> int:
    """The rows at which a choice for m rows is measured: the next power of two, ``LEAST_BUCKET`` at least."""
    return max(LEAST_BUCKET, 1 << (m - 1).bit_length())


def key_of(problem: GemmProblem, op: str, world_size: int) -> str:
    """What a choice depends on, as text. Rows of each rank, C and bias do not matter."""
    p = problem
    return f"{check_op(op)} {p.m}x{p.n}x{p.k}x{p.l} {p.dtype} {p.out_dtype} {p.partial_dtype} tp:{world_size}"


def bucketed(problem: GemmProblem) -> GemmProblem:
    """With the :func:`bucket` of its rows, and equal ones for all ranks."""
    return replace(problem, m=bucket(problem.m), m_per_rank=None)


def choices_file(device: str) -> Path:
    """Where the user's own choices for this GPU are."""
    return own_file("plans", device)


def look_up(problem: GemmProblem, op: str, world_size: int, device: str) -> Choice | None:
    """The recorded choice for these extents, or that for the :func:`bucket` of m; None where there is neither.

    device: the GPU's name. Raises ValueError where a file is broken.
    """
    known = read_choices(SHIPPED / file_name("plans", device), choices_file(device), Choice.from_dict, COMMAND)
    for each in (problem, bucketed(problem)):
        found = known.get(key_of(each, op, world_size))
        if found is not None:
            return Choice.from_dict(found, "recorded")
    return None


def record(device: str, choices: Choices) -> Path:
    """Adds choices to the user's file, beside what other processes add. Returns its path.

    Raises ValueError where the file is broken, which stays as it is.
    """
    return record_choices(choices_file(device), device, choices, Choice.from_dict, COMMAND)


def gpu_name(device: torch.device) -> str:
    """What files are named by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
