"""The structs that tell a fused kernel where its matrices lie and which flags it waits for and sets."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate, chain, groupby

import torch

from distgemm.gemm.cutlass import INT32_MAX
from distgemm.gemm.flags import FlagOps, flag_ops
from distgemm.gemm.fused.gemms import PRODUCTS, SEND_QUEUES, SENDS, FusedGemms
from distgemm.gemm.parameters import Arguments, Matrix, Terms
from distgemm.gemm.select import tiles_at_once, tiles_of
from distgemm.gemm.spec import GemmConfig, MatrixSpec
from distgemm.gemm.tensors import spec_of
from distgemm.plan.problem import DTYPE_BYTES

__all__ = ["Batches", "FusedArguments", "TwoTensors", "cut_pieces", "place", "row_pitch", "send_groups"]

WARP = 32
"""Threads of a warp."""
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


class Addend(ctypes.Structure):
    """struct Addend of fused.cuh."""

    _fields_ = (("flag", ctypes.c_uint64), ("batch", ctypes.c_int32))


class Addends(ctypes.Structure):
    """struct AddendPipeline::Params of fused_reduce.cuh."""

    _fields_ = (
        ("any", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("scale_a", ctypes.c_void_p),
        ("scale_b", ctypes.c_void_p),
        ("first", ctypes.c_int16 * PRODUCTS),
        ("count", ctypes.c_int16 * PRODUCTS),
        ("addends", Addend * PRODUCTS),
    )


class Send(ctypes.Structure):
    """struct Send of fused.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("source", "target", "flag", "wait_flag")),
        *((name, ctypes.c_int64) for name in ("source_pitch", "target_pitch")),
        *((name, ctypes.c_uint32) for name in ("rows", "row_bytes", "slice_bytes", "counter")),
        ("group", Group),
    )


class Queue(ctypes.Structure):
    """struct Sender::Queue of fused.cuh."""

    _fields_ = (("begin", ctypes.c_int32), ("end", ctypes.c_int32), ("pieces", ctypes.c_uint32))


class Sender(ctypes.Structure):
    """struct Sender::Params of fused.cuh."""

    _fields_ = (
        ("queues", Queue * SEND_QUEUES),
        ("picoseconds_per_kib", ctypes.c_uint32),
        ("first", ctypes.c_uint32 * SENDS),
        ("per_slice", ctypes.c_uint32 * SENDS),
        ("sends", Send * SENDS),
    )


class Handshake(ctypes.Structure):
    """struct Handshake of fused.cuh."""

    _fields_ = (("entry", FlagOps), ("exit", FlagOps), ("counters", ctypes.c_void_p))


class LinkPacing(ctypes.Structure):
    """struct LinkPacing of fused.cuh."""

    _fields_ = (("counters", ctypes.c_void_p), ("picoseconds_per_kib", ctypes.c_uint32))


class FusedArguments(ctypes.Structure):
    """What a fused kernel does. A struct, so that its addresses are cells: see :mod:`distgemm.gemm.launches`.

    ``base`` describes one GEMM; its ``l`` is the number of GEMMs. Matrices of one kind are batches of at most two
    tensors: ``received_operand`` and ``remote_d`` are the second ones. ``moving`` is the number of the operand that may
    be waited for, and then there are the numbers of batches of tensors. ``slice_k`` is in elements of k. The others are
    structs that the kernel's parameter has as well.
    """

    _fields_ = (
        ("base", Arguments),
        ("received_operand", Matrix),
        ("remote_d", Matrix),
        ("moving", ctypes.c_int32),
        *((name, ctypes.c_int32) for name in ("local_operands", "received_operands", "other_operands")),
        *((name, ctypes.c_int32) for name in ("sources", "local_results", "remote_results")),
        ("slice_k", ctypes.c_int32),
        ("remote_terms", Terms),
        ("operands", Operand * PRODUCTS),
        ("results", Result * PRODUCTS),
        ("groups", Group * PRODUCTS),
        ("addends", Addends),
        ("sender", Sender),
        ("handshake", Handshake),
        ("pacing", LinkPacing),
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
        arguments.handshake.counters = arguments.pacing.counters = gemms.counters.data_ptr()
    elif gemms.has_partial_sums or gemms.sends or gemms.entry:
        raise ValueError("a kernel with partial sums, sends or an entry takes counters")
    paced = round(1024e3 / gemms.link_rate) if gemms.link_rate else 0
    arguments.sender.picoseconds_per_kib = arguments.pacing.picoseconds_per_kib = paced
    arguments.handshake.entry, arguments.handshake.exit = flag_ops(gemms.entry), flag_ops(gemms.exit)

    count, reduces = len(gemms.products), gemms.has_partial_sums
    added = [*map(len, gemms.addends)] or [0] * count
    first_addends = [0, *accumulate(added)]
    groups = _groups(gemms.tile_interleave, count)
    for number, wait_flag in enumerate(gemms.wait_flags):
        sliced = int(not (gemms.whole_operands and gemms.whole_operands[number]))
        operand_flag, source_flag = (0, wait_flag) if reduces else (wait_flag, 0)
        arguments.operands[number] = Operand(operand_flag, operands.numbers[number], others.numbers[number], sliced)
        done_flag, result = gemms.done_flags[number], results.numbers[number]
        arguments.results[number] = Result(source_flag, done_flag, sources[number], result)
        arguments.groups[number] = groups[number]
        arguments.addends.first[number], arguments.addends.count[number] = first_addends[number], added[number]


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
    arguments.addends.any = bool(addends)
    for number, addend in enumerate(addends):
        arguments.addends.addends[number] = Addend(addend.wait_flag, sources.index(addend.matrix.data_ptr()))
    return [sources.count if address is None else sources.index(address) for address in partials]


def _place_terms(arguments: FusedArguments, gemms: FusedGemms, results: Sequence[int]) -> None:
    """C, bias and scales of the GEMMs whose D is not remote: they lie as D does, or are the same for all."""
    base, terms = arguments.base, arguments.base.terms
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
            lies = matrix and batches.matrix(matrix)
            setattr(*((terms, "aux") if gemms.has_partial_sums else (base, "source")), lies)
        else:
            setattr(terms, name, batches.first)
            setattr(terms, f"{name}_stride", batches.distance // getattr(gemms.template, name).element_size())
    remote, addends = Terms.from_buffer_copy(terms), arguments.addends
    remote.bias = remote.aux.data = None
    arguments.remote_terms = remote
    if addends.any:  # they come before the epilogue, and then these factors
        addends.alpha, addends.scale_a, addends.scale_b = terms.alpha, terms.scale_a, terms.scale_b
        terms.alpha, terms.scale_a, terms.scale_b = 1.0, None, None


def _place_sends(arguments: FusedArguments, gemms: FusedGemms, group_sizes: Sequence[int]) -> None:
    """The sends, the remote ones first, in slices."""
    groups = _groups(group_sizes, len(gemms.sends))
    arguments.slice_k = gemms.slice_k or gemms.spec.k
    sends = sorted(gemms.sends, key=lambda send: not send.remote)
    sender, remote = arguments.sender, sum(send.remote for send in sends)
    sender.queues[:] = [Queue(0, remote), Queue(remote, len(sends))]
    counter = 0
    for number, send in enumerate(sends):
        (rows, columns), size = send.source.shape, send.source.element_size()
        slice_columns = min(gemms.slice_k or columns, columns)
        sender.sends[number] = Send(
            *(send.source.data_ptr(), send.target.data_ptr(), send.flag, send.wait_flag),
            *(row_pitch(send.source), row_pitch(send.target)),
            *(rows, columns * size, slice_columns * size, counter),
            groups[number],
        )
        counter += -(-columns // slice_columns)


def cut_pieces(sender: Sender, part: int, parts: int, unit: int) -> None:
    """Compute how many pieces the sends have: the kernel's warps copy piece by piece.

    Args:
        sender: the sends, in queues and groups.
        part: bytes of a part of a piece, at most.
        parts: parts of a piece.
        unit: bytes that a thread copies at once, at most.
    """
    for queue in sender.queues:
        queue.pieces = 0
        for number in range(queue.begin, queue.end):
            send = sender.sends[number]
            group = range(send.group.first, send.group.first + send.group.size)
            if number == group.start:
                each = [_pieces(sender.sends[other], part, parts, unit) for other in group]
                first, most = queue.pieces, max(each)
                queue.pieces += -(-send.row_bytes // send.slice_bytes) * most * len(group)
            sender.first[number], sender.per_slice[number] = first, most


def _pieces(send: Send, part: int, parts: int, unit: int) -> int:
    """Pieces of a slice of a send."""
    in_part = min(part // min(send.slice_bytes, unit), WARP)
    units = send.rows * -(-send.slice_bytes // unit)
    return int(-(-units // (parts * in_part)))


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
