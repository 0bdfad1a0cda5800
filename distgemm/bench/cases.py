"""What is measured: layers of models as problems, and the schedules that are tried on them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from distgemm.measure.models import MODELS, get_model
from distgemm.plan.derive import make_plan
from distgemm.plan.ops import Box
from distgemm.plan.options import parse_mesh, parse_options
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import PATTERNS, Pattern

__all__ = ["CANDIDATES", "FEWER", "LAYERS", "OPS", "Candidate", "Case", "Job", "boxes", "jobs", "parse_schedule"]

LAYERS = tuple(layer.name for layer in next(iter(MODELS.values())).layers)

EXECUTION = ("provider", "config", "gemm_streams", "waits", "merge", "copies")
"""Options of a candidate that are not the plan's: the fields of ``distgemm.runtime.checks.ExecutionConfig``."""


class Candidate(NamedTuple):
    """A schedule with options, of its own and of ``distgemm.compile``."""

    schedule: str
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return " ".join([self.schedule, *(f"{key}={value}" for key, value in self.options.items())])

    def plan(self, problem: GemmProblem, ranks: int) -> Plan:
        """The plan that the CUDA runtime executes. Raises ValueError as ``make_plan`` does."""
        options = {key: value for key, value in self.options.items() if key not in EXECUTION}
        size = None if "mesh" in options else ranks
        return make_plan(problem, self.schedule, size, **({"sync": "barrier"} | options))


GATHER, CHAIN, PAIRWISE = (
    "all_gather_1d_tiling_cd_rotating_a",
    "reduce_scatter_1d_tiling_a_rotating_c",
    "reduce_scatter_1d_pairwise_a",
)
CHAIN_AR, PAIRWISE_AR = "all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_pairwise_a"


def _reductions(chain: str, pairwise: str) -> tuple[Candidate, ...]:
    return (
        Candidate(chain, {"chunks": 2}),
        Candidate(chain, {"chunks": 2, "provider": "cublas"}),
        *(Candidate(pairwise, {"chunks": chunks}) for chunks in (1, 2, 4)),
    )


CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "ag+gemm": tuple(
        Candidate(GATHER, {"chunks": chunks, "provider": provider})
        for provider in ("cutlass", "cublas")
        for chunks in (1, 2)
    ),
    "gemm+rs": _reductions(CHAIN, PAIRWISE),
    "gemm+ar": _reductions(CHAIN_AR, PAIRWISE_AR),
}
"""What is tried unless told otherwise."""

FEWER: dict[str, tuple[Candidate, ...]] = {
    "ag+gemm": (Candidate(GATHER, {"chunks": 1}), Candidate(GATHER, {"chunks": 1, "provider": "cublas"})),
    "gemm+rs": (Candidate(CHAIN, {"chunks": 2}), Candidate(PAIRWISE, {"chunks": 1})),
    "gemm+ar": (Candidate(CHAIN_AR, {"chunks": 2}), Candidate(PAIRWISE_AR, {"chunks": 1})),
}
"""What is tried when it is to be quick."""


class Case(NamedTuple):
    """A layer at some number of tokens, for ``ranks`` ranks that each have what they have of it among ``tp``.

    m, n, k: extents of the whole problem on these ranks
    """

    model: str
    layer: str
    pattern: Pattern
    m: int
    n: int
    k: int
    ranks: int
    tp: int

    @property
    def problem(self) -> GemmProblem:
        """In bfloat16."""
        return GemmProblem(self.m, self.n, self.k)

    def __str__(self) -> str:
        return f"{self.model} {self.layer} {self.pattern} m={self.m}"


class Job(NamedTuple):
    """A case, and what is tried on it."""

    case: Case
    candidates: tuple[Candidate, ...]


def parse_schedule(text: str) -> Candidate:
    """ "name chunks=2 provider=cublas" as a candidate. Raises ValueError for what has no name or is no option."""
    from distgemm.schedulers import schedule_options

    name, *words = text.split() or [""]
    if not name or "=" in name:
        raise ValueError(f"--schedule takes a name and options, as in 'gemm+rs chunks=2 provider=cublas', got {text!r}")
    options = parse_options(words)
    if "mesh" in options:
        options["mesh"] = parse_mesh(str(options["mesh"]))
    schedule_options(name)  # refuses a name that is not known
    return Candidate(name, options)


def boxes(pattern: Pattern, problem: GemmProblem, ranks: int) -> tuple[tuple[Box, ...], ...]:
    """The shards of A, B and D that :class:`distgemm.measure.timing.Operation` has, each rank's as :meth:`Plan.box`."""

    def part(extent: int, rank: int) -> tuple[int, int]:
        return rank * extent // ranks, (rank + 1) * extent // ranks

    p, one = problem, (0, 1)
    m, n, k = (0, p.m), (0, p.n), (0, p.k)
    found = []
    for rank in range(ranks):
        if pattern == "ag+gemm":
            found.append(((one, part(p.m, rank), k), (one, part(p.n, rank), k), (one, m, part(p.n, rank))))
        else:
            rows = part(p.m, rank) if pattern == "gemm+rs" else m
            found.append(((one, m, part(p.k, rank)), (one, n, part(p.k, rank)), (one, rows, n)))
    return tuple(zip(*found, strict=True))


def jobs(
    models: Sequence[str],
    layers: Sequence[str],
    patterns: Sequence[str],
    ms: Sequence[int],
    ranks: int,
    tp: int,
    candidates: Mapping[str, Sequence[Candidate]] | Sequence[Candidate] = CANDIDATES,
) -> list[Job]:
    """The cases, model by model, with what is tried on each: of a list, those that do the case's op.

    Raises ValueError for names that are not known, ranks that cannot share a case evenly, and schedules that do none
    of the ops.
    """
    _known("--layers", layers, LAYERS)
    _known("--pattern", patterns, PATTERNS)
    if ranks < 2 or ranks > tp:
        raise ValueError(f"--ranks is at least 2 and at most --tp, got {ranks} and {tp}")
    found = []
    used: set[str] = set()
    for model in models:
        for layer in get_model(model).layers:
            if layer.name not in layers:
                continue
            n, k = layer.among(ranks, tp)
            for m in ms:
                if m < 1 or m % ranks:
                    raise ValueError(f"--m is a multiple of the {ranks} ranks, got {m}")
                for pattern in (each for each in layer.patterns if each in patterns):
                    case = Case(model, layer.name, pattern, m, n, k, ranks, tp)
                    tried = candidates[pattern] if isinstance(candidates, Mapping) else _doing(case, candidates)
                    used |= set(map(str, tried))
                    found.append(Job(case, tuple(tried)))
    if not found:
        raise ValueError(f"none of the layers {', '.join(layers)} runs as {', '.join(patterns)}")
    if not isinstance(candidates, Mapping):
        for candidate in candidates:
            if str(candidate) not in used:
                raise ValueError(f"--schedule {candidate}: on {ranks} ranks it does none of {', '.join(patterns)}")
    return found


def _known(option: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{option} takes some of {', '.join(known)}, got {name!r}")


def _doing(case: Case, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that start from, and end with, the shards of the case's op."""
    wanted = boxes(case.pattern, case.problem, case.ranks)
    return [each for each in candidates if each.plan(case.problem, case.ranks).shards == wanted]
