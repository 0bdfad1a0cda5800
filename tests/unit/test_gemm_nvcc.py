"""Kernels compile for Hopper, without a GPU, and have the instructions that they should have."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec
from distgemm.gemm.cutlass import kernel_source
from distgemm.gemm.nvcc import SERIALISED, command, find_nvcc
from tests.unit.sass import main_loop

MATRIX = MatrixSpec("bfloat16", 256, 256)
PRODUCT = GemmSpec(MATRIX, MATRIX, MATRIX)
WITH_PARTIAL = GemmSpec(MATRIX, MATRIX, MATRIX, partial=MATRIX)
CODES = MatrixSpec("float8_e4m3fn", 256, 256)
FP8 = GemmSpec(CODES, CODES, MATRIX, scale_a="row", scale_b="row")
BLOCKS = GemmSpec(CODES, CODES, MATRIX, scale_a="1x128", scale_b="128x128")
KERNELS = {
    "128x256x64_1x2_cooperative": PRODUCT,
    "128x128x64_2x1_pingpong": WITH_PARTIAL,
    "128x128x64_1x2_pingpong": WITH_PARTIAL,
    "256x208x64_2x1_cooperative": PRODUCT,
    "128x128x32_1x1_plain": PRODUCT,
    # fp8 has registers for two products of whole tiles, of halves, or for one.
    "128x128x128_2x1_cooperative": BLOCKS,
    "128x144x128_2x1_cooperative": FP8,
    "128x192x128_2x1_cooperative": FP8,
    "128x160x128_2x1_cooperative": BLOCKS,
    "128x224x128_2x1_cooperative": FP8,
}


INSTRUCTIONS = {
    "128x256x64_1x2_cooperative": "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "128x128x64_2x1_pingpong": "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "128x128x64_1x2_pingpong": "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "256x208x64_2x1_cooperative": "wgmma.mma_async.sync.aligned.m64n208k16.f32.bf16.bf16",
    "128x128x32_1x1_plain": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "128x128x128_2x1_cooperative": "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    "128x144x128_2x1_cooperative": "wgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3.e4m3",
    "128x192x128_2x1_cooperative": "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3",
    "128x160x128_2x1_cooperative": "wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3",
    "128x224x128_2x1_cooperative": "wgmma.mma_async.sync.aligned.m64n112k32.f32.e4m3.e4m3",
}
"""The instruction that multiplies in each kernel."""
SPILLED = {"256x208x64_2x1_cooperative": 76}
"""Bytes that a thread with 208 sums spills; the other kernels spill none."""


@pytest.mark.sample(0)  # a kernel compiles for 10 s
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_its_instructions(name: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found: pip install 'distgemm[nvcc]'")
    source = kernel_source(KERNELS[name], GemmConfig.parse(name), "90a")
    keeping = ["--keep", "--keep-dir", str(tmp_path)]
    words = [*command(source, nvcc, tmp_path / "kernel.cubin"), "-Xptxas", "-v", *keeping]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ptx = (tmp_path / source.path.with_suffix(".ptx").name).read_text()
    output = done.stdout + done.stderr
    assert SERIALISED not in output
    assert f" {SPILLED.get(name, 0)} bytes spill stores" in output
    assert not [line for line in output.splitlines() if re.search(r"distgemm/gemm/kernels/.*warning", line)]
    assert INSTRUCTIONS[name] in ptx
    with_tma = "plain" not in name
    assert ("wgmma" in ptx) is with_tma
    # TMA loads A and B, and stores D.
    assert ("cp.async.bulk.tensor.3d.shared::cluster.global" in ptx) is with_tma
    assert ("cp.async.bulk.tensor.3d.global.shared::cta" in ptx) is with_tma
    if with_tma:
        # Descriptors of shared memory stay in uniform registers. If ptxas cannot prove that the lanes of a warp agree,
        # it copies four registers before each wgmma, and the warps that issue them become the limit of fp8 kernels.
        loop = main_loop(tmp_path / "kernel.cubin")
        assert loop.count("R2UR") < sum(name.endswith("GMMA") for name in loop)


def test_lambdas_capture_no_structured_bindings() -> None:
    """That is C++20, and kernels are compiled as C++17: some host compilers refuse it, nvcc only warns."""
    folder = Path(__file__).parents[2] / "distgemm" / "gemm" / "kernels"
    for path in folder.iterdir():
        text = path.read_text()
        for binding in re.finditer(r"auto\s*(?:const\s*)?&?\s*\[", text):
            depth = 0
            for end in range(binding.end(), len(text)):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                if depth < 0:
                    break
            scope = text[binding.end() : end]
            assert not re.search(r"\[[&=]", scope), f"{path.name}: {binding.group()}{scope[:60]}"
