"""A plan whose ranks each execute one per-tile kernel: a call is one launch. See docs/per_tile.md."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from distgemm.gemm.cubins import open_cubin
from distgemm.gemm.nvcc import KernelSource, build_together
from distgemm.gemm.per_tile.bind import params_of
from distgemm.gemm.per_tile.epochs import before
from distgemm.gemm.per_tile.kernel import Launch
from distgemm.gemm.per_tile.params import Params
from distgemm.gemm.per_tile.select import ROW_BYTES, gemm_of
from distgemm.plan.plan import Plan
from distgemm.runtime.checks import check_bias, check_gathered, check_gradients, check_shards
from distgemm.runtime.cuda.calls import GpuExecutable, PreparedCall
from distgemm.runtime.cuda.epoch_workspace import EpochValues, EpochWorkspace
from distgemm.runtime.cuda.executable import describe_kernels
from distgemm.runtime.cuda.recording import layout_of
from distgemm.runtime.executable import PER_TILE, Executable, ExecutionConfig, OnTimeout

__all__ = ["PerTileExecutable"]

LOG = logging.getLogger("distgemm")

Tensor = torch.Tensor

MAX_CALLS = 32
"""Layouts of calls whose parameters an executable keeps."""
HOPPER = 9
"""Major compute capability of the GPUs that the kernels are for."""


class BoundCall(NamedTuple):
    """The launch of calls of one layout, and the addresses of the tensors that its parameters have now."""

    launch: Launch
    addresses: tuple[int, ...]


class PerTileExecutable(GpuExecutable):
    """This rank's part of a plan on its GPU, with ``execution="per_tile"``; :func:`compile_plan` makes it.

    The plan gives the shards, and the order in which ranks multiply them. Its routes, slots and flags are not used: all
    ranks exchange pieces and partial sums directly, and add partial sums in float32. A call is one launch, captured or
    not. It satisfies :class:`distgemm.runtime.executable.Executable`.

    Calls raise ValueError for scales, which per-tile kernels do not have, and for matrices that TMA cannot copy: their
    addresses and rows are multiples of 16 bytes.

    Attributes:
        gemm: what each rank multiplies, for calls with dense tensors.
    """

    workspace: EpochWorkspace

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        execution: ExecutionConfig,
        *,
        timeout: float | None = None,
        on_timeout: OnTimeout = "raise",
        copies: bool = False,
        turned_b: bool = False,
    ) -> None:
        super().__init__(plan, group, device, execution, timeout, on_timeout)
        self._copies, self._has_warned = copies, False
        problem: Exception | None = None
        try:
            self.gemm = gemm_of(plan, execution.config, turned_b=turned_b)
            self._gemms = {turned_b: self.gemm}
            properties = torch.cuda.get_device_properties(device)
            if properties.major != HOPPER:
                raise ValueError(f"execution='per_tile' is for Hopper GPUs, got {properties.name}")
            self._blocks = properties.multi_processor_count
            sources = self.sources()
            build_together(sources, self.rank, plan.world_size)
            self.kernels = describe_kernels(sources, [])
            for source in sources:  # a first call could not: it may be captured
                open_cubin(source, Params).load_on(device.index or 0)
        except Exception as error:  # raised below, once all ranks know of it
            problem = error
        self._agree(problem)
        self._join(EpochWorkspace, self.gemm.slot_bytes, self.gemm.flags, self.gemm.packet_bytes)
        self._calls: OrderedDict[Any, BoundCall] = OrderedDict()

    @property
    def transfers(self) -> str:
        """Who moves data between ranks."""
        return PER_TILE

    @property
    def workspace_bytes(self) -> int:
        """Bytes of slots that it needs in each buffer of the workspace."""
        return self.gemm.slot_bytes

    def sources(self) -> list[KernelSource]:
        """The kernels of calls with dense tensors of one layout. Others compile their own at their first call."""
        return [self.gemm.traits.source()]

    def capture(self, a_shard: Tensor, b_shard: Tensor, c_shard: Tensor | None = None, **options: Any) -> PreparedCall:
        """A call on these tensors, to be replayed any number of times. It needs no graph.

        Args:
            a_shard: as a call takes it.
            b_shard: as a call takes it.
            c_shard: as a call takes it.
            **options: the keyword arguments of a call. Where ``out`` is None, D is a new tensor: ``replay.out``.
        """
        given = {name: options.pop(name, None) for name in ("bias", "scale_a", "scale_b", "out", "gathered")}
        if given["out"] is None:
            given["out"] = self._new_out()
        tensors = (a_shard, b_shard, c_shard, *given.values())
        check_gradients(self.rank, *tensors)
        read = self._readable(tensors)
        factors = {"alpha": 1.0, "beta": 0.0, **options}
        launch = self._bind(read, **factors)
        if any(x is not y for x, y in zip(read, tensors, strict=True)):  # each replay copies anew
            return PreparedCall(self, lambda stream: self._put_call(tensors, stream=stream, **factors), tensors)
        return PreparedCall(self, lambda stream: self._launch(launch, stream), tensors)

    def awaited(self, values: EpochValues) -> tuple[str, list[int]]:
        """What a replay waits for, in words, and the ranks that it waits for."""
        epoch = values.begun[self.rank]
        late = [rank for rank, begun in enumerate(values.begun) if before(begun, epoch)]
        missing = torch.nonzero(values.flags[: self.gemm.flags] != epoch).flatten().tolist()
        text = "all that it waits for has come, but its kernel has not ended"
        peers = set(late)
        if self.gemm.traits.one_shot:  # packets are not watched
            text = "it waits for partial sums" if late else "it waits for partial sums, or its kernel has not ended"
            peers = peers or set(range(self.plan.world_size)) - {self.rank}
        if missing:
            found = [self.gemm.slot_of(number, self.rank) for number in missing]
            found = [slot for slot in found if slot[0] != self.rank] or found  # its own are late only if peers' are
            senders = [sender for sender, _ in found]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            text = f"it waits for rank {senders[0]} at {found[0][1]}{more}"
            peers |= set(senders) - {self.rank}
        if late:
            text += f"; ranks {late} have not begun this replay"
        return text, sorted(peers)

    def _put_call(self, tensors: Sequence[Tensor | None], alpha: float, beta: float, stream: int) -> None:
        tensors = self._readable(tensors)  # copies live until the launch
        self._launch(self._launch_of(tensors, alpha, beta), stream)

    def _put_captured_call(self, tensors: Sequence[Tensor | None], alpha: float, beta: float, stream: int) -> None:
        tensors = self._readable(tensors)
        launch = self._launch_of(tensors, alpha, beta)
        self.workspace.keep(self)
        self._order.begin_captured(stream)
        launch(stream)  # the graph has a copy of the parameters
        self._order.end_captured(stream)

    def _launch_of(self, tensors: Sequence[Tensor | None], alpha: float, beta: float) -> Launch:
        """The launch of a call. Its parameters are those of the last call of this layout, with other addresses."""
        layout = layout_of(tensors, alpha, beta)
        found = self._calls.pop(layout.key, None)  # an error below may leave parameters of two calls
        if found is None or not layout.disjoint:  # the key has all that is checked, unless tensors share bytes
            found = BoundCall(self._bind(tensors, alpha, beta), layout.addresses)
        elif found.addresses != layout.addresses:
            a, b, c, bias, _, _, d, gathered = layout.addresses
            found.launch.params.move(a, b, d, bias, c, gathered)
            found = found._replace(addresses=layout.addresses)
        self._calls[layout.key] = found
        if len(self._calls) > MAX_CALLS:
            self._calls.popitem(last=False)
        return found.launch

    def _readable(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The tensors of a call, with copies of those that the kernel cannot read, if that is allowed."""
        if not self._copies:
            return tensors
        found = list(tensors)
        for at, name in enumerate(("A", "B", "C", "bias")):
            tensor = found[at]
            if tensor is not None and not _is_readable(name, tensor):
                found[at] = tensor.clone(memory_format=torch.contiguous_format)
                if not self._has_warned:
                    LOG.warning(
                        "%s on rank %d copies %s, since a per-tile kernel reads addresses and rows of multiples of %d "
                        "bytes: got the address %#x and strides %s",
                        *(self.plan.schedule, self.rank, name, ROW_BYTES, tensor.data_ptr(), tensor.stride()),
                    )
                    self._has_warned = True
        return found

    def _bind(self, tensors: Sequence[Tensor | None], alpha: float = 1.0, beta: float = 0.0) -> Launch:
        a_shard, b_shard, c_shard, bias, scale_a, scale_b, out, gathered = tensors
        for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
            if tensor is not None:
                raise ValueError(f"execution='per_tile' takes no {name}; execution='multi_kernel' does")
        assert a_shard is not None and b_shard is not None
        given = check_shards(self.plan, self.rank, self.device, a_shard, b_shard, c_shard, beta, out)
        check_bias(self.rank, bias, given["D"])
        if gathered is not None:
            if not self.gemm.traits.sends:
                raise ValueError(
                    f"{self.plan.schedule} does not bring all of A to rank {self.rank}: there is no gathered"
                )
            check_gathered(self.plan, self.rank, gathered, given)
        turned_b = not self._has_rows("B", given["B"])
        if (gemm := self._gemms.get(turned_b)) is None:  # its flags and slots are the same
            gemm = self._gemms[turned_b] = gemm_of(self.plan, self.execution.config, turned_b=turned_b)
        traits = replace(gemm.traits, a_major="k" if self._has_rows("A", given["A"]) else "m")
        gemm = replace(gemm, traits=traits)
        params = params_of(
            gemm,
            self.workspace.space,
            *(given[name] for name in "ABD"),
            alpha=float(alpha),
            bias=bias,
            c=given.get("C"),
            beta=float(beta),
            gathered=gathered,
            gb_per_s=traits.gb_per_s,
            executable=self.number,
        )
        return Launch(traits, params, self._blocks, self.device.index or 0)

    def _has_rows(self, name: str, x: Tensor) -> bool:
        """Whether rows of A or B are contiguous; otherwise columns are."""
        by_rows, by_columns = _contiguous(x)
        sent = name == "A" and self.gemm.traits.sends
        if by_rows or (by_columns and not sent):
            return by_rows
        raise ValueError(
            f"{name}'s shard on rank {self.rank} has contiguous rows{'' if sent else ' or columns'} that do not "
            f"overlap, got strides {x.stride()}; pass it as .contiguous()"
        )


def _is_readable(name: str, x: Tensor) -> bool:
    """Whether a per-tile kernel reads such a tensor: rows, or columns of B, that begin at multiples of 16 bytes."""
    if name in {"C", "bias"}:
        return x.stride(-1) == 1
    by_rows, by_columns = _contiguous(x)
    pitch = x.stride(-1) if not by_rows else x.stride(-2) if x.shape[-2] > 1 else x.shape[-1]
    return (by_rows or (by_columns and name == "B")) and not any(
        number % ROW_BYTES for number in (x.data_ptr(), pitch * x.element_size())
    )


def _contiguous(x: Tensor) -> tuple[bool, bool]:
    """Whether rows of a matrix are contiguous, and whether columns are; they do not overlap."""
    (rows, columns), (row_stride, column_stride) = x.shape[-2:], x.stride()[-2:]
    return column_stride == 1 and (row_stride >= columns or rows == 1), row_stride == 1 and column_stride >= rows


if TYPE_CHECKING:
    _satisfies_protocol: type[Executable] = PerTileExecutable
