"""Fuses collectives with GEMMs in graphs that inductor compiles, and finds those that are left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)
from torch._inductor import config  # noqa: PLC2701  (as above)
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # noqa: PLC2701  (as above)
from torch._inductor.fx_passes import micro_pipeline_tp  # noqa: PLC2701  (as above)

from distgemm.runtime.checks import process_group
from distgemm.torch_ops.report import REPORT, CallSite, NotFusedError

__all__ = ["FusionPass"]

GATHERS, SCATTERS = ("all_gather_into_tensor", "all_gather_into_tensor_out"), ("reduce_scatter_tensor",)
GEMMS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_scaled_mm")
MOVES = (
    "wait_tensor",
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_copy",
    "t",
    "transpose",
    "permute",
    "movedim",
    "split",
    "split_with_sizes",
    "chunk",
    "slice",
    "cat",
    "unsqueeze",
    "squeeze",
    "expand",
    "clone",
    "contiguous",
    "_to_copy",
    "convert_element_type",
    "force_stride_order",
    "getitem",
)
"""Ops that only move what a collective has brought, or will take."""
TRANSPOSES = ("t", "transpose", "permute", "movedim")
UNMATCHED = "inductor's pass did not match the ops between the collective and the GEMM"


class FusionPass(CustomGraphPass):
    """A pass behind inductor's own. It notes collectives beside GEMMs that are not fused in the report.

    Args:
        before: what was inductor's option ``post_grad_custom_post_pass``: a pass, several, or None. It runs first.
        fuse: whether it runs inductor's pass ``micro_pipeline_tp``, which is off by default.
        strict: whether it raises NotFusedError where it finds a collective that is not fused.
    """

    def __init__(self, before: Any, fuse: bool, strict: bool) -> None:
        self.before, self.fuse, self.strict = before, fuse, strict
        self._passes = before if isinstance(before, (list, tuple)) else [] if before is None else [before]

    def uuid(self) -> Any:
        """For the keys of cached graphs: which passes have run; None: a pass has no id."""
        earlier = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._passes]
        return None if None in earlier else get_hash_for_files((__file__,), f"{self.fuse} {self.strict} {earlier}")

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        """Fuse what can be fused, and look for what is left.

        Raises:
            NotFusedError: with ``strict``, if a collective beside a GEMM is left.
        """
        for each in self._passes:
            each(graph)
        collectives = [node for node in graph.nodes if _name(node) in (*GATHERS, *SCATTERS)]
        if self.fuse and collectives:
            for node in collectives:
                if _name(node) in GATHERS:
                    _add_bias_apart(node)
            with _as_if_ready():
                micro_pipeline_tp.micro_pipeline_tp_pass(graph)
        for node in graph.nodes:
            name = _name(node)
            if name in GATHERS:
                op, gemms = f"{name}, then a GEMM", _through_moves([node], lambda each: each.users)
            elif name in SCATTERS:
                op, gemms = f"a GEMM, then {name}", _through_moves([node], lambda each: each.all_input_nodes)
            else:
                continue
            if (gemm := next(gemms, None)) is not None:
                _note(node, op, gemm, self.fuse, self.strict)


def _add_bias_apart(gather: torch.fx.Node) -> None:
    """Replace each addmm of a gathered A by a GEMM and a sum: inductor's pass fuses no addmm."""
    aten = torch.ops.aten
    for node in list(_through_moves([gather], lambda each: each.users)):
        if node.target is not aten.addmm.default or node.kwargs or _origin(node.args[1]) is not gather:
            continue
        arguments: Any = node.args
        bias, a, b = arguments
        if bias.meta["val"].dim() != 1:
            continue
        width = node.meta["val"].shape[1]
        # The pass also fuses a GEMM between two reshapes: the sum follows the second, if that keeps the columns.
        reshapes = (user for user in node.users if user.target is aten.reshape.default)
        reshaped = next((user for user in reshapes if user.meta["val"].shape[-1] == width), None)
        with node.graph.inserting_before(node):
            found = _like(node, aten.mm.default, a, b)
            if reshaped is not None:
                found = _like(reshaped, aten.reshape.default, found, reshaped.args[1])
            found = _like(reshaped or node, aten.add.Tensor, found, bias)
            if reshaped is not None:
                reshaped.replace_all_uses_with(found)
                reshaped.graph.erase_node(reshaped)
                found = _like(node, aten.reshape.default, found, [-1, width])
        node.replace_all_uses_with(found)
        node.graph.erase_node(node)


def _like(node: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
    """A new node whose result has the shape and the type of that of ``node``."""
    found = node.graph.call_function(target, args)
    found.meta = dict(node.meta)
    return found


def _origin(a: Any) -> torch.fx.Node:
    """The node whose result, not transposed, a tensor has after moves."""
    while _name(a) in MOVES and _name(a) not in TRANSPOSES:
        a = a.all_input_nodes[0]
    found: torch.fx.Node = a
    return found


@contextmanager
def _as_if_ready() -> Iterator[None]:
    """Inductor's pass wants NCCL and symmetric memory, which torch's own ops need. distgemm's need neither here."""
    found = dist.is_nccl_available, symmetric_memory.is_symm_mem_enabled_for_group
    dist.is_nccl_available = lambda: True
    symmetric_memory.is_symm_mem_enabled_for_group = lambda group_name: True
    try:
        yield
    finally:
        dist.is_nccl_available, symmetric_memory.is_symm_mem_enabled_for_group = found


def _group(node: torch.fx.Node) -> str:
    """The name of a collective's group."""
    return next((each for each in reversed(node.args) if isinstance(each, str)), "")


def _name(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", "")) if node.op == "call_function" else ""


def _through_moves(start: Iterable[torch.fx.Node], neighbours: Any) -> Iterator[torch.fx.Node]:
    """GEMMs that are reached over ops that only move data."""
    seen, todo = set(start), list(start)
    while todo:
        for each in neighbours(todo.pop()):
            if each in seen:
                continue
            seen.add(each)
            if _name(each) in GEMMS:
                yield each
            elif _name(each) in MOVES:
                todo.append(each)


def _note(node: torch.fx.Node, op: str, gemm: torch.fx.Node, fused: bool, strict: bool) -> None:
    group = _group(node)
    value = node.all_input_nodes[0].meta["val"]
    # Extents that vary are no numbers: they have names.
    shape = tuple(extent if isinstance(extent, int) else str(extent) for extent in value.shape)
    site = CallSite(op, (shape,), value.dtype, (), process_group(group).size())
    reason = _reason(group, fused)
    if reason == UNMATCHED and _name(node) in SCATTERS and _name(gemm) == "addmm":
        reason = "a bias is added to the partial sums"
    REPORT.not_fused[site, reason] += 1
    if strict:
        raise NotFusedError(f"{site}: not fused, because {reason}")


def _reason(group: str, fused: bool) -> str:
    """Why inductor's pass has not fused a collective with a GEMM, as far as its settings tell."""
    if fused:
        return UNMATCHED
    if not config._micro_pipeline_tp:
        return "torch._inductor.config._micro_pipeline_tp is off"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL, without which inductor's pass does nothing"
    if not symmetric_memory.is_symm_mem_enabled_for_group(group):  # type: ignore[arg-type]
        return "symmetric memory is not enabled for this group"
    return UNMATCHED
