"""Cases of the benchmark: layers of models as problems, and the schedules that are tried on them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from distgemm.measure.models import MODELS, get_model
from distgemm.plan.patterns import does_pattern
from distgemm.plan.problem import GemmProblem
from distgemm.schedulers import Pattern, list_patterns, schedule_options

if TYPE_CHECKING:
    from distgemm.tune import TunedConfig

__all__ = ["CANDIDATES", "FEWER_CANDIDATES", "LAYERS", "Case", "Job", "cases", "jobs", "parse_candidate"]

LAYERS = tuple(layer.name for layer in next(iter(MODELS.values())).layers)

GATHER = "all_gather_1d_tiling_cd_rotating_a"
CHAIN, PAIRWISE = "reduce_scatter_1d_tiling_a_rotating_c", "reduce_scatter_1d_pairwise_a"
CHAIN_AR, PAIRWISE_AR = "all_reduce_1d_tiling_a_rotating_c", "all_reduce_1d_pairwise_a"
DIRECT: dict[Pattern, str] = {
    "ag+gemm": GATHER,
    "gemm+a2a": "all_to_all_1d_rotating_d",
    "a2a+gemm": "all_to_all_1d_rotating_a",
}
"""Of each pattern that sends no partial sums."""


def _reductions(chain: str, pairwise: str) -> tuple[str, ...]:
    return (
        f"{chain} chunks=2",
        f"{chain} chunks=2 provider=cublas",
        *(f"{pairwise} chunks={chunks}" for chunks in (1, 2, 4)),
    )


CANDIDATES: dict[Pattern, tuple[str, ...]] = {
    "gemm+rs": _reductions(CHAIN, PAIRWISE),
    "gemm+ar": _reductions(CHAIN_AR, PAIRWISE_AR),
    **{
        pattern: tuple(f"{name} chunks={chunks}{more}" for more in ("", " provider=cublas") for chunks in (1, 2))
        for pattern, name in DIRECT.items()
    },
}
"""The configurations that are tried by default, as :meth:`distgemm.tune.TunedConfig.parse` reads them."""

FEWER_CANDIDATES: dict[Pattern, tuple[str, ...]] = {
    **{pattern: (f"{name} chunks=1", f"{name} chunks=1 provider=cublas") for pattern, name in DIRECT.items()},
    "gemm+rs": (f"{CHAIN} chunks=2", f"{PAIRWISE} chunks=1"),
    "gemm+ar": (f"{CHAIN_AR} chunks=2", f"{PAIRWISE_AR} chunks=1"),
}
"""The configurations that are tried in a quick run."""


class Case(NamedTuple):
    """A layer with some number of tokens, on ``ranks`` ranks that each have the share of one of ``tp`` ranks.

    Attributes:
        model: name of the model.
        layer: name of the layer.
        pattern: what is done over the ranks.
        m, n, k: extents of the whole problem on these ranks.
        ranks: number of ranks.
        tp: number of ranks that share the layer.
        dtype: element type.
    """

    model: str
    layer: str
    pattern: Pattern
    m: int
    n: int
    k: int
    ranks: int
    tp: int
    dtype: str = "bfloat16"

    @property
    def problem(self) -> GemmProblem:
        """The problem on these ranks."""
        return GemmProblem(self.m, self.n, self.k, dtype=self.dtype)

    @property
    def local(self) -> tuple[int, int, int]:
        """m, n, k of the GEMM of one rank."""
        if self.pattern == "ag+gemm":
            return self.m, self.n // self.ranks, self.k
        if self.pattern in {"gemm+a2a", "a2a+gemm"}:
            return self.m // self.ranks, self.n, self.k
        return self.m, self.n, self.k // self.ranks

    @property
    def label(self) -> str:
        """Model, layer and pattern in a few words."""
        return f"{self.model.removeprefix('llama-3-')} {self.layer} {self.pattern}"

    def __str__(self) -> str:
        return f"{self.label} m={self.m}"


class Job(NamedTuple):
    """A case, and the configurations that are tried on it."""

    case: Case
    candidates: tuple[TunedConfig, ...]


def cases(
    models: Sequence[str],
    layers: Sequence[str],
    patterns: Sequence[Pattern],
    ms: Sequence[int],
    ranks: int,
    tp: int,
    dtype: str = "bfloat16",
) -> list[Case]:
    """The layers of models, model by model.

    Args:
        models, layers, patterns: names; a layer has a case for each pattern that can compute it.
        ms: numbers of tokens.
        ranks: number of ranks that run.
        tp: number of ranks that share a layer. Each rank that runs has the share of one of them.
        dtype: element type.

    Raises:
        ValueError: for an unknown name, for more ranks than tp, for layers that tp ranks cannot share evenly, and if no
            layer has one of the patterns.
    """
    for option, given, known in (("--layer", layers, LAYERS), ("--pattern", patterns, list_patterns())):
        for name in given:
            if name not in known:
                raise ValueError(f"{option} is one of {', '.join(known)}, got {name!r}")
    if ranks > tp:
        raise ValueError(f"--ranks {ranks} is more than the --tp {tp} ranks that share a layer")
    found = []
    for model in models:
        for layer in get_model(model).layers:
            if layer.name not in layers:
                continue
            n, k = layer.among(ranks, tp)
            for m in ms:
                for pattern in (*layer.patterns, *layer.all_to_alls):
                    if pattern in patterns:
                        found.append(Case(model, layer.name, pattern, m, n, k, ranks, tp, dtype))
    if not found:
        raise ValueError(f"none of the layers {', '.join(layers)} has the pattern {' or '.join(patterns)}")
    return found


def parse_candidate(text: str) -> TunedConfig:
    """The configuration that a text such as "gemm+rs chunks=2 provider=cublas" names.

    Raises:
        ValueError: if the text has another form, or the schedule is unknown.
    """
    from distgemm.tune import TunedConfig

    config = TunedConfig.parse(text)
    if config.method == "unfused":
        raise ValueError(f"a schedule is wanted; the unfused program is measured anyway: got {text!r}")
    schedule_options(config.schedule)  # raises for an unknown schedule
    return config


def jobs(found: Sequence[Case], candidates: Mapping[Pattern, Sequence[str]] | Sequence[str] = CANDIDATES) -> list[Job]:
    """The cases, each with the configurations that are tried on it.

    Args:
        found: the cases.
        candidates: configurations as text, by pattern; or for all cases, where each case takes those whose plan begins
            and ends with the shards of its pattern.

    Raises:
        ValueError: for one rank, for tokens that the ranks cannot share evenly, for an unknown schedule, and for a
            configuration that does no case's pattern.
    """
    parsed = {} if isinstance(candidates, Mapping) else {text: parse_candidate(text) for text in candidates}
    listed: list[Job] = []
    used: set[str] = set()
    for case in found:
        if case.ranks < 2:
            raise ValueError(f"--ranks is at least 2, got {case.ranks}")
        if case.m % case.ranks:
            raise ValueError(f"--m is a multiple of the {case.ranks} ranks, got {case.m}")
        if isinstance(candidates, Mapping):
            tried = [parse_candidate(text) for text in candidates[case.pattern]]
        else:
            fitting = {
                text: config
                for text, config in parsed.items()
                if does_pattern(config.plan(case.problem, case.ranks), case.pattern)
            }
            used |= set(fitting)
            tried = list(dict.fromkeys(fitting.values()))
        listed.append(Job(case, tuple(tried)))
    for text in parsed:
        if text not in used:
            patterns = ", ".join(dict.fromkeys(case.pattern for case in found))
            raise ValueError(f"--schedule {text}: on {found[0].ranks} ranks it does none of {patterns}")
    return listed
