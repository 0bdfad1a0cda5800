"""Lowering: from a rank's ops to actions on streams. Nothing is bound yet."""

from distgemm.runtime.cuda.lowering.actions import COMM, GEMM_STREAM, Action, Send, on_one_stream, waits_of
from distgemm.runtime.cuda.lowering.lower import lower, most_flags

__all__ = ["GEMM_STREAM", "COMM", "Action", "Send", "lower", "most_flags", "on_one_stream", "waits_of"]
