"""What a fused kernel does: the GEMMs that it computes, the flags that it waits for and sets, and what it sends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from distgemm.gemm.flags import MemOp
from distgemm.gemm.provider import GemmTensors
from distgemm.gemm.spec import GemmSpec, Moving
from distgemm.gemm.tensors import spec_of

__all__ = [
    "COUNTERS",
    "PACING_COUNTERS",
    "PRODUCTS",
    "RESERVED",
    "SENDS",
    "Addend",
    "FusedGemms",
    "FusedKind",
    "FusedSend",
    "combined_spec",
]

FusedKind = Literal["gather", "reduce", "reduce_send"]
"""``"gather"``: the GEMMs wait for A or B; the kernel may send this rank's shard. ``"reduce"``: they wait for partial
sums and add them. ``"reduce_send"``: they do so too, and the kernel copies finished results."""

PRODUCTS, SENDS = 128, 128
"""GEMMs that one kernel computes, and matrices that it sends, at most."""

COUNTERS = 2048
"""int32 counters of a kernel. In this order: one for each GEMM and ``TILE_TICKETS`` (both only with partial sums),
``SEND_QUEUES``, one for each slice of each send, and at the end ``RESERVED``."""
TILE_TICKETS, SEND_QUEUES, RESERVED = 1, 2, 6
PACING_COUNTERS = 2
"""The first of the reserved counters. Link pacing uses them; they are the only ones that are not 0 after a launch."""

MATRICES = ("a", "b", "d", "c", "partial")


@dataclass(frozen=True)
class FusedSend:
    """A matrix that the kernel copies while it multiplies, to another GPU or within this one.

    Attributes:
        source: (rows, columns), rows contiguous.
        target: of the same shape and type, rows contiguous.
        flag: address of the flag that the kernel sets when the first slice is stored; the flags of further slices
            follow it. 0: nobody waits.
        wait_flag: address of the flag that is 1 when the source is ready; 0: it is ready.
        remote: whether the target is another GPU's. Remote sends are paced. Other warps copy the sends that are not
            remote.
    """

    source: torch.Tensor
    target: torch.Tensor
    flag: int
    wait_flag: int = 0
    remote: bool = True


@dataclass(frozen=True)
class Addend:
    """A partial sum that a GEMM adds in addition to ``GemmTensors.partial``.

    Attributes:
        matrix: of the shape, strides and type of the GEMM's ``partial``.
        wait_flag: address of the flag that is 1 when the matrix has arrived; not 0.
    """

    matrix: torch.Tensor
    wait_flag: int

    def raise_misplaced(self, product: GemmTensors, remote: bool) -> None:
        """Raise ValueError if this GEMM, whose D may be remote, cannot add it."""
        like = product.partial
        if remote or like is None:
            raise ValueError("a GEMM with addends has a partial sum, and its D is not remote")
        matrix = self.matrix
        same = (matrix.shape, matrix.dtype, matrix.stride()) == (product.d.shape, like.dtype, like.stride())
        if not same or matrix.data_ptr() % 16:
            raise ValueError(
                f"an addend has the layout of the partial sum, {tuple(like.shape)} of {like.dtype} with strides "
                f"{like.stride()}, at a multiple of 16 bytes; got {tuple(matrix.shape)} of {matrix.dtype} with strides "
                f"{matrix.stride()} at {matrix.data_ptr()}"
            )
        if not self.wait_flag:
            raise ValueError("an addend has a wait flag, got 0")


@dataclass(frozen=True)
class FusedGemms:
    """The GEMMs of one fused kernel, in order, and what else the kernel does.

    A flag is an int32 in memory, given by its address; it becomes 1. A thread block that waits for a flag occupies its
    SM, so the flag must be set without an SM of this GPU: by a copy engine, a memory operation or another GPU's kernel.

    Attributes:
        products: the tensors of each GEMM. Shapes, strides, types and numbers are equal, and every D is another. Either
            all have the same terms, with C and bias as D lies; or some have a partial sum, and those with a remote D
            have neither C nor bias.
        moving: the operand that differs from GEMM to GEMM, and may be waited for. The other operand is the same in all.
            With partial sums both operands may differ: then ``moving`` is "a", and B is one of a few, at equal
            distances.
        wait_flags: for each GEMM, the flag that is set when its partial sum has arrived; without partial sums, when its
            moving operand has. 0: it is there. Operands with a flag lie in one allocation, the others in another.
        done_flags: for each GEMM, the flag that the kernel sets when D is stored; 0: nobody waits.
        remote: for each GEMM, whether D lies outside of the allocation of the other D's, perhaps at another GPU,
            perhaps with another stride. A GEMM with C or bias has a D that is not remote.
        counters: ``COUNTERS`` int32 that are 0, for this kernel alone, at a multiple of 8 bytes. Required with partial
            sums, sends or an entry.
        sends: what the kernel copies, with warps that the GEMMs do not use. All have rows of one length. The remote
            sends leave in order, and so do the others. With partial sums a send may wait for a flag, but not for one
            that a later send sets. Without partial sums all sends are remote, in the order in which the peers need
            them; slices of sends that peers multiply at the same time alternate.
        slice_k: elements of k in a slice of an operand that is waited for or sent. Each slice has a flag, directly
            behind the flag of the slice before. A multiple of a tile's depth; 0: operands are whole.
        whole_operands: for each GEMM, whether its operand arrives whole, with one flag, although ``slice_k`` is set.
            Empty: none does.
        tile_interleave: sizes of the groups of consecutive GEMMs whose tiles are interleaved; empty: each GEMM alone.
            A group that has both remote and other D's keeps the link busy; a group that shares an operand reads it
            once. No GEMM waits for another one of its group.
        link_rate: GB/s at which stores and sends to other GPUs leave; 0: without a limit. A rate slightly below that
            of the link prevents queues, in which loads would wait, too.
        entry: operations on flags, in phases, that the kernel performs while it multiplies. It stores and sends
            nothing remote before the end of the first phase. With an exit, or empty.
        exit: operations on flags, in phases, that the kernel performs after everything else.
        addends: for each GEMM, the partial sums that it adds before ``partial``, in order. Empty: none has any.

    Raises:
        ValueError: if one kernel cannot do this.
    """

    products: Sequence[GemmTensors]
    moving: Moving
    wait_flags: Sequence[int]
    done_flags: Sequence[int]
    remote: Sequence[bool]
    counters: torch.Tensor | None = None
    sends: Sequence[FusedSend] = ()
    slice_k: int = 0
    whole_operands: Sequence[bool] = ()
    tile_interleave: Sequence[int] = ()
    link_rate: float = 0.0
    entry: Sequence[Sequence[MemOp]] = ()
    exit: Sequence[Sequence[MemOp]] = ()
    addends: Sequence[Sequence[Addend]] = ()

    def __post_init__(self) -> None:
        count = len(self.products)
        if not 1 <= count <= PRODUCTS:
            raise ValueError(f"one kernel computes 1 to {PRODUCTS} GEMMs, got {count}")
        slices = sum(-(-send.source.shape[1] // (self.slice_k or send.source.shape[1])) for send in self.sends)
        max_slices = COUNTERS - RESERVED - SEND_QUEUES - (PRODUCTS + TILE_TICKETS if self.has_partial_sums else 0)
        if len(self.sends) > SENDS or slices > max_slices:
            raise ValueError(
                f"one kernel sends at most {SENDS} matrices in {max_slices} slices, got {len(self.sends)} in {slices}"
            )
        for product, remote, added in zip(self.products, self.remote, self.addends or (), strict=bool(self.addends)):
            for addend in added:
                addend.raise_misplaced(product, remote)
        if sum(map(len, self.addends)) > PRODUCTS:
            raise ValueError(f"one kernel adds at most {PRODUCTS} addends, got {sum(map(len, self.addends))}")
        if self.tile_interleave and (sum(self.tile_interleave) != count or min(self.tile_interleave) < 1):
            raise ValueError(
                f"tile_interleave has the sizes of groups of all GEMMs, got {[*self.tile_interleave]} for {count} GEMMs"
            )
        if bool(self.entry) != bool(self.exit):
            raise ValueError("a kernel has both an entry and an exit, or neither")
        if len(lengths := {send.source.shape[1] for send in self.sends}) > 1:
            raise ValueError(f"a kernel sends rows of one length, got {sorted(lengths)}")
        if not (self.has_partial_sums or all(send.remote for send in self.sends)):
            raise ValueError("a kernel without partial sums sends to other GPUs only, got a send within this GPU")
        if self.has_partial_sums and self.slice_k:
            raise ValueError(f"operands arrive in slices, partial sums do not; got slices of {self.slice_k}")

    @property
    def has_partial_sums(self) -> bool:
        """Whether a GEMM adds a partial sum."""
        return any(product.partial is not None for product in self.products)

    @property
    def kind(self) -> FusedKind:
        """The kernel's kind."""
        if not self.has_partial_sums:
            return "gather"
        return "reduce_send" if self.sends else "reduce"

    @property
    def template(self) -> GemmTensors:
        """The GEMM with most terms; if there are several, one with a D that is not remote."""

        def terms(number: int) -> tuple[int, bool]:
            product = self.products[number]
            return sum(x is not None for x in (product.c, product.bias, product.partial)), not self.remote[number]

        return self.products[max(range(len(self.products)), key=terms)]

    @functools.cached_property
    def spec(self) -> GemmSpec:
        """The spec of each GEMM, with all terms that some GEMMs have.

        Raises:
            ValueError: if the GEMMs differ in more than one kernel allows.
        """
        specs = [spec_of(product) for product in self.products]
        template = spec_of(self.template)
        if template.l > 1:
            raise ValueError(f"a fused kernel computes single matrices, got {template.l} batches")
        alignments: dict[str, Any] = {}
        for name in MATRICES:
            present = [matrix for spec in specs if (matrix := getattr(spec, name)) is not None]
            if present:
                alignments[name] = min(matrix.alignment for matrix in present)
        common = replace(
            template, **{name: replace(getattr(template, name), alignment=x) for name, x in alignments.items()}
        )
        for spec, remote in dict.fromkeys(zip(specs, self.remote, strict=True)):
            # GEMMs may differ in alignment, in the stride of a remote D, and with partial sums in their terms.
            adapted: dict[str, Any] = {
                name: replace(matrix, alignment=x) for name, x in alignments.items() if (matrix := getattr(spec, name))
            }
            if remote:
                adapted["d"] = replace(adapted["d"], stride=common.d.stride, padded=common.d.padded)
            absent: dict[str, Any] = {name: None for name in ("c", "bias", "partial") if getattr(spec, name) is None}
            if replace(spec, **adapted) != replace(common, **(absent if self.has_partial_sums else {})):
                raise ValueError(f"the GEMMs of one kernel have the same types and shapes, got {template} and {spec}")
        if common.block_rows_a:
            raise ValueError(
                f"fused kernels take scales of tensors and rows, got {common.scale_a} and {common.scale_b}; a kernel "
                "for each GEMM takes scales of blocks"
            )
        if self.has_partial_sums and "row" in (common.scale_a, common.scale_b):
            raise ValueError("GEMMs with partial sums have one scale for all rows, got one for each")
        return common

    @property
    def combined_spec(self) -> GemmSpec:
        """The spec of one GEMM as large as all of them."""
        return combined_spec(self.spec, len(self.products), self.moving)

    def addresses(self, name: str) -> list[Any]:
        """The address of one tensor in each GEMM; None for a GEMM without it."""
        return [None if (tensor := getattr(product, name)) is None else tensor.data_ptr() for product in self.products]


def combined_spec(spec: GemmSpec, count: int, moving: Moving) -> GemmSpec:
    """The spec of one GEMM as large as ``count`` GEMMs that differ in one operand."""
    mode = "rows" if moving == "a" else "columns"
    larger: dict[str, Any] = {}
    for name in (moving, "d", "c", "partial"):
        if (matrix := getattr(spec, name)) is not None:
            extent = "rows" if name in "ab" else mode
            larger[name] = replace(matrix, **{extent: getattr(matrix, extent) * count})
    return replace(spec, **larger)
