"""Finds collectives beside GEMMs that inductor has not fused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # noqa: PLC2701  (torch has no public name)
from torch._inductor import config  # noqa: PLC2701  (as above)
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # noqa: PLC2701  (as above)

from distgemm.runtime.checks import process_group
from distgemm.torch_ops.report import REPORT, CallSite, NotFusedError

__all__ = ["GraphInspection"]

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


class GraphInspection(CustomGraphPass):
    """A pass behind inductor's own. It notes collectives beside GEMMs in the report, and changes nothing.

    Args:
        before: what was inductor's option ``post_grad_custom_post_pass``: a pass, several, or None. It runs first.
        strict: whether it raises NotFusedError where it finds one.
    """

    def __init__(self, before: Any, strict: bool) -> None:
        self.before, self.strict = before, strict
        self._passes = before if isinstance(before, (list, tuple)) else [] if before is None else [before]

    def uuid(self) -> Any:
        """For the keys of cached graphs: which passes have run; None: a pass has no id."""
        earlier = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._passes]
        return None if None in earlier else get_hash_for_files((__file__,), f"{self.strict} {earlier}")

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        """Look at a graph.

        Raises:
            NotFusedError: with ``strict``, if a collective beside a GEMM is left.
        """
        for each in self._passes:
            each(graph)
        for node in graph.nodes:
            name = _name(node)
            if name in GATHERS and any(_through_moves([node], lambda each: each.users)):
                _note(node, f"{name}, then a GEMM", self.strict)
            elif name in SCATTERS and any(_through_moves([node], lambda each: each.all_input_nodes)):
                _note(node, f"a GEMM, then {name}", self.strict)


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


def _note(node: torch.fx.Node, op: str, strict: bool) -> None:
    group = next((each for each in reversed(node.args) if isinstance(each, str)), "")
    value = node.all_input_nodes[0].meta["val"]
    site = CallSite(op, (tuple(value.shape),), value.dtype, (), process_group(group).size())
    reason = _reason(group)
    REPORT.not_fused[site, reason] += 1
    if strict:
        raise NotFusedError(f"{site}: not fused, because {reason}")


def _reason(group: str) -> str:
    """Why inductor's pass has not fused a collective with a GEMM, as far as its settings tell."""
    if not config._micro_pipeline_tp:
        return "torch._inductor.config._micro_pipeline_tp is off"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL, without which inductor's pass does nothing"
    if not symmetric_memory.is_symm_mem_enabled_for_group(group):  # type: ignore[arg-type]
        return "symmetric memory is not enabled for this group"
    return "inductor's pass did not match the ops between the collective and the GEMM"
