"""Calls of registered ops by eager code, without torch's dispatcher.

A call of a ``torch.library.custom_op`` takes tens of microseconds of Python, and some hundred with gradients. A GEMM's
launch takes ten. Eager code needs only the op's function, and a node of the autograd graph. What depends only on the
shapes and types of the arguments is prepared in the first call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import flop_registry, register_flop_formula

from distgemm.runtime.torch_arguments import PLAIN
from distgemm.torch_ops.needs import recording

__all__ = ["EagerOp", "OpCall", "Prepared"]

Tensor = torch.Tensor


class Prepared(Protocol):
    """What a call needs that does not depend on the values of its tensors. Whoever makes it keeps it alive."""

    def is_current(self) -> bool:
        """Whether it may serve a further call."""
        ...


class OpCall(Protocol):
    """The arguments of a call of an op."""

    def prepare(self) -> Any:
        """Check the arguments; what :meth:`run` needs besides, a :class:`Prepared`.

        Of tensors it sees shapes, dtypes and devices only. None: there is nothing to compute, and :meth:`fake` returns
        the result.
        """
        ...

    def run(self, prepared: Any) -> Any:
        """What the op computes: a tensor or a list of tensors."""
        ...

    def fake(self) -> Any:
        """Tensors with the shapes of what :meth:`run` returns, as ``register_fake`` takes them."""
        ...


class EagerOp:
    """An op as a function: eager calls execute it directly, all others go through the registered op.

    Others are those that a tracer, a mode, a transform of torch.func or the profiler looks at, and those with tensors
    of other classes.

    Args:
        name: the op's name, with its namespace.
        schema: the op's schema.
        call: the class of the op's calls, made from the arguments.
        setup: as the ``setup_context`` of ``register_autograd``.
        backward: as the ``backward`` of ``register_autograd``.

    Attributes:
        op: the registered op.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        call: Callable[..., OpCall],
        setup: Callable[[Any, tuple[Any, ...], Any], None],
        backward: Callable[..., tuple[Any, ...]],
    ) -> None:
        self.op = torch.library.custom_op(name, self._compute, mutates_args=(), schema=schema)
        self.op.register_fake(self._shapes)
        self._name = name
        self.op.register_autograd(backward, setup_context=setup)
        self._call = call
        self._prepared: WeakValueDictionary[tuple[Any, ...], Prepared] = WeakValueDictionary()
        self._node = _autograd_function(name, call, setup, backward)

    def __call__(self, *args: Any) -> Any:
        """The op of these arguments, in the order of its schema. Lists of tensors are arguments of their own."""
        if torch.compiler.is_compiling():
            return self.op(*args)
        if forward_ad._current_level >= 0 and torch._C._functorch.peek_interpreter_stack() is not None:
            # Torch would return zeros. Tangents outside of torch.func are those of plain tensors: executables see them.
            raise RuntimeError(
                f"{self._name} has no forward-mode derivatives, as torch.func.jvp and jacfwd ask for them"
            )
        if recording() or _is_observed():
            return self.op(*args)
        key, is_plain, needs_grad = _read(args)
        if not is_plain:
            return self.op(*args)
        call = self._call(*args)
        prepared = self._prepared_for(key, call)
        if not needs_grad or not torch.is_grad_enabled():
            return _result(call, prepared)
        lengths = tuple([len(arg) if isinstance(arg, (list, tuple)) else -1 for arg in args])
        flat = [each for arg, length in zip(args, lengths, strict=True) for each in (arg if length >= 0 else (arg,))]
        found = self._node.apply(prepared, lengths, *flat)
        return list(found) if isinstance(found, tuple) else found

    def count_flops(self, formula: Callable[..., int]) -> None:
        """Let :class:`torch.utils.flop_counter.FlopCounterMode` count what the op multiplies.

        Args:
            formula: as :func:`torch.utils.flop_counter.register_flop_formula` takes it.
        """
        namespace, _, base = self._name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), base)
        if packet not in flop_registry:  # the module may be reloaded
            register_flop_formula(packet)(formula)

    def _compute(self, *args: Any) -> Any:
        if recording():
            return self._shapes(*args)
        call = self._call(*args)
        return _result(call, self._prepared_for(_read(args)[0], call))

    def _prepared_for(self, key: tuple[Any, ...], call: OpCall) -> Prepared | None:
        prepared = self._prepared.get(key)
        if prepared is None or not prepared.is_current():
            with torch.no_grad():
                prepared = call.prepare()
            if prepared is not None:
                self._prepared[key] = prepared
        return prepared

    def _shapes(self, *args: Any) -> Any:
        """What the op returns, without values. While calls are recorded, ``prepare`` notes what this one needs."""
        # Inductor traces each graph before it lowers it. Its import takes seconds, so eager code does without.
        if "torch._inductor.lowering" in sys.modules:
            _keep_order(self._name)
        call = self._call(*args)
        if recording():
            call.prepare()
        return call.fake()


def _result(call: OpCall, prepared: Prepared | None) -> Any:
    """What an op computes. Without tokens nothing moves, and results have no elements."""
    return call.fake() if prepared is None else call.run(prepared)


def _keep_order(name: str) -> None:
    """Let inductor keep the order of the calls of an op.

    Raises:
        RuntimeError: this torch's inductor lacks a name that this needs.
    """
    try:
        from distgemm.torch_ops.order import keep_order

        namespace, _, base = name.partition("::")
        keep_order(getattr(getattr(torch.ops, namespace), base).default)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"all ranks need the same order of calls, and distgemm cannot keep that of {name} in graphs that inductor "
            f'of torch {torch.__version__} compiles: {error}; backend="aot_eager" does not reorder'
        ) from error


def _read(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, bool]:
    """What :meth:`OpCall.prepare` may see, whether all tensors are of plain classes, and whether one requires grad."""
    key: list[Any] = []
    is_plain, needs_grad = True, False
    for arg in args:
        if isinstance(arg, Tensor):
            elements: Sequence[Any] = (arg,)
        elif isinstance(arg, (list, tuple)):
            key.append(len(arg))
            elements = arg
        else:
            key.append(arg)
            continue
        for each in elements:
            if isinstance(each, Tensor):
                # Batches of gradients (is_grads_batched) are plain by their class.
                is_plain = is_plain and type(each) in PLAIN and not torch._C._functorch.is_legacy_batchedtensor(each)
                needs_grad = needs_grad or each.requires_grad
                key += (each.shape, each.dtype, each.device)
            else:
                key.append(each)
    return tuple(key), is_plain, needs_grad


def _is_observed() -> bool:
    """Whether a mode, a transform, the profiler or torch.jit.trace looks at the ops that are called."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )


def _nested(flat: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """Arguments of an op from a flat list; a length of -1 stands for an argument that is no list."""
    found: list[Any] = []
    at = 0
    for length in lengths:
        found.append(flat[at] if length < 0 else list(flat[at : at + length]))
        at += abs(length)
    return found


def _autograd_function(
    name: str,
    call: Callable[..., OpCall],
    setup: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Any, ...]],
) -> Any:
    """A ``torch.autograd.Function`` of an op. It takes what is prepared, the lengths of lists, and flat arguments."""

    class Node:
        @staticmethod
        def forward(ctx: Any, prepared: Prepared | None, lengths: tuple[int, ...], *flat: Any) -> Any:
            # Without setup_context, for which torch inspects the signature in each call.
            args = tuple(_nested(flat, lengths))
            found = _result(call(*args), prepared)
            ctx.lengths, ctx.has_list = lengths, isinstance(found, list)
            setup(ctx, args, found)
            return tuple(found) if ctx.has_list else found

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            flat_needs = ctx.needs_input_grad
            ctx.needs_input_grad = tuple(_nested(flat_needs[2:], ctx.lengths))
            try:
                found = backward(ctx, list(grads) if ctx.has_list else grads[0])
            finally:
                ctx.needs_input_grad = flat_needs
            flat: list[Any] = [None, None]
            for grad, length in zip(found, ctx.lengths, strict=True):
                flat += [grad] if length < 0 else grad or [None] * length
            return tuple(flat)

    # Its class names the nodes of the graph, as the class of a registered op does.
    return type(name.replace("::", "_"), (Node, torch.autograd.Function), {})
