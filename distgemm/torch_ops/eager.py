"""Calls of registered ops by eager code, without torch's dispatcher.

A call of a ``torch.library.custom_op`` takes tens of microseconds of Python, and some hundred with gradients. A GEMM's
launch takes ten. Eager code needs only the op's function, and a node of the autograd graph. What depends only on the
shapes and types of the arguments is prepared in the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from distgemm.torch_ops.needs import recording

__all__ = ["EagerOp", "Prepared"]

Tensor = torch.Tensor
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that dispatch nothing by themselves."""


class Prepared(Protocol):
    """What a call needs that does not depend on the values of its tensors. Whoever makes it keeps it alive."""

    def is_current(self) -> bool:
        """Whether it may serve a further call."""
        ...


class EagerOp:
    """An op as a function: eager calls execute it directly, all others go through the registered op.

    Others are those that a tracer, a mode, a transform of torch.func or the profiler looks at, and those with tensors
    of other classes.

    Args:
        name: the op's name, with its namespace.
        schema: the op's schema.
        prepare: checks the arguments of a call, and returns what :attr:`run` needs besides. Of tensors it sees shapes,
            dtypes and devices only.
        run: what the op computes from that and the arguments. It returns a tensor or a list of tensors.
        fake: the shapes of what it returns, as ``register_fake`` takes it.
        setup: as the ``setup_context`` of ``register_autograd``.
        backward: as the ``backward`` of ``register_autograd``.

    Attributes:
        op: the registered op.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        prepare: Callable[..., Prepared],
        run: Callable[..., Any],
        fake: Callable[..., Any],
        setup: Callable[[Any, tuple[Any, ...], Any], None],
        backward: Callable[..., tuple[Any, ...]],
    ) -> None:
        self.op = torch.library.custom_op(name, self._compute, mutates_args=(), schema=schema)
        self.op.register_fake(self._shapes)
        self.op.register_autograd(backward, setup_context=setup)
        self._prepare, self._run, self._fake = prepare, run, fake
        self._prepared: WeakValueDictionary[tuple[Any, ...], Prepared] = WeakValueDictionary()
        self._node = _autograd_function(name, self._compute, setup, backward)

    def __call__(self, *args: Any) -> Any:
        """The op of these arguments, in the order of its schema. Lists of tensors are arguments of their own."""
        if torch.compiler.is_compiling() or _is_observed():
            return self.op(*args)
        flat: list[Any] = []
        lengths = []
        for arg in args:
            if type(arg) is list and (not arg or isinstance(arg[0], Tensor)):
                flat += arg
                lengths.append(len(arg))
            else:
                flat.append(arg)
                lengths.append(-1)
        needs_grad = False
        for arg in flat:
            if isinstance(arg, Tensor):
                if type(arg) not in PLAIN:
                    return self.op(*args)
                needs_grad = needs_grad or arg.requires_grad
        if not needs_grad or not torch.is_grad_enabled():
            return self._compute(*args)
        found = self._node.apply(tuple(lengths), *flat)
        return list(found) if isinstance(found, tuple) else found

    def _compute(self, *args: Any) -> Any:
        if recording():
            return self._shapes(*args)
        key = tuple([_metadata(arg) for arg in args])
        prepared = self._prepared.get(key)
        if prepared is None or not prepared.is_current():
            prepared = self._prepared[key] = self._prepare(*args)
        return self._run(prepared, *args)

    def _shapes(self, *args: Any) -> Any:
        """What the op returns, without values. While calls are recorded, ``prepare`` notes what this one needs."""
        if recording():
            self._prepare(*args)
        return self._fake(*args)


def _metadata(arg: Any) -> Any:
    """What :attr:`EagerOp.prepare` may see of an argument, as a part of a key."""
    if isinstance(arg, Tensor):
        return arg.shape, arg.dtype, arg.device
    return tuple([_metadata(each) for each in arg]) if isinstance(arg, (list, tuple)) else arg


def _is_observed() -> bool:
    """Whether a mode, a transform or the profiler looks at the ops that are called."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
    )


def _nested(flat: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """Arguments of an op from a flat list; a length of -1 stands for an argument that is no list of tensors."""
    found: list[Any] = []
    at = 0
    for length in lengths:
        found.append(flat[at] if length < 0 else list(flat[at : at + length]))
        at += abs(length)
    return found


def _autograd_function(
    name: str,
    run: Callable[..., Any],
    setup: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Any, ...]],
) -> Any:
    """A ``torch.autograd.Function`` of an op. Its arguments are the lengths of lists, then all arguments flat."""

    class Node:
        @staticmethod
        def forward(lengths: tuple[int, ...], *flat: Any) -> Any:
            found = run(*_nested(flat, lengths))
            return tuple(found) if isinstance(found, list) else found

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            lengths, *flat = inputs
            ctx.lengths, ctx.has_list = lengths, isinstance(output, tuple)
            setup(ctx, tuple(_nested(flat, lengths)), list(output) if ctx.has_list else output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            flat_needs = ctx.needs_input_grad
            ctx.needs_input_grad = tuple(_nested(flat_needs[1:], ctx.lengths))
            try:
                found = backward(ctx, list(grads) if ctx.has_list else grads[0])
            finally:
                ctx.needs_input_grad = flat_needs
            flat: list[Any] = [None]
            for grad, length in zip(found, ctx.lengths, strict=True):
                flat += [grad] if length < 0 else grad or [None] * length
            return tuple(flat)

    # Its class names the nodes of the graph, as the class of a registered op does.
    return type(name.replace("::", "_"), (Node, torch.autograd.Function), {})
