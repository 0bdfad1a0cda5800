"""Results of the benchmark: their file, and the figures that follow from measured times. Imports no torch.

A result has facts about the run, and ``rows``: one for each layer, pattern and number of tokens, with its ``methods``.
The fields ``name``, ``kind``, ``captured``, ``detail``, ``rounds`` (ms), ``error`` and ``wrong`` of a method are
measured; :func:`figures` adds the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Literal

from distgemm.arguments import read_json, shown, write
from distgemm.measure.roof import Roof
from distgemm.system import write_atomically

__all__ = [
    "AUTO",
    "OURS",
    "PART",
    "PEER",
    "Kind",
    "best",
    "failures",
    "figures",
    "label",
    "load",
    "notes",
    "of_executions",
    "percent",
    "roofs",
    "save",
    "summary",
    "wrong",
]

Kind = Literal["distgemm", "peer", "part"]
OURS: Kind = "distgemm"
PEER: Kind = "peer"
PART: Kind = "part"
"""Kinds of methods: this library's; others that compute the operation; parts of the operation, for roofs."""

AUTO = "distgemm auto"
UNFUSED = "NCCL + cuBLAS"
GEMMS = ("cuBLAS alone", "CUTLASS alone")
COPIES = "copies alone"

Row = dict[str, Any]
Result = dict[str, Any]


# --- figures --------------------------------------------------------------------------------------------


def roofs(times: Mapping[str, float], ranks: int) -> dict[str, float | str | None]:
    """The :class:`distgemm.measure.roof.Roof` of an operation, and the times of its parts; None if not measured.

    Args:
        times: ms of each method.
        ranks: number of ranks.

    Returns:
        ``gemm_ms``: the faster of cuBLAS and CUTLASS on the local GEMM, with its name in ``gemm``; ``copies_ms``: the
        copies alone; ``roof_ms`` and ``pipeline_roof_ms``.
    """
    gemms = {name: times[name] for name in GEMMS if name in times}
    gemm = min(gemms, key=lambda name: gemms[name]) if gemms else None
    found: dict[str, float | str | None] = {
        "gemm": gemm,
        "gemm_ms": gemms[gemm] if gemm else None,
        "copies_ms": times.get(COPIES),
        "roof_ms": None,
        "pipeline_roof_ms": None,
    }
    if (roof := _roof(found, ranks)) is not None:
        found |= {"roof_ms": roof.ms, "pipeline_roof_ms": roof.pipeline_ms}
    return found


def _roof(parts: Mapping[str, Any], ranks: int) -> Roof | None:
    known = parts["gemm_ms"] is not None and parts["copies_ms"] is not None
    return Roof(parts["gemm_ms"], parts["copies_ms"], ranks) if known else None


def figures(row: Row) -> Row:
    """The row with its :func:`roofs` and with further figures of each method; None if a figure is not known.

    The figures are ``ms``, the median of the rounds, ``min_ms``, ``max_ms`` and ``tflops`` of each GPU; and for whole
    operations ``efficiency`` (roof / time), ``pipeline_efficiency``, ``hidden`` and ``relative`` (time / that of NCCL +
    cuBLAS).
    """
    times = {each["name"]: median(each["rounds"]) for each in row["methods"] if each["rounds"]}
    if times.get(COPIES, 1.0) <= 0:  # only noise is left without the barrier
        del times[COPIES]
    found = roofs(times, row["ranks"])
    roof = _roof(found, row["ranks"])
    methods = []
    for each in row["methods"]:
        ms = times.get(each["name"])
        measured: dict[str, float | None] = dict.fromkeys(
            ("ms", "min_ms", "max_ms", "tflops", "efficiency", "pipeline_efficiency", "hidden", "relative")
        )
        if ms is not None:
            measured |= {"ms": ms, "min_ms": min(each["rounds"]), "max_ms": max(each["rounds"])}
            if each["kind"] != PART or each["name"] in GEMMS:
                measured["tflops"] = 2 * row["m"] * row["n"] * row["k"] / row["ranks"] / ms / 1e9
            if each["kind"] != PART:
                if roof is not None:
                    measured["efficiency"] = roof.ms / ms
                    measured["pipeline_efficiency"] = roof.pipeline_ms / ms
                    measured["hidden"] = roof.hidden_share(ms)
                measured["relative"] = ms / times[UNFUSED] if UNFUSED in times else None
        methods.append({**each, **measured})
    return {**row, "roofs": found, "methods": methods}


def best(row: Row, kind: Kind) -> dict[str, Any] | None:
    """The fastest method of a kind in a row with figures."""
    found = [each for each in row["methods"] if each["kind"] == kind and each["ms"] is not None]
    return min(found, key=lambda each: each["ms"]) if found else None


def of_executions(row: Row) -> dict[str, float]:
    """The time of the fastest method of each execution in a row with figures, ms: without what "auto" selected."""
    found: dict[str, float] = {}
    for each in row["methods"]:
        if each["kind"] == OURS and each["ms"] is not None and each["name"] != AUTO:
            words = dict(word.split("=", 1) for word in each["name"].split() if "=" in word)
            execution = words.get("execution", "multi_kernel")
            found[execution] = min(each["ms"], found.get(execution, math.inf))
    return found


def summary(rows: Iterable[Row]) -> dict[str, float]:
    """Geometric means over rows, of the fastest of this library's methods; without a row there is no mean.

    Returns:
        ``efficiency``, ``pipeline_efficiency``; ``peer`` and ``unfused``: time of the fastest peer, and of NCCL +
        cuBLAS, over this library's; ``least_peer``: the smallest of the former.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        ours, peer = best(row, OURS), best(row, PEER)
        if ours is None:
            continue
        each = {
            "efficiency": ours["efficiency"],
            "pipeline_efficiency": ours["pipeline_efficiency"],
            "peer": peer["ms"] / ours["ms"] if peer else None,
            "unfused": 1 / ours["relative"] if ours["relative"] else None,
        }
        for name, value in each.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    means = {name: geometric_mean(found) for name, found in values.items()}
    return means | ({"least_peer": min(values["peer"])} if "peer" in values else {})


def wrong(result: Result) -> list[str]:
    """The wrong results: row, method and error."""
    return [
        f"{label(row)}, {each['name']}: {each['error']}"
        for row in result["rows"]
        for each in row["methods"]
        if each["wrong"]
    ]


# --- files ----------------------------------------------------------------------------------------------


FIELDS = {"rows", "about", "date", "rounds", "planned", "complete", "peers"}
FACTS = {"gpus", "gpu", "cuda", "torch", "nccl", "nvls", "cutlass", "quack"}
"""What a result has, and its facts about the run."""
PLAIN_METHOD: dict[str, Any] = {"captured": True, "detail": "", "error": "", "wrong": False}
"""Fields of a method that a file may lack, as those in ``benchmarks/results`` do."""


def save(result: Result, path: Path) -> None:
    """Write a result as JSON. A reader sees the old file or the whole new one. A device or a pipe is written to."""
    text = json.dumps(result, indent=1) + "\n"
    if path.exists() and not path.is_file():
        write("path", path, text)  # to replace /dev/null would break other programs
    else:
        write_atomically(path, text)


def load(path: str | Path) -> Result:
    """Read a result from its file.

    Raises:
        ValueError: if the file cannot be read or holds something else.
    """
    found = read_json("file", path)
    about = found.get("about") if isinstance(found, dict) else None
    try:
        if not isinstance(found, dict):
            raise ValueError(f"it holds {shown(found)} instead of an object")
        if lacking := FIELDS - set(found):
            raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
        if not isinstance(about, dict) or not set(about) >= FACTS:
            raise ValueError(f"about is an object with {', '.join(sorted(FACTS))}, got {shown(about)}")
        if not isinstance(about["gpu"], str):
            raise TypeError
        found["rows"] = [
            figures(row | {"methods": [PLAIN_METHOD | each for each in row["methods"]]}) for row in found["rows"]
        ]
        for row in found["rows"]:
            label(row)  # has the fields that name a row
            for name in ("n", "k", "ranks", "tp"):
                row[name]
            for each in row["methods"]:
                if not all(isinstance(each[name], str) for name in ("name", "kind", "detail", "error")):
                    raise TypeError
        _resumptions(found)
    except KeyError as error:
        raise ValueError(f"{path} is not what distgemm bench --json wrote: a part of it lacks {error}") from None
    except (TypeError, AttributeError):
        raise ValueError(f"{path} is not what distgemm bench --json wrote: a field has a wrong type") from None
    except ValueError as error:
        raise ValueError(f"{path} is not what distgemm bench --json wrote: {error}") from None
    return found


def label(row: Row) -> str:
    """A row in a few words."""
    return f"{row['model'].removeprefix('llama-3-')} {row['layer']} {row['pattern']} m={row['m']}"


# --- remarks --------------------------------------------------------------------------------------------


def failures(row: Row) -> list[str]:
    """Lines about what failed in a row, and why."""
    whole = {"error": "nothing was measured", "tune_error": "not tuned"}
    found = [f"{what}: {row[key]}" for key, what in whole.items() if row.get(key)]
    for each in row["methods"]:
        if each["error"]:
            found.append(f"{each['name']} {'is WRONG' if each['wrong'] else 'failed'}: {each['error']}")
    return found


def notes(result: Result) -> list[str]:
    """Lines below the tables: means, what the columns are, what was not measured."""
    found = []
    means = summary(result["rows"])
    if "peer" in means:
        found.append(
            f"geometric means: the fastest peer takes {means['peer']:.3f} times as long as the fastest of distgemm (at "
            f"least {means['least_peer']:.3f}), NCCL + cuBLAS {means.get('unfused', math.nan):.3f} times; efficiency "
            f"{percent(means.get('efficiency'))}, of the pipeline's roof {percent(means.get('pipeline_efficiency'))}"
        )
    found += [
        f"ms: median of {result['rounds']} rounds, slowest rank; spread: (longest - shortest round) / median; TFLOP/s "
        "of each GPU",
        "efficiency: max(best GEMM alone, copies alone) / time; of pipeline: with 1/ranks of the shorter added",
        "hidden: 1 - (time - best GEMM alone) / copies alone, clipped to 0 % and 100 %; of NCCL: time / NCCL + cuBLAS",
    ]
    quack = result["about"]["quack"]
    found.append("quack: " + (f"{quack}{'' if result['peers'] else ', not measured'}" if quack else "not installed"))
    if not result["complete"]:
        found.append(f"the run was cut short: {len(result['rows'])} of {result['planned']} rows")
    return found + _resumptions(result)


def _resumptions(result: Result) -> list[str]:
    """A line about each resumption of a run."""
    found = []
    for each in result.get("resumptions", []):
        ratios = ", ".join(f"{anchor['row']} {anchor['ratio']:.3f}" for anchor in each["anchors"])
        found.append(f"resumed {each['date']}; new time / old time of rows that were measured again: {ratios or '-'}")
    return found


def percent(value: float | None) -> str:
    """A share as a text."""
    return "-" if value is None else f"{100 * value:.0f} %"
