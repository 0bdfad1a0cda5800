"""Whether branches of a CUDA graph make progress at once.

With ``wait_by="kernel"``, plans of mechanism "push" have two branches: kernels wait for flags, which memory operations
set behind copies on the other branch. CUDA does not promise that both go on at once. Here graphs have many
branches of long kernels, kernels that wait for flags, and copies from the host with the memory operations that set
these flags. Copy engines make such copies, as they make those between GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

pytestmark = pytest.mark.gpu(1)
SECONDS = 100.0


@pytest.mark.parametrize("connections", [None, 2, 4, 8, 32])
@pytest.mark.parametrize(("long", "pairs"), [(32, 1), (32, 16), (0, 64)])
def test_branches_go_on_at_once(connections: int | None, long: int, pairs: int) -> None:
    environment = dict(os.environ)
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    command = [sys.executable, "-m", "tests.gpu.test_graph_branches", str(long), str(pairs), "1000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    print(f"CUDA_DEVICE_MAX_CONNECTIONS {connections}, {long} long kernels: {done.stdout.strip()}")
    assert done.stdout.startswith("1000 replays")


def replay(long: int, pairs: int, replays: int) -> None:
    """Replay a graph of so many long kernels, and pairs of a kernel that waits and a copy that it waits for."""
    from distgemm.runtime.cuda.flag_kernel import bind_flag_ops
    from distgemm.runtime.cuda.memops import clear, mem_ops, wait_for, write

    device = torch.device("cuda", 0)
    flags = torch.zeros(2 * pairs, dtype=torch.int32, device=device)
    addresses = [flags.data_ptr() + 8 * number for number in range(pairs)]
    source = torch.ones(1 << 16, dtype=torch.int32).pin_memory()
    targets = [torch.zeros_like(source, device=device) for _ in range(pairs)]
    read = torch.zeros(pairs, dtype=torch.int32, device=device)
    waits = [bind_flag_ops([[wait_for(address)]], 0) for address in addresses]
    main = torch.cuda.Stream()
    branches = [torch.cuda.Stream() for _ in range(long + 2 * pairs)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(main):
        graph.capture_begin(capture_error_mode="thread_local")
        for target in targets:
            target.zero_()
        for number, branch in enumerate(branches):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                if number < long:
                    torch.cuda._sleep(200_000)
                elif number < long + pairs:  # before the copies, so that they are launched first
                    waits[number - long](branch.cuda_stream)
                    read[number - long] = targets[number - long][-1]
                else:
                    targets[number - long - pairs].copy_(source, non_blocking=True)
                    mem_ops([write(addresses[number - long - pairs])], branch.cuda_stream)
        for branch in branches:
            main.wait_stream(branch)
        mem_ops(clear(addresses), main.cuda_stream)
        graph.capture_end()
    start, wrong = time.monotonic(), torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(replays):
        graph.replay()
        wrong += (read != 1).sum()
    torch.cuda.synchronize()
    assert not wrong.item(), f"{wrong.item()} copies were not there when their flag was set"
    print(f"{replays} replays of {len(branches)} branches in {time.monotonic() - start:.2f} s")


if __name__ == "__main__":
    replay(*map(int, sys.argv[1:]))
