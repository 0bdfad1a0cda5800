"""distgemm build and tune-gemm: what they compile, print and refuse. The compiler only writes files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from distgemm.cli import main as cli
from distgemm.cli.build import DenseGemm
from distgemm.cli.tune_gemm import shapes_of
from distgemm.gemm.nvcc import cache_dir, cached
from distgemm.gemm.tensors import spec_of
from distgemm.gemm.tiles import TMA_TILES
from distgemm.plan.problem import GemmProblem
from tests.unit.test_gemm_kernel_cache import WRITES, Nvcc, nvcc

__all__ = ["nvcc"]  # a fixture
ONE = "128x256x64_1x2_cooperative"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})


def build(*arguments: str) -> str:
    done = invoke("build", "--arch", "90a", *arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def refused(*arguments: str, status: int = 2) -> str:
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (status, "")
    return done.stderr


def kernels() -> list[str]:
    return sorted(f"{manifest['kernel']} {manifest['arch']}" for _, manifest in cached() if manifest)


# --- build ----------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "file"))
    (line,) = refused("build", "--arch", "90a", "--config", ONE).splitlines()
    assert line.startswith(f"error: kernel cache: {tmp_path}/file/kernels cannot be made: ")
    assert line.endswith("; set DISTGEMM_CACHE_DIR to a folder that can be written")


def test_all_tma_configurations_by_default(nvcc: Nvcc) -> None:
    text = build("--jobs", "8")
    count = 2 * len(TMA_TILES)
    assert text == f"sm_90a: {count} compiled, 0 there already, {count}.0 MiB in {cache_dir()}/kernels\n"
    assert len(nvcc.calls) == count
    assert {manifest["macros"]["DG_SOURCE"] for _, manifest in cached() if manifest} == {"void", "cutlass::bfloat16_t"}
    assert not any("plain" in name for name in kernels())
    assert build().startswith(f"sm_90a: 0 compiled, {count} there already, {count}.0 MiB")
    assert len(nvcc.calls) == count


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (f"--config {ONE} --terms none", [f"{ONE} (bfloat16, row, row -> bfloat16) 90a"]),
        (
            f"--config {ONE} --config {ONE}_swizzle_4 --terms none --terms none --majors rc --majors cr",
            [f"{ONE} (bfloat16, {majors} -> bfloat16) 90a" for majors in ("column, row", "row, column")],
        ),
        (
            f"--config {ONE} --terms none --dtype bfloat16 --dtype float16 --out-dtype float32",
            [f"{ONE} ({dtype}, row, row -> float32) 90a" for dtype in ("bfloat16", "float16")],
        ),
        ("--dtype float32 --terms none", ["128x128x16_1x1_plain (float32, row, row -> float32) 90a"]),
        ("--arch 80 --terms none", ["128x128x32_1x1_plain (bfloat16, row, row -> bfloat16) 80"]),
    ],
)
def test_what_is_compiled(nvcc: Nvcc, arguments: str, found: list[str]) -> None:
    text = build(*arguments.split())
    assert f": {len(found)} compiled, 0 there already, {len(found)}.0 MiB" in text
    assert kernels() == found


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        ("none", ("void", "cutlass::bfloat16_t", "cutlass::bfloat16_t")),
        ("bias", ("void", "cutlass::bfloat16_t", "cutlass::bfloat16_t")),
        ("row_scales", ("void", "cutlass::bfloat16_t", "cutlass::bfloat16_t")),
        ("c", ("cutlass::bfloat16_t", "cutlass::bfloat16_t", "cutlass::bfloat16_t")),
        ("partial", ("float", "cutlass::bfloat16_t", "cutlass::bfloat16_t")),
        ("partial+c+bias", ("float", "cutlass::bfloat16_t", "cutlass::bfloat16_t")),
    ],
)
def test_terms(nvcc: Nvcc, terms: str, wanted: tuple[str, ...]) -> None:
    build("--config", ONE, "--terms", terms, "--partial-dtype", "float32")
    ((_, manifest),) = cached()
    assert manifest
    names = ("DG_SOURCE", "DG_AUX", "DG_BIAS")
    assert tuple(manifest["macros"][name] for name in names) == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_compiles_for(nvcc: Nvcc) -> None:
    done = invoke("build", "--config", ONE, "--terms", "none")
    assert done.exit_code == 0
    assert done.stderr.startswith("no GPU found: compiling for sm_90a; --arch names another\n")
    assert kernels()[0].endswith(" 90a")


def test_a_pack_that_cannot_be_written(nvcc: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found before anything is compiled."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISTGEMM_PACK", "0")  # as the command sets it; later tests find it as it was
    done = invoke("build", "--pack", str(tmp_path / "file" / "packs"))
    assert (
        done.exit_code == 2
        and f"--pack {tmp_path}/file/packs: the folder cannot be made: Not a directory" in done.stderr
    )
    assert not nvcc.calls


def test_a_link_to_nowhere_is_listed(nvcc: Nvcc) -> None:
    kernels = cache_dir() / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "abc-1.cubin").symlink_to("nowhere")
    assert "abc-1.cubin: incomplete" in invoke("build", "--list").stdout


def test_list(nvcc: Nvcc) -> None:
    assert invoke("build", "--list").stdout == f"total 0, 0.0 MiB in {cache_dir()}/kernels\n"
    build("--config", ONE, "--terms", "none", "--terms", "partial+c+bias")
    build("--config", f"{ONE}_direct", "--terms", "row_scales")
    broken = cache_dir() / "kernels" / "broken.cubin"
    broken.write_bytes(bytes(2048))
    calls = len(nvcc.calls)
    text = invoke("build", "--list").stdout
    assert len(nvcc.calls) == calls
    header, _, *rows, total = text.splitlines()
    assert header.split() == ["kernel", "arch", "compiler", "CUTLASS", "s", "KiB"]
    name = rf"{ONE} \(bfloat16, row, row -> bfloat16\)"
    facts = r"90a +release 13\.0, V13\.0\.48 +4\.2\S* +0\.\d +1024"
    patterns = [
        rf"{name} +{facts}\n    can add bias, row scales",
        rf"{name} +{facts}\n    can add any term",
        rf"{ONE}_direct \(.*\) +{facts}\n    can add any term",
        r"broken\.cubin: incomplete, is compiled again at its next use +2",
    ]
    blocks = re.split(r"\n(?=\S)", "\n".join(rows))
    assert len(blocks) == len(patterns)
    for pattern in patterns:
        assert sum(bool(re.fullmatch(pattern, block.rstrip())) for block in blocks) == 1, (pattern, text)
    assert total == f"total 4, 3.0 MiB in {cache_dir()}/kernels"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--dtype int8",
            "--dtype: one of float64, float32, tfloat32, bfloat16, float16, float8_e4m3fn, float8_e5m2, "
            "float4_e2m1fn_x2, got 'int8'",
        ),
        ("--out-dtype int8", "--out-dtype: one of float64"),
        ("--majors rx", "--majors: one of rr, rc, cr, cc, got 'rx'"),
        (
            "--terms partial --terms a",
            "none, or some of c, partial, bias, row_scales joined by +, got 'a'",
        ),
        ("--terms c+c", "joined by +, got 'c+c'"),
        ("--terms none+c", "joined by +, got 'none+c'"),
        ("--config 128x256x64", "a configuration is written like"),
        ("--arch hopper", "arch is written as nvcc does, such as 90a or 80, got 'hopper'"),
        ("--arch 75", "kernels are for sm_80 and newer, this is sm_75"),
        ("--dtype float64", "provider cutlass: A and B are of bfloat16"),
        ("--dtype float8_e4m3fn --majors rc", "provider cutlass: rows of A and B are contiguous in fp8"),
        (f"--arch 80 --config {ONE}", f"{ONE} for bfloat16 rr -> bfloat16: cooperative kernels are for sm_90a"),
        (f"--dtype float16 --dtype float32 --config {ONE}", f"{ONE} for float32 rr -> float32: tensor cores"),
    ],
)
def test_builds_that_are_refused(nvcc: Nvcc, arguments: str, message: str) -> None:
    printed = refused("build", *(() if "--arch" in arguments else ("--arch", "90a")), *arguments.split())
    assert printed.startswith("error: ")
    assert message in printed
    assert nvcc.calls == []


def test_what_the_compiler_says_keeps_its_lines(nvcc: Nvcc) -> None:
    nvcc.set(does=f'echo "first line" >&2; echo "second line" >&2; exit 1; {WRITES}')
    printed = refused("build", "--arch", "90a", "--config", ONE, "--terms", "none", status=1)
    assert printed.rstrip().endswith("failed with exit status 1:\nfirst line\nsecond line")
    assert kernels() == []


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISTGEMM_NVCC", str(tmp_path / "nvcc"))
    printed = refused("build", "--arch", "90a", status=1)
    assert printed == f"error: DISTGEMM_NVCC is '{tmp_path}/nvcc', where there is no file\n"


# --- tune-gemm ------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", ["8192 7168 8192", "--model llama-3-70b --tp 8 --m 8192 --chunks 8"])
def test_tuning_wants_a_gpu(arguments: str) -> None:
    printed = refused("tune-gemm", *arguments.split())
    assert printed == "error: tune-gemm measures on a GPU, and torch finds none; distgemm build needs none\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "takes M N K, such as 8192 7168 8192, or --model"),
        ("8192 7168", "takes M N K, such as 8192 7168 8192, or --model"),
        ("1 2 3 --model llama-3-8b", "takes M N K or --model, not both"),
        ("1 2 3 --tp 4", "--tp and --m go with --model"),
        ("--m 4096", "--tp and --m go with --model"),
        ("--model llama-2", "--model: one of llama-3-8b, llama-3-70b, llama-3-405b, all, got 'llama-2'"),
        ("1 2 3 --dtype fp8", "--dtype: one of"),
        ("0 2 3", "M: a whole number of at least 1, got '0'"),
        ("1 2 3 --gemm-streams 3", "--gemm-streams: a whole number from 1 to 2, got '3'"),
        ("1 2 3 --majors r", "--majors: one of rr, rc, cr, cc, got 'r'"),
    ],
)
def test_tunings_that_are_refused(arguments: str, message: str) -> None:
    assert message in refused("tune-gemm", *arguments.split())


def test_shapes_of_a_model() -> None:
    shapes = shapes_of((None, None, None), ["llama-3-70b"], 8, [4096], [8])
    assert shapes == {
        (4096, 1280, 8192): "qkv",
        (4096, 8192, 1024): "out",
        (4096, 7168, 8192): "fc1",
        (4096, 8192, 3584): "fc2",
        (512, 1280, 8192): "qkv / 8",
        (512, 8192, 1024): "out / 8",
        (512, 7168, 8192): "fc1 / 8",
        (512, 8192, 3584): "fc2 / 8",
    }
    assert list(shapes_of((None, None, None), ["llama-3-70b"], None, None, None)) == [
        (8192, 1280, 8192),
        (8192, 8192, 1024),
        (8192, 7168, 8192),
        (8192, 8192, 3584),
    ]


def test_shapes_by_hand() -> None:
    assert shapes_of((1000, 2, 3), None, None, None, None) == {(1000, 2, 3): ""}
    assert shapes_of((1000, 2, 3), None, None, None, [7]) == {(1000, 2, 3): "", (143, 2, 3): "/ 7"}


def test_shapes_of_several_models_tokens_and_chunks() -> None:
    found = shapes_of((None, None, None), ["llama-3-8b", "llama-3-70b"], 8, [512, 1024], [2, 4])
    assert found[512, 768, 4096] == "8b qkv" and found[256, 768, 4096] == "8b qkv / 2"
    assert found[512, 1280, 8192] == "70b qkv" and found[128, 1280, 8192] == "70b qkv / 4"
    assert {m for m, _, _ in found} == {128, 256, 512, 1024}


@pytest.mark.parametrize("dtype", ["bfloat16", "tfloat32", "float8_e4m3fn"])
@pytest.mark.parametrize("majors", ["rr", "cr", "rc"])
@pytest.mark.parametrize("terms", [(), ("c",), ("partial", "bias"), ("row_scales",)])
def test_what_is_measured_is_what_was_compiled(
    monkeypatch: pytest.MonkeyPatch, dtype: str, majors: str, terms: tuple[str, ...]
) -> None:
    """The spec of the random tensors is that which the kernels are built for."""
    for name in ("randn", "ones", "empty"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *shape, device, make=make, **keywords: make(*shape, **keywords))
    product = DenseGemm(GemmProblem(48, 64, 32, dtype=dtype, partial_dtype="float32"), majors, terms)
    found, wanted = spec_of(product.tensors()), product.spec
    if dtype == "float8_e4m3fn" and not terms:
        assert (found.scale_a, found.scale_b) == ("tensor", "tensor")
    for name in ("a", "b", "d", "c", "partial", "bias"):
        assert getattr(found, name) == getattr(wanted, name)
    if terms == ("row_scales",):
        assert (found.scale_a, found.scale_b) == (wanted.scale_a, wanted.scale_b) == ("row", "row")
