"""The layers of models whose products people run tensor parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from distgemm.arguments import member
from distgemm.schedulers import Pattern

__all__ = ["MODELS", "Layer", "Model", "get_model"]


class Layer(NamedTuple):
    """A linear layer, as global extents.

    Attributes:
        name: "qkv", "out", "fc1" (gate and up in one) or "fc2".
        pattern: the pattern with sequence parallelism: "ag+gemm" or "gemm+rs".
        n: outputs.
        k: inputs.
    """

    name: str
    pattern: Pattern
    n: int
    k: int

    def local(self, m: int, world_size: int) -> tuple[int, int, int]:
        """m, n, k of the GEMM of one rank."""
        if self.pattern == "ag+gemm":
            return m, -(-self.n // world_size), self.k
        return m, self.n, -(-self.k // world_size)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns that can compute it: "gemm+ar" replaces "gemm+rs" if activations are not sharded."""
        return (self.pattern,) if self.pattern == "ag+gemm" else (self.pattern, "gemm+ar")

    @property
    def all_to_alls(self) -> tuple[Pattern, ...]:
        """The pattern that computes it if each rank has the whole weight: for the projections around attention."""
        found: dict[str, tuple[Pattern, ...]] = {"qkv": ("gemm+a2a",), "out": ("a2a+gemm",)}
        return found.get(self.name, ())

    def among(self, ranks: int, tp: int) -> tuple[int, int]:
        """n and k of a smaller layer: each of ``ranks`` ranks has the share of one of ``tp`` ranks of this layer.

        Raises:
            ValueError: if tp ranks cannot share the layer evenly.
        """
        shared = self.n if self.pattern == "ag+gemm" else self.k
        if tp < 1 or shared % tp:
            what = "n" if self.pattern == "ag+gemm" else "k"
            raise ValueError(f"{tp} ranks cannot share {what} = {shared} of {self.name} evenly")
        share = shared // tp * ranks
        return (share, self.k) if self.pattern == "ag+gemm" else (self.n, share)


@dataclass(frozen=True)
class Model:
    """Extents of a Llama-like model.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads: query heads.
        kv_heads: key and value heads.
        head: elements of a head.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int = 128

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The four products of a block, in order."""
        return (
            Layer("qkv", "ag+gemm", (self.heads + 2 * self.kv_heads) * self.head, self.hidden),
            Layer("out", "gemm+rs", self.hidden, self.heads * self.head),
            Layer("fc1", "ag+gemm", 2 * self.intermediate, self.hidden),
            Layer("fc2", "gemm+rs", self.hidden, self.intermediate),
        )


MODELS = {
    "llama-3-8b": Model(hidden=4096, intermediate=14336, heads=32, kv_heads=8),
    "llama-3-70b": Model(hidden=8192, intermediate=28672, heads=64, kv_heads=8),
    "llama-3-405b": Model(hidden=16384, intermediate=53248, heads=128, kv_heads=8),
}


def get_model(name: str) -> Model:
    """The model of that name. Raises ValueError for one that is not known."""
    return MODELS[member("model", name, MODELS)]
