// A kernel that adds matrices, as a cubin:
//
//   D = sources[0] + sources[1] + ... + beta * C + bias
//
// It adds in this order, and rounds once. nvcc gets the macros DG_SOURCE and DG_D (element types), DG_SUM (float, or
// double where one of them is) and DG_VECTOR (elements that a thread loads at once).

#include <cstdint>

#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

#include "facts.cuh"

namespace distgemm {

constexpr int kSources = 64;
constexpr int kVector = DG_VECTOR;
constexpr int kThreads = 256;

using Source = DG_SOURCE;
using Result = DG_D;
using Sum = DG_SUM;
template <class T>
using Vector = cutlass::AlignedArray<T, kVector>;

struct Matrix {
  void const* data;
  int64_t stride;        // elements between rows
  int64_t batch_stride;  // elements between batches
};

struct Arguments {
  int32_t m, n, l, count;
  Matrix sources[kSources];
  Matrix c, d;
  void const* bias;  // n elements of Result
  double beta;
};

template <class T>
__device__ Vector<T> load(Matrix const& matrix, int64_t batch, int64_t row, int64_t column) {
  T const* data = static_cast<T const*>(matrix.data) + batch * matrix.batch_stride + row * matrix.stride + column;
  return *reinterpret_cast<Vector<T> const*>(data);
}

extern "C" __global__ void __launch_bounds__(kThreads) distgemm_sum(__grid_constant__ Arguments const args) {
  int64_t const columns = args.n / kVector;
  int64_t const total = columns * args.m * args.l;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < total; i += gridDim.x * int64_t(kThreads)) {
    int64_t const column = i % columns * kVector, row = i / columns % args.m, batch = i / columns / args.m;
    Sum value[kVector] = {};
    // Eight loads are in flight before the first value is added.
#pragma unroll 1
    for (int first = 0; first < args.count; first += 8) {
      Vector<Source> loaded[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (first + j < args.count) loaded[j] = load<Source>(args.sources[first + j], batch, row, column);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (first + j < args.count) {
#pragma unroll
          for (int v = 0; v < kVector; ++v) value[v] += Sum(Source(loaded[j][v]));
        }
      }
    }
    if (args.c.data) {
      Vector<Result> c = load<Result>(args.c, batch, row, column);
#pragma unroll
      for (int v = 0; v < kVector; ++v) value[v] += Sum(args.beta) * Sum(Result(c[v]));
    }
    if (args.bias) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) value[v] += Sum(static_cast<Result const*>(args.bias)[column + v]);
    }
    Vector<Result> out;
#pragma unroll
    for (int v = 0; v < kVector; ++v) out[v] = cutlass::NumericConverter<Result, Sum>::convert(value[v]);
    Result* data = static_cast<Result*>(const_cast<void*>(args.d.data));
    *reinterpret_cast<Vector<Result>*>(data + batch * args.d.batch_stride + row * args.d.stride + column) = out;
  }
}

using Params = Arguments;

DG_FACTS{DG_KERNEL(kThreads, 0)};

}  // namespace distgemm
