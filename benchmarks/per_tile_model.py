"""Compares the model of per-tile kernels with measurements, and predicts what was not measured.

    python benchmarks/per_tile_model.py --json FILE
    python benchmarks/per_tile_model.py --fit constants       fit all but the costs of tiles: 13 minutes
    python benchmarks/per_tile_model.py --fit all             fit all constants of the model: an hour
    python benchmarks/per_tile_model.py --executions FILE     only compare with a file of `distgemm bench --executions`
    python benchmarks/per_tile_model.py --executions FILE --machine h100    errors with the figures of another machine
    python benchmarks/per_tile_model.py --executions FILE --in-line         a file from before commit 895741e

It needs no GPU. Errors are those of the fastest kernel of each row. The roof is the longer of the best GEMM alone and
the bytes at 376 GB/s. Predictions are of the fastest kernel by the model. "selected" says what `schedule="auto"` costs
where nothing is recorded or measured: the time of what it predicts to be the fastest, over the fastest of all methods.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf, log, sqrt
from pathlib import Path
from statistics import geometric_mean, mean
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distgemm.bench import report
from distgemm.gemm.per_tile import model, select
from distgemm.gemm.per_tile.bind import SMS, RankGemm
from distgemm.gemm.per_tile.model import Costs, TileCosts, predict_per_tile
from distgemm.plan import GemmProblem, PlanError
from distgemm.schedulers import Pattern
from distgemm.simulator import Machine
from distgemm.simulator.machine import MAX_FIGURE, Rate
from distgemm.tune import TunedConfig
from distgemm.tune.candidates import predictions as all_predictions

RESULTS = Path(__file__).parent / "results"
LINK_GB_PER_S = 376.0
RANKS = (2, 4, 8)
WRITTEN_TOKENS = (512, 2048, 8192)
WRITTEN = ("model", "layer", "pattern", "m", "ranks", "kernel", "time_us", "bound", "law_us", "holds")
"""Of predictions, the rows and fields that are written."""
KERNELS = "per_tile_4xh200"
"""The file of benchmarks/per_tile.py that constants are fitted to: the times of all kernels."""
IN_LINE = ("executions_4xh200", "executions_few_4xh200")
"""Files of distgemm bench, with the fastest kernels beside all other methods. Their replays take longer by NODES: each
call in a graph had a node that recorded its end, and the next call waited for that node."""
PRESENT = ("executions_2xh200", "executions_few_2xh200", "executions_tp2_2xh200", "executions_few_tp2_2xh200")
"""Files of distgemm bench since a graph has one such node, for which no call waits."""
HOT, LATER, NODES = 0.87, 8.1, 4.2
"""The rate of the GPU at its power limit in KERNELS, as a share of the machine's, and what replays take longer, us, in
KERNELS and in IN_LINE. Fitted. benchmarks/per_tile.py launches one kernel behind the other, and one process launches
those of all GPUs in turn. distgemm bench pauses, and has a process for each GPU."""
SCHEDULES: Mapping[Pattern, str] = MappingProxyType(
    {
        "ag+gemm": "all_gather_1d_tiling_cd_rotating_a",
        "gemm+rs": "reduce_scatter_1d_pairwise_a",
        "gemm+ar": "all_reduce_1d_pairwise_a",
    }
)
OTHERS = {"columns": "all_reduce_1d_tiling_b_rotating_c", "one": "all_reduce_1d_one_shot_a"}
FITTED = ("start", "ticket", "stored", "flag", "sum_subtile", "write_subtile", "take", "split_share")
SHARES = ("MEMORY_SHARE", "LINK_SHARE")
KINDS = {"co": "cooperative", "pp": "pingpong"}
LABEL = re.compile(
    r"(?P<tile>\d+x\d+)_(?P<cluster>\dx\d)_(?P<kind>co|pp)(?P<split>_split_\d)?_s\d+_b\d+_?(?P<other>\w+)?"
)
"""Kernels in files of benchmarks/per_tile.py."""


class Kernel(NamedTuple):
    """A kernel and its time, us."""

    name: str
    gemm: RankGemm
    us: float


def costs(machine: str = select.MACHINE) -> Costs:
    return Costs(Machine.load(machine))


def in_line(usual: Costs, nodes: float = NODES) -> Costs:
    """The costs in the files of IN_LINE."""
    return replace(usual, start=usual.start + nodes)


def hot(usual: Costs, share: float, later: float) -> Costs:
    """The costs in KERNELS: of a GPU that is always at its power limit, with such a share of the rate."""
    rate = usual.machine.rates["bfloat16"]
    rates = {"bfloat16": Rate(rate.peak, rate.power * share)}
    return replace(usual, start=usual.start + later, machine=replace(usual.machine, boost=MAX_FIGURE, rates=rates))


def measured_kernels() -> Iterator[tuple[dict[str, Any], list[Kernel]]]:
    """Each row of KERNELS and its kernels."""
    found = json.loads((RESULTS / f"{KERNELS}.json").read_text())
    ranks = found["gpus"]
    for row in found["rows"]:
        sizes = (row["n"] * ranks, row["k"]) if row["pattern"] == "ag+gemm" else (row["n"], row["k"] * ranks)
        kernels = []
        for label, us in row["us"].items():
            parts = LABEL.fullmatch(label)
            assert parts, label
            config = f"{parts['tile']}x64_{parts['cluster']}_{KINDS[parts['kind']]}{parts['split'] or ''}"
            schedule = OTHERS.get(parts["other"] or "", SCHEDULES[row["pattern"]])
            plan = TunedConfig.parse(schedule).plan(GemmProblem(row["m"], *sizes), ranks)
            kernels.append(Kernel(label, select.gemm_of(plan, config), us))
        yield row, kernels


def fit(with_tiles: bool) -> None:
    """Fit the constants, also the costs of tiles or not, to per-tile kernels below 3 ms, and print them.

    Of each row, these are those of KERNELS within 20 % of the fastest, and those of distgemm bench within 25 %. Weights
    are 1 for the fastest, 0.5 within 10 % of it, and 0.2 for others.
    """
    from scipy.optimize import least_squares  # only this needs it

    rows = [(0, 1.2, kernels) for _, kernels in measured_kernels()]
    for kind, file in (*((1, file) for file in IN_LINE), *((2, file) for file in PRESENT)):
        rows += [(kind, 1.25, per_tile_of(row)) for row in report.load(RESULTS / f"{file}.json")["rows"]]
    used: list[tuple[int, Kernel, float]] = []
    for kind, most, kernels in rows:
        best = min(kernel.us for kernel in kernels)
        for kernel in kernels:
            if kernel.us <= min(most * best, 3000.0):
                weight = 1.0 if kernel.us == best else 0.5 if kernel.us < 1.1 * best else 0.2
                used.append((kind, kernel, sqrt(weight)))
    tiles = sorted({kernel.gemm.traits.block_tile for _, kernel, _ in used if with_tiles})
    usual, start = dict(model.TILES), [*(getattr(costs(), name) for name in FITTED)]
    start += [*(getattr(model, name) for name in SHARES), HOT, LATER, NODES]
    start += [value for tile in tiles for value in usual[tile]]

    def misses(scales: NDArray[np.float64]) -> NDArray[np.float64]:
        values = [x * scale for x, scale in zip(start, scales.tolist(), strict=True)]
        changed, rest = dict(zip(FITTED, values, strict=False)), values[len(FITTED) :]
        model.MEMORY_SHARE, model.LINK_SHARE, share, later, nodes, *of_tiles = rest
        model.TILES = usual | {tile: TileCosts(*of_tiles[3 * i : 3 * i + 3]) for i, tile in enumerate(tiles)}
        model.COOPERATIVE_US = model.TILES[128, 256].overhead
        there = replace(costs(), **changed)
        kinds = hot(there, share, later), in_line(there, nodes), there
        found = [weight * log(predict_per_tile(x.gemm, kinds[kind]).time / x.us) for kind, x, weight in used]
        return np.array([*found, *(0.05 * np.log(scales))])  # constants that few kernels depend on stay

    ones = np.ones(len(start))
    done = least_squares(misses, ones, diff_step=0.03, loss="soft_l1", f_scale=0.06, bounds=(0.3, 3.0), max_nfev=9)
    values = [round(x * scale, 3) for x, scale in zip(start, done.x.tolist(), strict=True)]
    names = (*FITTED, *SHARES, "HOT", "LATER", "NODES")
    print(dict(zip(names, values, strict=False)))
    print({tile: values[len(names) + 3 * i : len(names) + 3 * i + 3] for i, tile in enumerate(tiles)})


def errors_of_kernels() -> dict[str, Any]:
    """Errors of the fastest kernel of each row, and what the kernel costs that the model selects."""
    rows, there = [], hot(costs(), HOT, LATER)
    for row, kernels in measured_kernels():
        predicted = [predict_per_tile(kernel.gemm, there).time for kernel in kernels]
        best = min(kernels, key=lambda kernel: kernel.us)
        selected = kernels[predicted.index(min(predicted))]
        us = predicted[kernels.index(best)]
        rows.append(
            {
                **{key: row[key] for key in ("layer", "pattern", "m")},
                "kernel": best.name,
                "us": round(best.us, 1),
                "predicted_us": round(us, 1),
                "error": round(us / best.us - 1, 4),
                "selected": selected.name,
                "selected_costs": round(selected.us / best.us - 1, 4),
            }
        )
    return {**summary(rows), "selected_costs_mean": round(mean(row["selected_costs"] for row in rows), 4), "rows": rows}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = [row["error"] for row in rows]
    absolute = [abs(each) for each in found]
    return {
        "mean_abs_error": round(mean(absolute), 4),
        "max_abs_error": max(absolute),
        "mean_error": round(mean(found), 4),
    }


def problem_of(row: dict[str, Any]) -> GemmProblem:
    return GemmProblem(row["m"], row["n"], row["k"])


def per_tile_of(row: dict[str, Any]) -> list[Kernel]:
    """The per-tile kernels of a row of distgemm bench."""
    found = []
    for each in row["methods"]:
        if "execution=per_tile" in each["name"] and each["ms"]:
            config = TunedConfig.parse(each["name"])
            gemm = select.gemm_of(config.plan(problem_of(row), row["ranks"]), config.execution.config)
            found.append(Kernel(each["name"], gemm, each["ms"] * 1e3))
    return found


def errors_of_executions(path: Path, there: Costs) -> dict[str, Any]:
    """Errors of the fastest per-tile kernel of each row of a file of distgemm bench, with the costs there."""
    rows = []
    for row in report.load(path)["rows"]:
        best = min(per_tile_of(row), key=lambda kernel: kernel.us)
        error = predict_per_tile(best.gemm, there).time / best.us - 1
        about = {key: row[key] for key in ("model", "layer", "pattern", "m")}
        rows.append({**about, "us": round(best.us, 1), "error": round(error, 4)})
    return {**summary(rows), "rows": rows}


def selected(path: Path, nodes: float = 0.0) -> dict[str, Any]:
    """What `schedule="auto"` costs in the rows of a file if nothing is recorded or measured.

    Args:
        path: of a file of distgemm bench.
        nodes: us that replays of per-tile kernels took longer than they do now.

    Its time is that of the method that has the least predicted time. Where just this one was not measured, it is that
    of the fastest method of the same kind that was.
    """
    rows = []
    for row in report.load(path)["rows"]:
        times = all_predictions(problem_of(row), row["pattern"], row["ranks"])
        best = min(times, key=lambda config: (times[config], config.method != "unfused"))
        ours = {m["name"]: m["ms"] for m in row["methods"] if m["kind"] == report.OURS and m["name"] != "distgemm auto"}
        ours = {name: ms - nodes / 1e3 * ("execution=per_tile" in name) for name, ms in ours.items()}
        unfused = {"nccl": "NCCL + cuBLAS", **{f"{x}-shot": f"torch {x}-shot + cuBLAS" for x in ("one", "two")}}
        peers = {m["name"]: m["ms"] for m in row["methods"] if m["name"] in unfused.values()}
        if best.method == "unfused":
            kind, ms = f"unfused, {best.collective}", peers[unfused[best.collective]]
        else:
            kind = best.execution.execution
            same = {name: ms for name, ms in ours.items() if TunedConfig.parse(name).execution.execution == kind}
            exact = [ms for name, ms in same.items() if replace(TunedConfig.parse(name), source=best.source) == best]
            ms = exact[0] if exact else min(same.values())
        about = {key: row[key] for key in ("model", "layer", "pattern", "m")}
        costs_more = round(ms / min(*ours.values(), *peers.values()) - 1, 4)
        rows.append({**about, "selected": kind, "costs": costs_more})
    found = [1 + row["costs"] for row in rows]
    return {"mean": round(geometric_mean(found) - 1, 4), "most": round(max(found) - 1, 4), "rows": rows}


def compared(file: str) -> dict[str, Any]:
    """What is written of a file of IN_LINE or PRESENT; of the latter, only the numbers of rows."""
    older, path = file in IN_LINE, RESULTS / f"{file}.json"
    errors = errors_of_executions(path, in_line(costs()) if older else costs())
    chosen = selected(path, NODES if older else 0.0)
    if not older:
        errors, chosen = ({**each, "rows": len(each["rows"])} for each in (errors, chosen))
    return {**errors, "selected": chosen}


def predictions() -> Iterator[dict[str, Any]]:
    """The fastest kernel of each row of IN_LINE by the model, with other numbers of ranks, too."""
    for file in IN_LINE:
        for row in report.load(RESULTS / f"{file}.json")["rows"]:
            m, n, k = row["local"]
            gathers = row["pattern"] == "ag+gemm"
            gemm_us = 1e3 * min(x["ms"] for x in row["methods"] if x["name"] in {"cuBLAS alone", "CUTLASS alone"})
            sent = 2 * m * (k if gathers else n) * (2 if row["pattern"] == "gemm+ar" else 1)
            for ranks in RANKS:
                problem = GemmProblem(m, n * ranks if gathers else n, k if gathers else k * ranks)
                schedules = [SCHEDULES[row["pattern"]], *(OTHERS.values() if row["pattern"] == "gemm+ar" else ())]
                found = []
                for schedule in schedules:
                    plan = TunedConfig.parse(schedule).plan(problem, ranks)
                    for name in select.configs_of(plan):
                        try:
                            gemm = select.gemm_of(plan, name)
                        except (PlanError, ValueError):  # shards differ, or have no rows
                            continue
                        found.append((predict_per_tile(gemm, costs()), name, gemm))
                times, name, gemm = min(found, key=lambda each: each[0].time)
                roof = max(gemm_us, sent * (ranks - 1) / ranks / LINK_GB_PER_S / 1e3)
                law = 1.03 * roof + 7
                yield {
                    **{key: row[key] for key in ("model", "layer", "pattern", "m")},
                    "ranks": ranks,
                    "kernel": name,
                    "time_us": round(times.time, 1),
                    "bound": times.bound,
                    "law_us": round(law, 1),
                    "holds": times.time <= law,
                    "gemm": gemm,
                }


def with_lead(gemm: RankGemm, waves: float) -> RankGemm:
    """With a lead of so many waves of tiles, or as many units as there are."""
    at_once = SMS // (gemm.traits.cluster[0] * gemm.traits.cluster[1])
    return replace(gemm, lead=round(min(gemm.order.units, waves * at_once / gemm.ranks)))


ORDERS: dict[str, Callable[[RankGemm], RankGemm]] = {
    **{f"lead {waves} waves": partial(with_lead, waves=waves) for waves in (1, 3)},
    "lead all": partial(with_lead, waves=inf),
    **{f"group {group}": partial(replace, group=group) for group in (1, 2, 4, 8)},
}
FASTER = {
    "pace 374 GB/s": {"send_gb_per_s": 374.0, "store_gb_per_s": 374.0},
    "half the latencies": {"stored": 0.5, "flag": 0.5},
    "take half": {"take": 0.5},
    "half the start": {"start": 0.5},
    "sums at a fifth": {"sum_subtile": 0.2},
}
"""Rates and times, or times relative to what they are."""


def what_if(predicted: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Times over those predicted, for other orders and faster parts: geometric mean, least, and most."""
    usual = costs()

    def faster(change: Mapping[str, float]) -> Costs:
        values: dict[str, Any] = {key: x if x > 1 else x * getattr(usual, key) for key, x in change.items()}
        return replace(usual, **values)

    every = {key: value for change in FASTER.values() for key, value in change.items()}
    orders = [(name, change, usual) for name, change in ORDERS.items()]
    changed = [(name, None, faster(change)) for name, change in {**FASTER, "all of these": every}.items()]
    for name, order, cost in [*orders, *changed]:
        for pattern, ranks in itertools.product(SCHEDULES, RANKS):
            ratios, holds = [], 0
            for row in predicted:
                gemm = row["gemm"]
                if (row["pattern"], row["ranks"]) != (pattern, ranks) or row["m"] < 512:
                    continue
                us = predict_per_tile(order(gemm) if order else gemm, cost).time
                ratios.append(us / row["time_us"])
                holds += us <= row["law_us"]
            found = {"mean": geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
            numbers = {key: round(value, 3) for key, value in found.items()}
            yield {"change": name, "pattern": pattern, "ranks": ranks, **numbers, "holds": holds, "rows": len(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to a file")
    parser.add_argument("--fit", choices=("constants", "all"), help="only fit, without or with the costs of tiles")
    parser.add_argument("--executions", type=Path, metavar="FILE", help="only compare with a file of distgemm bench")
    parser.add_argument("--machine", default=select.MACHINE, help="of errors of --executions [%(default)s]")
    parser.add_argument("--in-line", action="store_true", help="--executions is a file like those of IN_LINE")
    args = parser.parse_args()
    if args.fit:
        fit(args.fit == "all")
        return

    def show(name: str, figures: Mapping[str, Any]) -> None:
        print(name, {key: value for key, value in figures.items() if key != "rows"}, flush=True)

    if args.executions:
        there = costs(args.machine)
        show("errors", errors_of_executions(args.executions, in_line(there) if args.in_line else there))
        show("selected", selected(args.executions, NODES if args.in_line else 0.0))
        return
    found: dict[str, Any] = {"benchmark": "per_tile_model", "nodes_us": NODES, KERNELS: errors_of_kernels()}
    show(KERNELS, found[KERNELS])
    for file in (*IN_LINE, *PRESENT):
        found[file] = compared(file)
        show(file, found[file])
    predicted = list(predictions())
    found["what_if"] = list(what_if(predicted))
    written = (row for row in predicted if row["m"] in WRITTEN_TOKENS)
    found["predictions"] = [{key: row[key] for key in WRITTEN} for row in written]
    for row in found["what_if"]:
        print(*row.values())
    for ranks in RANKS:
        rows = [row for row in predicted if row["ranks"] == ranks]
        print(f"{ranks} H200s: the law holds in {sum(row['holds'] for row in rows)} of {len(rows)} rows")
    if args.json:
        text = json.dumps(found, indent=1)
        one_line = re.sub(r"\{\n([^{}]*)\n *\}", lambda row: "{" + " ".join(row[1].split()) + "}", text)
        args.json.write_text(one_line + "\n")


if __name__ == "__main__":
    main()
