"""fp8: recipes, tensors in fp8, and a linear layer on one rank."""

from distgemm.fp8.layer import linear, multiply
from distgemm.fp8.quantize import Quantized, dequantize, quantize
from distgemm.fp8.recipe import RECIPES, Recipe, recipe
from distgemm.fp8.state import LayerState, fixed_weights

__all__ = [
    "RECIPES",
    "LayerState",
    "Quantized",
    "Recipe",
    "dequantize",
    "fixed_weights",
    "linear",
    "multiply",
    "quantize",
    "recipe",
]
