"""CuTe layouts, and the thread-value layouts that map ranks to tiles.

Import as ``distgemm.layouts``. Pure Python on pycute (from the nvidia-cutlass wheel) and numpy.
"""

if __name__ != "distgemm.layouts":
    raise ImportError(f"import distgemm.layouts, not {__name__}")

from distgemm.layouts.algebra import (
    IntTuple,
    Layout,
    coalesce,
    complement,
    composition,
    flatten,
    left_inverse,
    logical_divide,
    logical_product,
    product,
    right_inverse,
)
from distgemm.layouts.maps import ComposedLayout, Map, Modulo, Offset, Swizzle
from distgemm.layouts.tv import Axis, TVLayout

__all__ = [
    "Axis",
    "ComposedLayout",
    "IntTuple",
    "Layout",
    "Map",
    "Modulo",
    "Offset",
    "Swizzle",
    "TVLayout",
    "coalesce",
    "complement",
    "composition",
    "flatten",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "product",
    "right_inverse",
]
