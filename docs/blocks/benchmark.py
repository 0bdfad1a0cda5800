"""Runs of ``distgemm bench``."""

from __future__ import annotations

from functools import cache
from statistics import geometric_mean
from typing import Any, NamedTuple

from blocks import ROOT, rows_of, table
from distgemm.bench import report


@cache
def run(file: str) -> dict[str, Any]:
    """A run of the benchmark, with the figures that follow from its rounds."""
    return report.load(ROOT / "benchmarks" / "results" / f"{file}.json")


def label(row: dict[str, Any]) -> str:
    """A row in a few words, such as "70b out rs, 2048"."""
    reduced = {"gemm+rs": " rs", "gemm+ar": " ar", "gemm+a2a": " a2a", "a2a+gemm": " a2a"}.get(row["pattern"], "")
    return f"{row['model'].removeprefix('llama-3-')} {row['layer']}{reduced}, {row['m']}"


def methods_of(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods of a row, by name."""
    return {each["name"]: each for each in row["methods"]}


def ratios(file: str, peer: str) -> list[float]:
    """The time of a peer's fastest method over that of the fastest execution, by row."""
    found = []
    for row in run(file)["rows"]:
        named = {**row, "methods": [each for each in row["methods"] if each["name"].startswith(peer)]}
        found.append(report.best(named, report.PEER)["ms"] / report.best(row, report.OURS)["ms"])
    return found


@table
def ratio(file: str, peer: str) -> str:
    """The time of a peer over that of the fastest execution, the geometric mean of a run."""
    return f"{geometric_mean(ratios(file, peer)):.2f}"


EXECUTIONS = {"multi_kernel": "a kernel for each GEMM", "per_tile": "a per-tile kernel"}
LAW_FACTOR, LAW_US = 1.03, 7.0


class Comparison(NamedTuple):
    """A row of a comparison of executions, in us.

    Attributes:
        name: the row in a few words.
        times: of the fastest configuration of each execution.
        peer: of the fastest peer.
        gemm: of the best GEMM alone.
        link: of the bytes at what a copy engine carries.
    """

    name: str
    times: dict[str, float]
    peer: float
    gemm: float
    link: float

    @property
    def roof(self) -> float:
        """The longer of the two."""
        return max(self.gemm, self.link)

    @property
    def best(self) -> float:
        """Of the fastest execution."""
        return min(self.times.values())

    @property
    def lawful(self) -> bool:
        """Whether the law holds."""
        return self.best <= LAW_FACTOR * self.roof + LAW_US


def comparisons(file: str) -> list[Comparison]:
    """The rows of a run."""
    found = []
    for row in run(file)["rows"]:
        times = {execution: ms * 1e3 for execution, ms in report.of_executions(row).items()}
        peer = report.best(row, report.PEER)["ms"]
        gemm = min(methods_of(row)[name]["ms"] for name in ("cuBLAS alone", "CUTLASS alone")) * 1e3
        found.append(Comparison(label(row), times, peer * 1e3, gemm, link_us(row)))
    return found


@table
def executions(file: str, *parts: str) -> str:
    """The fastest configuration of each execution, the fastest peer and the roof, in us, by row; and what they say.

    With "summary" it has no rows.
    """
    found = comparisons(file)
    counts = {name: sum(each.times[name] == each.best for each in found) for name in EXECUTIONS}
    peers = [each.peer / each.best for each in found]
    fastest_in = " and ".join(f"{EXECUTIONS[name]} in {count}" for name, count in counts.items())
    text = (
        f"Of {len(found)} rows, the fastest execution is {fastest_in}. The fastest peer takes "
        f"{geometric_mean(peers):.2f} times as long in the geometric mean, {min(peers):.2f} times at least; it is "
        f"faster in {sum(each < 1 for each in peers)} rows. The law holds in {sum(each.lawful for each in found)}: "
        + " and ".join(
            f"in {sum(each.lawful for each in bound)} of {len(bound)} whose roof is the {name}"
            for name, bound in (
                ("GEMM", [each for each in found if each.gemm >= each.link]),
                ("link", [each for each in found if each.gemm < each.link]),
            )
        )
        + "."
    )
    if parts == ("summary",):
        return text
    rows = []
    for each in found:
        cells = [
            f"**{each.times[name]:.1f}**" if each.times[name] == each.best else f"{each.times[name]:.1f}"
            for name in EXECUTIONS
        ]
        over = f"{each.best - each.roof:.1f}"
        roof = f"{each.roof:.1f} {'link' if each.gemm < each.link else 'GEMM'}"
        rows.append([each.name, *cells, f"{each.peer:.1f}", roof, f"**{over}**" if each.lawful else over])
    heads = ["row", *EXECUTIONS, "peer", "roof", "fastest - roof"]
    return f"{text}\n\n{rows_of(' | '.join(heads), rows)}"


def link_us(row: dict[str, Any]) -> float:
    """The time of the bytes that a rank sends at what a copy engine carries, us."""
    m, n, k = row["local"]
    sent = {"ag+gemm": m * k, "gemm+rs": m * n, "gemm+ar": 2 * m * n, "gemm+a2a": m * n, "a2a+gemm": m * k}
    return sent[row["pattern"]] * 2 * (row["ranks"] - 1) / row["ranks"] / 376e3


AUTO = "distgemm auto"
SPREAD = 1.05
"""Two executables of one kernel seldom differ by more in one run."""


@table
def auto(file: str) -> str:
    """What schedule="auto" takes beside the fastest peer, and the rows in which that one is clearly faster."""
    found = [(row, methods_of(row)[AUTO], report.best(row, report.PEER)) for row in run(file)["rows"]]
    ratios = [peer["ms"] / ours["ms"] for _, ours, peer in found]
    faster, clearly = (sum(each * spread < 1 for each in ratios) for spread in (1, SPREAD))
    text = (
        f"In {len(found)} rows the fastest peer takes {geometric_mean(ratios):.2f} times as long as "
        f'`schedule="auto"` in the geometric mean. It is faster in {faster} rows, by more than '
        f"{100 * (SPREAD - 1):.0f} % in {clearly}:"
    )
    rows = [
        [
            label(row),
            f"{ours['ms'] * 1e3:.1f}",
            ours["detail"].removesuffix("; recorded"),
            f"{peer['ms'] * 1e3:.1f}",
            peer["name"],
        ]
        for (row, ours, peer), each in zip(found, ratios, strict=True)
        if each * SPREAD < 1
    ]
    return f"{text}\n\n{rows_of('row | auto | what it selected | peer | which', rows)}"
