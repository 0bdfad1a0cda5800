"""Compares the model of per-tile kernels with measurements, and predicts what was not measured.

    python benchmarks/per_tile_model.py --json FILE
    python benchmarks/per_tile_model.py --executions FILE     with what `distgemm bench --executions` has measured

It needs no GPU. Errors are those of the fastest kernel of each row. The roof is the longer of the best GEMM alone and
the bytes at 376 GB/s. Predictions are of the fastest kernel by the model.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgemm.bench import report
from distgemm.gemm.per_tile import model, select
from distgemm.gemm.per_tile.bind import SMS, RankGemm
from distgemm.gemm.per_tile.kernel import KernelTraits
from distgemm.gemm.per_tile.model import Costs, TileCosts, TileTimes, predict_per_tile
from distgemm.gemm.per_tile.select import CONFIGS, traits_of
from distgemm.plan import GemmProblem
from distgemm.simulator import Machine
from distgemm.tune import TunedConfig

RESULTS = Path(__file__).parent / "results"
TP = 8
LINK_GB_PER_S = 376.0
RANKS = (2, 4, 8)
MEASURED = ("per_tile_later_h100", "per_tile_later_2xh100")
"""Files with the times of the present kernels."""
FITTED = ("ticket", "stored", "sum_subtile", "write_subtile", "take")
NOTHING: Mapping[str, float] = MappingProxyType({})
LOCAL_STORED_US = 1.0
"""From a store to local memory until it is known to be complete."""
SCHEDULES = {"co": "cooperative", "pp": "pingpong"}


def gemm_of(row: dict[str, Any], traits: KernelTraits, ranks: int) -> RankGemm:
    return RankGemm(traits, tuple(range(1, ranks)), row["m"] // ranks, row["n"], row["k"])


Row = tuple[dict[str, Any], dict[str, float], dict[str, TileTimes]]


def measured(file: str, changed: Mapping[str, float] = NOTHING) -> Iterator[Row]:
    """Each row of a file, with measured and predicted times of its kernels.

    The fastest kernel of a row was measured twice: the geometric mean counts. Some cooperative ones were measured
    a third time as they are now, "no borrow": that time counts.
    """
    found = json.loads((RESULTS / f"{file}.json").read_text())
    alone = found["gpus"] == 1
    costs = replace(Costs(Machine.load("h100")), **{**changed, **({"stored": LOCAL_STORED_US} if alone else {})})
    for row in found["rows"]:
        if row["layer"] == "tiny":
            continue
        times = {label: us for label, us in row["us"].items() if label.count("_") == 4}  # the others are variants
        best = min(times, key=times.__getitem__)
        twice = geometric_mean([times[best], row["us"].get("again", times[best])])
        times[best] = row["us"].get("no borrow", twice)
        predicted: dict[str, TileTimes] = {}
        for label in times:
            tile, cluster, schedule, _, stages = label.split("_")
            traits = traits_of(f"{tile}x64_{cluster}_{SCHEDULES[schedule]}", row["pattern"])
            traits = replace(traits, sends=traits.sends and not alone, epilogue_stages=int(stages[1:]))
            gemm = gemm_of(row, traits, TP if alone else found["gpus"])
            predicted[label] = predict_per_tile(gemm, costs, arrived=alone)
        yield row, times, predicted


def fit() -> None:
    """Fit the constants to all kernels, and print them."""
    from scipy.optimize import least_squares  # only this needs it

    found = (json.loads((RESULTS / f"{file}.json").read_text())["rows"] for file in MEASURED)
    names = {label.split("_")[0] for rows in found for row in rows for label in row["us"]}
    tiles = [tile for tile in model.TILES if "{}x{}".format(*tile) in names]
    start = [*(getattr(Costs(Machine.load("h100")), name) for name in FITTED), model.MEMORY_SHARE]
    start += [value for tile in tiles for value in model.TILES[tile]]
    usual = dict(model.TILES)

    def misses(scales: NDArray[np.float64]) -> NDArray[np.float64]:
        values = [x * scale for x, scale in zip(start, scales.tolist(), strict=True)]
        changed = dict(zip(FITTED, values, strict=False)) | {"flag": values[FITTED.index("stored")]}
        model.MEMORY_SHARE, rest = values[len(FITTED)], values[len(FITTED) + 1 :]
        model.TILES = usual | {tile: TileCosts(*rest[3 * i : 3 * i + 3]) for i, tile in enumerate(tiles)}
        found = []
        for file in MEASURED:
            for _, times, predicted in measured(file, changed):
                for label, us in times.items():
                    slower = us / min(times.values())
                    weight = 1.0 if slower == 1.0 else 0.5 if slower < 1.25 else 0.1
                    found.append(sqrt(weight) * log(predicted[label].time / us))
        return np.array(found)

    ones = np.ones(len(start))
    done = least_squares(misses, ones, diff_step=0.02, loss="soft_l1", f_scale=0.05, bounds=(0.2, 3.0), max_nfev=12)
    print(*(f"{x * scale:.3f}" for x, scale in zip(start, done.x, strict=True)), f"cost {done.cost:.4f}")


def errors(file: str) -> dict[str, Any]:
    rows = []
    for row, times, predicted in measured(file):
        best = min(times, key=times.__getitem__)
        selected = min(predicted, key=lambda label: predicted[label].time)
        about = {key: row[key] for key in ("layer", "pattern", "m")}
        error = predicted[best].time / times[best] - 1
        rows.append(
            {
                **about,
                "kernel": best,
                "us": round(times[best], 1),
                "predicted_us": round(predicted[best].time, 1),
                "error": round(error, 4),
                "selected": selected,
                "selected_costs": round(times[selected] / times[best] - 1, 4),
            }
        )
    absolute = [abs(row["error"]) for row in rows]
    costs = [row["selected_costs"] for row in rows]
    return {
        "mean_abs_error": round(mean(absolute), 4),
        "max_abs_error": max(absolute),
        "mean_error": round(mean(row["error"] for row in rows), 4),
        "selected_costs_mean": round(mean(costs), 4),
        "rows": rows,
    }


def predictions() -> Iterator[dict[str, Any]]:
    alone = {
        (row["layer"], row["m"]): row["us"]["cublas"]
        for row in json.loads((RESULTS / "per_tile_h100.json").read_text())["rows"]
        if "cublas" in row["us"]
    }
    for row in json.loads((RESULTS / "per_tile_2xh100.json").read_text())["rows"]:
        recorded = min(row["recorded"]["cuBLAS alone"], row["recorded"]["CUTLASS alone"])
        for machine in (Machine.load("h100"), Machine.load("h200")):
            gpu = machine.name[:4]
            gemm_us = alone.get((row["layer"], row["m"]), recorded) if gpu == "H100" else recorded
            for ranks in RANKS:
                found = []
                for name in CONFIGS[row["pattern"]]:
                    gemm = gemm_of(row, traits_of(name, row["pattern"]), ranks)
                    found.append((predict_per_tile(gemm, Costs(machine)), name))
                times, name = min(found, key=lambda pair: pair[0].time)
                roof = max(gemm_us, row["link_us"] * 2 * (ranks - 1) / ranks)
                law = 1.03 * roof + 7
                yield {
                    **{key: row[key] for key in ("layer", "pattern", "m", "n", "k")},
                    "gpu": gpu,
                    "ranks": ranks,
                    "kernel": name,
                    **{f"{key}_us": round(value, 1) for key, value in times._asdict().items()},
                    "bound": times.bound,
                    "roof_us": round(roof, 1),
                    "law_us": round(law, 1),
                    "holds": times.time <= law,
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
    "half the latencies": {"stored": 1.1, "flag": 1.1},
    "take 2 us": {"take": 2.0},
    "start 1.5 us": {"start": 1.5},
    "sums at a fifth": {"sum_subtile": 0.12},
}


def what_if(predicted: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Times over those predicted, for other orders and faster parts: geometric mean, least, and most."""
    usual = Costs(Machine.load("h100"))
    every = {key: value for change in FASTER.values() for key, value in change.items()}
    orders = [(name, change, usual) for name, change in ORDERS.items()]
    costs = [(name, None, replace(usual, **change)) for name, change in {**FASTER, "all of these": every}.items()]
    for name, order, cost in [*orders, *costs]:
        for pattern, ranks in itertools.product(("ag+gemm", "gemm+rs", "gemm+ar"), RANKS):
            ratios, holds = [], 0
            for row in predicted:
                if (row["gpu"], row["pattern"], row["ranks"]) != ("H100", pattern, ranks):
                    continue
                gemm = gemm_of(row, traits_of(row["kernel"], pattern), ranks)
                us = predict_per_tile(order(gemm) if order else gemm, cost).time
                ratios.append(us / row["time_us"])
                holds += us <= row["law_us"]
            found = {"mean": geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
            numbers = {key: round(value, 3) for key, value in found.items()}
            yield {"change": name, "pattern": pattern, "ranks": ranks, **numbers, "holds": holds}


def executions(path: Path) -> list[float]:
    """Predicted over measured time, by row, of the fastest per-tile kernel of a file of the benchmark."""
    found, result = [], report.load(path)
    for row in result["rows"]:
        ours = [each for each in row["methods"] if "execution=per_tile" in each["name"] and each["ms"]]
        best = min(ours, key=lambda each: each["ms"])
        config = TunedConfig.parse(best["name"])
        plan = config.plan(GemmProblem(row["m"], row["n"], row["k"]), row["ranks"])
        us = predict_per_tile(select.gemm_of(plan, config.execution.config), Costs(Machine.load("h200"))).time
        found.append(us / best["ms"] / 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to a file")
    parser.add_argument("--fit", action="store_true", help="only fit the constants to the measurements: 5 minutes")
    parser.add_argument("--executions", type=Path, metavar="FILE", help="only compare with a file of distgemm bench")
    args = parser.parse_args()
    if args.executions:
        ratios = executions(args.executions)
        wrong = mean(abs(ratio - 1) for ratio in ratios)
        print(
            f"{len(ratios)} rows: mean error {wrong:.1%}, predicted / measured {min(ratios):.2f} to {max(ratios):.2f}"
        )
        return
    if args.fit:
        fit()
        return
    found = {"benchmark": "per_tile_model", **{file: errors(file) for file in MEASURED}}
    for file in MEASURED:
        print(file, {key: value for key, value in found[file].items() if key != "rows"})
    found["predictions"] = list(predictions())
    found["what_if"] = list(what_if(found["predictions"]))
    for row in found["what_if"]:
        print(*row.values())
    for gpu in ("H100", "H200"):
        for ranks in RANKS:
            rows = [row for row in found["predictions"] if (row["gpu"], row["ranks"]) == (gpu, ranks)]
            print(f"{ranks} {gpu}s: the law holds in {sum(row['holds'] for row in rows)} of {len(rows)} rows")
    if args.json:
        text = json.dumps(found, indent=1)
        rows = re.sub(r"\{\n([^{}]*)\n *\}", lambda row: "{" + " ".join(row[1].split()) + "}", text)  # a line for each
        args.json.write_text(rows + "\n")


if __name__ == "__main__":
    main()
