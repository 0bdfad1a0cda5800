"""Readers of torch's arguments: tensors, devices and types. The others are in :mod:`distgemm.arguments`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distgemm.arguments import wrong

__all__ = ["PLAIN", "is_plain", "read_device", "read_dtype", "read_tensor"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that dispatch nothing by themselves."""


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor of such a class that :func:`read_tensor` returns."""
    return type(value) in PLAIN and value.layout is torch.strided and not value.is_nested and not value.is_meta


def read_tensor(name: str, value: Any) -> torch.Tensor:
    """A dense tensor of one process, which has values.

    Args:
        name: name of the argument.
        value: what was given.

    Raises:
        ValueError: for anything else: a list, an array, a DTensor, and a sparse, nested or meta tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise wrong(name, "a torch.Tensor, as torch.as_tensor makes it", value)
    if isinstance(value, DTensor):
        raise wrong(name, "a tensor of this rank, and no DTensor; to_local() returns it", value)
    if value.is_nested:
        raise wrong(name, "a dense tensor, and no nested one", value)
    if value.layout is not torch.strided:
        raise wrong(name, f"a dense tensor, and not one with the layout {value.layout}", value)
    if value.is_meta:
        raise wrong(name, "a tensor with values, and not one on the device meta", value)
    return value


def read_device(name: str, value: Any, kinds: Collection[str]) -> torch.device:
    """A device.

    Args:
        name: name of the argument.
        value: a device, its name, or the number of a GPU.
        kinds: the types of devices that are right, such as "cuda".

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, (torch.device, str, int)) and not isinstance(value, bool):
        try:
            found = torch.device(value)
        except (RuntimeError, ValueError):  # it is no device's name or number
            found = None
        if found is not None and found.type in kinds:
            return found
    example = {"cuda": "'cuda:0'", "cpu": "'cpu'"}
    raise wrong(name, f"a device such as {' or '.join(example.get(kind, repr(kind)) for kind in kinds)}", value)


def read_dtype(name: str, value: Any, known: Collection[torch.dtype]) -> torch.dtype:
    """One of some types of elements.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, torch.dtype) and value in known:
        return value
    raise wrong(name, f"one of {', '.join(map(str, known))}", value)
