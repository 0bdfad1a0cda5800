"""Measures GEMMs in fp8 on one GPU, with each scaling: this project's kernels with all their tiles, and torch's.

    python benchmarks/gemm_fp8.py --compile-only      # on CPUs, for Hopper
    python benchmarks/gemm_fp8.py --json benchmarks/results/gemm_fp8_h100.json
    python benchmarks/gemm_fp8.py --fit benchmarks/results/gemm_fp8_h100.json  # rates for distgemm/gemm/tiles.py

The shapes are those of one of 8 ranks in the layers of Llama 3; results are in bf16. torch's is `torch._scaled_mm` with
`use_fast_accum=False`, which moves sums to float32 after every 128 of k as these kernels do, and for blocks
`torch.nn.functional.scaled_mm`. Scales lie as each of them wants them. No time of a product counts quantising;
"quantize" is what torch takes for A. Methods run in CUDA graphs, interleaved round by round. Rows that the file has
already are not measured again.

`--fit` takes for each tile the rate with the least squares of errors, where an error is the logarithm of estimated over
measured time. It holds out every second shape first, and then takes all. It prints how much slower selected tiles are
than the fastest ones.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn import functional

from distgemm import fp8
from distgemm.fp8 import Quantized
from distgemm.gemm import GemmTensors, bind
from distgemm.gemm.cutlass import CutlassProvider, kernel_source
from distgemm.gemm.nvcc import build
from distgemm.gemm.select import estimate, tile_of, work
from distgemm.gemm.spec import GemmConfig, GemmSpec, MatrixSpec
from distgemm.gemm.tensors import spec_of
from distgemm.measure.models import MODELS
from distgemm.measure.timing import time_launches
from distgemm.plan.scaling import SCALINGS

SCALES = ("tensorwise", "rowwise", "blockwise")
CHECKED_ROWS = 64
TOLERANCE = 2.0**-6
"""Of the largest result. Roundings are smaller, and wrong scales or blocks make larger errors."""


def tensors_of(m: int, n: int, k: int, name: str, device: str) -> tuple[GemmTensors, Quantized, Quantized]:
    """A GEMM with operands of a normal distribution, and its operands with their scales."""
    scaling = SCALINGS[name]
    make = torch.randn if device == "cuda" else torch.empty
    x, w = (make(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    a, b = fp8.quantize(x, scaling.a), fp8.quantize(w, scaling.b)
    blocks = name == "blockwise"
    scales = [each.scales if blocks else each.scales.reshape(-1) for each in (a, b)]
    d = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    found = GemmTensors(
        *(a.codes, b.codes, d), scale_a=scales[0], scale_b=scales[1], block_rows=(1, 128) if blocks else None
    )
    return found, a, b


def configs_of(tensors: GemmTensors, provider: CutlassProvider, swizzles: Sequence[int] = (1,)) -> list[GemmConfig]:
    """All configurations with TMA, the default first, with stripes of tiles of these widths."""
    found = [one for one in provider.configs(spec_of(tensors)) if one.kernel_schedule != "plain"]
    return [replace(one, swizzle=swizzle) for swizzle in swizzles for one in found]


def torch_method(a: Quantized, b: Quantized, name: str) -> Callable[[], torch.Tensor]:
    """torch's product, with scales laid out as it wants them."""
    codes = a.codes, b.codes.t()
    if name != "blockwise":
        scales = a.scales, b.scales.t().contiguous()
        return lambda: torch._scaled_mm(*codes, *scales, out_dtype=torch.bfloat16, use_fast_accum=False)
    scale_a = a.scales.t().contiguous().t()
    padding = -b.scales.shape[1] % 4  # rows of its scales of B are padded to multiples of 4
    scale_b = functional.pad(b.scales, (0, padding)).t()
    part, square = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    return lambda: functional.scaled_mm(*codes, scale_a, part, scale_b, square, output_dtype=torch.bfloat16)


def measure(m: int, n: int, k: int, name: str, rounds: int, swizzles: Sequence[int], burst_ms: float) -> dict[str, Any]:
    """A row: times of all methods, and why others have none."""
    tensors, a, b = tensors_of(m, n, k, name, "cuda")
    rows = Quantized(a.codes[:CHECKED_ROWS], a.scales[:CHECKED_ROWS], a.scaling)
    wanted = fp8.dequantize(rows, torch.float32) @ fp8.dequantize(b, torch.float32).t()
    configs = configs_of(tensors, CutlassProvider(), swizzles)
    methods: dict[str, Callable[[], Any]] = {"torch": torch_method(a, b, name)}
    methods |= {str(config): bind(tensors, config=config) for config in configs}
    errors = {}
    for method, launch in methods.items():
        tensors.d.fill_(float("nan"))
        try:
            found = launch()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            if method != "torch":
                raise
            errors[method] = str(error).partition("\n")[0]  # this torch has no such scales
            continue
        found = tensors.d if found is None else found
        off = float((found[:CHECKED_ROWS].float() - wanted).abs().max() / wanted.abs().max())
        if not off <= TOLERANCE:
            errors[method] = f"differs by {off:.4f} of the largest result"
    methods = {method: launch for method, launch in methods.items() if method not in errors}
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    methods["quantize"] = lambda: fp8.quantize(x, a.scaling)
    found = time_launches(list(methods.values()), tensors.d.device, rounds=rounds, burst_ms=burst_ms)
    times = dict(zip(methods, found, strict=True))
    return {
        "m": m,
        "n": n,
        "k": k,
        "scaling": name,
        "default": str(configs[0]),
        "ms": {method: round(ms, 5) for method, ms in times.items()},
        "errors": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, nargs="+", default=[2048, 8192], help="rows of A")
    parser.add_argument("--models", nargs="+", default=["llama-3-8b", "llama-3-70b", "llama-3-405b"])
    parser.add_argument("--ranks", type=int, default=8, help="ranks that share a layer")
    parser.add_argument("--scalings", nargs="+", choices=SCALES, default=list(SCALES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--burst-ms",
        type=float,
        default=12.0,
        help="length of a burst of one method; in shorter ones, the method before decides the clocks (%(default)s)",
    )
    parser.add_argument(
        "--swizzles", type=int, nargs="+", default=[1], help="widths of stripes of tiles, each measured (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="no row is begun after so long")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile the kernels for Hopper and measure nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rows are kept")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit rates of tiles to its rows; needs no GPU")
    args = parser.parse_args()
    if args.fit:
        fit(json.loads(args.fit.read_text())["rows"])
        return
    shapes = dict.fromkeys(
        layer.local(m, args.ranks) for m in args.m for name in args.models for layer in MODELS[name].layers
    )
    provider = CutlassProvider("90a")
    small = [tensors_of(256, 256, 256, name, "cpu")[0] for name in args.scalings]
    build(kernel_source(spec_of(one), config, "90a") for one in small for config in configs_of(one, provider))
    if args.compile_only:
        return
    machine = {"benchmark": "gemm_fp8", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows = kept(args.json, machine)
    done = {(row["m"], row["n"], row["k"], row["scaling"]) for row in rows}
    todo = [(*shape, name) for shape in shapes for name in args.scalings if (*shape, name) not in done]
    end = time.monotonic() + args.seconds
    for m, n, k, name in track(todo, description="measuring", console=Console(stderr=True)):
        if time.monotonic() > end:
            break
        rows.append(measure(m, n, k, name, args.rounds, args.swizzles, args.burst_ms))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n")
    report(rows)


def spec_of_row(row: dict[str, Any]) -> GemmSpec:
    """What a row measured."""
    m, n, k = row["m"], row["n"], row["k"]
    scales = {"tensorwise": ("tensor", "tensor"), "rowwise": ("row", "row"), "blockwise": ("1x128", "128x128")}
    a, b = (MatrixSpec("float8_e4m3fn", rows, k) for rows in (m, n))
    scale_a, scale_b = scales[row["scaling"]]
    return GemmSpec(a, b, MatrixSpec("bfloat16", m, n), scale_a=scale_a, scale_b=scale_b)


def times_of(row: dict[str, Any]) -> dict[GemmConfig, float]:
    """The times of a row's configurations without stripes of tiles, ms."""
    times = {GemmConfig.parse(name): ms for name, ms in row["ms"].items() if name not in ("torch", "quantize")}
    return {config: ms for config, ms in times.items() if config.swizzle == 1}


def excess(row: dict[str, Any], rates: Mapping[Any, float] | None = None) -> float:
    """The time of the configuration that is selected, over that of the fastest one.

    Args:
        row: with their times.
        rates: of tiles, by kernel schedule, m and n; None: those of the package.
    """
    times, spec = times_of(row), spec_of_row(row)

    def estimated(config: GemmConfig) -> float:
        return estimate(spec, config) if rates is None else work(spec, config) / rates[tile_of(config)]

    listed = [config for config in CutlassProvider("90a").configs(spec) if config in times]
    return times[min(listed, key=estimated)] / min(times.values())


def fit(rows: list[dict[str, Any]]) -> None:
    """Print the rates of tiles that fit rows, without and with scales of blocks."""
    for blocks in (False, True):
        own = [row for row in rows if (row["scaling"] == "blockwise") == blocks]
        shapes = sorted({(row["m"], row["n"], row["k"]) for row in own})
        half = [row for row in own if shapes.index((row["m"], row["n"], row["k"])) % 2 == 0]
        rest = [row for row in own if row not in half]
        print("with scales of blocks" if blocks else "without scales of blocks")
        for name, fitted, held_out in (("every second shape", half, rest), ("all shapes", own, [])):
            rates = rates_of(fitted)
            found = {"fitted": fitted, "held out": held_out}
            for what, which in found.items():
                if which:
                    slower = [excess(row, rates) for row in which]
                    print(f"  {name}, {what}: {statistics.geometric_mean(slower):.4f}, most {max(slower):.4f}")
        for (schedule, m, n), rate in rates.items():
            print(f"  {schedule} {m}x{n}: {rate:.3f}")


def rates_of(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int], float]:
    """The rates of tiles with their better clusters that fit rows, as shares of the highest one."""
    errors: dict[tuple[str, int, int], list[float]] = {}
    for row in rows:
        spec, best = spec_of_row(row), dict[tuple[str, int, int], float]()
        for config, ms in times_of(row).items():
            best[tile_of(config)] = max(best.get(tile_of(config), 0.0), work(spec, config) / ms)
        for tile, rate in best.items():
            errors.setdefault(tile, []).append(math.log(rate))
    means = {tile: statistics.mean(found) for tile, found in errors.items()}
    return {tile: math.exp(mean - max(means.values())) for tile, mean in means.items()}


def kept(path: Path | None, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that a file has.

    Raises:
        ValueError: if they were measured elsewhere.
    """
    if path is None or not path.exists():
        return []
    found: dict[str, Any] = json.loads(path.read_text())
    rows: list[dict[str, Any]] = found.pop("rows")
    found.pop("command", None)
    if found != machine:
        raise ValueError(f"{path} was measured with {found}, and this is {machine}: name another file")
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    console = Console(width=160)
    columns = ("m x n x k", "scaling", "torch", "default", "best", "best / torch", "best config", "quantize", "errors")
    table = Table(*columns, caption="TFLOP/s, and us to quantize A")
    ratios: dict[str, list[float]] = {}
    for row in rows:
        flop = 2 * row["m"] * row["n"] * row["k"]
        rates = {method: flop / ms / 1e9 for method, ms in row["ms"].items() if method != "quantize"}
        theirs = rates.pop("torch", None)
        best = max(rates, key=rates.__getitem__, default="")
        figures = [rates.get(row["default"]), rates.get(best)]
        if theirs and best:
            ratios.setdefault(row["scaling"], []).append(rates[best] / theirs)
        ratio = f"{rates[best] / theirs:.2f}" if theirs and best else ""
        shown = ["" if x is None else f"{x:.0f}" for x in (theirs, *figures)]
        errors = "; ".join(f"{method}: {error}" for method, error in row["errors"].items())
        quantize = f"{row['ms']['quantize'] * 1e3:.0f}"
        table.add_row(f"{row['m']}x{row['n']}x{row['k']}", row["scaling"], *shown, ratio, best, quantize, errors)
    console.print(table)
    for name, found in ratios.items():
        console.print(f"{name}: best / torch {statistics.geometric_mean(found):.3f}, least {min(found):.3f}")


if __name__ == "__main__":
    main()
