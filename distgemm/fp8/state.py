"""What a layer keeps between calls: largest magnitudes of the steps before, and the quantised weight."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses import FakeTensor  # noqa: PLC2701  (torch has no public name)

from distgemm.arguments import finite
from distgemm.fp8.quantize import Quantized
from distgemm.fp8.recipe import Recipe, read_recipe

__all__ = ["LayerState", "Role", "fixed_weights"]

Tensor = torch.Tensor
Role = Literal["x", "w", "dy"]
ROLES: tuple[Role, ...] = ("x", "w", "dy")

_STEPS: list[dict[tuple[LayerState, bool, bool], Quantized]] = []
"""The quantised weights of each ``with`` block of :func:`fixed_weights` that has begun."""


@contextlib.contextmanager
def fixed_weights() -> Iterator[None]:
    """Inside the ``with`` block, each layer quantises its weight once: for the microbatches of a step.

    Weights must not change inside the block: an optimizer's step comes after it. Without the block, a weight is
    quantised once for each forward pass and the backward pass that belongs to it.
    """
    _STEPS.append({})
    try:
        yield
    finally:
        _STEPS.pop()


class LayerState(nn.Module):
    """What a linear layer with a recipe keeps between calls. A layer makes its own.

    A "delayed" recipe takes the scale of a tensor from the largest magnitude in its history. The history moves on in
    the backward pass, so an evaluation or a recomputed forward pass does not change it. Before the first backward pass,
    the scales are those of the "current" recipe. A step whose largest magnitude is zero, infinite, NaN or unknown
    repeats that of the step before. The history stays in float32 when the layer gets another dtype.

    Args:
        recipe: the layer's recipe, or its name.
        device: where the history is: that of the layer's weight. None: torch's default device.

    Attributes:
        recipe: the layer's recipe.
        history: a buffer, for recipes with "delayed" and "static": largest magnitudes of X, W and dY in their rows, one
            column for each step.
    """

    history: Tensor

    def __init__(self, recipe: Recipe | str, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.recipe = recipe = read_recipe("recipe", recipe)
        if recipe.amax != "current":
            steps = recipe.history if recipe.amax == "delayed" else 1
            self.register_buffer("history", torch.zeros(len(ROLES), steps, dtype=torch.float32, device=device))
        self._seen: dict[Role, Tensor] = {}
        self._started: dict[Role, bool] = {}

    def reset_parameters(self) -> None:
        """Empty the history, as after ``to_empty``."""
        if self.recipe.amax != "current":
            self.history.zero_()
        self._forget()

    def _forget(self) -> None:
        """Drop what belongs to the history that was there before."""
        self._seen.clear()
        self._started.clear()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(x: Tensor) -> Tensor:
            found = fn(x)
            return found if found.dtype == x.dtype else x.to(found.device)

        self._forget()
        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if the history is not on the device of the layer's input."""
        if self.recipe.amax != "current" and self.history.device != device:
            raise ValueError(
                f"the history of the LayerState is on {self.history.device}, and the layer's input is on {device}: "
                "move the state there, LayerState.to(device), or make it there, LayerState(recipe, device)"
            )

    def set(self, *, x: float, w: float, dy: float = 0.0) -> None:
        """Set the largest magnitudes of a "static" recipe.

        They are the same on all ranks, because a scale is that of all shards. Ranks that differ raise ValueError in
        the next call over gloo. On GPUs only the first call of a recipe compares them, and later ones compute wrong
        results.

        Args:
            x: of the input.
            w: of the weight.
            dy: of the gradient of the output; 0: there is no backward pass.

        Raises:
            ValueError: for a recipe with "current", which keeps none, and for numbers that are negative or not finite.
        """
        if self.recipe.amax == "current":
            raise ValueError("LayerState.set is for a recipe such as 'tensorwise_static', got one with amax='current'")
        values = [finite(name, value, least=0.0) for name, value in (("x", x), ("w", w), ("dy", dy))]
        self.history.copy_(self.history.new_tensor(values)[:, None])
        self._forget()

    def amax(self, role: Role) -> Tensor | None:
        """The largest magnitude that the history has, (1, 1); None: it has none, or the recipe takes the current one.

        Raises:
            ValueError: for a "static" recipe before :meth:`set`.
        """
        if self.recipe.amax == "current":
            return None
        row = self.history[ROLES.index(role)]
        if isinstance(row, FakeTensor):
            return row.max().view(1, 1)
        if role not in self._started or not self._started[role]:
            # Looks at values, which waits for a GPU: only until there is a number, as in a loaded state dict.
            self._started[role] = bool(row.any())
        if not self._started[role]:
            if self.recipe.amax == "static":
                raise ValueError(
                    f"the recipe is static, and there is no largest magnitude of {role!r}: LayerState.set(x=..., "
                    "w=..., dy=...) sets them"
                )
            return None
        return row.max().view(1, 1)

    def note(self, role: Role, amax: Tensor) -> None:
        """Keep the largest magnitude of a tensor until :meth:`advance`."""
        if isinstance(amax, FakeTensor):  # nothing computes it
            return
        seen = self._seen.get(role)
        self._seen[role] = amax.view(()) if seen is None else torch.maximum(seen, amax.view(()))

    def advance(self, reduce_max: Callable[[Tensor], Tensor]) -> None:
        """Move the history on by a step, at the end of a backward pass.

        Args:
            reduce_max: the maximum over ranks of three numbers.
        """
        if self.recipe.amax != "delayed" or not self._seen:
            return
        latest = torch.stack([self._seen.get(role, self.history.new_zeros(())) for role in ROLES])
        self._seen.clear()
        latest = reduce_max(latest)
        # Zero also stands for a tensor that was not quantised since the last step. No scale comes from such numbers.
        latest = torch.where((latest > 0) & latest.isfinite(), latest, self.history[:, 0])
        self.history.copy_(torch.cat([latest[:, None], self.history[:, :-1]], 1))

    def weight(self, transposed: bool, make: Callable[[], Quantized]) -> Quantized:
        """The quantised weight, or its transpose: inside of :func:`fixed_weights` the one that was made before."""
        if not _STEPS:
            return make()
        # Autograd does not save tensors of inference mode.
        key = self, transposed, torch.is_inference_mode_enabled()
        found = _STEPS[-1].get(key)
        if found is None:
            found = _STEPS[-1][key] = make()
        return found
