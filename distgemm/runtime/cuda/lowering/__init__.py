"""Lowering: passes that turn a rank's ops into actions on streams. No tensor and no address is known yet."""

from distgemm.runtime.cuda.lowering.actions import COMM, GEMM_STREAM, Action, check_waits, on_one_stream, waits_of
from distgemm.runtime.cuda.lowering.lower import check_across, copies_first, lower, most_flags

__all__ = [
    "GEMM_STREAM",
    "COMM",
    "Action",
    "check_across",
    "check_waits",
    "copies_first",
    "lower",
    "most_flags",
    "on_one_stream",
    "waits_of",
]
