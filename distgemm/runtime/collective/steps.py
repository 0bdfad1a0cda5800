"""Steps of the collective runtime: what a call does for each op, and for messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from distgemm.plan.ops import Copy, View, contains
from distgemm.plan.scaling import OperandScaling
from distgemm.runtime.checks import gathered_box
from distgemm.runtime.collective.memory import CallState, Place

__all__ = [
    "Add",
    "Float32Precision",
    "Join",
    "KeepTile",
    "Message",
    "Move",
    "Multiply",
    "Post",
    "Sum",
    "Synchronize",
    "TileScales",
    "matmul",
]

Tensor = torch.Tensor

Float32Precision = Literal["ieee", "tf32"]


# --- messages -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Message:
    """One Copy between ranks, as its sender or its receiver sees it.

    Attributes:
        number: among all messages of the plan, the same at both ends.
        work: index in :attr:`CallState.works`.
        copy: the op.
        sends: whether this rank sends it; otherwise it receives it.
        peer: the other rank.
        place: what is sent, or where it goes.
        dtype: of its elements.
    """

    number: int
    work: int
    copy: Copy
    sends: bool
    peer: int
    place: Place
    dtype: torch.dtype

    @property
    def view(self) -> View:
        """The memory of this rank that is sent or received."""
        return self.copy.src if self.sends else self.copy.dst

    def buffer(self, call: CallState) -> Tensor:
        """The contiguous bytes to send, or to receive into."""
        tensor = self.place(call)
        if not tensor.is_contiguous():
            staging = call.staging[self.work] = torch.empty(tensor.shape, dtype=self.dtype, device=tensor.device)
            tensor = staging.copy_(tensor) if self.sends else staging
        # All backends carry bytes, and some not every dtype.
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    def unpack(self, call: CallState) -> None:
        """Move what has arrived from staging memory to its place."""
        staging = call.staging[self.work]
        if staging is not None:
            self.place(call).copy_(staging)


@dataclass(slots=True, eq=False)
class Post:
    """Post all messages of a round."""

    messages: list[Message]

    def __call__(self, call: CallState) -> None:
        call.at = self.messages[0].copy
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend if message.sends else dist.irecv,
                    message.buffer(call),
                    group=call.group,
                    tag=message.number,
                    group_peer=message.peer,
                )
                for message in self.messages
            ]
        )
        # NCCL makes one kernel of the batch, and returns one work for it.
        one_work = len(works) != len(self.messages)
        for index, message in enumerate(self.messages):
            call.works[message.work] = works[-1 if one_work else index]


@dataclass(slots=True, eq=False)
class Join:
    """Wait for messages, each for the first time.

    Attributes:
        messages: the messages.
        unpack: whether the next steps use what has arrived.
    """

    messages: list[Message]
    unpack: bool

    def __call__(self, call: CallState) -> None:
        for message in self.messages:
            call.at = message.copy
            call.works[message.work].wait()
            if self.unpack:
                message.unpack(call)


@dataclass(slots=True, frozen=True)
class Synchronize:
    """A Barrier.

    Attributes:
        device: this rank's GPU, with NCCL; None: a CPU.
    """

    device: torch.device | None

    def __call__(self, call: CallState) -> None:
        dist.barrier(call.group, device_ids=None if self.device is None else [self.device.index])


# --- ops ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Sum:
    """The sum of a Reduce, or the epilogue of a Gemm: all terms are added before the one rounding.

    Attributes:
        sources: partial sums.
        c: C's tile, which is added with factor beta; None: this op does not add it, nor the bias.
        bias_columns: C's tile's columns of the shard, which the bias is added to.
        out: where the sum goes.
        total: memory of the accumulation dtype, the same tensor each time in a call.
        in_place: whether ``out`` has the accumulation dtype, and there are no sources.
    """

    sources: list[Place]
    c: Place | None
    bias_columns: slice
    out: Place
    total: Place
    in_place: bool

    def target(self, call: CallState) -> Tensor:
        """Where a product goes before the terms are added."""
        adds = self.c is not None and (call.beta != 0 or call.bias is not None)
        return self.out(call) if self.in_place and not adds else self.total(call)

    def finish(self, call: CallState, target: Tensor) -> None:
        """Add all terms to the target, and round."""
        for source in self.sources:
            target.add_(source(call))
        if self.c is not None:
            if call.beta != 0:  # where beta is 0 there may be no C
                target.add_(self.c(call), alpha=call.beta)
            if call.bias is not None:
                target.add_(call.bias[self.bias_columns])
        if target is self.total(call):
            self.out(call).copy_(target)


@dataclass(slots=True, eq=False)
class TileScales:
    """The scales of a tile of A or B.

    Attributes:
        place: where they are.
        scaling: which elements share one.
    """

    place: Place
    scaling: OperandScaling

    def apply(self, call: CallState, tile: Tensor) -> None:
        """Multiply the elements of a tile, which are float32, by their scales."""
        scales = self.place(call)
        tile.mul_(self.scaling.expand(scales.to(tile.dtype), *tile.shape[1:]))


@dataclass(slots=True, eq=False)
class Multiply:
    """A Gemm.

    Attributes:
        a: A's tile.
        b: B's tile.
        converted: memory for both in the dtype that is multiplied; empty: they have it.
        scales: those of A and B, by which their converted elements are multiplied; empty: there are none.
        sum: what follows the product.
        out_dtype: dtype of the product where the operands have another; None: they have the same.
        precision: of float32; None: the operands are not float32.
    """

    a: Place
    b: Place
    converted: list[Place]
    scales: list[TileScales]
    sum: Sum
    out_dtype: torch.dtype | None
    precision: Float32Precision | None

    def __call__(self, call: CallState) -> None:
        a, b = self.a(call), self.b(call)
        if self.converted:
            a, b = self.converted[0](call).copy_(a), self.converted[1](call).copy_(b)
        for tile, scales in zip((a, b), self.scales, strict=False):
            scales.apply(call, tile)
        target = self.sum.target(call)
        with _float32_precision(target.device, self.precision):
            matmul(a, b, target, self.out_dtype)
        if call.alpha != 1:
            target.mul_(call.alpha)
        self.sum.finish(call, target)


@dataclass(slots=True, eq=False)
class Add:
    """A Reduce."""

    sum: Sum

    def __call__(self, call: CallState) -> None:
        total = self.sum.total(call).zero_()
        self.sum.finish(call, total)


@dataclass(slots=True, eq=False)
class KeepTile:
    """Copy a tile of A to where the caller wants A. Later the tile's slot may be used again."""

    tile: Place
    view: View

    def __call__(self, call: CallState) -> None:
        if call.gathered is not None:
            memory = call.memory
            whole, box = gathered_box(memory.plan, memory.rank), memory.own(self.view).box
            if not contains(whole, box):
                return  # it multiplies rows of other ranks, too
            (batch, _), (row, _), _ = whole
            (l0, l1), (m0, m1), (k0, k1) = box
            call.gathered[l0 - batch : l1 - batch, m0 - row : m1 - row, k0:k1].copy_(self.tile(call))


@dataclass(slots=True, eq=False)
class Move:
    """A Copy within the rank."""

    src: Place
    dst: Place

    def __call__(self, call: CallState) -> None:
        self.dst(call).copy_(self.src(call))


def matmul(a: Tensor, b: Tensor, out: Tensor, out_dtype: torch.dtype | None) -> None:
    """out = a @ b.T for each l; ``out_dtype`` is out's dtype where the operands have another."""
    if a.shape[0] == 1:
        a, b, out = a[0], b[0], out[0]
    product: Any = torch.mm if a.dim() == 2 else torch.bmm
    if out_dtype is None:
        product(a, b.transpose(-1, -2), out=out)
    else:
        product(a, b.transpose(-1, -2), out_dtype=out_dtype, out=out)


@contextlib.contextmanager
def _float32_precision(device: torch.device, precision: Float32Precision | None) -> Iterator[None]:
    """Multiply float32 with this precision, and restore the caller's setting."""
    backends: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend = backends.matmul
    before = backend.fp32_precision
    if precision is None or precision == before or (precision == "ieee" and before == "none"):
        yield
        return
    backend.fp32_precision = precision
    try:
        yield
    finally:
        backend.fp32_precision = before
