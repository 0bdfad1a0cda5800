"""What the type of partial sums does to the accuracy of a GEMM + reduce-scatter in fp8, on CPUs over gloo.

    python benchmarks/fp8_partial_sums.py --record benchmarks/results/fp8_partial_sums.json

Errors are root mean squares, relative to that of the true product. "codes": against the product of the dequantised
operands in float64, so what sums and results round. "tensors": against the product of the tensors before they were
quantised.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distgemm
from distgemm import fp8
from distgemm.runtime.launch import launch

M, N, K = 128, 128, 8192
SCHEDULES = {"pairwise": "reduce_scatter_1d_pairwise_a", "chain": "reduce_scatter_1d_tiling_a_rotating_c"}


def errors() -> list[dict[str, Any]]:
    """The errors of all schedules and types, of the whole result."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    torch.manual_seed(0)
    x, w = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    recipe = fp8.recipe("rowwise")
    operands = [fp8.quantize(each, recipe.forward[0], power_of_two=True) for each in (x, w)]
    codes, tensors = (
        a.double() @ b.double().t() for a, b in (tuple(fp8.dequantize(each) for each in operands), (x, w))
    )
    rows = []
    for name, schedule in SCHEDULES.items():
        for partial in (torch.bfloat16, torch.float32):
            given = fp8.recipe("rowwise", partial_dtype=partial)
            a, b = (each.chunk(ranks, 1)[rank].contiguous() for each in (x, w))
            d = distgemm.matmul_reduce_scatter(a, b, group=group, recipe=given, schedule=schedule)
            parts = [torch.empty_like(d) for _ in range(ranks)]
            dist.all_gather(parts, d)
            found = torch.cat(parts).double()
            rows.append({"ranks": ranks, "schedule": name, "partial_dtype": str(partial).removeprefix("torch.")})
            for key, true in (("codes", codes), ("tensors", tensors)):
                rows[-1][key] = float((found - true).norm() / true.norm())
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="a file for the errors")
    options = parser.parse_args()
    rows = [row for ranks in (2, 4, 8) for row in launch(errors, ranks, timeout=300)[0]]
    for row in rows:
        print(row)
    if options.record:
        facts = {"command": "python benchmarks/fp8_partial_sums.py --record FILE", "torch": torch.__version__}
        options.record.write_text(json.dumps({**facts, "m": M, "n": N, "k": K, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
