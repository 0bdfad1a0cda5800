"""Functions of the CUDA driver that are called often, by ctypes. All others are called through cuda.bindings."""

from __future__ import annotations

import ctypes
import functools

__all__ = ["EARLY", "LaunchAttribute", "LaunchConfig", "error_text", "libcuda"]

_UINT, _POINTER = ctypes.c_uint, ctypes.c_void_p
SIGNATURES = {
    # LaunchConfig, function, parameters, extra
    "cuLaunchKernelEx": (_POINTER, _POINTER, _POINTER, _POINTER),
    # descriptor, type, modes, address, extents, strides, box, element strides, interleave, swizzle, L2 promotion, fill
    "cuTensorMapEncodeTiled": (_POINTER, _UINT, _UINT, *[_POINTER] * 5, *[_UINT] * 4),
    # descriptor, address
    "cuTensorMapReplaceAddress": (_POINTER, _POINTER),
    # error, text
    "cuGetErrorString": (_UINT, _POINTER),
    "cuGetErrorName": (_UINT, _POINTER),
}


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", _UINT * 3),
        ("block", _UINT * 3),
        ("shared_bytes", _UINT),
        ("stream", _POINTER),
        ("attributes", _POINTER),
        ("attribute_count", _UINT),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with an integer."""

    _fields_ = (("id", _UINT), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


EARLY = LaunchAttribute(6, b"", 1)
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may begin before the kernel in front of it on the
stream has ended. It waits itself before it touches global memory."""


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver's library. Its functions return a CUresult.

    Raises:
        OSError: if there is no driver.
    """
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


def error_text(error: int) -> str:
    """What a CUresult means, and its name."""
    meaning, name = ctypes.c_char_p(), ctypes.c_char_p()
    if libcuda().cuGetErrorString(error, ctypes.byref(meaning)) or libcuda().cuGetErrorName(error, ctypes.byref(name)):
        return f"error {error}"
    return f"{(meaning.value or b'').decode()} ({(name.value or b'').decode()})"
