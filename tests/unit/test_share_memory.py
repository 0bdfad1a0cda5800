"""Tensors that share memory are found, whatever storages they belong to."""

from __future__ import annotations

import numpy as np
import torch

from distgemm.runtime.checks import share_memory


def test_views_of_one_storage() -> None:
    whole = torch.zeros(8, 8)
    assert share_memory(whole, whole)
    assert share_memory(whole[:4], whole[3:])
    assert not share_memory(whole[:4], whole[4:])
    assert not share_memory(whole[:0], whole)
    assert not share_memory(whole, torch.zeros(8, 8))


def test_storages_over_the_same_memory() -> None:
    """As tensors of numpy, of DLPack or of a pointer have them: each has a storage, and these begin at any address."""
    memory = np.zeros(64, np.float32)
    whole, behind = torch.from_numpy(memory), torch.from_numpy(memory[16:48])
    assert whole.untyped_storage().data_ptr() != behind.untyped_storage().data_ptr()
    assert share_memory(whole, behind) and share_memory(behind, whole)
    assert share_memory(torch.from_dlpack(memory)[20:], behind)
    assert not share_memory(whole[:16], behind)
    assert not share_memory(behind, whole[48:])


def test_tensors_without_memory() -> None:
    """Tensors on the device meta all have the address 0."""
    x, y = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert not share_memory(x, y)
    assert not share_memory(x, torch.zeros(4))
