"""Replays of all kinds of executables by processes that share one GPU. They take turns of milliseconds.

    python -m tests.gpu.process_replays --replays 20000 --ranks 2 --seconds 500 --json FILE
    python -m tests.gpu.process_replays --per-tile --replays 2000

The last line of the output is one JSON object. The exit status is 0 where all replays were made and right, 1 where an
element was wrong, and 2 where replays are missing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from distgemm.runtime.launch import launch
from tests.gpu import cuda_worker as worker
from tests.gpu import per_tile_worker
from tests.gpu.streams_harness import cases
from tests.gpu.test_shared import fitting

NOISE_ELEMENTS = 1 << 10
"""NCCL sends through sockets here: more would be most of the time."""
START_S = 90.0
"""Time to start the processes and to make the executables."""


def main(
    replays: Annotated[int, typer.Option(min=1, help="How many; each is one on every rank.")] = 20_000,
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time for the replays.")] = 500.0,
    seed: Annotated[int, typer.Option(help="Of the order and of the inputs.")] = 0,
    word: Annotated[str, typer.Option(help="Only executables with this word.")] = "",
    per_tile: Annotated[bool, typer.Option("--per-tile", help="Of executables with per-tile kernels.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Make the replays."""
    every = per_tile_worker.cases(ranks) if per_tile else fitting(cases(ranks), ranks)
    every = [case for case in every if word in str(case)]
    compile_kernels = per_tile_worker.compile_kernels if per_tile else worker.compile_kernels
    launch(compile_kernels, 1, every, backend="nccl", timeout=600, share=True)
    arguments = (every, replays, seed, seconds, NOISE_ELEMENTS)
    found = launch(worker.replay_at_random, ranks, *arguments, backend="nccl", timeout=seconds + START_S, share=True)
    wrong, made = sum(one.wrong for one in found), min(one.made for one in found)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(),
        "executables": len(every),
        "replays": made,
        "wrong_elements": wrong,
        "by_rank": [one._asdict() for one in found],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(1 if wrong else 2 * (made < replays))


if __name__ == "__main__":
    typer.run(main)
