"""What "auto" selects, from the file of a benchmark instead of a measurement of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distgemm.bench.cases import parse_candidate
from distgemm.bench.report import AUTO, OURS
from distgemm.bench.report import UNFUSED as NCCL
from distgemm.gemm.cache import Entries
from distgemm.plan import GemmProblem
from distgemm.schedulers import PATTERNS
from distgemm.tune.cache import CACHE, key_of
from distgemm.tune.config import UNFUSED, TunedConfig
from distgemm.tune.search import Tuned, entry_of, fastest_of, with_fallback

__all__ = ["record_benchmark"]

UNFUSED_PROGRAMS = {
    NCCL: UNFUSED,
    "torch two-shot + cuBLAS, copied": replace(UNFUSED, collective="two-shot"),
    "torch one-shot + cuBLAS": replace(UNFUSED, collective="one-shot"),
}
"""Methods of a benchmark that are unfused programs of "auto". These put D in a tensor of the caller."""


def record_benchmark(result: Mapping[str, Any], *, write: bool = True) -> list[Tuned]:
    """The fastest configuration of each row of a benchmark, recorded for the GPU that it ran on.

    Args:
        result: what :func:`distgemm.bench.report.load` reads. A row needs a method that "auto" can select: a
            configuration of this library, or one of ``UNFUSED_PROGRAMS``.
        write: whether the configurations are recorded in the cache folder.

    Raises:
        ValueError: for a row in which a method was wrong or that has no method that "auto" can select, and for
            an unknown schedule.
    """
    entries: Entries = {}
    found: list[Tuned] = []
    path = CACHE.path(result["about"]["gpu"]) if write else None
    for row in result["rows"]:
        key = key_of(GemmProblem(row["m"], row["n"], row["k"]), row["pattern"], row["ranks"])
        times: dict[TunedConfig, float] = {}
        refused: dict[str, str] = {}
        unfused = UNFUSED_PROGRAMS if row["pattern"] in PATTERNS else {}
        for method in row["methods"]:
            if method["wrong"]:
                raise ValueError(f"{key}: {method['name']} was wrong: {method['error']}")
            ours = method["kind"] == OURS and method["name"] != AUTO
            config = parse_candidate(method["name"]) if ours else unfused.get(method["name"])
            if config is not None and (method["error"] or method["ms"] is None):
                refused[str(config)] = method["error"] or "it was not measured"
            elif config is not None:
                times[config] = method["ms"]
        if not times:
            raise ValueError(f'{key}: no method was measured that schedule="auto" can select')
        ran, texts = sorted(times, key=times.__getitem__), {str(config): ms for config, ms in times.items()}
        fastest = with_fallback(fastest_of(ran, texts), ran, texts)
        entries[key] = entry_of(fastest, texts)
        found.append(Tuned(replace(fastest, source="measured"), texts, refused, path))
    if write:
        CACHE.record(result["about"]["gpu"], entries)
    return found
