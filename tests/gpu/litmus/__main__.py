"""A litmus test of the flags and packets through which kernels pass data: store, set, wait, load, compare.

    python -m tests.gpu.litmus                            two ranks on one GPU
    python -m tests.gpu.litmus --gpus 2                   on two GPUs, each a rank; needs peer access
    python -m tests.gpu.litmus --rounds 100000 --seconds 30

``litmus.cu`` says what a round is. First the protocol runs as it is, along each path that the kernel takes, and for
each tile size: it must give no stale word. Then parts of it are left out, one at a time. Where any epoch ends a wait,
there must be stale words, or the test could not see any. What the other parts give is reported.

On one GPU, both ranks' memory is behind one L2. Once the wait for TMA's stores has ended, they are in L2, where every
later load finds them: a release that is left out behind this wait cannot show there. It can show where the wait is left
out, too. Between two GPUs, a store may be under way on the link when the wait has ended, and only the release waits for
it.

The last line of the output is one JSON object. The exit status is 0 where all rounds were made, none was stale, and the
control was; 1 where a word was stale or newer; 2 where rounds are missing; 3 where the control has seen nothing.
"""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from distgemm.gemm.nvcc import KernelSource, command, find_nvcc

FLAGGED = ("piece", "part", "sum")
PATHS = (*FLAGGED, "packet")
CHANGES = ("nothing", "release", "wait and release", "proxy fence", "acquire", "epoch", "whole stores")
"""What is left out, in the order of litmus.cu's enum."""

SLOTS, ROW, WARP_GROUPS = 2, 256, 2
"""As in litmus.cu."""
ROUNDS_PER_LAUNCH = 10_000
LAUNCH_LIMIT_S = 10.0
"""Time after which the blocks of a launch give up: a round takes some microseconds."""
FURTHER_BYTES = 256 << 20
"""Memory that the further blocks of a rank read, and as much that they write."""


class Variant(NamedTuple):
    """The protocol, or a part of it.

    Attributes:
        path: how data is stored at the peer.
        omitted: what is left out.
        control: whether stale words are wanted: such a variant shows that the test sees them.
    """

    path: str
    omitted: str = "nothing"
    control: bool = False

    def __str__(self) -> str:
        return self.path if self.omitted == "nothing" else f"{self.path} without {self.omitted}"


PROTOCOL = [Variant(path) for path in PATHS]
CONTROLS = [Variant(path, "epoch", control=True) for path in PATHS]
OMISSIONS = [
    *(Variant(path, omitted) for path in FLAGGED for omitted in ("release", "wait and release", "acquire")),
    *(Variant(path, "proxy fence") for path in ("piece", "part")),
    Variant("packet", "whole stores"),
]
"""What they give is reported, and may be nothing."""
LARGE_TILE = 64 << 10
"""Bytes of a tile for which parts are left out as well: its stores take longer."""


class Arguments(ctypes.Structure):
    """struct Arguments of litmus.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "peer_slots", "flags", "peer_flags")),
        *((name, ctypes.c_void_p) for name in ("read", "written")),
        ("units", ctypes.c_uint64),
        ("running", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("first_round", "rounds", "seed")),
        *((name, ctypes.c_int32) for name in ("rank", "blocks", "further_blocks", "bytes", "jitter_ns")),
    )


RESULT_COUNTS = ("rounds", "stale_rounds", "stale_words", "newer_words")
RESULT_FIELDS = (*RESULT_COUNTS, "oldest", "timeouts")


class Result(ctypes.Structure):
    """struct Result of litmus.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in RESULT_COUNTS),
        *((name, ctypes.c_uint32) for name in RESULT_FIELDS[len(RESULT_COUNTS) :]),
    )


@dataclass(frozen=True)
class LitmusSource(KernelSource):
    """A source in this folder."""

    @property
    def path(self) -> Path:
        return Path(__file__).parent / self.file


def compiled(folder: Path, arch: str = "90a") -> Path:
    """The library, compiled into a folder.

    Raises:
        RuntimeError: where there is no compiler, or it fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found; set DISTGEMM_NVCC to its path")
    out = folder / "litmus.so"
    words = [word for word in command(LitmusSource("litmus", (), arch, "litmus.cu"), nvcc, out) if word != "-cubin"]
    # With host code. nvcc looks for its runtime in lib64; the PyPI packages have it in lib.
    words += ["-shared", "-Xcompiler", "-fPIC", f"-L{nvcc.parent.parent / 'lib'}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(done.args)}\n{done.stdout}{done.stderr}")
    return out


def opened(path: Path) -> ctypes.CDLL:
    """The library, known to take these structs."""
    functions = ctypes.CDLL(str(path))
    functions.litmus_error_string.restype = ctypes.c_char_p
    functions.litmus_launch.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    sizes = functions.litmus_arguments_size(), functions.litmus_result_size()
    if sizes != (ctypes.sizeof(Arguments), ctypes.sizeof(Result)):
        raise RuntimeError(f"litmus.cu has structs of {sizes} bytes, __main__.py others")
    return functions


@dataclass(frozen=True)
class Shape:
    """How many blocks do what.

    Attributes:
        bytes: of a tile.
        blocks: of each rank that pass tiles on.
        further_blocks: of each rank, which read and write other memory.
    """

    bytes: int
    blocks: int
    further_blocks: int

    def __post_init__(self) -> None:
        if self.bytes % (ROW * WARP_GROUPS) or not 0 < self.bytes <= 64 << 10:
            raise ValueError(f"bytes is a multiple of {ROW * WARP_GROUPS} up to {64 << 10}, got {self.bytes}")
        if self.blocks < 1 or self.further_blocks < 0:
            raise ValueError(f"blocks is > 0 and further blocks are >= 0, got {self.blocks} and {self.further_blocks}")


def shape_on(sms: int, ranks_on_gpu: int, size: int, blocks: int) -> Shape:
    """Blocks on all SMs of a GPU but two for each rank: all blocks of all ranks are resident at once.

    Raises:
        ValueError: where the blocks do not fit.
    """
    available = sms // ranks_on_gpu - 2
    if blocks > available:
        raise ValueError(f"each rank has {available} SMs, and one for each of {blocks} blocks is wanted")
    return Shape(size, blocks, available - blocks)


class Rank:
    """The memory and the stream of one rank. Flags of epochs are not cleared: 0 is none of their epochs."""

    def __init__(self, rank: int, device: torch.device, shape: Shape) -> None:
        self.rank, self.device, self.shape = rank, device, shape

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.uint8, device=device)

        self.slots = zeros(SLOTS * shape.blocks * shape.bytes)
        self.flags = zeros(8 * SLOTS * shape.blocks * WARP_GROUPS)
        self.further = [zeros(FURTHER_BYTES) for _ in range(2)]
        self.running = torch.zeros(1, dtype=torch.int32, device=device)
        self.result = zeros(ctypes.sizeof(Result))
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def launch(
        self, functions: ctypes.CDLL, peer: Rank, variant: Variant, first: int, rounds: int, seed: int, jitter: int
    ) -> None:
        """Launch so many rounds from ``first`` on. The peer is launched as well."""
        shape = self.shape
        arguments = Arguments(
            *(x.data_ptr() for x in (self.slots, peer.slots, self.flags, peer.flags)),
            *(self.further[0].data_ptr(), peer.further[1].data_ptr(), FURTHER_BYTES // 16),
            *(self.running.data_ptr(), self.result.data_ptr(), int(LAUNCH_LIMIT_S * 1e9)),
            *(first, rounds, seed, self.rank),
            *(shape.blocks, shape.further_blocks, shape.bytes, jitter),
        )
        with torch.cuda.device(self.device):
            error = functions.litmus_launch(
                ctypes.addressof(arguments),
                PATHS.index(variant.path),
                CHANGES.index(variant.omitted),
                self.stream.cuda_stream,
            )
        if error:
            what = {-1: "this path is not compiled with this change", -2: "the driver encodes no tensor map"}
            raise RuntimeError(f"{variant}: {what.get(error) or functions.litmus_error_string(error).decode()}")

    def clear(self) -> None:
        """Make the memory ready for a launch."""
        self.running.fill_(self.shape.blocks)

    def read(self) -> Result:
        """What all launches have found."""
        return Result.from_buffer_copy(bytes(self.result.cpu().tolist()))


@dataclass
class Row:
    """What a variant gave, of both ranks.

    Attributes:
        variant: the variant.
        bytes: of a tile.
        rounds: of all blocks.
        stale_rounds: rounds in which a block loaded a word of an earlier round.
        stale_words: such words.
        newer_words: words of a later round.
        oldest: rounds by which the oldest stale word was behind.
        timeouts: blocks that gave up.
        seconds: time.
        wanted: rounds to be made.
        control: whether stale words are wanted.
    """

    variant: str
    bytes: int
    rounds: int
    stale_rounds: int
    stale_words: int
    newer_words: int
    oldest: int
    timeouts: int
    seconds: float
    wanted: int
    control: bool

    @property
    def complete(self) -> bool:
        """Whether all rounds were made."""
        return self.rounds >= self.wanted and not self.timeouts

    def __str__(self) -> str:
        each = self.seconds / max(1, self.rounds) * 1e9
        return (
            f"{self.bytes:6} B, {self.variant:32} {self.rounds:>11,} rounds, {self.stale_rounds:,} stale "
            f"({self.stale_words:,} words, at most {self.oldest} rounds old), {self.newer_words:,} newer words, "
            f"{self.timeouts} timeouts, {self.seconds:.1f} s, {each:.0f} ns a round"
        )


def measure(
    functions: ctypes.CDLL,
    devices: list[torch.device],
    shape: Shape,
    variant: Variant,
    rounds: int,
    deadline: float,
    seed: int,
    jitter: int,
) -> Row:
    """Run a variant: so many rounds of all blocks together, or as many as there is time for."""
    ranks = [Rank(number, device, shape) for number, device in enumerate(devices)]
    blocks = 2 * shape.blocks
    start, made, chance = time.monotonic(), 0, random.Random(seed)
    told, found = start, [rank.read() for rank in ranks]
    while made * blocks < rounds and time.monotonic() < deadline:
        now = min(ROUNDS_PER_LAUNCH, -(-(rounds - made * blocks) // blocks))
        for rank in ranks:
            rank.clear()
        synchronize(devices)
        order = chance.sample(range(2), 2)  # either rank may begin
        for number in order:
            ranks[number].launch(functions, ranks[1 - number], variant, 1 + made, now, seed, jitter)
        synchronize(devices)
        made += now
        found = [rank.read() for rank in ranks]
        if any(one.timeouts for one in found):
            break
        if time.monotonic() > told + 5.0:
            told = time.monotonic()
            print(f"  {variant}: {made * blocks:,} rounds, {sum(one.stale_rounds for one in found)} stale", flush=True)
    sums = {name: sum(getattr(one, name) for one in found) for name in RESULT_FIELDS}
    sums["oldest"] = max(one.oldest for one in found)
    seconds = round(time.monotonic() - start, 2)
    return Row(str(variant), shape.bytes, **sums, seconds=seconds, wanted=rounds, control=variant.control)


def synchronize(devices: list[torch.device]) -> None:
    """Wait for the devices. Kernels end by themselves after LAUNCH_LIMIT_S."""
    for device in dict.fromkeys(devices):
        torch.cuda.synchronize(device)


def enable_peer_access(devices: list[torch.device]) -> None:
    """Let two GPUs write each other's memory.

    Raises:
        RuntimeError: where they cannot.
    """
    from cuda.bindings import runtime

    for here, there in (devices, devices[::-1]):
        if not torch.cuda.can_device_access_peer(here, there):
            raise RuntimeError(f"{here} cannot write the memory of {there}")
        with torch.cuda.device(here):
            torch.cuda.current_stream()  # makes the context current
            (error,) = runtime.cudaDeviceEnablePeerAccess(there.index, 0)
        if error not in (runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled):
            raise RuntimeError(f"peer access from {here} to {there}: {error.name}")


def status_of(rows: list[Row], variants: list[Variant]) -> int:
    """The exit status, as the docstring of this module says."""
    by_name = {str(variant): variant for variant in variants}
    protocol = [row for row in rows if by_name[row.variant].omitted == "nothing"]
    controls = [row for row in rows if row.control]
    if any(row.stale_rounds or row.newer_words for row in protocol):
        return 1
    if len(rows) < len(variants) or not protocol or not all(row.complete for row in protocol):
        return 2
    return 0 if controls and all(row.stale_rounds for row in controls) else 3


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of all blocks together, for each path and size.")] = 10_000_000,
    size: Annotated[list[int] | None, typer.Option("--bytes", help="Bytes of a tile; may be repeated.")] = None,
    gpus: Annotated[int, typer.Option(help="1: both ranks on one GPU; 2: each on its own.")] = 1,
    blocks: Annotated[int, typer.Option(help="Blocks of each rank that pass tiles on.")] = 16,
    seconds: Annotated[float, typer.Option(help="Time for everything.")] = 240.0,
    seed: Annotated[int, typer.Option(help="Of the delays.")] = 0,
    jitter: Annotated[int, typer.Option(help="A block is up to so many ns late, in one of 8 rounds.")] = 2000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Run the litmus test."""
    if gpus not in (1, 2) or rounds < 1:
        raise typer.BadParameter(f"gpus is 1 or 2 and rounds > 0, got {gpus} and {rounds}")
    if torch.cuda.device_count() < gpus:
        raise typer.BadParameter(f"{gpus} GPUs wanted, {torch.cuda.device_count()} found")
    start = time.monotonic()
    deadline = start + seconds
    with tempfile.TemporaryDirectory() as folder:
        functions = opened(compiled(Path(folder)))
    print(f"compiled in {time.monotonic() - start:.1f} s", flush=True)
    devices = [torch.device("cuda", rank % gpus) for rank in range(2)]
    if gpus == 2:
        enable_peer_access(devices)
    properties = torch.cuda.get_device_properties(0)
    sizes = size or [2048, 8192]
    cases = [(variant, one, rounds) for one in sizes for variant in PROTOCOL]
    changed = dict.fromkeys([*sizes, LARGE_TILE])
    cases += [(variant, one, max(1, rounds // 10)) for one in changed for variant in (*CONTROLS, *OMISSIONS)]
    rows: list[Row] = []
    for number, (variant, one, count) in enumerate(cases):
        now = time.monotonic()
        share = now + (deadline - now) / (len(cases) - number) * (3 if variant in PROTOCOL else 1)
        shape = shape_on(properties.multi_processor_count, 2 // gpus, one, blocks)
        rows.append(measure(functions, devices, shape, variant, count, min(share, deadline), seed + number, jitter))
        print(rows[-1], flush=True)
    status = status_of(rows, [variant for variant, _, _ in cases])
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "gpu": properties.name,
        "gpus": gpus,
        "shape": {name: value for name, value in asdict(shape).items() if name != "bytes"},
        "seed": seed,
        "status": status,
        "release_seen": any(row.stale_rounds for row in rows if row.variant.endswith("without release")),
        "seconds": round(time.monotonic() - start, 1),
        "rows": [asdict(row) for row in rows],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(status)


if __name__ == "__main__":
    typer.run(main)
