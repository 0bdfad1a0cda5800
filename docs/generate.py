"""What the site shows of the code itself: a hook of mkdocs. Nothing that it makes is committed.

It adds a page with a picture for each registered schedule, and fills the places marked ``<!-- generated: name -->``
in the pages: predictions of the simulator, measured rows, the output of the program in own_schedule.md.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distgemm
from distgemm.cli.main import CHUNKS, _fewest
from distgemm.schedulers import (
    list_families,
    registry,
    schedule_aliases,
    schedule_doc,
    schedule_mesh_rank,
    schedule_options,
)
from distgemm.simulator import Timeline, predict_unfused, simulate
from distgemm.simulator.machine import Machine
from distgemm.viz.figures import draw_schedule, draw_timeline
from distgemm.viz.text import show_schedule

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
MARK = re.compile(r"<!-- generated: ([\w ]+) -->")
MESHES = {1: (4,), 2: (2, 2), 3: (2, 2, 2)}
LARGE = {1: (8,), 2: (2, 4), 3: (2, 2, 2)}
KINDS = {
    "all_gather": "All-gather + GEMM",
    "reduce_scatter": "GEMM + reduce-scatter",
    "all_reduce": "GEMM + all-reduce",
    "tensor_parallel": "On a mesh",
}


def by_kind() -> dict[str, list[str]]:
    """All schedules in groups, for the navigation."""
    found: dict[str, list[str]] = {title: [] for title in KINDS.values()}
    for name in distgemm.list_schedules():
        title = next((title for prefix, title in KINDS.items() if name.startswith(prefix)), "Others")
        found.setdefault(title, []).append(name)
    return {title: names for title, names in found.items() if names}


# --- a page for each schedule ---------------------------------------------------------------------------


def _rows(title: str) -> dict[str, list[str]]:
    """The rows of a table of formulas.md, by their first cell."""
    section = (DOCS / "formulas.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    return {row[0].strip("`"): row[1:] for row in rows}


def _moves(name: str) -> list[str]:
    """What each rank sends, from the tables of formulas."""
    routes = _rows("Routes")
    options = schedule_options(name)
    found = []
    for move in _rows("Schedules")[name][0].split("; "):
        match = re.fullmatch(r"(\S+) by `(\w+)` along (\w)", move)
        assert match, move
        share, route, axis = match.groups()
        chosen = str(options.get(route, route))
        if chosen in _rows("Schedules"):
            chosen = _rows("Schedules")[chosen][0].split("`")[1]
        where = ("to the next rank", "to the rank before", "to each other rank")
        parts = [
            f"**{_put(cell, share, axis)}** bytes {to}"
            for cell, to in zip(routes[chosen], where, strict=True)
            if cell != "0"
        ]
        note = f" (by the default, `{route}={options[route]!r}`)" if route in options else ""
        along = f"along {axis}: " if schedule_mesh_rank(name) > 1 else ""
        found.append(f"- {along}{', '.join(parts)}{note}")
    return found


def _put(formula: str, share: str, axis: str) -> str:
    """A route's formula for this share and axis: X·T with A/N along N is N·A/N."""
    return re.sub(r"\bT\b", share, re.sub(r"\bX\b", axis, formula))


def _size(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _example(name: str) -> str:
    """What the plan of one product says."""
    mesh = LARGE[schedule_mesh_rank(name)]
    shape = (8192, 57344, 8192) if name.startswith("all_gather") else (8192, 8192, 28672)
    problem = distgemm.GemmProblem(*shape)
    plan = distgemm.make_plan(problem, distgemm.get_schedule(name, mesh=mesh))
    links = plan.link_bytes()
    sent = {rank: sum(size for (src, _), size in links.items() if src == rank) for rank in range(plan.world_size)}
    ranks = f"{plan.world_size} ranks" + (f" as {'x'.join(map(str, mesh))}" if len(mesh) > 1 else "")
    return (
        f"For m, n, k = {', '.join(map(str, shape))} in bfloat16 on {ranks}: a rank sends {_size(max(sent.values()))}, "
        f"the busiest link carries {_size(max(links.values()))}, the workspace is "
        f"{_size(max(plan.workspace_bytes(rank) for rank in range(plan.world_size)))}."
    )


def _doc(name: str) -> str:
    """The whole docstring."""
    text = registry._entry(name).build.__doc__ or ""
    return _prose("\n".join(line.strip() for line in text.strip().splitlines()))


def _prose(text: str) -> str:
    """Text in which a product is no emphasis."""
    return re.sub(r"(?<=\w)\*(?=\w)", "·", text)


def schedule_page(name: str) -> str:
    """The page of a schedule."""
    _, workspace, waiting = _rows("Schedules")[name]
    axes = schedule_mesh_rank(name)
    mesh = MESHES[axes]
    scheduler = distgemm.get_schedule(name, mesh=mesh)
    take = "world_size=8" if axes == 1 else f"mesh={LARGE[axes]}"
    shown = f"{scheduler.world_size} ranks" + (f" in a mesh of {'x'.join(map(str, mesh))}" if axes > 1 else "")
    families = [family for family, default in list_families().items() if default == name]
    options = ", ".join(f"`{key}={value!r}`" for key, value in schedule_options(name).items())
    facts = [
        ("also called", ", ".join(f"`{alias}`" for alias in schedule_aliases(name))),
        ("default of", ", ".join(f"`{family}`" for family in families)),
        ("takes", "`world_size`" if axes == 1 else f"`mesh` of {axes} sides"),
        ("options", options),
    ]
    return "\n".join(
        [
            "---\nhide: [toc]\n---\n",
            f"# {name}\n",
            f"{_doc(name)}\n",
            *(f"- {key}: {value}" for key, value in facts if value),
            "\n```python",
            f'schedule = distgemm.get_schedule("{name}", {take})',
            "```\n",
            f"## Picture\n\nWith {shown}, one chunk. Colours and numbers are ranks, *it.* is the iteration.\n",
            f"[![Tile grids and work of {name}]({name}.svg)]({name}.svg)\n",
            "## Bytes and workspace\n\nEach rank sends\n",
            *_moves(name),
            f"\nand has a workspace of **{workspace}** bytes" + (f", W = {waiting}.\n" if waiting else ".\n"),
            f"{_example(name)}\n",
            "The symbols, other routes and the test of these formulas: [Bytes and workspace](../formulas.md).\n",
            "## Grids\n\n```text",
            show_schedule(scheduler),
            "```",
        ]
    )


def schedule_picture(name: str) -> bytes:
    """The picture of a schedule, SVG."""
    scheduler = distgemm.get_schedule(name, mesh=MESHES[schedule_mesh_rank(name)])
    return _svg(lambda path: draw_schedule(scheduler, path))


def _svg(draw: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        draw(path)
        return path.read_bytes()


def schedule_index() -> str:
    """The page that lists all schedules."""
    lines = ["# All schedules\n", "r: rank, i: iteration, all ranks modulo N. [How to choose](../which_schedule.md).\n"]
    for title, names in by_kind().items():
        lines += [f"## {title}\n", "| schedule | work and movement |", "| --- | --- |"]
        lines += [f"| [{name}]({name}.md) | {_prose(schedule_doc(name))} |" for name in names]
        lines.append("")
    return "\n".join(lines)


# --- predictions and measurements -----------------------------------------------------------------------

RANKS = 8
MACHINE = Machine.load("h200")
MODELS = {"70B": (8192, 28672), "8B": (4096, 14336)}


def _layer(layer: str, model: str, tokens: int) -> tuple[distgemm.GemmProblem, str, list[str]]:
    hidden, intermediate = MODELS[model]
    if layer == "fc1":
        names = [name for name in distgemm.list_schedules() if name.startswith("all_gather_1d")]
        return distgemm.GemmProblem(tokens, 2 * intermediate, hidden), "ag+gemm", names
    names = [name for name in distgemm.list_schedules() if name.startswith("reduce_scatter_1d")]
    return distgemm.GemmProblem(tokens, hidden, intermediate), "gemm+rs", names


@cache
def _timeline(problem: distgemm.GemmProblem, schedule: str, chunks: int) -> Timeline:
    return simulate(distgemm.make_plan(problem, schedule, RANKS, chunks=chunks), MACHINE)


def _best(problem: distgemm.GemmProblem, schedule: str) -> tuple[int, Timeline]:
    """The chunks that the command line would show, and their timeline."""
    lines = [(chunks, _timeline(problem, schedule, chunks)) for chunks in CHUNKS]
    return lines[_fewest((chunks, line.time) for chunks, line in lines)]


def predictions(layer: str, model: str, tokens: int) -> str:
    """A table of predicted times: all 1D schedules of a layer, by chunks."""
    problem, kind, names = _layer(layer, model, tokens)
    rows: list[tuple[float, str]] = []
    roof = 0.0
    for name in names:
        lines = [_timeline(problem, name, chunks) for chunks in CHUNKS]
        roof = lines[0].roof if name == list_families()[kind] else roof
        sent = sum(size for (src, _), size in lines[0].plan.link_bytes().items() if src == 0)
        best = min(line.time for line in lines)
        times = " | ".join(f"**{t}**" if t == f"{best / 1e3:.3f}" else t for t in _ms(lines))
        workspace = max(line.plan.workspace_bytes(0) for line in lines)
        rows.append((best, f"| [{name}](schedules/{name}.md) | {times} | {sent >> 20} | {workspace >> 20} |"))
    plain = predict_unfused(problem, MACHINE, kind, RANKS) / 1e3
    shape = f"m {problem.m}, n {problem.n}, k {problem.k}"
    heads = " | ".join(f"chunks={c}, ms" for c in CHUNKS)
    return "\n".join(
        [
            f"Predicted, {layer} of Llama {model}, {tokens} tokens ({shape}), bfloat16, 8 H200s, by the model:\n",
            f"| schedule | {heads} | sent by a rank, MiB | workspace, MiB |",
            f"|{' --- |' * (len(CHUNKS) + 3)}",
            *(row for _, row in sorted(rows, key=lambda pair: pair[0])),
            f"\nThe local GEMM alone, or the copies alone if they take longer: {roof / 1e3:.3f} ms. "
            f"A library's collective and one GEMM, one after the other: {plain:.3f} ms.",
        ]
    )


def _ms(lines: list[Any]) -> list[str]:
    return [f"{line.time / 1e3:.3f}" for line in lines]


GATHER = "all_gather_1d_tiling_cd_rotating_a"
RING = "reduce_scatter_1d_tiling_a_rotating_c"
PAIRWISE = "reduce_scatter_1d_pairwise_a"
COMPARED = {"fc1": [GATHER], "fc2": [RING, PAIRWISE]}
"""What the guide recommends."""

TOKENS = (512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 16384)


def by_tokens(layer: str, model: str) -> str:
    """A table of predicted times for several numbers of tokens: the schedules that the guide recommends."""
    names = COMPARED[layer]
    links = " | ".join(f"[{name}](schedules/{name}.md), ms" for name in names)
    lines = [
        f"Predicted, {layer} of Llama {model}, bfloat16, 8 H200s, in brackets the chunks:\n",
        f"| tokens | {links} | a library's collective and one GEMM, ms | the local GEMM alone, ms |",
        f"|{' --- |' * (len(names) + 3)}",
    ]
    for tokens in TOKENS:
        problem, kind, _ = _layer(layer, model, tokens)
        best = [_best(problem, name) for name in names]
        times = [line.time for _, line in best] + [predict_unfused(problem, MACHINE, kind, RANKS)]
        cells = [f"**{time / 1e3:.3f}**" if time == min(times) else f"{time / 1e3:.3f}" for time in times]
        cells = [f"{cell} ({chunks})" for cell, (chunks, _) in zip(cells, best, strict=False)] + cells[-1:]
        lines.append(f"| {tokens} | {' | '.join(cells)} | {best[0][1].gemm_alone / 1e3:.3f} |")
    return "\n".join(lines)


def crossover(model: str) -> str:
    """The first row of the table of fc2 in which the ring is faster than one sum at the end."""
    for tokens in TOKENS:
        ring, pairwise = (_best(_layer("fc2", model, tokens)[0], name)[1].time for name in COMPARED["fc2"])
        if ring < pairwise:
            return str(tokens)
    raise RuntimeError(f"the ring is nowhere ahead in fc2 of {model}: the guide has to say otherwise")


def timeline_picture(layer: str) -> bytes:
    """The predicted timeline of the schedule that the guide recommends, SVG."""
    timeline = _timeline(_layer(layer, "70B", 8192)[0], COMPARED[layer][0], 1 if layer == "fc1" else 2)
    return _svg(lambda path: draw_timeline(timeline, path))


def measured(operation: str) -> str:
    """The measured rows of one kind of layer, as a table."""
    rows = json.loads((RESULTS / "simulator_vs_measured.json").read_text())["rows"]
    chosen = [row for row in rows if row["op"].startswith(operation) and row["how"] != "floor"]
    chosen.sort(key=lambda row: (-row["ranks"], row["op"], row["measured"]))
    lines = ["| ranks | operation | how | schedule that does the same | measured, ms |", f"|{' --- |' * 5}"]
    for row in chosen:
        name = row["schedule"]
        link = f"[{name}](schedules/{name}.md)" if name else "none"
        lines.append(f"| {row['ranks']} | {row['op']} | {row['how']} | {link} | {row['measured']:.3f} |")
    return "\n".join(lines)


def against_measurement() -> str:
    """All rows of the comparison, as a table."""
    rows = json.loads((RESULTS / "simulator_vs_measured.json").read_text())["rows"]
    lines = ["| ranks | operation | how | measured, ms | predicted, ms | error, % |", f"|{' --- |' * 6}"]
    for row in rows:
        figures = f"{row['measured']:.3f} | {row['predicted']:.3f} | {100 * row['error']:+.1f}"
        lines.append(f"| {row['ranks']} | {row['op']} | {row['how']} | {figures} |")
    return "\n".join(lines)


# --- measurements.md ------------------------------------------------------------------------------------


def planning(file: str, sizes: tuple[int, ...]) -> str:
    """Times of planning and proving, for these world sizes."""
    found = json.loads((RESULTS / file).read_text())
    lines = ["| schedule | ranks | ops | plan, ms | verify, ms |", "| --- | --- | --- | --- | --- |"]
    for row in (row for size in sizes for row in found["rows"] if row["world_size"] == size):
        ranks = "x".join(map(str, row["mesh"]))
        lines.append(
            f"| `{row['schedule']}` | {ranks} | {row['ops']} | {row['plan_ms']:.1f} | {row['verify_ms']:.1f} |"
        )
    return "\n".join(lines)


def mutation_score() -> str:
    """The totals of the mutation score."""
    found = json.loads((RESULTS / "mutation_score.json").read_text())
    total = {key: sum(kind[key] for kind in found["kinds"].values()) for key in next(iter(found["kinds"].values()))}
    rest = ", ".join(f"{total[key]} {key}" for key in ("missed", "slack", "equivalent", "contradiction"))
    return (
        f"{found['plans']} plans, {total['generated']} mutations: {total['caught']} caught, {rest}. "
        f"Score {found['score']:.0%}."
    )


@cache
def _results(file: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / file).read_text())


def _name(row: dict[str, Any]) -> str:
    """A row of a benchmark in a few words: the op is said where the layer does not say it."""
    reduced = f" {row['op'].partition('+')[2]}" if row["op"] != "ag+gemm" else ""
    return f"{row['model'].removeprefix('llama-3-')} {row['layer']}{reduced}, {row['m']}"


def _methods(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in row["methods"]}


AUTO = "distgemm auto"


def benchmark(file: str) -> str:
    """What schedule="auto" takes in each row of a benchmark, beside its peers and roofs, ms; above it the outcome."""
    found = _results(file)
    shot = any("torch two-shot + cuBLAS" in _methods(row) for row in found["rows"])
    lines = [
        f"| row | auto | its choice | NCCL + cuBLAS | torch {'two-shot' if shot else 'fused'} | cuBLAS alone "
        "| copies alone | peer / auto | efficiency | of pipeline |",
        f"|{' --- |' * 10}",
    ]
    for row in found["rows"]:
        methods = _methods(row)
        auto = methods[AUTO]
        peers = [each["ms"] for each in row["methods"] if each["kind"] == "peer" and each["ms"]]
        fused = methods.get("torch fused", methods.get("torch two-shot + cuBLAS"))
        times = [methods["NCCL + cuBLAS"], fused, methods["cuBLAS alone"], methods["copies alone"]]
        cells = [
            _name(row),
            f"**{auto['ms']:.4f}**",
            _choice(auto["detail"]),
            *(f"{each['ms']:.4f}" for each in times),
            f"{min(peers) / auto['ms']:.2f}",
            f"{auto['efficiency']:.0%}",
            f"{auto['pipeline_efficiency']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*outcome(file), "", *lines])


PEERS = ("NCCL + cuBLAS", "torch", "quack")
"""How the names of peers begin. Of several, as quack's tiles, the fastest in each row counts."""

RUNS = {
    "2 GPUs, gathers and reductions": "bench_2xh200.json",
    "4 GPUs, gathers and reductions": "bench_4xh200.json",
    "2 GPUs, all-reduces": "bench_all_reduce_2xh200.json",
    "4 GPUs, all-reduces": "bench_all_reduce_4xh200.json",
    "4 GPUs, few tokens": "bench_small_4xh200.json",
}
"""What the summary of the measurements has."""

EFFICIENCY, LEAST, LEAST_OF_PIPELINE = 0.92, 0.85, 0.95
"""What was aimed at: efficiency in the geometric mean; and in each row, or this share of the pipeline's roof."""


def _mean(figures: Iterable[float]) -> float:
    return statistics.geometric_mean(figures)


def _ratios(file: str, peer: str) -> dict[str, float]:
    """By row: what the fastest method of a peer takes over what auto takes. Rows in which none ran are left out."""
    found = {}
    for row in _results(file)["rows"]:
        times = [
            each["ms"]
            for each in row["methods"]
            if each["kind"] == "peer" and each["name"].startswith(peer) and each["ms"]
        ]
        if times:
            found[_name(row)] = min(times) / _methods(row)[AUTO]["ms"]
    return found


def _share(file: str, key: str) -> dict[str, float]:
    """By row: auto's share of a roof."""
    return {_name(row): _methods(row)[AUTO][key] for row in _results(file)["rows"]}


def _missed(file: str) -> list[str]:
    """Rows that reach neither share."""
    pipeline = _share(file, "pipeline_efficiency")
    return [
        name
        for name, share in _share(file, "efficiency").items()
        if share < LEAST and pipeline[name] < LEAST_OF_PIPELINE
    ]


def _together(names: list[str]) -> str:
    """Names of rows, those of one layer as one: 8b qkv, 2048 and 8192 tokens as 8b qkv 2048, 8192."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, tokens = name.rsplit(", ", 1)
        layers.setdefault(layer, []).append(tokens)
    return "; ".join(f"{layer} {', '.join(tokens)}" for layer, tokens in layers.items())


def in_short() -> str:
    """The runs of the benchmark, a row each."""
    lines = [
        "| GPUs, ops | rows | times NCCL + cuBLAS: mean, least | torch fused, two-shot: mean, least "
        "| quack: mean, least | efficiency | of pipeline roof | run of |",
        f"|{' --- |' * 8}",
    ]
    for title, file in RUNS.items():
        cells = [title, str(len(_results(file)["rows"]))]
        for peer in PEERS:
            ratios = _ratios(file, peer).values()
            cells.append(f"**{_mean(ratios):.2f}**, {min(ratios):.3f}" if ratios else "not run")
        cells += [f"{_mean(_share(file, key).values()):.3f}" for key in ("efficiency", "pipeline_efficiency")]
        lines.append(f"| {' | '.join([*cells, _results(file)['date'][:10]])} |")
    return "\n".join(lines)


def targets() -> str:
    """Which of the runs reach what was aimed at, and the rows that do not."""
    lines = [
        f"| GPUs, ops | mean efficiency, at least {EFFICIENCY}? | rows at {LEAST}, or at {LEAST_OF_PIPELINE} of the "
        "pipeline roof | rows below both | rows not faster than a peer |",
        f"|{' --- |' * 5}",
    ]
    for title, file in RUNS.items():
        mean = _mean(_share(file, "efficiency").values())
        missed, rows = _missed(file), len(_results(file)["rows"])
        slower = []
        for peer in PEERS:
            behind = [name for name, ratio in _ratios(file, peer).items() if ratio <= 1]
            slower += [f"{peer}: {_together(behind)}"] if behind else []
        cells = [
            title,
            f"{'yes' if mean >= EFFICIENCY else 'no'}, {mean:.3f}",
            f"{rows - len(missed)} of {rows}",
            _together(missed) or "none",
            ". ".join(slower) or "none",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def outcome(file: str) -> list[str]:
    """What a run of the benchmark says, the lines of a list."""
    lines = []
    for peer in PEERS:
        ratios = _ratios(file, peer)
        if not ratios:
            continue
        least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        ahead = sum(ratio > 1 for ratio in ratios.values())
        lines.append(
            f"- Faster than {peer} in {ahead} of {len(ratios)} rows: {_mean(ratios.values()):.2f} times in the "
            f"geometric mean, from {ratios[least]:.3f} ({least}) to {ratios[most]:.2f} ({most})."
        )
    efficiency, pipeline = (_share(file, key) for key in ("efficiency", "pipeline_efficiency"))
    rows, missed = len(efficiency), len(_missed(file))
    lines.append(
        f"- Efficiency {_mean(efficiency.values()):.3f} in the geometric mean, {_mean(pipeline.values()):.3f} of the "
        f"pipeline roof. {rows - missed} of {rows} rows reach {LEAST}, or {LEAST_OF_PIPELINE} of the pipeline roof."
    )
    details = [_methods(row)[AUTO]["detail"] for row in _results(file)["rows"]]
    one = [each for each in details if "waits by gemm" in each]
    unfused = sum(each.startswith("unfused") for each in details)
    alone = sum(
        "copies by gemm" in each or ("mechanism=store" in each and not each.startswith("all_reduce")) for each in one
    )
    lines.append(
        f"- Auto takes one kernel for all GEMMs in {len(one)} of {rows} rows, in {alone} of these without any copy "
        f"engine, in {sum('along=n' in each for each in one)} in chunks of columns; a kernel for each GEMM in "
        f"{rows - len(one) - unfused}; the unfused program in {unfused}."
    )
    return lines


MANY = "one_of_many_2xh200.json"
MANY_ALL_REDUCE = "one_of_many_all_reduce_2xh200.json"


def one_of_many(file: str, tokens: int, ops: tuple[str, ...]) -> str:
    """The fastest of the tuner's candidates, as one of 4 and of 8 ranks; ms."""
    by_row: dict[str, dict[int, dict[str, Any]]] = {}
    for row in _results(file)["rows"]:
        if row["case"]["m"] == tokens and row["case"]["op"] in ops:
            by_row.setdefault(_name(row["case"]).partition(",")[0], {})[row["case"]["ranks"]] = row
    lines = ["| row | 4 ranks, ms | by | efficiency | 8 ranks, ms | by | efficiency |", f"|{' --- |' * 7}"]
    for name, found in by_row.items():
        cells = [name]
        for row in map(found.get, (4, 8)):
            cells += [f"{row['ms']:.4f}", _choice(row["best"]), f"{row['efficiency']:.2f}"] if row else ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plain(candidate: str) -> str:
    """A candidate's name, its options in one order."""
    schedule, _, how = candidate.partition(", ")
    name, *options = schedule.split(" ")
    return " ".join([name, *sorted(options)]) + f", {how}"


def one_of_many_beside_four(file: str, tokens: int) -> str:
    """What the tuner's candidates for reductions take as one of 4 ranks on two GPUs, over what they took on 4 GPUs.

    Without those by one kernel in tiles chosen by shape, as these are others now.
    """
    on_four = {
        (each["layer"], each["problem"]["m"]): {_plain(name): ms for name, ms in each["ms"].items()}
        for each in _results(file)["layers"]
    }
    ratios = []
    for row in _results(MANY)["rows"]:
        case = row["case"]
        if (case["ranks"], case["m"], case["op"]) != (4, tokens, "gemm+rs"):
            continue
        took = on_four.get((f"{case['model'].removeprefix('llama-3-')} {case['layer']}", tokens), {})
        for name, ms in row["times"].items():
            by_shape = "by cutlass," in name and "waits by gemm" in name
            if not by_shape and _plain(name) in took:
                ratios.append(ms / took[_plain(name)])
    ratios.sort()
    tenth = len(ratios) // 10
    return (
        f"{len(ratios)} candidates, {_mean(ratios):.3f} in the geometric mean, eight of ten between "
        f"{ratios[tenth]:.3f} and {ratios[-1 - tenth]:.3f}, the extremes {ratios[0]:.3f} and {ratios[-1]:.3f}"
    )


def gemms() -> str:
    """CUTLASS beside cuBLAS, whole and in chunks; TFLOP/s."""
    lines = [
        "| layer | m x n x k | cuBLAS | CUTLASS | ratio | 8 chunks: cuBLAS | CUTLASS, two streams | of whole |",
        f"|{' --- |' * 8}",
    ]
    for row in _results("gemm_h200.json")["rows"]:
        rate = row["tflops"]
        chunks = rate["cutlass_chunks_two_streams"]
        cells = [
            ", ".join(row["layers"]),
            f"{row['m']} x {row['n']} x {row['k']}",
            *(f"{rate[key]:.0f}" for key in ("cublas", "cutlass")),
            f"{rate['cutlass'] / rate['cublas']:.3f}",
            f"{rate['cublas_chunks']:.0f}",
            f"{chunks:.0f}",
            f"{chunks / rate['cutlass']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gemms_outcome() -> str:
    """The mean and the extremes of that table."""
    rates = {", ".join(row["layers"]): row["tflops"] for row in _results("gemm_h200.json")["rows"]}
    ratios = {name: rate["cutlass"] / rate["cublas"] for name, rate in rates.items()}
    least = min(ratios, key=ratios.__getitem__)
    below = [name for name, rate in rates.items() if rate["cutlass_chunks_two_streams"] < 0.95 * rate["cutlass"]]
    return (
        f"CUTLASS reaches {_mean(ratios.values()):.3f} of cuBLAS's rate in the geometric mean, {ratios[least]:.3f} at "
        f"least ({least}). Eight chunks on two streams reach 0.95 of the whole GEMM in {len(rates) - len(below)} of "
        f"{len(rates)} layers; not in {', '.join(below)}."
    )


def host_time() -> str:
    """What a call costs the host on 2 and 4 GPUs, us."""
    names = {"all_gather": "gather", "reduce_scatter_1d_tiling": "ring", "reduce_scatter_1d_pairwise": "pairwise sums"}
    four = _results("host_time_4xh200.json")["rows"]
    lines = ["| plan | 2 GPUs: call | replay | the graph's launch | 4 GPUs: replay | the graph's launch |"]
    lines.append(f"|{' --- |' * 6}")
    for row in _results("host_time_2xh200.json")["rows"]:
        name = next(short for long, short in names.items() if row["schedule"].startswith(long))
        options = [f"{key}={value}" for key, value in row["options"].items() if key != "config"]
        key = (row["schedule"], row["options"])
        (other,) = (each["us"] for each in four if (each["schedule"], each["options"]) == key)
        times = [*(row["us"][each] for each in ("call", "replay", "graph")), other["replay"], other["graph"]]
        lines.append(f"| {', '.join([name, *options])} | {' | '.join(f'{time:.0f}' for time in times)} |")
    return "\n".join(lines)


def host_time_auto() -> str:
    """What replays of auto's choices cost the host."""
    times = [row["us"] for row in _results("host_time_auto_2xh200.json")["rows"]]
    within = sum(each["replay"] <= max(20, 0.05 * each["gpu"]) for each in times)
    least, most = min(each["replay"] for each in times), max(each["replay"] for each in times)
    return f"{least:.0f} to {most:.0f} us; {within} of {len(times)} within 20 us or 5 % of the GPU's time"


def layer() -> str:
    """A whole layer, forward and backward; ms."""
    found = _results("layer_4xh200.json")
    lines = ["| | layer | its eight products with communication |", "| --- | --- | --- |"]
    for name, time in sorted(found["layer_ms"].items(), key=lambda pair: -pair[1]):
        lines.append(f"| {name} | {time:.3f} | {sum(part[name] for part in found['parts_ms'].values()):.3f} |")
    return "\n".join(lines)


def simulator_error(key: str, rows: str) -> str:
    """One figure of the comparison, %."""
    return f"{100 * _results('simulator_vs_measured.json')['statistics'][rows][key]:.1f}"


def _choice(detail: str) -> str:
    """A choice in a few words: what its schedule's name has in common with the row is left out."""
    text = re.sub(r"(all_gather|reduce_scatter|all_reduce)_1d_", "", detail.partition(";")[0])
    names = {"tiling_cd_rotating_a": "direct", "tiling_a_rotating_c": "ring", "pairwise_a": "pairwise"}
    for long, short in names.items():
        text = text.replace(long, short)
    return text.replace("GEMMs by ", "").replace("waits by kernel", "spinning")


def comparison() -> str:
    """How far the simulator is from what was measured."""
    found = json.loads((RESULTS / "simulator_vs_measured.json").read_text())
    lines = ["| rows | number | Spearman | mean error % | mean abs. error % | largest % |", f"|{' --- |' * 6}"]
    for name, each in found["statistics"].items():
        errors = (f"{100 * each[key]:.1f}" for key in ("mean_error", "mean_abs_error", "max_abs_error"))
        lines.append(f"| {name} | {each['rows']} | {each['spearman']:.3f} | {' | '.join(errors)} |")
    return "\n".join(lines)


# --- the reader's own schedule --------------------------------------------------------------------------


def own_schedule_program() -> str:
    """The program in own_schedule.md, its first."""
    program, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "own_schedule.md").read_text(), re.S)
    return str(program)


OWN_FILE = "ring_b.py"
"""What own_schedule.md says to save it as."""

OWN_COMMANDS = (
    "verify all_gather_1d_ring_b --world-size 2,3,8",
    "simulate all_gather_1d_ring_b --world-size 8 --m 57344 --n 8192",
)


def own_schedule_run(*arguments: str) -> str:
    """What Python prints, called beside a file with that program. In another process: it registers a schedule."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / OWN_FILE).write_text(own_schedule_program())
        environment = {**os.environ, "PYTHONPATH": str(DOCS.parent), "PYTHONIOENCODING": "utf-8"}
        environment.pop("COLUMNS", None)
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise RuntimeError(f"the program in own_schedule.md fails, {arguments}:\n{done.stderr}")
    return done.stdout


def own_schedule_output() -> str:
    """What it prints."""
    return f"```text\n{own_schedule_run(OWN_FILE)}```"


def own_schedule_commands() -> str:
    """Some commands that know the schedule, and what they print."""
    lines = []
    for command in OWN_COMMANDS:
        printed = own_schedule_run("-m", "distgemm", "--import", OWN_FILE, *command.split())
        lines.append(f"$ distgemm --import {OWN_FILE} {command}\n{printed}")
    return f"```console\n{''.join(lines)}```"


MARKS: dict[str, Callable[[], str]] = {
    "fc1 70B": lambda: predictions("fc1", "70B", 8192),
    "fc1 70B small": lambda: predictions("fc1", "70B", 2048),
    "fc1 70B tokens": lambda: by_tokens("fc1", "70B"),
    "fc2 70B tokens": lambda: by_tokens("fc2", "70B"),
    "crossover 70B": lambda: crossover("70B"),
    "fc2 8B tokens": lambda: by_tokens("fc2", "8B"),
    "crossover 8B": lambda: crossover("8B"),
    "fc2 70B": lambda: predictions("fc2", "70B", 8192),
    "fc2 70B small": lambda: predictions("fc2", "70B", 2048),
    "fc1 8B": lambda: predictions("fc1", "8B", 8192),
    "fc2 8B": lambda: predictions("fc2", "8B", 8192),
    "measured fc1": lambda: measured("AG 70B fc1"),
    "measured fc2": lambda: measured("RS 70B fc2"),
    "planning": lambda: planning("planning.json", (8, 72)),
    "planning cubes": lambda: planning("planning_cubes.json", (8, 64, 216, 512)),
    "mutation score": mutation_score,
    "in short": in_short,
    "targets": targets,
    "benchmark": lambda: benchmark("bench_4xh200.json"),
    "benchmark two": lambda: benchmark("bench_2xh200.json"),
    "benchmark small": lambda: benchmark("bench_small_4xh200.json"),
    "benchmark all reduce": lambda: benchmark("bench_all_reduce_4xh200.json"),
    "benchmark all reduce two": lambda: benchmark("bench_all_reduce_2xh200.json"),
    "one of many": lambda: one_of_many(MANY, 2048, ("ag+gemm", "gemm+rs")),
    "one of many 8192": lambda: one_of_many(MANY, 8192, ("ag+gemm", "gemm+rs")),
    "one of many all reduce": lambda: one_of_many(MANY_ALL_REDUCE, 2048, ("gemm+ar",)),
    "one of many beside four": lambda: one_of_many_beside_four("tune_reductions_2048_4xh200.json", 2048),
    "one of many beside four 8192": lambda: one_of_many_beside_four("tune_reductions_4xh200.json", 8192),
    "gemms": gemms,
    "gemms outcome": gemms_outcome,
    "host time": host_time,
    "host time auto": host_time_auto,
    "layer": layer,
    "comparison": comparison,
    "error of prototypes": lambda: simulator_error("mean_abs_error", "all"),
    "largest error of prototypes": lambda: simulator_error("max_abs_error", "all"),
    "error of the runtime": lambda: simulator_error("mean_abs_error", "distgemm bench"),
    "largest error of the runtime": lambda: simulator_error("max_abs_error", "distgemm bench"),
    "against measurement": against_measurement,
    "own schedule output": own_schedule_output,
    "own schedule commands": own_schedule_commands,
}


def fill(markdown: str) -> str:
    """A page with its marked places filled."""
    return MARK.sub(lambda match: MARKS[match[1]](), markdown)


# --- hooks ----------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    (schedules,) = [entry["Schedules"] for entry in config.nav or [] if "Schedules" in entry]
    del schedules[1:]
    for title, names in by_kind().items():
        schedules.append({title: [{re.sub(".*_1d_", "", name): f"schedules/{name}.md"} for name in names]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    made: dict[str, str | bytes] = {"schedules/index.md": schedule_index()}
    for name in distgemm.list_schedules():
        made |= {f"schedules/{name}.md": schedule_page(name), f"schedules/{name}.svg": schedule_picture(name)}
    made |= {f"{layer}.svg": timeline_picture(layer) for layer in ("fc1", "fc2")}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    return fill(markdown)
