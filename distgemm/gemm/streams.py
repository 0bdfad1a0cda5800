"""CUDA streams that torch does not share."""

from __future__ import annotations

import torch
from cuda.bindings import runtime

__all__ = ["new_stream", "stream_of"]


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream, which is never destroyed. Torch's streams come from a pool, so other code may capture on them."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context current
        error, stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    if error:
        raise RuntimeError(f"CUDA could not create a stream: {error.name}")
    external: torch.cuda.Stream = torch.cuda.ExternalStream(int(stream), device)  # type: ignore[no-untyped-call]
    return external


def stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The stream with a handle. 0 is the default stream; torch.cuda.ExternalStream(0) would be one of torch's pool."""
    if handle == 0:
        return torch.cuda.default_stream(device)
    external: torch.cuda.Stream = torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]
    return external
