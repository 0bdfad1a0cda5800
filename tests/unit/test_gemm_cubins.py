"""Cubins in a process: what the driver is asked for, without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver

from distgemm.gemm import cubins
from distgemm.gemm.cubins import Cubin, Fact, open_cubin, read_facts
from distgemm.gemm.driver import EARLY, LaunchAttribute, LaunchConfig
from distgemm.gemm.flags import FlagOps
from distgemm.gemm.nvcc import KernelSource, command, find_nvcc
from distgemm.gemm.sums import _Arguments, sum_source  # noqa: PLC2701  (its size is checked)
from distgemm.runtime.cuda.discard_kernel import DiscardArguments

SOURCE = KernelSource("a kernel", (), "90a")


class FakeDriver:
    """Notes launches, and answers with these errors."""

    def __init__(self, *errors: int) -> None:
        self.errors, self.launches = [*errors], list[tuple[Any, ...]]()

    def cuLaunchKernelEx(self, config: int, function: int, pointers: Any, extra: None) -> int:  # noqa: N802
        found = LaunchConfig.from_address(config)
        parameter = ctypes.c_uint32.from_address(pointers[0]).value
        assert extra is None and not found.attribute_count
        self.launches.append(
            (tuple(found.grid), tuple(found.block), found.shared_bytes, found.stream, function, parameter)
        )
        return self.errors.pop(0)


@pytest.fixture
def cubin(monkeypatch: pytest.MonkeyPatch) -> Cubin:
    """A cubin that is loaded on device 1."""
    facts = {"threads": Fact(0, 0, 384), "shared_bytes": Fact(0, 0, 1000), "size": Fact(0, 0, 12)}
    monkeypatch.setattr(cubins, "cubin_path", lambda source: source.path)
    monkeypatch.setattr(cubins, "read_facts", lambda image: facts)
    found = Cubin(SOURCE)
    found._functions[1] = 77
    return found


def test_the_launch_config_lies_as_in_cuda() -> None:
    theirs = driver.CUlaunchConfig()
    for number, dimension in enumerate("XYZ", 1):
        setattr(theirs, f"gridDim{dimension}", number)
        setattr(theirs, f"blockDim{dimension}", 10 * number)
    theirs.sharedMemBytes, theirs.hStream = 4096, driver.CUstream(1 << 40)
    size = ctypes.sizeof(LaunchConfig)
    ours = LaunchConfig((1, 2, 3), (10, 20, 30), 4096, 1 << 40)
    assert ctypes.string_at(ctypes.addressof(ours), size) == ctypes.string_at(theirs.getPtr(), size)


def test_the_launch_attribute_lies_as_in_cuda() -> None:
    """It says that a kernel may begin before the one in front of it has ended."""
    theirs = driver.CUlaunchAttribute()
    theirs.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    theirs.value.programmaticStreamSerializationAllowed = 1
    size = ctypes.sizeof(LaunchAttribute)
    assert ctypes.string_at(ctypes.addressof(EARLY), size) == ctypes.string_at(theirs.getPtr(), size)
    config = driver.CUlaunchConfig()
    config.attrs, config.numAttrs = [theirs, theirs], 2
    first = LaunchConfig.from_address(int(config.getPtr())).attributes
    assert ctypes.string_at(first + size, size) == ctypes.string_at(theirs.getPtr(), size)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("waits", [False, True, None])
def test_only_kernels_that_wait_begin_early(waits: bool | None, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"threads": Fact(0, 0, 384), "shared_bytes": Fact(0, 0, 1000)}
    facts |= {} if waits is None else {"begins_early": Fact(0, 0, int(waits))}
    monkeypatch.setattr(cubins, "cubin_path", lambda source: source.path)
    monkeypatch.setattr(cubins, "read_facts", lambda image: facts)
    found = Cubin(SOURCE)
    found._functions[1] = 77
    attributes = list[tuple[int, int | None]]()

    def launch(config: int, *rest: Any) -> int:
        given = LaunchConfig.from_address(config)
        attributes.append((given.attribute_count, given.attributes))
        return 0

    monkeypatch.setattr(cubins, "libcuda", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    found.launcher(1, (1, 1, 1), 0, asked)(0)
    assert attributes == [(1, ctypes.addressof(EARLY)) if asked and waits else (0, None)]


def test_launches(cubin: Cubin, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, parameter = FakeDriver(0, 0, 0), ctypes.c_uint32(5)
    monkeypatch.setattr(cubins, "libcuda", lambda: fake)
    launch = cubin.launcher(1, (4, 2, 1), ctypes.addressof(parameter))
    for stream, value in ((0, 5), (1 << 40, 6), (0, 7)):
        parameter.value = value
        launch(stream)
    expected = [(stream or None, 77, value) for stream, value in ((0, 5), (1 << 40, 6), (0, 7))]
    assert fake.launches == [((4, 2, 1), (384, 1, 1), 1000, *rest) for rest in expected]


def test_a_thread_without_a_context_gets_one(cubin: Cubin, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, parameter, made = FakeDriver(201, 0, 201, 1), ctypes.c_uint32(5), list[int]()

    def make_current(device: int) -> bool:
        made.append(device)
        return len(made) == 1

    monkeypatch.setattr(cubins, "libcuda", lambda: fake)
    monkeypatch.setattr(cubins, "error_text", lambda error: f"error {error}")
    monkeypatch.setattr(cubins, "_make_current", make_current)
    launch = cubin.launcher(1, (1, 1, 1), ctypes.addressof(parameter))
    launch(0)
    assert made == [1] and len(fake.launches) == 2
    with pytest.raises(RuntimeError, match="CUDA could not launch kernel a kernel: error 201"):
        launch(0)  # it has one, and the driver refuses all the same
    with pytest.raises(RuntimeError, match=r"could not launch kernel a kernel: error 1$"):
        launch(0)


@pytest.mark.usefixtures("cubin")
def test_a_kernel_for_another_struct_is_refused() -> None:
    open_cubin.cache_clear()
    with pytest.raises(RuntimeError, match="was compiled for another parameter than this version passes"):
        open_cubin(SOURCE, FlagOps)
    open_cubin.cache_clear()


@pytest.mark.sample(0)  # a kernel compiles for some seconds
@pytest.mark.parametrize(
    ("source", "struct"),
    [
        (KernelSource("flags", (), "90a", "flags.cu", ("flags.cuh", "facts.cuh")), FlagOps),
        (KernelSource("discard", (), "90a", "discard.cu", ("facts.cuh",)), DiscardArguments),
        (sum_source("bfloat16", "float32", 4, "90a"), _Arguments),
        (sum_source("float64", "bfloat16", 1, "80"), _Arguments),
    ],
    ids=lambda value: value.name if isinstance(value, KernelSource) else "",
)
def test_small_kernels_take_these_structs(source: KernelSource, struct: type[ctypes.Structure], tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found: pip install 'distgemm[nvcc]'")
    done = subprocess.run(
        command(source, nvcc, tmp_path / "out"), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    image = (tmp_path / "out").read_bytes()
    facts = read_facts(image)
    assert facts["size"].value == ctypes.sizeof(struct) and facts["threads"].value in (32, 256)
    assert source.entry.encode() + b"\0" in image
