"""Each kind of kernel compiles for Hopper, without a GPU, and has the instructions it should have."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """By configuration: the compiler's output, and the PTX."""
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found: pip install 'distgemm[nvcc]'")

    folders: dict[str, Path] = {name: tmp_path_factory.mktemp("kernel") for name in KERNELS}

    def one(name: str) -> tuple[str, str]:
        folder = folders[name]
        spec, kind = KERNELS[name]
        source = kernel_source(spec, GemmConfig.parse(name), "90a", kind)
        keeping = ["--keep", "--keep-dir", str(folder)]
        done = subprocess.run(
            [*command(source, nvcc, folder / "kernel.so"), *keeping], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr, (folder / source.path.with_suffix(".ptx").name).read_text()

    with ThreadPoolExecutor() as pool:
        return dict(zip(KERNELS, pool.map(one, KERNELS), strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_wgmma_is_not_serialised(compiled: dict[str, tuple[str, str]], name: str) -> None:
    output, _ = compiled[name]
    assert SERIALISED not in output


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("128x256x64_1x2_cooperative", "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"),
        ("128x128x64_2x1_pingpong", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"),
        ("128x128x64_1x2_pingpong", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"),
        ("128x128x32_1x1_plain", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    ],
)
def test_tensor_cores_multiply(compiled: dict[str, tuple[str, str]], name: str, instruction: str) -> None:
    _, ptx = compiled[name]
    assert instruction in ptx
    with_tma = "plain" not in name
    assert ("wgmma" in ptx) is with_tma
    # TMA loads A and B, and stores D.
    assert ("cp.async.bulk.tensor.3d.shared::cluster.global" in ptx) is with_tma
    assert ("cp.async.bulk.tensor.3d.global.shared::cta" in ptx) is with_tma


@pytest.mark.parametrize("name", KERNELS)
def test_fused_kernels_wait_for_flags_and_set_them(compiled: dict[str, tuple[str, str]], name: str) -> None:
    _, ptx = compiled[name]
    kind = KERNELS[name][1]
    # Flags of this GPU and of others; tickets from block to block of a cluster; copies without tensor maps.
    for instruction, kinds in (
        ("ld.acquire.sys.global.u32", ("gather", "reduce", "reduce_send")),
        ("fence.acq_rel.sys", ("gather", "reduce", "reduce_send")),
        ("st.relaxed.sys.global.u32", ("gather", "reduce", "reduce_send")),
        ("st.async.shared::cluster", ("reduce", "reduce_send")),
        ("cp.async.bulk.global.shared::cta.bulk_group", ("gather", "reduce_send")),
    ):
        assert (instruction in ptx) is (kind in kinds), instruction
