"""Per-tile kernels: the drawing of an order, and what the model says."""

from __future__ import annotations

from collections import Counter
from typing import Any

from blocks import read, rows_of, table
from distgemm.gemm.per_tile.order import TileOrder
from distgemm.viz.text import show_tile_order

RANKS = (2, 4, 8)
FILES = {"executions_4xh200": "of 512 to 16384 tokens", "executions_few_4xh200": "of 4 to 128 tokens"}
PRESENT = {"executions_2xh200": "of 512 to 16384 tokens", "executions_few_2xh200": "of 4 to 128 tokens"}


def _label(row: dict[str, Any]) -> str:
    """A layer and its rows of A, such as "8B out, 2048"."""
    return f"{row['layer'].replace('b ', 'B ')}, {row['m']}"


@table
def tile_order(own: str) -> str:
    """The order of a small gather (own tiles "first") or reduction ("last")."""
    order = TileOrder((1, 2), blocks=2, columns=6, group=2, lead=4, own_first=own == "first")
    return f"```text\n{show_tile_order(order, 1, width=100)}\n```"


@table
def per_tile_errors() -> str:
    """How far the model is off."""
    model = read("per_tile_model")
    kernels = model["per_tile_4xh200"]
    said, present = (
        " and ".join(f"{_error(model[file])} {tokens}" for file, tokens in files.items()) for files in (FILES, PRESENT)
    )
    return (
        "For the fastest kernel of each row on 2 H200s with shares of 8 ranks, the mean absolute error is "
        f"{present}. On 4 H200s it is {said} with `distgemm bench`, and {_error(kernels)} with "
        "`benchmarks/per_tile.py`. There, the kernel that the model selects takes "
        f"{100 * kernels['selected_costs_mean']:.1f} % longer than the fastest one on average."
    )


def _error(found: dict[str, Any]) -> str:
    return (
        f"{100 * found['mean_abs_error']:.1f} % ({100 * found['max_abs_error']:.0f} % at most) in {_count(found)} rows"
    )


def _count(found: dict[str, Any]) -> int:
    """Of the files of PRESENT, only numbers of rows are kept."""
    return found["rows"] if isinstance(found["rows"], int) else len(found["rows"])


@table
def per_tile_selected() -> str:
    """What "auto" costs where nothing is recorded or measured."""
    model, said = read("per_tile_model"), []
    for files in (PRESENT, FILES):
        found = {tokens: model[file]["selected"] for file, tokens in files.items()}
        said.append(
            " and ".join(
                f"{100 * each['mean']:.1f} % longer in the mean of {_count(each)} rows {tokens} "
                f"({100 * each['most']:.0f} % at most)"
                for tokens, each in found.items()
            )
        )
    return (
        f"On 2 H200s with shares of 8 ranks that takes {said[0]}. On 4 H200s it takes {said[1]}, if a per-tile kernel "
        f"takes {model['nodes_us']} us less now than then"
    )


@table
def per_tile_predictions() -> str:
    """Predictions of rows, with what was measured on 4 H200s."""
    model = read("per_tile_model")
    keys = ("model", "layer", "pattern", "m")
    measured = {tuple(row[key] for key in keys): row for file in FILES for row in model[file]["rows"]}
    predicted: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in model["predictions"]:
        predicted.setdefault(tuple(row[key] for key in keys), {})[row["ranks"]] = row
    rows = []
    for place, found in predicted.items():
        last, known = found[RANKS[-1]], measured[place]
        kernel = last["kernel"].replace("x64_", " ").replace("_cooperative", "").replace("_pingpong", "")
        rows.append(
            [
                f"{last['model'].removeprefix('llama-3-').upper()} {last['layer']}, {last['m']}",
                f"`{last['pattern']}`",
                f"{known['us']:.1f}",
                f"{100 * known['error']:+.0f}",
                *(_time(found[ranks]) for ranks in RANKS),
                last["bound"],
                kernel.replace("_", " "),
            ]
        )
    heads = " | ".join(f"{ranks} H200s" for ranks in RANKS)
    head = f"layer, rows | pattern | 4 H200s, measured | error, % | {heads} | bound by | kernel"
    holds = Counter(row["ranks"] for each in predicted.values() for row in each.values() if row["holds"])
    counts = ", ".join(f"{holds[ranks]} with {ranks} H200s" for ranks in RANKS)
    return f"{rows_of(head, rows)}\n\nOf {len(rows)} rows, the law holds in {counts}."


def _time(row: dict[str, Any]) -> str:
    time = f"{row['time_us']:.0f}"
    return f"{f'**{time}**' if row['holds'] else time} / {row['law_us']:.0f}"


@table
def per_tile_gathered(file: str) -> str:
    """The fastest kernel of each gather, without and with all of A handed out, us."""
    rows = []
    for row in read(file)["rows"]:
        us = row["us"]
        rows.append(
            [
                _label(row),
                f"{us['again']:.1f}",
                f"{us['gathered']:.1f}",
                f"{us['gathered'] / us['again']:.2f}",
            ]
        )
    return rows_of("layer, rows | without | with all of A | ratio", rows)


@table
def per_tile_few(file: str) -> str:
    """The fastest kernel of few rows whose tiles end with their shards, and that whose tiles span them, us."""
    rows = []
    for row in read(file)["rows"]:
        us = row["us"]
        cublas = us.pop("cublas")
        ending, spanning = (
            min((name for name in us if name.endswith("_span") == spans), key=us.__getitem__) for spans in (False, True)
        )
        rows.append(
            [
                _label(row),
                f"`{row['pattern']}`",
                f"{us[ending]:.1f}",
                f"{us[spanning]:.1f}",
                " ".join(spanning.split("_")[:2]),
                f"{cublas:.1f}",
            ]
        )
    return rows_of("layer, rows | pattern | shards end tiles | tiles span shards | kernel | cuBLAS alone", rows)


@table
def per_tile_split(file: str) -> str:
    """The fastest kernel of few rows without split k, and that with it, us."""
    rows = []
    for row in read(file)["rows"]:
        us = row["us"]
        cells = [_label(row), f"`{row['pattern']}`"]
        for splits in (False, True):
            best = min((name for name in us if name != "cublas" and ("split" in name) == splits), key=us.__getitem__)
            kernel = best.replace("_pp", "").replace("_split", "").split("_s")[0]
            cells += [f"{us[best]:.1f}", kernel.replace("_", " ")]
        rows.append([*cells, f"{us['cublas']:.1f}"])
    head = "layer, rows | pattern | without | kernel | with split k | kernel, thread blocks | cuBLAS alone"
    return rows_of(head, rows)


@table
def per_tile_alone(file: str) -> str:
    """The fastest kernel of each row for which everything has arrived, beside 1.03 times its roof + 3 us."""
    rows, holds = [], 0
    for row in read(file)["rows"]:
        us = row["us"]
        if "cublas" not in us:  # the smallest replays
            continue
        best = min((name for name in us if name != "cublas"), key=us.__getitem__)
        link = None if row["pattern"] == "ag+gemm" else row["link_us"]  # alone, a gather sends nothing
        over = us[best] - 1.03 * max(us["cublas"], link or 0.0) - 3.0
        holds += over <= 0
        rows.append(
            [
                _label(row),
                f"`{row['pattern']}`",
                f"{us[best]:.1f}",
                " ".join(best.split("_")[:2]),
                f"{us['cublas']:.1f}",
                "" if link is None else f"{link:.1f}",
                f"**{over:.1f}**" if over <= 0 else f"{over:.1f}",
            ]
        )
    head = "layer, rows | pattern | us | kernel | cuBLAS alone | bytes at 376 GB/s | over the limit"
    return f"The limit holds in {holds} of {len(rows)} rows.\n\n{rows_of(head, rows)}"
