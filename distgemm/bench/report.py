"""Figures, tables, files and pictures of what was measured. Pure functions of a result; imports no torch.

A result is what the JSON file holds: facts about the run, and ``rows``, one for each layer, op and number of tokens,
each with its ``methods``. Of a method, ``name``, ``kind``, ``captured``, ``detail``, ``rounds`` (milliseconds),
``error`` and ``wrong`` are measured; :func:`figures` adds what follows from them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from distgemm.cli.common import new_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "OURS",
    "PART",
    "PEER",
    "best",
    "draw",
    "failures",
    "figures",
    "hidden_share",
    "label",
    "load",
    "notes",
    "roofs",
    "row_table",
    "save",
    "summary",
    "summary_table",
    "wrong",
]

OURS, PEER, PART = "distgemm", "peer", "part"
"""Kinds of methods: schedules of ours; what else does the operation; a part of it, for roofs."""

UNFUSED = "NCCL + cuBLAS"
GEMMS = ("cuBLAS alone", "CUTLASS alone")
COPIES = "copies alone"

Row = dict[str, Any]
Result = dict[str, Any]


# --- figures --------------------------------------------------------------------------------------------


def roofs(times: Mapping[str, float], ranks: int) -> dict[str, float | str | None]:
    """What an operation cannot be faster than, from the milliseconds of its parts; None for what was not measured.

    gemm_ms:     the faster of cuBLAS and CUTLASS on the whole local product; ``gemm`` says which
    copies_ms:   the copies alone
    roof_ms:     the longer of both: all that can be hidden is hidden
    pipeline_roof_ms: with as many equal iterations as ranks, of which the first copy or the last GEMM has nothing to
                 hide behind: the longer of both, and a part of the shorter
    """
    gemms = {name: times[name] for name in GEMMS if name in times}
    gemm = min(gemms, key=lambda name: gemms[name]) if gemms else None
    gemm_ms, copies_ms = (gemms[gemm] if gemm else None), times.get(COPIES)
    roof = pipeline = None
    if gemm_ms is not None and copies_ms is not None:
        roof = max(gemm_ms, copies_ms)
        pipeline = roof + min(gemm_ms, copies_ms) / ranks
    return {"gemm": gemm, "gemm_ms": gemm_ms, "copies_ms": copies_ms, "roof_ms": roof, "pipeline_roof_ms": pipeline}


def hidden_share(ms: float, gemm_ms: float, copies_ms: float) -> float:
    """Share of the communication that is hidden: 1 - (time - GEMM alone) / copies alone, clipped to [0, 1]."""
    return min(1.0, max(0.0, 1 - (ms - gemm_ms) / copies_ms))


def figures(row: Row) -> Row:
    """The row with its roofs, and with what follows for each method that was measured: ``ms`` (the median of rounds),
    ``min_ms``, ``max_ms``, ``tflops`` of each GPU; for whole operations ``efficiency`` (roof / time),
    ``pipeline_efficiency``, ``hidden`` and ``relative`` (time / that of NCCL + cuBLAS). None for what is not known."""
    times = {each["name"]: median(each["rounds"]) for each in row["methods"] if each["rounds"]}
    if times.get(COPIES, 1.0) <= 0:  # what is left without a barrier, where that is all noise
        del times[COPIES]
    found = roofs(times, row["ranks"])
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
                measured |= _of_roofs(ms, found)
                measured["relative"] = ms / times[UNFUSED] if UNFUSED in times else None
        methods.append({**each, **measured})
    return {**row, "roofs": found, "methods": methods}


def _of_roofs(ms: float, found: Mapping[str, Any]) -> dict[str, float | None]:
    if found["roof_ms"] is None:
        return {}
    return {
        "efficiency": found["roof_ms"] / ms,
        "pipeline_efficiency": found["pipeline_roof_ms"] / ms,
        "hidden": hidden_share(ms, found["gemm_ms"], found["copies_ms"]),
    }


def best(row: Row, kind: str) -> dict[str, Any] | None:
    """The fastest method of a kind in a row with figures."""
    found = [each for each in row["methods"] if each["kind"] == kind and each["ms"] is not None]
    return min(found, key=lambda each: each["ms"]) if found else None


def summary(rows: Iterable[Row]) -> dict[str, float]:
    """Geometric means over the rows that have them, of the best of ours: ``efficiency`` and
    ``pipeline_efficiency``, and how many times as long the best peer takes (``peer``) and NCCL + cuBLAS (``unfused``);
    ``least_peer`` is the smallest of the former. Absent where there is no such row."""
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
    """What was computed wrongly: row, method and error."""
    return [
        f"{label(row)}, {each['name']}: {each['error']}"
        for row in result["rows"]
        for each in row["methods"]
        if each["wrong"]
    ]


# --- files ----------------------------------------------------------------------------------------------


def save(result: Result, path: Path) -> None:
    """Write a result as JSON, all of it or nothing."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(json.dumps(result, indent=1) + "\n")
    written.replace(path)


def load(path: Path) -> Result:
    """A result from its file. Raises ValueError for a file that cannot be read, or holds something else."""
    try:
        found = json.loads(path.read_text())
        found["rows"] = [figures(row) for row in found["rows"]]
        if lacking := {"about", "date", "rounds", "planned", "complete", "peers"} - set(found):
            raise KeyError(*sorted(lacking))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what distgemm bench --json wrote: {type(error).__name__}: {error}") from None
    return dict(found)


# --- tables ---------------------------------------------------------------------------------------------


def label(row: Row) -> str:
    """A row in a few words."""
    return f"{row['model'].removeprefix('llama-3-')} {row['layer']} {row['op']} m={row['m']}"


def _table(title: str | None, texts: Sequence[str], numbers: Sequence[str], last: str | None = None) -> Table:
    table = new_table(title)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    if last:
        table.add_column(last, overflow="fold")
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def row_table(row: Row) -> Table:
    """The methods of a row with figures, the fastest first; those that failed last."""
    from rich.text import Text

    as_with = f", n and k of each rank as with {row['tp']}" if row["tp"] != row["ranks"] else ""
    title = f"{label(row)}: {row['m']} x {row['n']} x {row['k']} on {row['ranks']} ranks{as_with}"
    table = _table(title, ["method"], ["ms", "spread", "TFLOP/s", "efficiency", "of pipeline", "hidden", "of NCCL"])
    for each in sorted(row["methods"], key=lambda each: math.inf if each["ms"] is None else each["ms"]):
        name = Text(each["name"] + (f" ({each['detail']})" if each["detail"] else ""))
        if each["ms"] is None:
            table.add_row(name, "WRONG" if each["wrong"] else "failed", style="red")
            continue
        table.add_row(
            name,
            _ms(each["ms"]),
            _percent((each["max_ms"] - each["min_ms"]) / each["ms"]),
            "-" if each["tflops"] is None else f"{each['tflops']:.0f}",
            _percent(each["efficiency"]),
            _percent(each["pipeline_efficiency"]),
            _percent(each["hidden"]),
            _percent(each["relative"]),
            style={OURS: "bold", PART: "dim"}.get(each["kind"]),
        )
    return table


def failures(row: Row) -> list[str]:
    """What went wrong in a row, and why."""
    whole = {"error": "nothing was measured", "tune_error": "not tuned"}
    found = [f"{what}: {row[key]}" for key, what in whole.items() if row.get(key)]
    for each in row["methods"]:
        if each["error"]:
            found.append(f"{each['name']} {'is WRONG' if each['wrong'] else 'failed'}: {each['error']}")
    return found


def summary_table(result: Result) -> Table:
    """All rows: the best of ours, the best peer, and how they compare; geometric means below."""
    from rich.text import Text

    table = _table(
        "all rows", ["row", "best distgemm"], ["ms", "efficiency", "auto", "peer ms", "peer / ours"], "best peer"
    )
    for row in result["rows"]:
        ours, peer = best(row, OURS), best(row, PEER)
        auto = next((each for each in row["methods"] if each["name"] == "distgemm auto"), None)
        table.add_row(
            label(row),
            Text(ours["name"] if ours else "-"),
            _ms(ours["ms"] if ours else None),
            _percent(ours["efficiency"] if ours else None),
            _ms(auto["ms"] if auto else None),
            _ms(peer["ms"] if peer else None),
            f"{peer['ms'] / ours['ms']:.2f}" if ours and peer else "-",
            Text(peer["name"] if peer else "-"),
        )
    return table


def notes(result: Result) -> list[str]:
    """What stands below the tables: means, what the columns say, what was not there."""
    found = []
    means = summary(result["rows"])
    if "peer" in means:
        found.append(
            f"geometric means: the best peer takes {means['peer']:.3f} times as long as the best of distgemm (least "
            f"{means['least_peer']:.3f}), NCCL + cuBLAS {means.get('unfused', math.nan):.3f} times; efficiency "
            f"{_percent(means.get('efficiency'))}, of the pipeline's roof {_percent(means.get('pipeline_efficiency'))}"
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
    return found


# --- pictures -------------------------------------------------------------------------------------------


def draw(result: Result, path: Path) -> None:
    """Bars of efficiency: for each row the best of ours, and every peer. Needs matplotlib.

    Raises ValueError for another suffix than .svg and .png, and where no row has an efficiency.
    """
    from distgemm.viz.figures import FAINT, GRID, INK, PALETTE, _dpi, _figure, _suffix

    kind = _suffix(path)
    rows = [row for row in result["rows"] if any(each["efficiency"] is not None for each in row["methods"])]
    if not rows:
        raise ValueError("there is nothing to draw: no row has a method with an efficiency")
    bars = [_bars(row) for row in rows]
    names = list(dict.fromkeys(name for each in bars for name in each))
    width, height = max(7.0, 1.2 + 0.16 * len(names) * len(rows) + 0.35 * len(rows)), 4.6
    figure = _figure(width, height)
    axes = figure.add_axes((0.8 / width, 1.5 / height, 1 - 1.0 / width, 1 - 2.3 / height))
    share = 0.85 / len(names)
    for number, name in enumerate(names):
        places = [at + (number - (len(names) - 1) / 2) * share for at, each in enumerate(bars) if name in each]
        heights = [each[name] for each in bars if name in each]
        colour = INK if number >= len(PALETTE) else PALETTE[number]
        axes.bar(places, heights, share, label=name, color=colour)
    axes.axhline(1, color=FAINT, linewidth=0.8)
    axes.set_xticks(range(len(rows)), [label(row) for row in rows], rotation=30, ha="right", size=8)
    axes.set_ylabel("efficiency: roof / time")
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    about = result["about"]
    figure.text(0.25 / width, 1 - 0.3 / height, f"distgemm on {about['gpus']} x {about['gpu']}", weight="bold")
    figure.legend(loc="upper left", bbox_to_anchor=(0.2 / width, 1 - 0.36 / height), ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, format=kind, dpi=_dpi(width, height))


def _bars(row: Row) -> dict[str, float]:
    """Efficiency by what the bar is called."""
    ours = best(row, OURS)
    found = {"distgemm, best": ours["efficiency"]} if ours else {}
    for each in row["methods"]:
        if each["name"] == "distgemm auto" or each["kind"] == PEER:
            found[each["name"]] = each["efficiency"]
    return {name: value for name, value in found.items() if value is not None}
