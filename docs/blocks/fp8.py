"""What fp8 does to losses and sums."""

from __future__ import annotations

import runpy
from statistics import geometric_mean

from blocks import ROOT, read, rows_of, table


@table
def fp8_losses() -> str:
    """The losses of the small Llama, by recipe, scope and number of ranks, each beside bf16 on one rank."""
    runs = read("fp8_training")["runs"]
    of = {(row["run"]["recipe"], row["run"]["scope"], row["run"]["tp"]): row["loss"] for row in runs}
    ranks = sorted({tp for *_, tp in of})
    rows = []
    for recipe, scope in dict.fromkeys((recipe, scope) for recipe, scope, _ in of):
        cells = [f"`{recipe}`" if recipe != "bf16" else recipe, scope if recipe != "bf16" else ""]
        for tp in ranks:
            loss = of.get((recipe, scope, tp))
            base = of["bf16", "global", 1]
            change = "" if (recipe, tp) == ("bf16", 1) or loss is None else f" ({100 * (loss / base - 1):+.2f} %)"
            cells.append("" if loss is None else f"{loss:.4f}{change}")
        rows.append(cells)
    titles = ["one rank" if tp == 1 else f"TP {tp}" for tp in ranks]
    return rows_of(" | ".join(["recipe", "scope of scales", *titles]), rows)


@table
def fp8_partial_sums() -> str:
    """The errors of a GEMM + reduce-scatter, by the type of partial sums."""
    rows = [
        [
            str(row["ranks"]),
            row["schedule"],
            row["partial_dtype"],
            *(f"{100 * row[key]:.2f}" for key in ("codes", "tensors")),
        ]
        for row in read("fp8_partial_sums")["rows"]
    ]
    return rows_of("ranks | sums | partial sums in | error against codes, % | error against tensors, % ", rows)


@table
def fp8_gemms() -> str:
    """The rates of GEMMs in fp8 over torch's, by GPU and scaling."""
    excess = runpy.run_path(str(ROOT / "benchmarks" / "gemm_fp8.py"))["excess"]
    rows = []
    for gpu in ("H200", "H100"):
        found = read(f"gemm_fp8_{gpu.lower()}")["rows"]
        for scaling in dict.fromkeys(row["scaling"] for row in found):
            best, selected = {}, {}
            for row in found:
                if row["scaling"] == scaling and "torch" in row["ms"]:
                    ms = min(ms for name, ms in row["ms"].items() if name not in {"torch", "quantize"})
                    shape = f"{row['m']}x{row['n']}x{row['k']}"
                    best[shape] = row["ms"]["torch"] / ms
                    selected[shape] = row["ms"]["torch"] / (ms * excess(row))
            cells = [gpu, scaling]
            for ratios in (selected, best):
                least = min(ratios, key=ratios.__getitem__)
                cells += [f"{geometric_mean(ratios.values()):.3f}", f"{ratios[least]:.3f} ({least})"]
            rows.append([*cells, str(len(best))])
    return rows_of("GPU | scales | selected tile: mean | least | best tile: mean | least | shapes", rows)
