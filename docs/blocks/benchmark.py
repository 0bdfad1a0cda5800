"""Runs of ``distgemm bench``."""

from __future__ import annotations

import re
from functools import cache
from statistics import geometric_mean
from typing import Any

from blocks import ROOT, rows_of, table
from distgemm.bench import report

PEERS = ("NCCL + cuBLAS", "torch", "quack")
"""How the names of peers begin. Of several, such as quack's tiles, the fastest in each row counts."""
RUNS = {
    "2 GPUs, gathers and reductions": "bench_2xh200",
    "4 GPUs, gathers and reductions": "bench_4xh200",
    "2 GPUs, all-reduces": "bench_all_reduce_2xh200",
    "4 GPUs, all-reduces": "bench_all_reduce_4xh200",
    "4 GPUs, few tokens": "bench_small_4xh200",
}
MEAN_TARGET, ROW_TARGET, PIPELINE_TARGET = 0.92, 0.85, 0.95
"""Efficiency in the geometric mean; in each row; or in each row of the pipeline roof."""


@cache
def run(file: str) -> dict[str, Any]:
    """A run of the benchmark, with the figures that follow from its rounds."""
    return report.load(ROOT / "benchmarks" / "results" / f"{file}.json")


def label(row: dict[str, Any]) -> str:
    """A row in a few words, such as "70b out rs, 2048"."""
    reduced = f" {row['pattern'].partition('+')[2]}" if row["pattern"] != "ag+gemm" else ""
    return f"{row['model'].removeprefix('llama-3-')} {row['layer']}{reduced}, {row['m']}"


def methods_of(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods of a row, by name."""
    return {each["name"]: each for each in row["methods"]}


def auto(row: dict[str, Any]) -> dict[str, Any]:
    """What schedule="auto" took."""
    return methods_of(row)["distgemm auto"]


def shares(file: str, key: str) -> dict[str, float]:
    """Auto's share of a roof, by row."""
    return {label(row): auto(row)[key] for row in run(file)["rows"]}


def ratios(file: str, peer: str) -> dict[str, float]:
    """The time of a peer's fastest method over auto's, by row. Rows in which none ran are left out."""
    found = {}
    for row in run(file)["rows"]:
        times = [
            each["ms"]
            for each in row["methods"]
            if each["kind"] == "peer" and each["name"].startswith(peer) and each["ms"]
        ]
        if times:
            found[label(row)] = min(times) / auto(row)["ms"]
    return found


@table
def ratio(file: str, peer: str) -> str:
    """The time of a peer over auto's, the geometric mean of a run."""
    return f"{geometric_mean(ratios(file, peer).values()):.2f}"


def missed(file: str) -> list[str]:
    """Rows that reach neither target."""
    pipeline = shares(file, "pipeline_efficiency")
    return [
        name
        for name, share in shares(file, "efficiency").items()
        if share < ROW_TARGET and pipeline[name] < PIPELINE_TARGET
    ]


@table
def summary() -> str:
    """The runs of the benchmark, a row each."""
    rows = []
    for title, file in RUNS.items():
        cells = [title, str(len(run(file)["rows"]))]
        for peer in PEERS:
            found = ratios(file, peer).values()
            cells.append(f"**{geometric_mean(found):.2f}**, {min(found):.3f}" if found else "not run")
        cells += [f"{geometric_mean(shares(file, key).values()):.3f}" for key in ("efficiency", "pipeline_efficiency")]
        rows.append([*cells, run(file)["date"][:10]])
    peers = " | ".join(f"{peer} / auto: mean, least" for peer in PEERS)
    return rows_of(f"GPUs, patterns | rows | {peers} | efficiency | of the pipeline roof | date", rows)


@table
def targets() -> str:
    """Which runs reach the targets, and the rows that do not."""
    rows = []
    for title, file in RUNS.items():
        mean, below, count = geometric_mean(shares(file, "efficiency").values()), missed(file), len(run(file)["rows"])
        slower = {peer: [name for name, ratio in ratios(file, peer).items() if ratio <= 1] for peer in PEERS}
        cells = [
            title,
            f"{'yes' if mean >= MEAN_TARGET else 'no'}, {mean:.3f}",
            f"{count - len(below)} of {count}",
            _by_layer(below) or "none",
            ". ".join(f"{peer}: {_by_layer(names)}" for peer, names in slower.items() if names) or "none",
        ]
        rows.append(cells)
    head = f"GPUs, patterns | mean efficiency >= {MEAN_TARGET}"
    head += f" | rows with {ROW_TARGET}, or {PIPELINE_TARGET} of the pipeline roof"
    return rows_of(f"{head} | rows below both | rows not faster than a peer", rows)


def _by_layer(names: list[str]) -> str:
    """Labels of rows, those of one layer as one: "8b qkv 2048, 8192; 8b out rs 2048"."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, tokens = name.rsplit(", ", 1)
        layers.setdefault(layer, []).append(tokens)
    return "; ".join(f"{layer} {', '.join(tokens)}" for layer, tokens in layers.items())


@table
def benchmark(file: str) -> str:
    """A run of the benchmark: what it says, and auto beside its peers and roofs."""
    rows = []
    shot = any("torch two-shot + cuBLAS" in methods_of(row) for row in run(file)["rows"])
    torch = "torch two-shot + cuBLAS" if shot else "torch fused"
    for row in run(file)["rows"]:
        ours, methods = auto(row), methods_of(row)
        peers = [each["ms"] for each in row["methods"] if each["kind"] == "peer" and each["ms"]]
        others = ("NCCL + cuBLAS", torch, "cuBLAS alone", "copies alone")
        cells = [label(row), f"**{ours['ms']:.4f}**", *(f"{methods[name]['ms']:.4f}" for name in others)]
        cells += [f"{min(peers) / ours['ms']:.2f}", f"{ours['efficiency']:.0%}", f"{ours['pipeline_efficiency']:.0%}"]
        rows.append([*cells, short(ours["detail"])])
    head = f"row | auto | NCCL + cuBLAS | torch {'two-shot' if shot else 'fused'} | cuBLAS alone | copies alone"
    head += " | peer / auto | efficiency | of the pipeline roof | auto takes"
    return "\n".join([*_outcome(file), "", rows_of(head, rows)])


def _outcome(file: str) -> list[str]:
    """What a run says, as the lines of a list."""
    lines = []
    for peer in PEERS:
        found = ratios(file, peer)
        if found:
            least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
            lines.append(
                f"- Auto is faster than {peer} in {sum(each > 1 for each in found.values())} of {len(found)} rows. "
                f"The peer takes {geometric_mean(found.values()):.2f} times as long in the geometric mean, "
                f"{found[least]:.3f} times at least ({least}) and {found[most]:.2f} times at most ({most})."
            )
    count, below = len(run(file)["rows"]), missed(file)
    efficiency, pipeline = (geometric_mean(shares(file, key).values()) for key in ("efficiency", "pipeline_efficiency"))
    lines.append(
        f"- The efficiency is {efficiency:.3f} in the geometric mean, and {pipeline:.3f} of the pipeline roof. "
        f"{count - len(below)} of {count} rows reach {ROW_TARGET}, or {PIPELINE_TARGET} of the pipeline roof."
    )
    details = [auto(row)["detail"] for row in run(file)["rows"]]
    kinds = {
        "a per-tile kernel": "per-tile kernel",
        "the fused kernel that per-tile kernels replaced": "fused kernel",
        "the unfused program": "unfused",
    }
    taken = {kind: sum(word in each for each in details) for kind, word in kinds.items()}
    taken["a kernel for each GEMM"] = count - sum(taken.values())
    lines.append(
        f"- Of {count} rows, auto takes {', '.join(f'{kind} in {rows}' for kind, rows in taken.items() if rows)}."
    )
    return lines


def short(config: str) -> str:
    """A tuned configuration in a few words; the row says which collective it is."""
    text = re.sub(r"(all_gather|reduce_scatter|all_reduce)_1d_", "", config.partition(";")[0])
    names = {"tiling_cd_rotating_a": "direct", "tiling_a_rotating_c": "chain", "pairwise_a": "pairwise"}
    for long, name in names.items():
        text = text.replace(long, name)
    return text.replace("GEMMs by ", "").replace(", 1 GEMM stream, fused", ", fused")


EXECUTIONS = ("multi_kernel", "single_kernel", "per_tile")
LAW_FACTOR, LAW_US = 1.03, 7.0


@table
def executions(file: str) -> str:
    """The fastest configuration of each execution, the fastest peer and the roof, in us, by row; and what they say."""
    rows, best_of, peers, law = [], dict.fromkeys(EXECUTIONS, 0), [], 0
    for row in run(file)["rows"]:
        ours: dict[str, list[float]] = {execution: [] for execution in EXECUTIONS}
        for each in row["methods"]:
            if each["kind"] == "distgemm":
                named = re.search(r"execution=(\w+)", each["name"])
                ours[named[1] if named else "multi_kernel"].append(each["ms"] * 1e3)
        times = {execution: min(found) for execution, found in ours.items()}
        peer = min(each["ms"] * 1e3 for each in row["methods"] if each["kind"] == "peer" and each["ms"])
        gemm = min(methods_of(row)[name]["ms"] for name in ("cuBLAS alone", "CUTLASS alone")) * 1e3
        roof, best = max(gemm, link_us(row)), min(times.values())
        best_of[min(times, key=times.__getitem__)] += 1
        peers.append(peer / best)
        holds = best <= LAW_FACTOR * roof + LAW_US
        law += holds
        cells = [f"**{time:.1f}**" if time == best else f"{time:.1f}" for time in times.values()]
        over = f"{best - roof:.1f}"
        rows.append([label(row), *cells, f"{peer:.1f}", f"{roof:.1f}", f"**{over}**" if holds else over])
    count = len(rows)
    text = (
        f"Of {count} rows, per-tile kernels are the fastest in {best_of['per_tile']}, a kernel for each GEMM in "
        f"{best_of['multi_kernel']}, and the kernel that they replaced in {best_of['single_kernel']}. The fastest "
        f"peer takes {geometric_mean(peers):.2f} times as long as the fastest of them in the geometric mean, "
        f"{min(peers):.2f} times at least; it is faster in {sum(each < 1 for each in peers)} rows. The law holds in "
        f"{law}."
    )
    head = "row | multi_kernel | replaced | per_tile | peer | roof | fastest - roof"
    return f"{text}\n\n{rows_of(head, rows)}"


def link_us(row: dict[str, Any]) -> float:
    """The time of the bytes that a rank sends at what a copy engine carries, us."""
    m, n, k = row["local"]
    sent = {"ag+gemm": m * k, "gemm+rs": m * n, "gemm+ar": 2 * m * n}[row["pattern"]]
    return sent * 2 * (row["ranks"] - 1) / row["ranks"] / 376e3
