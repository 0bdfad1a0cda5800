"""The structs that tell a fused kernel where its matrices lie and which flags it waits for and sets."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate, chain, groupby

import torch

from distgemm.gemm.cutlass import INT32_MAX, Arguments, Matrix
from distgemm.gemm.flags import FlagOps, flag_ops
from distgemm.gemm.fused.gemms import PRODUCTS, SENDS, FusedGemms
from distgemm.gemm.select import tiles_at_once, tiles_of
from distgemm.gemm.spec import GemmConfig, MatrixSpec
from distgemm.gemm.tensors import spec_of
from distgemm.plan.problem import DTYPE_BYTES

__all__ = ["Batches", "FusedArguments", "TwoTensors", "place", "row_pitch", "send_groups"]

MAX_BATCH_STRIDE = 1 << 40
"""TMA's limit: bytes from one batch of a tensor to the next are fewer."""


class Operand(ctypes.Structure):
    """struct Operand of fused.cuh."""

    _fields_ = (
        ("flag", ctypes.c_uint64),
        ("batch", ctypes.c_int32),
        ("other_batch", ctypes.c_int16),
        ("sliced", ctypes.c_int16),
    )


class Result(ctypes.Structure):
    """struct Result of fused.cuh."""

    _fields_ = (
        ("source_flag", ctypes.c_uint64),
        ("done_flag", ctypes.c_uint64),
        ("source_batch", ctypes.c_int32),
        ("batch", ctypes.c_int32),
    )


class Group(ctypes.Structure):
    """struct Group of fused.cuh."""

    _fields_ = (("first", ctypes.c_int16), ("size", ctypes.c_int16))


class Product(ctypes.Structure):
    """struct Product of fused.cuh."""

    _fields_ = (
        ("operand", Operand),
        ("result", Result),
        ("group", Group),
        ("first_addend", ctypes.c_int16),
        ("addends", ctypes.c_int16),
    )


class Addend(ctypes.Structure):
    """struct Addend of fused.cuh."""

    _fields_ = (("flag", ctypes.c_uint64), ("batch", ctypes.c_int32))


class Send(ctypes.Structure):
    """struct Send of fused.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("source", "target", "flag", "wait_flag")),
        *((name, ctypes.c_int64) for name in ("source_pitch", "target_pitch")),
        *((name, ctypes.c_uint32) for name in ("rows", "row_bytes", "slice_bytes", "counter")),
        ("group", Group),
    )


class FusedArguments(ctypes.Structure):
    """struct FusedArguments of fused.cuh."""

    _fields_ = (
        ("base", Arguments),
        ("received_operand", Matrix),
        ("remote_d", Matrix),
        ("moving", ctypes.c_int32),
        *((name, ctypes.c_int32) for name in ("local_operands", "received_operands", "other_operands")),
        *((name, ctypes.c_int32) for name in ("sources", "local_results", "remote_results")),
        ("slice_k", ctypes.c_int32),
        ("counters", ctypes.c_void_p),
        ("picoseconds_per_kib", ctypes.c_uint32),
        ("entry", FlagOps),
        ("exit", FlagOps),
        ("products", Product * PRODUCTS),
        ("addend_count", ctypes.c_int32),
        ("addends", Addend * PRODUCTS),
        ("remote_sends", ctypes.c_int32),
        ("local_sends", ctypes.c_int32),
        ("sends", Send * SENDS),
    )


def send_groups(gemms: FusedGemms, config: GemmConfig, blocks: int) -> list[int]:
    """Sizes of the groups of sends whose slices alternate, for kernels that gather.

    A group has the sends whose GEMMs the peers compute at the same time; GEMMs whose tiles are interleaved begin
    together. If its slices did not alternate, the tiles of the group's last GEMM would wait for all other sends.

    Args:
        gemms: this rank's GEMMs. The peers compute the same number of the same shape.
        config: the kernel's configuration.
        blocks: thread blocks of a GPU.
    """
    tiles, at_once = tiles_of(gemms.spec, config), tiles_at_once(config, blocks)
    count = len(gemms.products)
    begins = [group.first for group in _groups(gemms.tile_interleave, count)]
    first = max(0, count - len(gemms.sends))  # peers without rows get sends, but send nothing
    numbers = [begins[number] if number < count else number for number in range(first, first + len(gemms.sends))]
    # A GEMM that begins at the end of a wave belongs to the next wave, as most of its tiles do.
    waves = [(2 * number + 1) * tiles // (2 * at_once) for number in numbers]
    return [len(list(group)) for _, group in groupby(waves)]


def place(arguments: FusedArguments, gemms: FusedGemms, send_group_sizes: Sequence[int] = ()) -> None:
    """Fill in all but ``arguments.base``, and the addresses in ``arguments.base``.

    Args:
        arguments: the struct; its ``base`` describes ``gemms.template``.
        gemms: what the kernel does.
        send_group_sizes: as :func:`send_groups` returns them; empty: no slices alternate.

    Raises:
        ValueError: if matrices do not lie as :class:`FusedGemms` says.
    """
    arguments.base.l = len(gemms.products)
    operands, others = _place_operands(arguments, gemms)
    results = _place_results(arguments, gemms)
    sources = _place_sources(arguments, gemms)
    _place_terms(arguments, gemms, results.numbers)
    _place_sends(arguments, gemms, send_group_sizes)

    if gemms.counters is not None:
        arguments.counters = gemms.counters.data_ptr()
    elif gemms.has_partial_sums or gemms.sends or gemms.entry:
        raise ValueError("a kernel with partial sums, sends or an entry takes counters")
    arguments.picoseconds_per_kib = round(1024e3 / gemms.link_rate) if gemms.link_rate else 0
    arguments.entry, arguments.exit = flag_ops(gemms.entry), flag_ops(gemms.exit)

    count, reduces = len(gemms.products), gemms.has_partial_sums
    added = [*map(len, gemms.addends)] or [0] * count
    first_addends = [0, *accumulate(added)]
    groups = _groups(gemms.tile_interleave, count)
    for number, wait_flag in enumerate(gemms.wait_flags):
        sliced = int(not (gemms.whole_operands and gemms.whole_operands[number]))
        operand_flag, source_flag = (0, wait_flag) if reduces else (wait_flag, 0)
        arguments.products[number] = Product(
            Operand(operand_flag, operands.numbers[number], others.numbers[number], sliced),
            Result(source_flag, gemms.done_flags[number], sources[number], results.numbers[number]),
            groups[number],
            first_addends[number],
            added[number],
        )


def _place_operands(arguments: FusedArguments, gemms: FusedGemms) -> tuple[TwoTensors, Batches]:
    """The batches of the moving operand and of the other one."""
    spec, base = gemms.spec, arguments.base
    fixed = "b" if gemms.moving == "a" else "a"
    others = Batches(gemms.addresses(fixed))
    if others.count > (PRODUCTS if gemms.has_partial_sums else 1):
        few = f", or use at most {PRODUCTS} at equal distances; here the last has number {others.count - 1}"
        raise ValueError(f"the GEMMs of one kernel share {fixed.upper()}{few if gemms.has_partial_sums else ''}")
    setattr(base, fixed, others.matrix(getattr(spec, fixed)))
    received = [not gemms.has_partial_sums and flag != 0 for flag in gemms.wait_flags]
    operands = TwoTensors(gemms.addresses(gemms.moving), received)
    arguments.moving = "ab".index(gemms.moving)
    setattr(base, gemms.moving, operands.first.matrix(getattr(spec, gemms.moving)))
    arguments.received_operand = operands.second.matrix(getattr(spec, gemms.moving))
    arguments.local_operands, arguments.received_operands = operands.first.count, operands.second.count
    arguments.other_operands = others.count
    return operands, others


def _place_results(arguments: FusedArguments, gemms: FusedGemms) -> TwoTensors:
    """The batches of D."""
    spec, count = gemms.spec, len(gemms.products)
    results = TwoTensors(gemms.addresses("d"), gemms.remote)
    pairs = zip(gemms.products, gemms.remote, strict=True)
    remote_d = next((spec_of(product).d for product, remote in pairs if remote), spec.d)
    arguments.base.d, arguments.remote_d = results.first.matrix(spec.d), results.second.matrix(remote_d)
    arguments.local_results, arguments.remote_results = results.first.count, results.second.count
    if not gemms.has_partial_sums and (any(gemms.remote) or any(gemms.done_flags) or results.first.count != count):
        raise ValueError(
            f"without partial sums the D's lie in one allocation at equal distances, and have no done flags; got "
            f"{results.first.count} places for {count} D's, {sum(gemms.remote)} of them remote"
        )
    if gemms.has_partial_sums and results.first.count > count:
        raise ValueError(
            f"D's that are not remote lie at equal distances, got {results.first.count} places for {count} GEMMs"
        )
    return results


def _place_sources(arguments: FusedArguments, gemms: FusedGemms) -> list[int]:
    """The batches of the partial sums; for a GEMM without one, that behind the last."""
    partials = gemms.addresses("partial")
    addends = [*chain.from_iterable(gemms.addends)]
    partial_spec = gemms.spec.partial
    if partial_spec is None:
        return [0] * len(partials)
    present = [address for address in partials if address is not None]
    sources = Batches([*present, *(addend.matrix.data_ptr() for addend in addends)])
    arguments.base.source, arguments.sources = sources.matrix(partial_spec), sources.count
    arguments.addend_count = len(addends)
    for number, addend in enumerate(addends):
        arguments.addends[number] = Addend(addend.wait_flag, sources.index(addend.matrix.data_ptr()))
    return [sources.count if address is None else sources.index(address) for address in partials]


def _place_terms(arguments: FusedArguments, gemms: FusedGemms, results: Sequence[int]) -> None:
    """C, bias and scales of the GEMMs whose D is not remote: they lie as D does, or are the same for all."""
    base = arguments.base
    local = [number for number, result in enumerate(results) if result >= 0]
    for name in ("c", "bias", "scale_a", "scale_b"):
        addresses = [address for number in local if (address := gemms.addresses(name)[number]) is not None]
        if not addresses:
            continue
        batches = Batches(addresses)
        if batches.distance and batches.numbers != [results[number] for number in local]:
            raise ValueError(f"{name} of each GEMM lies as D does, or is the same for all")
        if name == "c":
            matrix = gemms.spec.c
            # With partial sums, the kernel's source is the partial sum, and C is its aux.
            setattr(base, "aux" if gemms.has_partial_sums else "source", matrix and batches.matrix(matrix))
        else:
            setattr(base, name, batches.first)
            setattr(base, f"{name}_stride", batches.distance // getattr(gemms.template, name).element_size())


def _place_sends(arguments: FusedArguments, gemms: FusedGemms, group_sizes: Sequence[int]) -> None:
    """The sends, the remote ones first, in slices."""
    groups = _groups(group_sizes, len(gemms.sends))
    arguments.slice_k = gemms.slice_k or gemms.spec.k
    sends = sorted(gemms.sends, key=lambda send: not send.remote)
    arguments.remote_sends = sum(send.remote for send in sends)
    arguments.local_sends = len(sends) - arguments.remote_sends
    counter = 0
    for number, send in enumerate(sends):
        (rows, columns), size = send.source.shape, send.source.element_size()
        slice_columns = min(gemms.slice_k or columns, columns)
        arguments.sends[number] = Send(
            *(send.source.data_ptr(), send.target.data_ptr(), send.flag, send.wait_flag),
            *(row_pitch(send.source), row_pitch(send.target)),
            *(rows, columns * size, slice_columns * size, counter),
            groups[number],
        )
        counter += -(-columns // slice_columns)


def _groups(sizes: Sequence[int], count: int) -> list[Group]:
    """The group of each number below ``count``; empty sizes: each number is a group."""
    sizes = sizes or [1] * count
    return [Group(sum(sizes[:i]), size) for i, size in enumerate(sizes) for _ in range(size)]


def row_pitch(matrix: torch.Tensor) -> int:
    """Bytes from row to row; 0 for a single row."""
    return matrix.stride(0) * matrix.element_size() if matrix.shape[0] > 1 else 0


class Batches:
    """Addresses as batches of one tensor.

    Attributes:
        first: the lowest address.
        distance: bytes from one batch to the next.
        numbers: the batch of each address.
        count: batches up to the last.

    Raises:
        ValueError: if TMA cannot describe such a tensor.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self.first = min(addresses)
        self.distance = math.gcd(*(address - self.first for address in addresses))
        while self.distance >= MAX_BATCH_STRIDE and self.distance % 32 == 0:
            self.distance //= 2
        span = max(addresses) - self.first
        if self.distance >= MAX_BATCH_STRIDE or (self.distance and span // self.distance >= INT32_MAX):
            raise ValueError(
                f"matrices of one kernel lie at multiples of one distance, of less than 2**40 bytes and fewer than "
                f"2**31 of them, and these, of {self.distance} bytes, span {span}"
            )
        self.numbers = [*map(self.index, addresses)]
        self.count = 1 + max(self.numbers)

    def index(self, address: int) -> int:
        """The batch at an address."""
        return (address - self.first) // self.distance if self.distance else 0

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """The struct, for batches of such matrices."""
        return Matrix(self.first, spec.stride, self.distance // DTYPE_BYTES[spec.dtype])


class TwoTensors:
    """Addresses in two allocations, as batches of two tensors.

    Attributes:
        first: the batches of the first tensor.
        second: the batches of the second tensor.
        numbers: the batch of each address; ~batch in the second tensor.
    """

    def __init__(self, addresses: Sequence[int], in_second: Sequence[bool]) -> None:
        pairs = [*zip(addresses, in_second, strict=True)]
        first = [address for address, second in pairs if not second]
        second = [address for address, second in pairs if second]
        self.first, self.second = Batches(first or second), Batches(second or first)
        self.numbers = [
            ~self.second.index(address) if in_second else self.first.index(address) for address, in_second in pairs
        ]
