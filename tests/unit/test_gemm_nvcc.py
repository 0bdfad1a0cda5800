"""Each kind of kernel compiles for Hopper, without a GPU, and has the instructions it should have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec
from distgemm.gemm.cutlass import KernelKind, kernel_source
from distgemm.gemm.nvcc import SERIALISED, command, find_nvcc

MATRIX = MatrixSpec("bfloat16", 256, 256)
PRODUCT = GemmSpec(MATRIX, MATRIX, MATRIX)
WITH_PARTIAL = GemmSpec(MATRIX, MATRIX, MATRIX, partial=MATRIX)
KERNELS: dict[str, tuple[GemmSpec, KernelKind]] = {
    "128x256x64_1x2_cooperative": (PRODUCT, "gather"),
    "128x128x64_2x1_pingpong": (WITH_PARTIAL, "reduce"),
    "128x128x64_1x2_pingpong": (WITH_PARTIAL, "reduce_send"),
    "128x128x32_1x1_plain": (PRODUCT, "one_gemm"),
}


INSTRUCTIONS = {
    "128x256x64_1x2_cooperative": "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "128x128x64_2x1_pingpong": "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "128x128x64_1x2_pingpong": "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "128x128x32_1x1_plain": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
}
"""The instruction that multiplies in each kernel."""

KIND_INSTRUCTIONS: dict[str, tuple[KernelKind, ...]] = {
    "ld.acquire.sys.global.u32": ("gather", "reduce", "reduce_send"),
    "fence.acq_rel.sys": ("gather", "reduce", "reduce_send"),
    "st.relaxed.sys.global.u32": ("gather", "reduce", "reduce_send"),
    "st.async.shared::cluster": ("reduce", "reduce_send"),
    "cp.async.bulk.global.shared::cta.bulk_group": ("gather", "reduce_send"),
}
"""Instructions for flags of this GPU and of others, for tickets from block to block of a cluster, and for copies that
are no tensors; and the kinds of kernels that have them."""


@pytest.mark.sample(1)  # a kernel compiles for a minute
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_the_instructions_of_its_kind(name: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found: pip install 'distgemm[nvcc]'")
    spec, kind = KERNELS[name]
    source = kernel_source(spec, GemmConfig.parse(name), "90a", kind)
    keeping = ["--keep", "--keep-dir", str(tmp_path)]
    done = subprocess.run(
        [*command(source, nvcc, tmp_path / "kernel.so"), *keeping], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ptx = (tmp_path / source.path.with_suffix(".ptx").name).read_text()
    assert SERIALISED not in done.stdout + done.stderr
    assert INSTRUCTIONS[name] in ptx
    with_tma = "plain" not in name
    assert ("wgmma" in ptx) is with_tma
    # TMA loads A and B, and stores D.
    assert ("cp.async.bulk.tensor.3d.shared::cluster.global" in ptx) is with_tma
    assert ("cp.async.bulk.tensor.3d.global.shared::cta" in ptx) is with_tma
    for instruction, kinds in KIND_INSTRUCTIONS.items():
        assert (instruction in ptx) is (kind in kinds), instruction
