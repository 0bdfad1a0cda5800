"""Several products of one shape by one kernel, which waits for each of them by itself.

The kernel is one of :mod:`distgemm.gemm.cutlass`. Its persistent thread blocks go from one product to the next without
a pause, so that products which do not fill the GPU cost no more than one that does. It is of one of three kinds:

* "operands": the warp that loads A and B waits for each product's A (or B);
* "results": products add a partial sum, for which the warp that loads it waits, or several, and whoever stores the last
  tile of a result writes a word, here or in peers' memory. So sums are passed on from rank to rank, or meet at one;
* "deliveries": the same, and two warps copy: one what is finished to peers, one what comes from there to its place.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from typing import Any

import torch

from distgemm.gemm.cutlass import (
    INT32_MAX,
    Arguments,
    CutlassKernel,
    CutlassLaunch,
    CutlassProvider,
    Matrix,
    kernel_source,
)
from distgemm.gemm.flags import FlagOps, MemOp, flag_ops
from distgemm.gemm.nvcc import KernelSource
from distgemm.gemm.provider import GemmTensors
from distgemm.gemm.select import order, select_config, tiles_at_once, tiles_of
from distgemm.gemm.spec import GemmConfig, GemmSpec, MatrixSpec, Status
from distgemm.gemm.tensors import spec_of
from distgemm.plan.problem import DTYPE_BYTES

__all__ = [
    "COUNTERS",
    "PRODUCTS",
    "SENDS",
    "Further",
    "FusedGemms",
    "FusedSend",
    "bind_fused",
    "fused_source",
    "storing_first",
    "together",
]

PRODUCTS, SENDS = 128, 128
"""How many products a kernel computes, and how many pieces of matrices it sends, at most."""
LONGEST_STRIDE = 1 << 40
"""Bytes from one batch of a tensor to the next are fewer, for TMA."""
COUNTERS, RESERVED, TURNS = 2048, 6, 2
"""How many int32 a kernel counts with; how many of them, the last, for other things than products and sends; and how
many of these, the first, for turns on the link, which are not 0 again afterwards."""
HANDED_OUT, QUEUES = 1, 2
"""How many, where there are partial sums, count tiles, behind those of products; and how many pieces of what is sent:
away, or not."""

MATRICES = ("a", "b", "d", "c", "partial")


@dataclass(frozen=True)
class FusedSend:
    """Rows that a kernel copies, here or to another GPU's memory, while it multiplies.

    source, target: matrices of the same shape and type, with contiguous rows
    word:           the address of an int32 at the other rank that is set to 1 once a slice of the target is there;
                    words of further slices follow. 0: nobody is told
    waits:          the address of an int32 that is 1 once the source has come, or is computed; 0: it is there
    away:           whether it goes to another GPU, and takes turns on the link. What does not is copied by warps of
                    its own, beside what does
    """

    source: torch.Tensor
    target: torch.Tensor
    word: int
    waits: int = 0
    away: bool = True


@dataclass(frozen=True)
class Further:
    """What is added to a product besides its partial sum.

    matrix: of the same shape, strides and type
    waits:  the address of an int32 that is 1 once it has come; not 0
    """

    matrix: torch.Tensor
    waits: int

    def raise_misplaced(self, product: GemmTensors, away: bool) -> None:
        """Raises ValueError where it cannot be added to this product, whose D lies in another memory if ``away``."""
        like = product.partial
        if away or like is None:
            raise ValueError("what is added to a product beside its partial sum is added where its D stays")
        matrix = self.matrix
        alike = (matrix.shape, matrix.dtype, matrix.stride()) == (product.d.shape, like.dtype, like.stride())
        if not alike or matrix.data_ptr() % 16:
            raise ValueError(
                f"what is added to a product lies as its partial sum does, {tuple(like.shape)} of {like.dtype} with "
                f"strides {like.stride()}, at multiples of 16 bytes; got {tuple(matrix.shape)} of {matrix.dtype} with "
                f"strides {matrix.stride()} at {matrix.data_ptr()}"
            )
        if not self.waits:
            raise ValueError("what is added to a product beside its partial sum has a word that says so, got 0")


@dataclass(frozen=True)
class FusedGemms:
    """Products that one kernel computes, in this order.

    products: of the same shapes, strides, types and numbers; D is another in each. Either all have the same terms, C
              and bias where D is; or some have a partial sum, and those whose D is away neither C nor bias
    moving:   the operand that is another in each, "a" or "b", and may be waited for; the other one is the same. Where
              there are partial sums both may differ: "a" moves, and B is one of a few, at equal distances
    waits:    of each product, the address of an int32 that is 1 once its partial sum has come, or its moving operand
              where there are no partial sums; 0: it is there. Operands that are waited for lie in one memory, those
              that are there in another
    tile_interleave:  of how many products in a row tiles are computed in turn, for all products: so that those which go away
              and those which stay take turns, and the link is always busy; or so that what they are multiplied by is
              read once for several. None of them waits for another one of these. Empty: each is computed alone
    sends:    what else the kernel does: by warps that no product needs, and in order, what goes away and what does not
              each. All have rows of one length. With partial sums: what is finished goes away, and what has come to
              where it belongs; none waits for what needs a later one. Without, all goes away: what peers multiply, the
              last of them last, and so on; of those whose products run at the same time there, :func:`sent_in_turn`,
              slice by slice
    slice:    elements of k in a slice of an operand that is waited for, or sent: each slice has a word, behind that of
              the one before. A multiple of a tile's depth; 0: all of k
    opens:    the address of an int32 that is 1 once something may be sent; 0: at once, or behind the entry
    entire:   of each product, whether its operand comes as a whole nevertheless, with one word. Empty: none does
    done_flags:    of each product, the address of an int32 that is set to 1 once its D is stored; 0: nobody waits for it
    away:     of each product, whether its D lies in another memory than those of the others, or in several, with rows
              at another distance perhaps. All with C or a bias are not away
    further:  of each product what else is added, in this order, and before its partial sum; those with something have
              one, and are not away. Empty: nothing
    counters: where there are partial sums, sends, or something to enter, COUNTERS int32 that are 0, for this kernel
              alone, at a multiple of 8 bytes
    rate:     at how many GB/s stores and sends to other GPUs leave; 0: as fast as they can. A little below what the
              link takes, so that they do not queue up: loads would stand behind them
    entry, exit: what is waited for and written, in phases: of the entry the first comes before anything is stored or
              sent away, and beside all products; the exit behind all else. Both or none

    A thread block waits while it occupies its SM. So what is waited for must not need one of this GPU: copy engines,
    memory operations and kernels of other GPUs may write words.

    Raises ValueError for a number of products that no kernel computes.
    """

    products: Sequence[GemmTensors]
    moving: str
    waits: Sequence[int]
    done_flags: Sequence[int]
    away: Sequence[bool]
    counters: torch.Tensor | None = None
    sends: Sequence[FusedSend] = ()
    slice: int = 0
    opens: int = 0
    entire: Sequence[bool] = ()
    tile_interleave: Sequence[int] = ()
    rate: float = 0.0
    entry: Sequence[Sequence[MemOp]] = ()
    exit: Sequence[Sequence[MemOp]] = ()
    further: Sequence[Sequence[Further]] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.products) <= PRODUCTS:
            raise ValueError(f"one kernel computes 1 to {PRODUCTS} products, got {len(self.products)}")
        slices = sum(-(-send.source.shape[1] // (self.slice or send.source.shape[1])) for send in self.sends)
        most = COUNTERS - RESERVED - QUEUES - (PRODUCTS + HANDED_OUT if self.adds else 0)
        if len(self.sends) > SENDS or slices > most:
            raise ValueError(
                f"one kernel sends at most {SENDS} chunks in {most} slices, got {len(self.sends)} in {slices}"
            )
        for one, away, added in zip(self.products, self.away, self.further or (), strict=bool(self.further)):
            for each in added:
                each.raise_misplaced(one, away)
        if sum(map(len, self.further)) > PRODUCTS:
            raise ValueError(f"one kernel adds at most {PRODUCTS} further sums, got {sum(map(len, self.further))}")
        if self.tile_interleave and (sum(self.tile_interleave) != len(self.products) or min(self.tile_interleave) < 1):
            raise ValueError(
                f"products tile_interleave are all of a kernel's, got {[*self.tile_interleave]} of {len(self.products)} products"
            )
        if bool(self.entry) != bool(self.exit):
            raise ValueError("a kernel that enters a replay also leaves it")
        if self.opens and self.entry:
            raise ValueError("what a kernel sends waits for one word, and behind an entry that is the entry's")
        if len(lengths := {send.source.shape[1] for send in self.sends}) > 1:
            raise ValueError(f"a kernel sends rows of one length, got {sorted(lengths)}")
        if not (self.adds or all(send.away for send in self.sends)):
            raise ValueError("a kernel that waits for operands sends to other GPUs, and copies nothing here")
        if self.adds and self.slice:
            raise ValueError(f"what is waited for in slices are operands, not partial sums; got slices of {self.slice}")

    @property
    def adds(self) -> bool:
        """Whether partial sums are waited for, and passed on."""
        return any(one.partial is not None for one in self.products)

    @property
    def kind(self) -> str:
        """The kernel's kind."""
        if not self.adds:
            return "operands"
        return "deliveries" if self.sends else "results"

    @property
    def fullest(self) -> GemmTensors:
        """The product with most terms; of several, one whose D is not away."""

        def terms(number: int) -> tuple[int, bool]:
            one = self.products[number]
            return sum(x is not None for x in (one.c, one.bias, one.partial)), not self.away[number]

        return self.products[max(range(len(self.products)), key=terms)]

    @functools.cached_property
    def spec(self) -> GemmSpec:
        """That of each product, with all terms that some have. Raises ValueError where they differ otherwise."""
        specs = [spec_of(one) for one in self.products]
        fullest = spec_of(self.fullest)
        if fullest.l > 1:
            raise ValueError(f"products that wait are single matrices, got {fullest.l} batches")
        least: dict[str, Any] = {}
        for name in MATRICES:
            present = [matrix for spec in specs if (matrix := getattr(spec, name)) is not None]
            if present:
                least[name] = min(matrix.alignment for matrix in present)
        common = replace(fullest, **{name: replace(getattr(fullest, name), alignment=of) for name, of in least.items()})
        for spec, away in zip(specs, self.away, strict=True):
            # What others of this kind may lack, and how they may differ.
            alike: dict[str, Any] = {
                name: replace(matrix, alignment=of) for name, of in least.items() if (matrix := getattr(spec, name))
            }
            if away:
                alike["d"] = replace(alike["d"], stride=common.d.stride, padded=common.d.padded)
            lacks: dict[str, Any] = {name: None for name in ("c", "bias", "partial") if getattr(spec, name) is None}
            if replace(spec, **alike) != replace(common, **(lacks if self.adds else {})):
                raise ValueError(f"one kernel computes products of one kind, got {fullest} and {spec}")
        if self.adds and "row" in (common.scale_a, common.scale_b):
            raise ValueError(
                "one kernel computes products with partial sums and one scale for all rows, got one for each"
            )
        return common

    @property
    def whole(self) -> GemmSpec:
        """A product as large as all of them."""
        return together(self.spec, len(self.products), self.moving)

    def addresses(self, name: str) -> list[Any]:
        """Of one tensor of each product; None where it has none."""
        return [None if (tensor := getattr(one, name)) is None else tensor.data_ptr() for one in self.products]


def together(spec: GemmSpec, count: int, moving: str) -> GemmSpec:
    """A product as large as ``count`` of these, which differ in A or B."""
    mode = "rows" if moving == "a" else "columns"
    larger: dict[str, Any] = {}
    for name in (moving, "d", "c", "partial"):
        if (matrix := getattr(spec, name)) is not None:
            along = "rows" if name in "ab" else mode
            larger[name] = replace(matrix, **{along: getattr(matrix, along) * count})
    return replace(spec, **larger)


def fused_source(gemms: FusedGemms, config: GemmConfig | None = None) -> KernelSource:
    """What the kernel is compiled from; config None: by shape, that of a product as large as all of them unless its
    tiles would reach beyond each of these; where results take turns the first pingpong one.

    Raises ValueError where there is none.
    """
    provider = CutlassProvider()
    return _source(provider, gemms, _configuration(provider, gemms, config))


def bind_fused(gemms: FusedGemms, config: GemmConfig | None = None) -> CutlassLaunch:
    """The kernel, compiled if need be, with its arguments encoded. Raises ValueError as :func:`fused_source` does, and
    where tensors do not lie as :class:`FusedGemms` says."""
    provider = CutlassProvider()
    taken = _configuration(provider, gemms, config)
    return _kernel(_source(provider, gemms, taken), taken, provider).bind_fused(gemms)


def storing_first(configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """Configurations of a kernel that stores at peers, pingpong ones first: what is stored takes its turn on the link
    while the other warp group multiplies."""
    return sorted(configs, key=lambda one: one.kernel_schedule != "pingpong")


def _source(provider: CutlassProvider, gemms: FusedGemms, config: GemmConfig) -> KernelSource:
    return kernel_source(gemms.spec, config, provider.arch, gemms.kind)


def _configuration(provider: CutlassProvider, gemms: FusedGemms, config: GemmConfig | None) -> GemmConfig:
    if not (status := provider.supports(gemms.spec)):
        raise ValueError(f"provider cutlass, products by one kernel that waits: {status.reason}")
    tried = [config] if config is not None else _by_shape(provider, gemms)
    if gemms.rate and gemms.adds:
        tried = storing_first(tried)
    for taken in tried:
        if _supports(provider, gemms, taken):
            return taken
    status = _supports(provider, gemms, tried[0])
    raise ValueError(
        f"provider cutlass, {config or 'any configuration'}, products by one kernel that waits: {status.reason}"
    )


def _by_shape(provider: CutlassProvider, gemms: FusedGemms) -> list[GemmConfig]:
    """The one chosen for a product as large as all of them first, unless its tiles would reach beyond each of these."""
    whole, count = gemms.whole, len(gemms.products)
    found = order(gemms.spec, provider.configs(whole), count=count)
    chosen = select_config(provider, whole)
    fits = count * tiles_of(gemms.spec, chosen) <= tiles_of(whole, chosen)
    return [chosen, *found] if fits else found


def _supports(provider: CutlassProvider, gemms: FusedGemms, config: GemmConfig) -> Status:
    if not gemms.spec.operands_aligned:
        return Status("TMA wants addresses and strides of A and B in multiples of 16 bytes, and not 0")
    if gemms.adds and not gemms.spec.results_aligned:
        return Status("TMA wants addresses, strides and rows of D, C and the partial sum in multiples of 16 bytes")
    if config.kernel_schedule == "plain" or (gemms.adds and config.epilogue != "tma"):
        return Status("what no warp loads through TMA, none can wait for: take a configuration with TMA")
    if gemms.slice % config.tile[2] and gemms.slice < gemms.spec.k:
        return Status(f"slices of {gemms.slice} elements are no multiple of the depth of tiles, {config.tile[2]}")
    if not all(map(_can_be_sent, gemms.sends)):
        return Status("what is sent has addresses, strides and rows in multiples of 16 bytes")
    return provider.supports(gemms.spec, config)


def _can_be_sent(send: FusedSend) -> bool:
    """Whether TMA moves it."""
    sizes = [send.source.shape[1] * send.source.element_size(), send.source.data_ptr(), send.target.data_ptr()]
    return not any(size % 16 for size in (*sizes, _pitch(send.source), _pitch(send.target)))


def _pitch(matrix: torch.Tensor) -> int:
    """Bytes from row to row."""
    return matrix.stride(0) * matrix.element_size() if matrix.shape[0] > 1 else 0


class _Product(ctypes.Structure):
    """The struct Product of fused.cuh."""

    _fields_ = (
        *(("operand_word", ctypes.c_uint64), ("operand", ctypes.c_int32)),
        *((name, ctypes.c_int16) for name in ("other", "sliced")),
        *((name, ctypes.c_uint64) for name in ("source_word", "result_word")),
        *((name, ctypes.c_int32) for name in ("source", "result")),
        *((name, ctypes.c_int16) for name in ("first", "tile_interleave", "further", "sources")),
    )


class _Further(ctypes.Structure):
    """The struct Further of fused.cuh."""

    _fields_ = (("word", ctypes.c_uint64), ("batch", ctypes.c_int32))


class _Send(ctypes.Structure):
    """The struct Send of fused.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("source", "target", "word", "awaited")),
        *((name, ctypes.c_int64) for name in ("source_pitch", "target_pitch")),
        *((name, ctypes.c_uint32) for name in ("rows", "row_bytes", "slice_bytes", "counter")),
        *((name, ctypes.c_int16) for name in ("first", "tile_interleave")),
    )


class _Arguments(ctypes.Structure):
    """The struct FusedArguments of fused.cuh."""

    _fields_ = (
        ("base", Arguments),
        ("operand_elsewhere", Matrix),
        ("d_elsewhere", Matrix),
        *(
            (name, ctypes.c_int32)
            for name in (
                "moving",
                "operands_here",
                "operands_elsewhere",
                "others",
                "sources",
                "results_here",
                "results_elsewhere",
                "slice",
            )
        ),
        ("counters", ctypes.c_void_p),
        ("pace", ctypes.c_uint32),
        ("entry", FlagOps),
        ("exit", FlagOps),
        ("products", _Product * PRODUCTS),
        ("adds", ctypes.c_int32),
        ("further", _Further * PRODUCTS),
        ("opens", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("sent", "taken")),
        ("sends", _Send * SENDS),
    )


class _FusedKernel(CutlassKernel):
    """The compiled kernel."""

    arguments = _Arguments

    def bind_fused(self, gemms: FusedGemms) -> CutlassLaunch:
        """Encodes the arguments."""
        spec = gemms.spec
        if not (spec.m and spec.n):
            return self.launch(gemms.products, None)
        arguments = _Arguments(self.encoded(gemms.fullest, spec, gemms.kind))
        turns = () if gemms.adds else sent_in_turn(gemms, self.config, arguments.base.sm_count)
        _place(arguments, gemms, turns)
        return self.launch(gemms.products, arguments)


def sent_in_turn(gemms: FusedGemms, config: GemmConfig, blocks: int) -> list[int]:
    """Of how many sends in a row slices leave in turn, with so many thread blocks per GPU: of those whose products run
    at the same time, those tile_interleave as early as the first of them. So all tiles of one wave have something to multiply
    from the first slices on, where otherwise those of the last product would wait until all others had come.
    """
    tiles, at_once = tiles_of(gemms.spec, config), tiles_at_once(config, blocks)
    count = len(gemms.products)
    begins = [first for first, _ in _grouped(gemms.tile_interleave, count)]
    first = max(0, count - len(gemms.sends))  # where peers have no rows, more is sent than comes
    numbers = [begins[number] if number < count else number for number in range(first, first + len(gemms.sends))]
    # A product that begins at the end of a wave belongs to the next one, as most of its tiles do.
    waves = [(2 * number + 1) * tiles // (2 * at_once) for number in numbers]
    return [len(list(group)) for _, group in groupby(waves)]


def _place(arguments: _Arguments, gemms: FusedGemms, turns: Sequence[int] = ()) -> None:
    """Where the products' matrices lie. Raises ValueError where that is not as :class:`FusedGemms` says.

    turns: of how many sends in a row slices leave in turn; empty: each goes alone
    """
    spec, count, sums, base = gemms.spec, len(gemms.products), gemms.adds, arguments.base
    base.l = count
    fixed = "b" if gemms.moving == "a" else "a"
    others = _Batches(gemms.addresses(fixed))
    if others.count > (PRODUCTS if sums else 1):
        few = f", or it is one of {PRODUCTS} at equal distances, and here the last is {others.count - 1}"
        raise ValueError(f"products of one kernel share {fixed.upper()}{few if sums else ''}")
    setattr(base, fixed, others.matrix(getattr(spec, fixed)))
    operands = _Places(gemms.addresses(gemms.moving), [not sums and word != 0 for word in gemms.waits])
    arguments.moving = "ab".index(gemms.moving)
    setattr(base, gemms.moving, operands.here.matrix(getattr(spec, gemms.moving)))
    arguments.operand_elsewhere = operands.elsewhere.matrix(getattr(spec, gemms.moving))
    arguments.operands_here, arguments.operands_elsewhere = operands.here.count, operands.elsewhere.count
    arguments.others = others.count

    results = _Places(gemms.addresses("d"), gemms.away)
    away = next((spec_of(one).d for one, far in zip(gemms.products, gemms.away, strict=True) if far), spec.d)
    base.d, arguments.d_elsewhere = results.here.matrix(spec.d), results.elsewhere.matrix(away)
    arguments.results_here, arguments.results_elsewhere = results.here.count, results.elsewhere.count
    if not sums and (any(gemms.away) or any(gemms.done_flags) or results.here.count != count):
        raise ValueError(
            f"without partial sums, D's lie at equal distances in one memory and nobody is told of them; {count} of "
            f"them have {results.here.count} places, {sum(gemms.away)} lie away"
        )
    if sums and results.here.count > count:
        raise ValueError(
            f"D's that are not away lie at equal distances, {count} products have {results.here.count} places"
        )
    _place_terms(arguments, gemms, results.numbers)

    if gemms.counters is not None:
        arguments.counters = gemms.counters.data_ptr()
    elif sums or gemms.sends or gemms.entry:
        raise ValueError("products with partial sums, sends or an entry take counters")
    arguments.pace = round(1024e3 / gemms.rate) if gemms.rate else 0
    arguments.entry, arguments.exit = flag_ops(gemms.entry), flag_ops(gemms.exit)
    _place_sends(arguments, gemms, turns)
    further = [*gemms.further] or [()] * count
    every = [*chain.from_iterable(further)]
    partial = [at for at in gemms.addresses("partial") if at is not None]
    sources = _Batches([*partial, *(one.matrix.data_ptr() for one in every)]) if sums else None
    if sources is not None and spec.partial is not None:
        base.source, arguments.sources = sources.matrix(spec.partial), sources.count
        arguments.adds = len(every)
        for number, one in enumerate(every):
            arguments.further[number] = _Further(one.waits, sources.index(one.matrix.data_ptr()))
    first_further = [0, *accumulate(map(len, further))]
    tile_interleave = _grouped(gemms.tile_interleave, count)
    for number, at in enumerate(gemms.addresses("partial")):
        source = 0 if sources is None else sources.count if at is None else sources.index(at)
        sliced = int(not (gemms.entire and gemms.entire[number]))
        operand_word, source_word = (0, gemms.waits[number]) if sums else (gemms.waits[number], 0)
        arguments.products[number] = _Product(
            *(operand_word, operands.numbers[number], others.numbers[number], sliced),
            *(source_word, gemms.done_flags[number], source, results.numbers[number]),
            *tile_interleave[number],
            *(first_further[number], len(further[number])),
        )


def _grouped(groups: Sequence[int], count: int) -> list[tuple[int, int]]:
    """The first of each one's group, and how many are in it; empty: each is a group."""
    sizes = groups or [1] * count
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes) for _ in range(size)]


def _place_sends(arguments: _Arguments, gemms: FusedGemms, turns: Sequence[int]) -> None:
    """What is sent, in which slices and in which order."""
    tile_interleave = _grouped(turns, len(gemms.sends))
    arguments.slice, arguments.opens = gemms.slice or gemms.spec.k, gemms.opens
    sends = sorted(gemms.sends, key=lambda send: not send.away)
    arguments.sent = sum(send.away for send in sends)
    arguments.taken = len(sends) - arguments.sent
    counter = 0
    for number, send in enumerate(sends):
        (rows, columns), size = send.source.shape, send.source.element_size()
        along = min(gemms.slice or columns, columns)
        arguments.sends[number] = _Send(
            *(send.source.data_ptr(), send.target.data_ptr(), send.word, send.waits),
            *(_pitch(send.source), _pitch(send.target)),
            *(rows, columns * size, along * size, counter),
            *tile_interleave[number],
        )
        counter += -(-columns // along)


def _place_terms(arguments: _Arguments, gemms: FusedGemms, results: Sequence[int]) -> None:
    """C, bias and scales of the products whose D is here: they lie as D does, or are the same for all."""
    base = arguments.base
    here = [number for number, result in enumerate(results) if result >= 0]
    for name in ("c", "bias", "scale_a", "scale_b"):
        addresses = [at for number in here if (at := gemms.addresses(name)[number]) is not None]
        if not addresses:
            continue
        places = _Batches(addresses)
        if places.distance and places.numbers != [results[number] for number in here]:
            raise ValueError(f"{name} of each product lies as D does, or is the same for all")
        if name == "c":
            matrix = gemms.spec.c
            # By the kernel's names, the first of what is added is its source.
            setattr(base, "aux" if gemms.adds else "source", matrix and places.matrix(matrix))
        else:
            setattr(base, name, places.first)
            setattr(base, f"{name}_stride", places.distance // getattr(gemms.fullest, name).element_size())


class _Batches:
    """Addresses as batches of one tensor.

    first:    the lowest
    distance: bytes from one batch to the next
    numbers:  which batch each of them is
    count:    batches up to the last
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self.first = min(addresses)
        self.distance = math.gcd(*(address - self.first for address in addresses))
        while self.distance >= LONGEST_STRIDE and self.distance % 32 == 0:
            self.distance //= 2
        span = max(addresses) - self.first
        if self.distance >= LONGEST_STRIDE or (self.distance and span // self.distance >= INT32_MAX):
            raise ValueError(
                f"matrices of one kernel lie at multiples of one distance, of less than 2**40 bytes and fewer than "
                f"2**31 of them, and these, of {self.distance} bytes, span {span}"
            )
        self.numbers = [*map(self.index, addresses)]
        self.count = 1 + max(self.numbers)

    def index(self, address: int) -> int:
        """Which batch lies there."""
        return (address - self.first) // self.distance if self.distance else 0

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """The struct, for batches of such matrices."""
        return Matrix(self.first, spec.stride, self.distance // DTYPE_BYTES[spec.dtype])


class _Places:
    """Addresses in two memories.

    here, elsewhere: the batches in each
    numbers:         which batch each address is, ~batch elsewhere
    """

    def __init__(self, addresses: Sequence[int], elsewhere: Sequence[bool]) -> None:
        near = [at for at, far in zip(addresses, elsewhere, strict=True) if not far]
        away = [at for at, far in zip(addresses, elsewhere, strict=True) if far]
        self.here, self.elsewhere = _Batches(near or away), _Batches(away or near)
        self.numbers = [
            ~self.elsewhere.index(at) if far else self.here.index(at)
            for at, far in zip(addresses, elsewhere, strict=True)
        ]


@functools.cache
def _kernel(source: KernelSource, config: GemmConfig, provider: CutlassProvider) -> _FusedKernel:
    return _FusedKernel(source, config, provider)
