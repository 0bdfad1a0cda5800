"""The fused kernel: all GEMMs of a rank as one persistent kernel.

Its thread blocks go from one GEMM to the next without a pause. So several GEMMs that each leave a part of the GPU idle
cost no more than one large GEMM.

``gemms``: what such a kernel computes, waits for, sets and sends. ``arguments``: the structs that describe it to the
kernel. ``kernel``: source, configuration and launch. The CUDA code is ``distgemm/gemm/kernels/fused.cuh`` and
``fused_reduce.cuh``.
"""
