"""CuTe layouts, and the thread-value layouts that map ranks to tiles.

Import this package as ``distgemm.layouts``. It is pure Python. It needs numpy and pycute, which the nvidia-cutlass
wheel contains.
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
from distgemm.layouts.maps import ComposedLayout, Divide, Map, Modulo, Offset, Swizzle
from distgemm.layouts.tv import Axis, TVLayout

__all__ = [
    "Axis",
    "ComposedLayout",
    "Divide",
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
