"""Machine: what the cost model knows about GPUs and the links between them. Pure data, read from JSON.

Times are microseconds, bandwidths GB/s (1e9 bytes), rates TFLOP/s. ``sources`` in each file of ``machines/`` says
where its figures come from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from distgemm.arguments import (
    MAX_EXTENT,
    finite,
    instance,
    integer,
    member,
    path_of,
    read_json,
    string,
    write,
    wrong,
)
from distgemm.plan.plan import Plan
from distgemm.plan.problem import DTYPE_BYTES, DTYPES

__all__ = ["GemmCost", "KernelTile", "Link", "Machine", "Rate", "list_machines"]

MACHINES = Path(__file__).parent / "machines"

MIN_FIGURE, MAX_FIGURE = 1e-9, 1e12
"""Bounds of all figures, in their units. Between them, no quotient of figures overflows."""


class Rate(NamedTuple):
    """The rate at which a GPU multiplies one element type, TFLOP/s.

    Attributes:
        peak: of all SMs at full clock; one SM has peak / sms.
        power: the most that the whole GPU sustains under its power limit.
    """

    peak: float
    power: float


class KernelTile(NamedTuple):
    """An output tile m x n that one SM computes, and its rate as a share of the peak."""

    m: int
    n: int
    efficiency: float


class Link(NamedTuple):
    """One kind of connection.

    A transfer of b bytes occupies its engine for gap + b / bandwidth, and has arrived one latency later. Transfers
    without a pause between them pay the latency once.

    Attributes:
        bandwidth: per rank and direction, GB/s.
        gap: between two transfers of one engine, us.
        latency: us.
    """

    bandwidth: float
    gap: float
    latency: float


OPTIONAL = ("small_collective", "symmetric")
"""Links that a machine may do without."""
LINKS = ("nvlink", "network", "collective", *OPTIONAL)


class GemmCost(NamedTuple):
    """What a GEMM asks of the SMs.

    Attributes:
        tiles: output tiles, each the work of one SM.
        tile_us: time of a tile, us.
        flop: floating-point operations.
        alone: time with the launch if it has the GPU to itself, us.
    """

    tiles: int
    tile_us: float
    flop: float
    alone: float


@dataclass(frozen=True)
class Machine:
    """GPUs and links, for :func:`distgemm.simulator.simulate`.

    Attributes:
        name: for titles.
        sms: streaming multiprocessors of a GPU.
        rates: the Rate of each element type.
        tiles: output tiles of the kernels to choose from; the fastest is taken for each shape.
        gemm_launch: from the moment a GEMM may start to its first tile, us.
        tile_overhead: of each tile outside the loop over K (pipeline fill, epilogue), us.
        boost: multiplication in a replay at the power limit above, us; the rest runs at ``sustained`` times that rate.
        sustained: a share, at most 1.
        memory: rate that kernels reach, GB/s.
        sum_memory: rate of the kernel that executes Reduce, reads and writes together, GB/s.
        nvlink: links within a host, when the copy engine pushes.
        pull_bandwidth: rate when the receiver pulls instead, GB/s.
        copy_streams: copy streams per rank at which the bandwidth above holds.
        contended: rate of all copy streams together if there are more of them, GB/s.
        network: links between hosts, the bandwidth that of one adapter.
        ranks_per_host: ranks that NVLink connects; None: all. A plan with ranks_per_host replaces it.
        adapters_per_host: network adapters that the ranks of a host share; None: each rank has one of its own.
        signal: until a flag is seen by its reader, us.
        wait: from there until the op that waited starts, us.
        copy_launch: from the moment a copy may start to its start, unless the copy before it takes longer, us.
        signal_gap: for which a signal after a copy stops the copy's stream, us.
        barrier: of a barrier, from the last arrival, us.
        replay: from the end of a replay to the beginning of the next one, us: exit and launch.
        entry: from there until copies may leave, us: each rank learns that the others have left their last replay.
        gemm_streams: GEMMs of one rank in flight.
        collective: a library's collective of large messages, for predict_unfused; bytes are those a rank receives.
        sources: where the figures come from.
        small_collective: of small messages, where this is faster; None: as large ones.
        symmetric: all-reduces of torch's symmetric memory; None: as other collectives.
        store_bandwidth: rate at which a link carries what GEMMs store at peers, GB/s; None: as copies.

    Raises:
        ValueError: for figures out of range.
    """

    name: str
    sms: int
    rates: Mapping[str, Rate]
    tiles: tuple[KernelTile, ...]
    gemm_launch: float
    tile_overhead: float
    boost: float
    sustained: float
    memory: float
    sum_memory: float
    nvlink: Link
    pull_bandwidth: float
    copy_streams: int
    contended: float
    network: Link
    ranks_per_host: int | None
    adapters_per_host: int | None
    signal: float
    wait: float
    copy_launch: float
    signal_gap: float
    barrier: float
    replay: float
    entry: float
    gemm_streams: int
    collective: Link
    sources: Mapping[str, str] = field(default_factory=dict)
    small_collective: Link | None = None
    symmetric: Link | None = None
    store_bandwidth: float | None = None

    def __post_init__(self) -> None:
        string("name", self.name)
        for name in ("sms", "copy_streams", "gemm_streams"):
            integer(name, getattr(self, name), 1, MAX_EXTENT)
        for name in ("ranks_per_host", "adapters_per_host"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 1, MAX_EXTENT)
        _rate("sustained", self.sustained, 1.0)
        stores = () if self.store_bandwidth is None else ("store_bandwidth",)
        for name in ("memory", "sum_memory", "pull_bandwidth", "contended", *stores):
            _rate(name, getattr(self, name))
        waits = ("signal", "wait", "signal_gap", "barrier", "replay", "entry")
        for name in ("gemm_launch", "tile_overhead", "copy_launch", "boost", *waits):
            _time(name, getattr(self, name))
        for name in LINKS:
            if name in OPTIONAL and getattr(self, name) is None:
                continue
            link = instance(name, getattr(self, name), Link, f"a Link with the fields {', '.join(Link._fields)}")
            _rate(f"{name}.bandwidth", link.bandwidth)
            _time(f"{name}.gap", link.gap)
            _time(f"{name}.latency", link.latency)
        if not isinstance(self.rates, Mapping) or not self.rates:
            raise wrong("rates", "a mapping from at least one element type to a Rate", self.rates)
        for dtype, rate in self.rates.items():
            member("each element type of rates", dtype, DTYPES)
            instance(f"rates.{dtype}", rate, Rate, "a Rate with the fields peak, power")
            _rate(f"rates.{dtype}.peak", rate.peak)
            _rate(f"rates.{dtype}.power", rate.power)
        if not isinstance(self.tiles, tuple) or not self.tiles:
            raise wrong("tiles", "a tuple of at least one KernelTile", self.tiles)
        for number, tile in enumerate(self.tiles):
            instance(f"tiles[{number}]", tile, KernelTile, "a KernelTile with the fields m, n, efficiency")
            integer(f"tiles[{number}].m", tile.m, 1, MAX_EXTENT)
            integer(f"tiles[{number}].n", tile.n, 1, MAX_EXTENT)
            _rate(f"tiles[{number}].efficiency", tile.efficiency)
        sources = self.sources
        texts = isinstance(sources, Mapping) and all(isinstance(text, str) for pair in sources.items() for text in pair)
        if not texts:
            raise wrong("sources", "a mapping of texts", sources)

    # --- files --------------------------------------------------------------------------------------

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """A machine that ships with the package, by name, or the machine in a JSON file.

        Raises:
            ValueError: naming the file and what is wrong with it.
        """
        wanted = f"one of {', '.join(list_machines())}, or the path of a .json file"
        path = path_of("machine", name, wanted)
        if path.suffix != ".json" and len(path.parts) == 1:
            path = MACHINES / f"{name}.json"
            if not path.is_file():
                raise wrong("machine", wanted, str(name))
        fields = read_json("machine", path)
        try:
            return cls.from_dict(fields)
        except ValueError as error:
            raise ValueError(f"machine {path}: {error}") from None

    @classmethod
    def from_dict(cls, fields: Any) -> Machine:
        """The machine that :meth:`to_dict` wrote. Raises ValueError for missing, unknown or wrong fields."""
        fields_of = dataclasses.fields(cls)
        known = {each.name for each in fields_of}
        needed = {each.name for each in fields_of if each.default is each.default_factory is dataclasses.MISSING}
        wanted = f"a JSON object with the fields {', '.join(sorted(known))}"
        if not isinstance(fields, dict):
            raise wrong("fields", wanted, fields)
        unknown = sorted(map(str, set(fields) - known))
        missing = sorted(needed - set(fields))
        if unknown or missing:
            lists = (("has unknown", unknown), ("lacks", missing))
            raise ValueError(f"fields is {wanted}; it {' and '.join(f'{what} {keys}' for what, keys in lists if keys)}")
        values = dict(fields)
        for key in LINKS:
            if values.get(key) is not None or key not in OPTIONAL:
                values[key] = Link(**_named(key, values[key], Link._fields))
        if not isinstance(values["rates"], dict):
            raise wrong("rates", "an object with an object for each element type", values["rates"])
        values["rates"] = {
            dtype: Rate(**_named(f"rates.{dtype}", rate, Rate._fields)) for dtype, rate in values["rates"].items()
        }
        if not isinstance(values["tiles"], list) or not values["tiles"]:
            raise wrong("tiles", "a list of objects with the fields m, n, efficiency", values["tiles"])
        values["tiles"] = tuple(
            KernelTile(**_named(f"tiles[{number}]", tile, KernelTile._fields))
            for number, tile in enumerate(values["tiles"])
        )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The machine as JSON knows it."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for key in LINKS:
            fields[key] = fields[key] and fields[key]._asdict()
        fields["rates"] = {dtype: rate._asdict() for dtype, rate in self.rates.items()}
        fields["tiles"] = [tile._asdict() for tile in self.tiles]
        fields["sources"] = dict(self.sources)
        return fields

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON; :meth:`load` reads it back. Raises ValueError if the file cannot be written."""
        write("path", path, json.dumps(self.to_dict(), indent=2) + "\n")

    # --- costs --------------------------------------------------------------------------------------

    def rate(self, dtype: str) -> Rate:
        """The rate of an element type. Raises ValueError if the machine has none."""
        found = None
        if isinstance(dtype, str):  # tensor cores multiply both types of 8 bits at one rate
            found = self.rates.get("float8_e4m3fn" if dtype == "float8_e5m2" else dtype)
        if found is None:
            raise wrong(
                "dtype", f"one of {', '.join(self.rates)}, the types of which {self.name} has a GEMM rate", dtype
            )
        return found

    def same_host(self, one: int, other: int) -> bool:
        """Whether NVLink connects two ranks."""
        one, other = integer("one", one, 0), integer("other", other, 0)
        return self.ranks_per_host is None or one // self.ranks_per_host == other // self.ranks_per_host

    def of_plan(self, plan: Plan) -> Machine:
        """The machine with the hosts of a plan; this one if the plan says nothing of hosts."""
        if plan.ranks_per_host is None:
            return self
        return dataclasses.replace(self, ranks_per_host=plan.ranks_per_host)

    def link(self, src: int, dst: int) -> Link:
        """The link between two ranks."""
        src, dst = integer("src", src, 0), integer("dst", dst, 0)
        return self.nvlink if self.same_host(src, dst) else self.network

    def gemm(
        self, m: int, n: int, k: int, batches: int = 1, *, dtype: str, out_bytes: int = 2, read_bytes: int = 0
    ) -> GemmCost:
        """What D (m, n) = A (m, k) B (n, k) asks of the SMs, with the fastest output tile.

        out_bytes, read_bytes: bytes that the epilogue writes, and reads, for each element of D
        """
        for name, value, least in (
            *(("m", m, 1), ("n", n, 1), ("k", k, 1), ("batches", batches, 1)),
            *(("out_bytes", out_bytes, 0), ("read_bytes", read_bytes, 0)),
        ):
            integer(name, value, least, MAX_EXTENT)
        rate = self.rate(dtype)
        per_sm = rate.peak / self.sms * 1e6
        flop = 2.0 * batches * m * n * k
        moved = batches * (DTYPE_BYTES[dtype] * (m + n) * k + (out_bytes + read_bytes) * m * n)
        best: tuple[float, int, float] | None = None
        for tile in self.tiles:
            tiles = batches * ceil(m / tile.m) * ceil(n / tile.n)
            epilogue = tile.m * tile.n * read_bytes / (self.memory / self.sms * 1e3)
            tile_us = 2.0 * tile.m * tile.n * k / (per_sm * tile.efficiency) + self.tile_overhead + epilogue
            waves = ceil(tiles / self.sms)
            # What must come from memory holds small products back; every tile waits for its share.
            tile_us = max(tile_us, moved / (self.memory * 1e3) / waves)
            if best is None or waves * tile_us < best[0]:
                best = waves * tile_us, tiles, tile_us
        assert best is not None
        alone = self.gemm_launch + max(best[0], flop / (rate.power * 1e6))
        return GemmCost(best[1], best[2], flop, alone)

    def clock(self, dtype: str, flop: float) -> float:
        """Share of the rate at the power limit that remains in a replay with so many operations per rank."""
        at_limit = finite("flop", flop, least=0) / (self.rate(dtype).power * 1e6)
        if at_limit <= self.boost:
            return 1.0
        return at_limit / (self.boost + (at_limit - self.boost) / self.sustained)

    def copy_us(self, size: int, src: int = 0, dst: int = 1) -> float:
        """Time of one copy of ``size`` bytes on idle links, until it has arrived, us."""
        link = self.link(src, dst)
        return link.gap + finite("size", size, least=0) / (link.bandwidth * 1e3) + link.latency


def list_machines() -> list[str]:
    """Names of the machines that ship with the package."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def _named(what: str, given: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, dict) or set(given) != set(fields):
        raise wrong(what, f"an object with the fields {', '.join(fields)}", given)
    return given


def _rate(name: str, value: Any, most: float = MAX_FIGURE) -> None:
    finite(name, value, least=MIN_FIGURE, most=most)


def _time(name: str, value: Any) -> None:
    finite(name, value, least=0, most=MAX_FIGURE)
