"""Compares the model of per-tile kernels with measurements, and predicts what was not measured.

    python benchmarks/per_tile_model.py --json FILE

It needs no GPU. Errors are those of the fastest kernel of each row. The roof is the longer of the best GEMM alone and
the bytes at 376 GB/s. Predictions are of the fastest kernel by the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from distgemm.gemm.per_tile.bind import SMS, RankGemm
from distgemm.gemm.per_tile.kernel import KernelTraits
from distgemm.gemm.per_tile.model import Costs, TileTimes, predict_per_tile
from distgemm.gemm.per_tile.order import PieceOrder, TileOrder
from distgemm.gemm.per_tile.select import CONFIGS, traits_of
from distgemm.simulator import Machine

RESULTS = Path(__file__).parent / "results"
TP = 8
LINK_GB_PER_S = 376.0
RANKS = (2, 4, 8)
EARLIER = {"start": 4.5, "take": 6.8}
"""Costs of the kernels that were measured, which are older than those of this tree."""
EARLIER_SUM_US = 1.1
"""What a subtile of a partial sum cost them, divided by the epilogue stages."""
LOCAL_STORED_US = 1.0
"""From a store to local memory until it is known to be complete."""
SCHEDULES = {"co": "cooperative", "pp": "pingpong"}


def h100() -> Machine:
    """The machine of the measurements: the H200 with slower memory, which streams at 3000 GB/s."""
    return replace(Machine.load("h200"), name="H100", memory=3000.0)


class Earlier(RankGemm):
    """Of the kernels that were measured: they sent the rows of a group of tiles in turn."""

    @cached_property
    def pieces(self) -> PieceOrder:
        rows = self.order.group * self.traits.cluster[0] * self.traits.tile[0] // self.traits.piece_rows
        return replace(RankGemm.pieces.func(self), group=rows)


def gemm_of(row: dict[str, Any], traits: KernelTraits, ranks: int, kind: type[RankGemm] = RankGemm) -> RankGemm:
    return kind(traits, tuple(range(1, ranks)), row["m"] // ranks, row["n"], row["k"])


def measured(file: str) -> Iterator[tuple[dict[str, Any], dict[str, float], dict[str, TileTimes]]]:
    """Each row of a file, with measured and predicted times of its kernels."""
    found = json.loads((RESULTS / f"{file}.json").read_text())
    alone = found["gpus"] == 1
    costs = Costs(h100(), **EARLIER, **({"stored": LOCAL_STORED_US} if alone else {}))
    for row in found["rows"]:
        if row["layer"] == "tiny":
            continue
        times: dict[str, float] = {}
        predicted: dict[str, TileTimes] = {}
        for label, us in row["us"].items():
            parts = label.split("_")
            if label == "cublas" or parts[-1] == "sends" or parts[1] != "2x1":  # of these there are few
                continue
            traits = traits_of(f"{parts[0]}x64_{parts[1]}_{SCHEDULES[parts[2]]}", row["pattern"])
            traits = replace(traits, sends=traits.sends and not alone, epilogue_stages=int(parts[4][1:]))
            gemm = gemm_of(row, traits, TP if alone else found["gpus"], Earlier)
            earlier = replace(
                costs,
                senders=SMS * traits.tile[0] // traits.piece_rows,  # a piece had the rows of a tile
                sum_subtile=EARLIER_SUM_US / traits.epilogue_stages,
            )
            times[label], predicted[label] = us, predict_per_tile(gemm, earlier, arrived=alone)
        yield row, times, predicted


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
                "us": times[best],
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
        for machine in (h100(), Machine.load("h200")):
            gpu = machine.name[:4]
            gemm_us = alone.get((row["layer"], row["m"]), recorded) if gpu == "H100" else recorded
            for ranks in RANKS:
                found = []
                for name in CONFIGS:
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


@dataclass(frozen=True)
class Changed(RankGemm):
    """A product with another lead, in waves. None: as many as there are."""

    waves: float | None = None

    @cached_property
    def order(self) -> TileOrder:
        order, cluster = super().order, self.traits.cluster
        lead = order.units if self.waves is None else round(self.waves * SMS / (cluster[0] * cluster[1]) / self.ranks)
        return replace(order, lead=min(order.units, lead))


ORDERS: dict[str, dict[str, Any]] = {
    **{f"lead {waves} waves": {"waves": waves} for waves in (1, 3)},
    "lead all": {"waves": None},
    **{f"group {group}": {"group": group} for group in (1, 2, 4, 8)},
}
FASTER = {
    "pace 374 GB/s": {"send_gb_per_s": 374.0, "store_gb_per_s": 374.0},
    "33 senders": {"senders": 33},
    "half the latencies": {"stored": 1.0, "flag": 1.0},
    "take 1 us": {"take": 1.0},
    "start 2.5 us": {"start": 2.5},
    "sums at a fifth": {"sum_subtile": 0.05},
}


def what_if(predicted: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Times over those predicted, for other orders and faster parts: geometric mean, least, and most."""
    costs = Costs(h100())
    every = {key: value for change in FASTER.values() for key, value in change.items()}
    for name, change in {**ORDERS, **FASTER, "all of these": every}.items():
        for pattern, ranks in itertools.product(("ag+gemm", "gemm+rs", "gemm+ar"), RANKS):
            ratios, holds = [], 0
            for row in predicted:
                if (row["gpu"], row["pattern"], row["ranks"]) != ("H100", pattern, ranks):
                    continue
                gemm = gemm_of(row, traits_of(row["kernel"], pattern), ranks)
                if "waves" in change:
                    us = predict_per_tile(Changed(**{**vars_of(gemm), **change}), costs).time
                elif "group" in change:
                    us = predict_per_tile(replace(gemm, **change), costs).time
                else:
                    us = predict_per_tile(gemm, replace(costs, **change)).time
                ratios.append(us / row["time_us"])
                holds += us <= row["law_us"]
            found = {"mean": geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
            numbers = {key: round(value, 3) for key, value in found.items()}
            yield {"change": name, "pattern": pattern, "ranks": ranks, **numbers, "holds": holds}


def vars_of(gemm: RankGemm) -> dict[str, Any]:
    return {each.name: getattr(gemm, each.name) for each in fields(gemm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to a file")
    args = parser.parse_args()
    found = {"benchmark": "per_tile_model", **{file: errors(file) for file in ("per_tile_h100", "per_tile_2xh100")}}
    for file in ("per_tile_h100", "per_tile_2xh100"):
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
