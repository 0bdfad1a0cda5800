"""How far the simulator is off: ``python benchmarks/simulator_vs_measured.py [--json FILE] [--machine H200]``.

Measured: ms on H200s, bf16, in CUDA graphs, slowest rank, median. One description of the machine predicts all
rows; where the measured figure is the best of several variants, so is the predicted one.

Two programs were measured: prototypes, whose replays began and signalled in another way, which ``PROTOTYPE`` says, and
the CUDA runtime, as the machine has it, by ``distgemm bench``.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from distgemm import GemmProblem, make_plan
from distgemm.bench.choices import UNFUSED_PROGRAMS
from distgemm.bench.report import AUTO, OURS
from distgemm.simulator import predict_unfused, simulate
from distgemm.simulator.machine import Machine
from distgemm.tune import TunedConfig

GATHER = "all_gather_1d_tiling_cd_rotating_a"
RING = "reduce_scatter_1d_tiling_a_rotating_c"
PAIRWISE = "reduce_scatter_1d_pairwise_a"

# Global M x N x K at 8 ranks. At 4 ranks each rank has the same local N (all-gather) or K (reduce-scatter).
SHAPES = {
    "AG 8B qkv": (8192, 6144, 4096),
    "AG 70B qkv": (8192, 10240, 8192),
    "AG 70B fc1": (8192, 57344, 8192),
    "AG 405B qkv": (8192, 18432, 16384),
    "AG 405B fc1": (8192, 106496, 16384),
    "AG 70B fc1 M=2048": (2048, 57344, 8192),
    "RS 8B fc2": (8192, 4096, 14336),
    "RS 70B out": (8192, 8192, 8192),
    "RS 70B fc2": (8192, 8192, 28672),
    "RS 405B out": (8192, 16384, 16384),
    "RS 405B fc2": (8192, 16384, 53248),
    "RS 70B fc2 M=2048": (2048, 8192, 28672),
}

NAIVE_8 = {
    "AG 8B qkv": 0.232,
    "AG 70B qkv": 0.409,
    "AG 70B fc1": 1.541,
    "AG 405B qkv": 0.956,
    "AG 405B fc1": 5.547,
    "AG 70B fc1 M=2048": 0.397,
    "RS 8B fc2": 0.288,
    "RS 70B out": 0.443,
    "RS 70B fc2": 0.781,
    "RS 405B out": 1.008,
    "RS 405B fc2": 2.859,
}
NCCL_8 = {
    "AG 8B qkv": 0.331,
    "AG 70B qkv": 0.611,
    "AG 70B fc1": 1.680,
    "AG 405B qkv": 1.532,
    "AG 405B fc1": 5.978,
    "AG 70B fc1 M=2048": 0.493,
    "RS 8B fc2": 0.386,
    "RS 70B out": 0.592,
    "RS 70B fc2": 1.060,
    "RS 405B out": 1.474,
    "RS 405B fc2": 3.204,
}
NCCL_4 = {
    "AG 8B qkv": 0.261,
    "AG 70B qkv": 0.570,
    "AG 70B fc1": 1.673,
    "AG 405B qkv": 1.439,
    "AG 70B fc1 M=2048": 0.452,
    "RS 8B fc2": 0.368,
    "RS 70B out": 0.549,
    "RS 70B fc2": 1.008,
    "RS 405B out": 1.400,
    "RS 70B fc2 M=2048": 0.269,
}
ALL_REDUCE_4 = {
    "RS 8B fc2": 0.488,
    "RS 70B out": 0.816,
    "RS 70B fc2": 1.310,
    "RS 405B out": 1.925,
    "RS 70B fc2 M=2048": 0.339,
}
PUSH_4 = {
    "AG 8B qkv": 0.190,
    "AG 70B qkv": 0.357,
    "AG 70B fc1": 1.414,
    "AG 405B qkv": 0.936,
    "AG 70B fc1 M=2048": 0.372,
}
RING_4 = {"RS 70B out": 0.388, "RS 70B fc2": 0.719, "RS 405B out": 0.866, "RS 70B fc2 M=2048": 0.228}
SUM_4 = {
    "RS 8B fc2": 0.244,
    "RS 70B out": 0.409,
    "RS 70B fc2": 0.783,
    "RS 405B out": 0.948,
    "RS 70B fc2 M=2048": 0.208,
}
FLOOR_8 = {
    "AG 8B qkv": 0.197,
    "AG 70B qkv": 0.352,
    "AG 70B fc1": 1.371,
    "AG 405B qkv": 0.813,
    "AG 405B fc1": 5.207,
    "AG 70B fc1 M=2048": 0.323,
    "RS 8B fc2": 0.200,
    "RS 70B out": 0.352,
    "RS 70B fc2": 0.666,
    "RS 405B out": 0.797,
    "RS 405B fc2": 2.671,
}
FLOOR_4 = {
    "AG 8B qkv": 0.178,
    "AG 70B qkv": 0.301,
    "AG 70B fc1": 1.310,
    "AG 405B qkv": 0.796,
    "AG 70B fc1 M=2048": 0.355,
    "RS 8B fc2": 0.169,
    "RS 70B out": 0.300,
    "RS 70B fc2": 0.645,
    "RS 405B out": 0.741,
    "RS 70B fc2 M=2048": 0.206,
}

PROTOTYPE = {"replay": 24.0, "entry": 0.0, "copy_launch": 0.0, "signal_gap": 0.0}
PROTOTYPE_LINK = {"gap": 1.0, "latency": 14.0}
"""What the prototypes' replays, signals and copies cost besides bytes; of the machine, in the runtime."""

BENCHMARKS = [Path(__file__).parent / "results" / f"bench_schedules_{ranks}xh200.json" for ranks in (4, 2)]
"""Layers of three Llamas by ``distgemm bench``, with what schedules took that were named."""

EXECUTIONS = [Path(__file__).parent / "results" / f"executions_{run}xh200.json" for run in ("4", "few_4", "2")]
"""The same by ``distgemm bench --executions``: plans with a kernel for each GEMM, and unfused programs; on H200s."""
UNFUSED = {name.removesuffix(", copied"): config.collective for name, config in UNFUSED_PROGRAMS.items()}
"""The collectives of the benchmark's methods. The model knows no copy of what is summed."""


@dataclass(frozen=True)
class Row:
    """One measured figure and its prediction, ms.

    schedule: whose plans do what was measured; "" for a library's collective and one GEMM
    """

    ranks: int
    op: str
    how: str
    measured: float
    predicted: float
    schedule: str = ""

    @property
    def error(self) -> float:
        """predicted / measured - 1"""
        return self.predicted / self.measured - 1


def problem(op: str, ranks: int) -> GemmProblem:
    """The product of a row."""
    m, n, k = SHAPES[op]
    if op.startswith("AG"):
        return GemmProblem(m, n // 8 * ranks, k)
    return GemmProblem(m, n, k // 8 * ranks)


def prototype(machine: Machine) -> Machine:
    """The machine as the prototypes used it."""
    return dataclasses.replace(machine, **PROTOTYPE, nvlink=machine.nvlink._replace(**PROTOTYPE_LINK))


def _best(op: str, ranks: int, machine: Machine, schedule: str, chunks: list[int], gemm_streams: list[int]) -> float:
    machine = prototype(machine)
    plans = [make_plan(problem(op, ranks), schedule, ranks, chunks=count) for count in chunks]
    return min(simulate(plan, machine, gemm_streams=count).time for plan in plans for count in gemm_streams) / 1e3


def _naive(op: str, ranks: int, machine: Machine, schedule: str) -> float:
    """Pulled by the copy engine, one chunk per rank, one stream of GEMMs, a barrier per replay."""
    machine = prototype(machine)
    pull = machine.nvlink._replace(bandwidth=machine.pull_bandwidth)
    plan = make_plan(problem(op, ranks), schedule, ranks, sync="barrier")
    return simulate(plan, dataclasses.replace(machine, nvlink=pull), gemm_streams=1).time / 1e3


def predict(machine: Machine) -> list[Row]:
    """All rows."""
    rows = []
    for op, time in NAIVE_8.items():
        schedule = GATHER if op.startswith("AG") else PAIRWISE
        rows.append(Row(8, op, "pull, one stream", time, _naive(op, 8, machine, schedule), schedule))
    for how, measured, schedule, chunks, gemm_streams in (
        ("push, best of 4 or 8 chunks", PUSH_4, GATHER, [1, 2], [1, 2]),
        ("ring, chunks=2", RING_4, RING, [2], [2]),
        ("push + sum", SUM_4, PAIRWISE, [1, 2], [1, 2]),
    ):
        for op, time in measured.items():
            rows.append(Row(4, op, how, time, _best(op, 4, machine, schedule, chunks, gemm_streams), schedule))
    for ranks, table in ((8, NCCL_8), (4, NCCL_4)):
        for op, time in table.items():
            kind = "ag+gemm" if op.startswith("AG") else "gemm+rs"
            predicted = predict_unfused(problem(op, ranks), machine, kind, ranks) / 1e3
            rows.append(Row(ranks, op, "NCCL + GEMM, eager" if ranks == 8 else "NCCL + GEMM", time, predicted))
    for op, time in ALL_REDUCE_4.items():
        predicted = predict_unfused(problem(op, 4), machine, "gemm+ar", 4) / 1e3
        rows.append(Row(4, op, "GEMM + NCCL all-reduce", time, predicted))
    return rows


def benchmark(machine: Machine) -> list[Row]:
    """What ``distgemm bench`` measured of schedules that were named, waits on memory; not in the other statistics."""
    rows = []
    for case in (row for path in BENCHMARKS for row in json.loads(path.read_text())["rows"]):
        product = GemmProblem(case["m"], case["n"], case["k"])
        for method in case["methods"]:
            name, *given = method["name"].split()
            if name not in (GATHER, RING, PAIRWISE):
                continue
            options = dict(pair.split("=") for pair in given)
            chunks, gemm_streams = int(options.get("chunks", 1)), int(options.get("gemm_streams", 2))
            plan = make_plan(product, name, case["ranks"], chunks=chunks, sync="barrier")
            predicted = simulate(plan, machine, gemm_streams=gemm_streams).time / 1e3
            op = f"{case['model'].removeprefix('llama-3-')} {case['layer']} {case['m']}"
            rows.append(Row(case["ranks"], op, method["name"], method["ms"], predicted, name))
    return rows


def executions(machine: Machine, files: Sequence[Path]) -> list[Row]:
    """What ``distgemm bench --executions`` measured; not in the other statistics."""
    rows = []
    for case in (row for path in files for row in json.loads(path.read_text())["rows"]):
        product, ranks = GemmProblem(case["m"], case["n"], case["k"]), case["ranks"]
        op = f"{case['model'].removeprefix('llama-3-')} {case['layer']} {case['pattern']} {case['m']}"
        for method in case["methods"]:
            name, measured = method["name"], float(np.median(method["rounds"]))
            if name in UNFUSED:
                predicted = predict_unfused(product, machine, case["pattern"], ranks, UNFUSED[name])
                rows.append(Row(ranks, op, UNFUSED[name], measured, predicted / 1e3))
            elif method["kind"] == OURS and name != AUTO and "per_tile" not in name:
                config = TunedConfig.parse(name)
                how = "stores" if ("mechanism", "store") in config.options else "copies"
                plan, streams = config.plan(product, ranks), config.execution.gemm_streams
                rows.append(Row(ranks, op, how, measured, simulate(plan, machine, gemm_streams=streams).time / 1e3))
    return rows


def floors(machine: Machine) -> list[Row]:
    """The floor of each row, max(whole GEMM, copies alone); no plan's time, so not in the statistics."""
    machine = prototype(machine)
    rows = []
    for ranks, table in ((8, FLOOR_8), (4, FLOOR_4)):
        for op, time in table.items():
            plan = make_plan(problem(op, ranks), GATHER if op.startswith("AG") else PAIRWISE, ranks)
            rows.append(Row(ranks, op, "floor", time, simulate(plan, machine).roof / 1e3))
    return rows


def _ranks(values: list[float]) -> np.ndarray:
    array = np.asarray(values)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])


def spearman(rows: list[Row]) -> float:
    """Rank correlation of measured and predicted times."""
    one, other = _ranks([row.measured for row in rows]), _ranks([row.predicted for row in rows])
    return float(np.corrcoef(one, other)[0, 1])


def concordance(rows: list[Row], apart: float = 0.0) -> tuple[int, int]:
    """(pairs of ways to do the same op in the right order, pairs), of those that were measured so far apart."""
    by_op = defaultdict(list)
    for row in rows:
        if "all-reduce" not in row.how:
            by_op[row.ranks, row.op].append(row)
    right = pairs = 0
    for same in by_op.values():
        for one, other in combinations(same, 2):
            if max(one.measured, other.measured) >= (1 + apart) * min(one.measured, other.measured):
                pairs += 1
                right += (one.measured < other.measured) == (one.predicted < other.predicted)
    return right, pairs


def statistics(rows: list[Row]) -> dict[str, float]:
    """Rank correlation and errors of some rows."""
    errors = [abs(row.error) for row in rows]
    return {
        "rows": len(rows),
        "spearman": spearman(rows),
        "mean_error": float(np.mean([row.error for row in rows])),
        "mean_abs_error": float(np.mean(errors)),
        "median_abs_error": float(np.median(errors)),
        "max_abs_error": float(np.max(errors)),
    }


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows, all and by how they were done."""
    found = {"all": rows, "plans (not NCCL)": [row for row in rows if "NCCL" not in row.how]}
    for row in rows:
        found.setdefault(f"{row.how}, {row.ranks} ranks", []).append(row)
    return found


def main(
    output: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    machine: Annotated[str, typer.Option(help="A machine's name or JSON file.")] = "h200",
    files: Annotated[list[Path] | None, typer.Option("--executions", help="Runs of the benchmark.")] = None,
) -> None:
    """Print measured and predicted times, the error of each, and whether their order is right."""
    described = Machine.load(machine)
    rows, roofs, benched = predict(described), floors(described), benchmark(described)
    executed = executions(described, files or EXECUTIONS)
    table = Table("ranks", "op", "how", title=f"simulator against measurement: {described.name}")
    for title in ("measured ms", "predicted ms", "error %"):
        table.add_column(title, justify="right")
    for group in (rows, roofs, benched):
        for row in group:
            figures = f"{row.measured:.3f}", f"{row.predicted:.3f}", f"{100 * row.error:+.1f}"
            table.add_row(str(row.ranks), row.op, row.how, *figures)
        table.add_section()
    summary = Table("rows", title="by how it was done")
    for title in ("number", "Spearman", "mean error %", "mean |error| %", "largest |error| %"):
        summary.add_column(title, justify="right")
    stats = {
        name: statistics(group)
        for name, group in {
            **groups(rows),
            "floors": roofs,
            "distgemm bench": benched,
            **{
                f"distgemm bench, {ranks} ranks": [row for row in benched if row.ranks == ranks]
                for ranks in sorted({row.ranks for row in benched})
            },
            **{
                f"distgemm bench, {how}": [row for row in benched if row.schedule == schedule]
                for schedule, how in ((GATHER, "push"), (RING, "ring"), (PAIRWISE, "push + sum"))
            },
            **{
                f"executions, {how}, {ranks} ranks": [row for row in executed if (row.how, row.ranks) == (how, ranks)]
                for how, ranks in sorted({(row.how, row.ranks) for row in executed})
            },
        }.items()
    }
    for name, one in stats.items():
        errors = (f"{100 * one[key]:+.1f}" if key == "mean_error" else f"{100 * one[key]:.1f}" for key in ERRORS)
        summary.add_row(name, f"{one['rows']:.0f}", f"{one['spearman']:.3f}", *errors)
    console = Console(width=120)
    console.print(table)
    console.print(summary)
    order = {f"{100 * apart:.0f}": concordance(rows, apart) for apart in (0.0, 0.05)}
    for apart, (right, pairs) in order.items():
        console.print(
            f"ways to do one op that differ by {apart} % or more: {right} of {pairs} pairs in the right order"
        )
    if output is not None:
        listed = [{**dataclasses.asdict(row), "error": row.error} for row in rows + roofs]
        found = {"benchmark": "simulator_vs_measured", "unit": "ms", "machine": described.to_dict()}
        found |= {"statistics": stats, "pairs_in_order": order, "rows": listed}
        found["benchmark_rows"] = [{**dataclasses.asdict(row), "error": row.error} for row in benched]
        output.write_text(json.dumps(found, indent=1) + "\n")


ERRORS = ("mean_error", "mean_abs_error", "max_abs_error")


if __name__ == "__main__":
    typer.run(main)
