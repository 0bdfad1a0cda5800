"""What was measured beside the runs of ``distgemm bench``."""

from __future__ import annotations

import json
from statistics import geometric_mean

from blocks import read, rows_of, table


@table
def simulator_errors() -> str:
    """Mean and largest error of the simulator."""
    found = read("simulator_vs_measured")["statistics"]
    of = [
        f"{100 * found[rows][key]:.1f} %"
        for rows in ("all", "distgemm bench")
        for key in ("mean_abs_error", "max_abs_error")
    ]
    return (
        f"For prototypes and NCCL the mean absolute error is {of[0]} and the largest {of[1]}. For the CUDA runtime "
        f"they are {of[2]} and {of[3]}."
    )


@table
def simulator_rows() -> str:
    """Measured and predicted times."""
    rows = [
        [str(row["ranks"]), row["layer"], row["how"], *(f"{row[key]:.3f}" for key in ("measured", "predicted"))]
        + [f"{100 * row['error']:+.1f}"]
        for row in read("simulator_vs_measured")["rows"]
    ]
    return rows_of("ranks | layer | how | measured, ms | predicted, ms | error, %", rows)


@table
def simulator_statistics() -> str:
    """Correlation and errors, by what was measured."""
    rows = []
    for name, each in read("simulator_vs_measured")["statistics"].items():
        errors = (f"{100 * each[key]:.1f}" for key in ("mean_error", "mean_abs_error", "max_abs_error"))
        rows.append([name, str(each["rows"]), f"{each['spearman']:.3f}", *errors])
    return rows_of("rows | number | Spearman | mean error, % | mean absolute error, % | largest, %", rows)


@table
def gemms() -> str:
    """CUTLASS beside cuBLAS, whole and in chunks."""
    rows = []
    for row in read("gemm_h200")["rows"]:
        rate = row["tflops"]
        chunks = rate["cutlass_chunks_two_streams"]
        cells = [", ".join(row["layers"]), f"{row['m']} x {row['n']} x {row['k']}"]
        cells += [f"{rate[key]:.0f}" for key in ("cublas", "cutlass")] + [f"{rate['cutlass'] / rate['cublas']:.3f}"]
        rows.append([*cells, f"{rate['cublas_chunks']:.0f}", f"{chunks:.0f}", f"{chunks / rate['cutlass']:.2f}"])
    head = (
        "layer | m x n x k | cuBLAS | CUTLASS | CUTLASS / cuBLAS | 8 chunks, cuBLAS | 8 chunks, CUTLASS on two streams"
    )
    return rows_of(f"{head} | chunks / whole, CUTLASS", rows)


@table
def gemms_outcome() -> str:
    """What that table says."""
    rates = {", ".join(row["layers"]): row["tflops"] for row in read("gemm_h200")["rows"]}
    found = {name: rate["cutlass"] / rate["cublas"] for name, rate in rates.items()}
    least = min(found, key=found.__getitem__)
    below = [name for name, rate in rates.items() if rate["cutlass_chunks_two_streams"] < 0.95 * rate["cutlass"]]
    return (
        f"CUTLASS reaches {geometric_mean(found.values()):.3f} of cuBLAS's rate in the geometric mean, and "
        f"{found[least]:.3f} at least ({least}). Eight chunks on two streams reach 0.95 of the rate of the whole "
        f"GEMM in {len(rates) - len(below)} of {len(rates)} layers. The exceptions are {', '.join(below)}."
    )


@table
def host_time() -> str:
    """What a call costs the host on 2 and 4 GPUs."""
    names = {"all_gather": "gather", "reduce_scatter_1d_tiling": "chain", "reduce_scatter_1d_pairwise": "pairwise sums"}
    four = {json.dumps([row["schedule"], row["options"]]): row["us"] for row in read("host_time_4xh200")["rows"]}
    rows = []
    for row in read("host_time_2xh200")["rows"]:
        name = next(short for long, short in names.items() if row["schedule"].startswith(long))
        plan = ", ".join([name, *(f"{key}={value}" for key, value in row["options"].items())])
        other = four[json.dumps([row["schedule"], row["options"]])]
        times = [*(row["us"][each] for each in ("call", "replay", "graph")), other["replay"], other["graph"]]
        rows.append([plan, *(f"{time:.0f}" for time in times)])
    return rows_of("plan | 2 GPUs: call | 2 GPUs: replay | 2 GPUs: launch | 4 GPUs: replay | 4 GPUs: launch", rows)


@table
def host_time_auto() -> str:
    """What replays of auto's configurations cost the host."""
    times = [row["us"] for row in read("host_time_auto_2xh200")["rows"]]
    within = sum(each["replay"] <= max(20, 0.05 * each["gpu"]) for each in times)
    least, most = min(each["replay"] for each in times), max(each["replay"] for each in times)
    return (
        f"{least:.0f} to {most:.0f} us of the host; {within} of {len(times)} take at most 20 us, or at most 5 % of the "
        "GPU's time"
    )


@table
def planning(file: str) -> str:
    """Times of planning and proving, and of the plan of another number of rows."""
    found = sorted(read(file)["rows"], key=lambda row: row["world_size"])
    rows = [
        [f"`{row['schedule']}`", "x".join(map(str, row["mesh"])), str(row["ops"])]
        + [
            "-" if row.get(key) is None else f"{row[key]:.1f}"
            for key in ("plan_ms", "verify_ms", "new_m_ms", "few_rows_ms")
        ]
        for row in found
    ]
    return rows_of("schedule | ranks | ops | make_plan, ms | verify, ms | new m, ms | few rows, ms", rows)


@table
def planning_own() -> str:
    """What one rank of hundreds or thousands needs."""
    rows = [
        [f"`{row['schedule']}`", "x".join(map(str, row["mesh"])), str(row["ops_of_rank"])]
        + [f"{row[key]:.0f}" for key in ("own_ms", "proof_ms", "fingerprint_ms", "peak_mb")]
        for row in read("planning_own")["rows"]
    ]
    return rows_of("schedule | mesh | ops of the rank | own ops, ms | proof, ms | fingerprint, ms | peak, MB", rows)


@table
def mutants() -> str:
    """What the oracle and the proof say of mutants, by what was changed."""
    found = read("mutants")
    columns = ("mutants", "no plan", "undefined", "wrong", "right", "right, refused", "missed", "other error")
    every = [*found["counts"].items(), ("**all**", found["total"])]
    rows = [[kind, *(str(counts.get(column, 0)) for column in columns)] for kind, counts in every]
    return rows_of(" | ".join(("changed", *columns)), rows)


@table
def mutants_total() -> str:
    """The totals of the mutants."""
    found = read("mutants")
    total = found["total"]
    refused, right = total.get("right, refused", 0), total["right"]
    return (
        f"{total['mutants']} mutants of {found['plans']} plans, {total['mutants'] - right} of them not right: "
        f"{total.get('missed', 0)} missed, {total.get('other error', 0)} other errors. Of the {right} that are right, "
        f"{refused} ({refused / right:.1%}) are refused."
    )
