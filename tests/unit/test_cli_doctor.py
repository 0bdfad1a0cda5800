"""distgemm doctor: what each check makes of facts, what runtimes need, and the command on this machine."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distgemm.cli import doctor
from distgemm.cli import main as cli
from distgemm.cli.doctor import Check, checks, runtimes, unsatisfied
from distgemm.gemm import nvcc
from distgemm.measure.machine_facts import Facts, Gpu, look, parse_nvlinks

H200 = Gpu("NVIDIA H200", (9, 0), 140 << 30, multicast=True, nvlinks=18)
WELL = Facts(
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    gpus=(H200,) * 4,
    driver="580.159.04",
    driver_cuda="13.0",
    gloo=True,
    nccl="2.28.9",
    cutlass="4.2.0.0",
    include="/wheel/include",
    nvcc="/cuda/bin/nvcc",
    nvcc_version="release 13.0, V13.0.88",
    gxx="12.2.0",
    cache="/cache",
    kernels=3,
)
BARE = Facts(torch="2.13.0+cpu", gloo=True, symmetric_error="torch is built for the CPU", cache="/cache")


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_a_machine_that_has_everything() -> None:
    found = by_name(checks(WELL))
    assert {name for name, check in found.items() if check.status != "ok"} == {"multicast (NVLS)", "kernel pack"}
    assert found["GPUs"].detail == "4 x NVIDIA H200, compute capability 9.0, 140 GiB"
    assert found["driver"].detail == "580.159.04, for CUDA up to 13.0; torch is built for CUDA 13.0"
    assert found["NVLink"].detail == "18 active links on each GPU"
    assert found["kernel cache"].detail == "/cache: 3 kernels"
    assert [check.status for check in runtimes(WELL)] == ["ok"] * 4
    assert by_name(runtimes(WELL))["cuda"].detail == "up to 4 ranks"


def test_a_machine_without_a_gpu() -> None:
    works = by_name(runtimes(BARE))
    assert [check.status for check in works.values()] == ["ok", "ok", "fix", "fix"]
    assert "GPUs: torch is built for the CPU" in works["cuda"].detail
    assert "no NVIDIA driver found" in works["cuda"].detail
    assert "a build with CUDA" in works["cuda"].fix
    assert all(check.fix for check in checks(BARE) if check.status == "fix")


def test_a_machine_with_a_pack_and_without_a_compiler() -> None:
    lacking = replace(WELL, nvcc=None, gxx=None, include=None, cutlass_error="no headers", kernels=0)
    assert by_name(runtimes(lacking))["cuda"].status == "fix"
    packed = replace(lacking, pack="distgemm-kernels 0.1+cu13.sm90a.0", packed=428)
    assert by_name(runtimes(packed))["cuda"].status == "ok"
    found = by_name(checks(packed))
    assert found["kernel pack"] == Check("kernel pack", "ok", "distgemm-kernels 0.1+cu13.sm90a.0: 428 kernels")
    assert {found[name].status for name in ("compiler", "CUTLASS")} == {"note"}
    assert by_name(runtimes(replace(packed, cache_error="no place")))["cuda"].status == "fix"


@pytest.mark.parametrize(
    ("change", "name", "detail", "fix"),
    [
        ({"torch": None, "torch_error": "no libcudart"}, "torch", "no libcudart", "pip install 'torch"),
        ({"torch": "2.9.1+cu130"}, "torch", "too old", "torch>=2.11"),
        ({"torch": None}, "GPUs", "not known without torch", "pip install 'torch"),
        ({"gpus": (), "gpu_error": "No CUDA GPUs"}, "GPUs", "none found: No CUDA GPUs", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": (replace(H200, capability=(7, 5)),)}, "GPUs", "compute capability 7.5", "8.0 or newer"),
        ({"driver": None, "driver_cuda": None}, "driver", "no NVIDIA driver", "install NVIDIA's driver"),
        ({"driver_cuda": "12.8"}, "driver", "up to 12.8; torch is built for CUDA 13.0", "update the driver"),
        ({"no_peer": ((0, 1), (1, 0))}, "peer access", "0 -> 1, 1 -> 0", "CUDA_VISIBLE_DEVICES"),
        (
            {"gpus": (H200, replace(H200, mem_ops="CUDA_ERROR_NOT_SUPPORTED"))},
            "stream memory operations",
            "GPUs [1] refuse them: GPU 1 says CUDA_ERROR_NOT_SUPPORTED",
            "update the driver",
        ),
        ({"nccl": None}, "NCCL", "has none", "pip install 'torch"),
        ({"symmetric_error": "lacks rendezvous"}, "symmetric memory", "lacks rendezvous", "pip install 'torch"),
        ({"include": None, "cutlass_error": "no headers"}, "CUTLASS", "no headers", "pip install nvidia-cutlass"),
        ({"nvcc": None, "kernels": 0}, "compiler", "nvcc was not found", "distgemm[nvcc]"),
        ({"nvcc_error": "DISTGEMM_NVCC is 'x'"}, "compiler", "DISTGEMM_NVCC is 'x'", "DISTGEMM_NVCC"),
        ({"gxx": None}, "compiler", "but no g++", "install g++"),
        (
            {"nvcc_version": "release 14.0, V14.0.1"},
            "compiler",
            "too new: the driver serves CUDA up to 13.0, and does not load kernels",
            "update the driver, or install an older nvcc and set DISTGEMM_NVCC",
        ),
        (
            {"nvcc_version": "release 11.5, V11.5.119"},
            "compiler",
            "V11.5.119, too old for sm_90a, which CUDA 12.0 knows",
            "install a newer nvcc, and set DISTGEMM_NVCC",
        ),
        ({"cache_error": "/ cannot be written"}, "kernel cache", "/cache: / cannot", "DISTGEMM_CACHE_DIR"),
    ],
)
def test_what_stops_the_cuda_runtime(change: dict[str, object], name: str, detail: str, fix: str) -> None:
    facts = replace(WELL, **change)  # type: ignore[arg-type]
    check = by_name(checks(facts))[name]
    assert check.status == "fix"
    assert detail in check.detail
    assert fix in check.fix
    runtime = by_name(runtimes(facts))["cuda"]
    assert runtime.status == "fix"
    assert f"{name}: {check.detail}" in runtime.detail
    assert check.fix in runtime.fix


def test_kernels_that_are_compiled_already_need_no_compiler() -> None:
    assert by_name(runtimes(replace(WELL, nvcc=None)))["cuda"].status == "ok"
    assert by_name(runtimes(replace(WELL, nvcc=None, cache_error="read-only")))["cuda"].status == "ok"


@pytest.mark.parametrize(
    ("value", "status", "detail"),
    [
        ("1", "fix", "streams share 1 hardware queue,"),
        ("3", "fix", "streams share 3 hardware queues,"),
        ("8", "ok", "8 hardware queues"),
        ("64", "fix", "'64', where CUDA takes 1 to 32"),
        ("many", "fix", "'many', where CUDA takes"),
    ],
)
def test_queues(value: str, status: str, detail: str) -> None:
    facts = replace(WELL, environment={"CUDA_DEVICE_MAX_CONNECTIONS": value})
    check = by_name(checks(facts))["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert check.status == status
    assert detail in check.detail
    assert by_name(runtimes(facts))["cuda"].status == "ok"


def test_notes() -> None:
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    details = {
        "on;": {},
        "off, by NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1;": off,
        "off in part, by NCCL_NVLS_ENABLE=0;": {"NCCL_NVLS_ENABLE": "0"},
    }
    for detail, environment in details.items():
        check = by_name(checks(replace(WELL, environment=environment)))["multicast (NVLS)"]
        assert check.status == "note"
        assert check.detail.startswith(detail)
    for links, detail in ((None, "not known"), (0, "no active links on GPUs [1]")):
        check = by_name(checks(replace(WELL, gpus=(H200, replace(H200, nvlinks=links)))))["NVLink"]
        assert (check.status, check.detail[: len(detail)]) == ("note", detail)
    other = by_name(checks(replace(WELL, gpus=(replace(H200, capability=(8, 0)),))))["GPUs"]
    assert other.status == "ok"
    assert "the default provider is cutlass on 9.0 alone" in other.detail
    assert "2 damaged" in by_name(checks(replace(WELL, broken=2)))["kernel cache"].detail


def test_required() -> None:
    assert unsatisfied(runtimes(WELL), ["cuda", "collective", "reference"]) == []
    assert unsatisfied(runtimes(BARE), ["cuda", "collective", "cuda"]) == ["cuda"]
    assert unsatisfied(runtimes(replace(BARE, torch=None)), ["reference", "collective"]) == ["collective"]
    with pytest.raises(ValueError, match="--require is one of reference, collective, cuda, got 'nccl'"):
        unsatisfied(runtimes(WELL), ["nccl"])


def test_links_are_read_from_nvidia_smi() -> None:
    status = (
        "GPU 0: NVIDIA H200 (UUID: GPU-aa-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\t Link 2: <inactive>\n"
        "GPU 1: NVIDIA L4 (UUID: GPU-bb-2)\n"
    )
    assert parse_nvlinks(status) == {"aa-1": 2, "bb-2": 0}
    assert parse_nvlinks("") == {}


def test_looking_at_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert (look().cache, look().cache_error) == (str(tmp_path / "new" / "cache"), "")
    (tmp_path / "new").write_text("a file")
    (tmp_path / "new").chmod(0o755)
    assert look().cache_error == f"{tmp_path / 'new'} cannot be written"
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "cut_short.cubin").write_bytes(b"")
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path))
    assert (look().kernels, look().broken) == (0, 1)
    kernels.chmod(0o777)
    assert look().cache_error == f"users other than its owner can write {kernels} (mode 777)"


def test_kernels_that_are_too_new_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGEMM_CACHE_DIR", str(tmp_path))
    manifest = dict.fromkeys(("kernel", "arch", "cutlass"), "") | {
        "macros": {},
        "seconds": 1,
        "sha256": hashlib.sha256(b"").hexdigest(),
    }
    (tmp_path / "kernels").mkdir()
    for number, compiler in enumerate(("release 12.8", "release 14.0")):
        (tmp_path / "kernels" / f"{number}.cubin").touch()
        text = json.dumps(manifest | {"compiler": compiler})
        (tmp_path / "kernels" / f"{number}.json").write_text(text)
    monkeypatch.setattr(nvcc, "driver_cuda", lambda: "13.0")
    assert (look().kernels, look().broken) == (1, 0)


def test_looking_at_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGEMM_NVCC", str(tmp_path / "nvcc"))
    assert "where there is no file" in look().nvcc_error
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert look().environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(cli.app, ["doctor", *arguments], env={**os.environ, "COLUMNS": "120"})
        return done.exit_code, done.stdout, done.stderr

    monkeypatch.setattr(doctor, "look", lambda: BARE)
    code, printed, error = invoke()
    assert (code, error) == (0, "")
    for check in checks(BARE) + runtimes(BARE):
        assert check.name in printed
    assert "-> install NVIDIA's driver" in printed
    assert invoke("--require", "collective")[0] == 0
    code, _, error = invoke("--require", "cuda")
    assert (code, error) == (1, "required, and does not work here: cuda\n")
    code, printed, error = invoke("--require", "gloo")
    assert (code, printed) == (2, "")
    assert error == "error: --require is one of reference, collective, cuda, got 'gloo'\n"
    code, printed, _ = invoke("--json", "-", "--require", "cuda")
    found = json.loads(printed)
    assert code == 1
    assert [Check(**each) for each in found["checks"]] == checks(BARE)
    assert [Check(**each) for each in found["runtimes"]] == runtimes(BARE)


def test_command_on_this_machine() -> None:
    """Whatever it has: exit status 0, and a word on each runtime."""
    done = CliRunner().invoke(cli.app, ["doctor", "--json", "-"])
    assert (done.exit_code, done.stderr) == (0, "")
    found = {each["name"]: each["status"] for each in json.loads(done.stdout)["runtimes"]}
    assert list(found) == ["reference", "collective over gloo", "collective over NCCL", "cuda"]
    assert found["reference"] == found["collective over gloo"] == "ok"
