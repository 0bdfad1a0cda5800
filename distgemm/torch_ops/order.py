"""The order of the ops in graphs that inductor compiles.

All ranks make the same calls in the same order. Inductor reorders ops that are independent, to save memory, and ranks
with unequal shards need unequal memory: they would get unequal orders. Inductor keeps the order of kernels that it
takes for collectives, so the ops become such kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor import ir, lowering  # noqa: PLC2701  (torch has no public name)
from torch._inductor.virtualized import V  # noqa: PLC2701  (as above)
from torch._library.utils import get_layout_constraint_tag  # noqa: PLC2701  (as above)

__all__ = ["OrderedKernel", "keep_order"]


class OrderedKernel(ir._CollectiveKernel):
    """A call of an op in a graph of inductor: torch's fallback for custom ops, and a collective.

    Attributes:
        previous: the call before it in the graph.
        is_generated: whether the graph's program has it already.
    """

    previous: OrderedKernel | None = None
    is_generated = False

    def codegen(self, wrapper: Any) -> None:
        """Write the call into the graph's program.

        Raises:
            RuntimeError: inductor has moved it before a call that was before it.
        """
        if self.previous is not None and not self.previous.is_generated:
            raise RuntimeError(
                f"inductor of torch {torch.__version__} reorders {self.previous.op_overload} and {self.op_overload}, "
                "and could do so in another way on another rank; torch._inductor.config.reorder_for_peak_memory = "
                'False or backend="aot_eager" keeps the order'
            )
        super().codegen(wrapper)
        self.is_generated = True


@functools.cache
def keep_order(op: torch._ops.OpOverload) -> None:
    """Let inductor keep the order of the calls of this op, of others like it, and of collectives.

    Args:
        op: an op with an argument ``group``, the name of a process group.
    """
    names = [argument.name for argument in op._schema.arguments]

    def lower(*args: Any, **kwargs: Any) -> Any:
        previous = _last_call()
        found = OrderedKernel.create(op, *args, **kwargs)
        kernel = _last_call()
        if kernel is None or kernel is previous:
            raise RuntimeError(
                f"inductor of torch {torch.__version__} has made another kernel of {op} than {OrderedKernel.__name__}, "
                'so its order would not be kept; backend="aot_eager" does not reorder'
            )
        kernel.previous = previous
        # Inductor takes the last constant of a collective for the name of its group.
        kernel.constant_args = (*kernel.constant_args, {**dict(zip(names, args, strict=False)), **kwargs}["group"])
        return torch.utils._pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, found)

    # Without a lowering, inductor would make this fallback in the first call, with the strides that custom ops want.
    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
    lowering.make_fallback(op, constraint)  # type: ignore[no-untyped-call]
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _last_call() -> OrderedKernel | None:
    """The last call in the graph so far."""
    return next((each for each in reversed(V.graph.operations) if isinstance(each, OrderedKernel)), None)
