// A GEMM with ordinary loads and mma.sync (IEEE float32: FMA), for operands of any alignment, and for GPUs without wgmma.
// What it computes is said in gemm.cu. The macros below select it.
//
// A thread block computes a tile of 128 x 128. Its 256 threads load 64 bytes of k of each row of A and B into registers
// while they multiply what they have put into shared memory before, K-major in both operands.

#include <cstdint>
#include <type_traits>

#include "facts.cuh"
#include "terms.cuh"

#ifndef DG_ELEMENT
#error "DG_ELEMENT, DG_ELEMENT_B, DG_D, DG_SOURCE, DG_AUX, DG_BIAS, DG_A_ROW, DG_B_ROW, DG_VECTOR_A, DG_VECTOR_B, \
DG_MMA_K, DG_PTX_A and DG_PTX_B are needed"
#endif

namespace distgemm {

constexpr bool fma = std::is_same_v<Element, float>;
constexpr int kTile = 128, kThreads = 256, kSums = kTile * kTile / kThreads;
constexpr int kRow = 64, kDepth = kRow / sizeof(Element);  // of k: bytes and elements
constexpr int kOperand = kTile * kRow;                     // bytes in shared memory

struct Params {
  int32_t m, n, k;
  Matrix a, b, source, d;
  Terms terms;
};

// Where a byte of a row lies in shared memory: the 16-byte pieces of 8 rows have banks of their own.
CUTLASS_DEVICE int place(int row, int byte) { return row * kRow + (byte ^ (row / 2 % 4 * 16)); }

// Loads this thread's elements of an operand: kVector at once, if those along k are contiguous. Neighbouring threads
// load neighbours in memory.
template <class T, bool kAlongK, int kVector>
class Loader {
  static_assert(kAlongK || kVector == 1);
  using Vector = std::conditional_t<
      kVector * sizeof(T) == 16, uint4,
      std::conditional_t<
          kVector * sizeof(T) == 8, uint2,
          std::conditional_t<
              kVector * sizeof(T) == 4, uint32_t, std::conditional_t<kVector * sizeof(T) == 2, uint16_t, uint8_t>>>>;
  static constexpr int kAcross = kDepth / kVector;  // loads of a row
  static constexpr int kLoads = kTile * kAcross / kThreads;
  // From one load to the next one of this thread.
  static constexpr int kRows = kAlongK ? kThreads / kAcross : 0, kColumns = kAlongK ? 0 : kThreads / kTile;

 public:
  CUTLASS_DEVICE Loader(Matrix const& matrix, int first_row, int rows, int columns, int l, int thread)
      : row_(kAlongK ? thread / kAcross : thread % kTile),
        column_(kAlongK ? thread % kAcross * kVector : thread / kTile),
        rows_(rows - first_row),
        columns_(columns),
        stride_(matrix.stride),
        data_(static_cast<T const*>(matrix.data) + l * matrix.batch_stride) {
    data_ += (int64_t(first_row) + row_) * (kAlongK ? stride_ : 1);
  }

  // Elements outside of the operand are 0.
  CUTLASS_DEVICE void load(int first_column) {
    int const left = columns_ - first_column;
    T const* from = data_ + (int64_t(first_column) + column_) * (kAlongK ? 1 : stride_);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      bool const inside = row_ + i * kRows < rows_ && column_ + i * kColumns < left;
      values_[i] = inside ? *reinterpret_cast<Vector const*>(from) : Vector{};
      from += (kAlongK ? kRows : kColumns) * stride_;
    }
  }

  CUTLASS_DEVICE void store(char* shared) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      char* const to = shared + place(row_ + i * kRows, (column_ + i * kColumns) * int(sizeof(T)));
      *reinterpret_cast<Vector*>(to) = values_[i];
    }
  }

 private:
  int row_, column_, rows_, columns_;
  int64_t stride_;
  T const* data_;
  Vector values_[kLoads];
};

#define DG_TEXT_(x) #x
#define DG_TEXT(x) DG_TEXT_(x)

CUTLASS_DEVICE void load_matrices(uint32_t (&to)[4], char const* from) {
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(uint32_t(__cvta_generic_to_shared(from)))
               : "memory");
}

// 8 warps multiply: each has 32 rows and 64 columns of the tile, in pieces of 16 x 8.
struct TensorCores {
  static constexpr int kDown = 2, kAcross = 8;
  int row, column, lane;

  CUTLASS_DEVICE explicit TensorCores(int thread)
      : row(thread / 32 % 4 * 32), column(thread / 128 * 64), lane(thread % 32) {}

  CUTLASS_DEVICE int row_of(int i) const { return row + i / (kAcross * 4) * 16 + lane / 4 + i % 4 / 2 * 8; }
  CUTLASS_DEVICE int column_of(int i) const { return column + i / 4 % kAcross * 8 + lane % 4 * 2 + i % 2; }

  CUTLASS_DEVICE void multiply(float (&sums)[kSums], char const* shared_a, char const* shared_b) const {
    CUTLASS_PRAGMA_UNROLL
    for (int byte = 0; byte < kRow; byte += 32) {
      uint32_t a[kDown][4], b[kAcross / 2][4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kDown; ++i) {
        load_matrices(a[i], shared_a + place(row + i * 16 + lane % 16, byte + lane / 16 * 16));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kAcross / 2; ++j) {
        load_matrices(b[j], shared_b + place(column + j * 16 + lane / 16 * 8 + lane % 8, byte + lane / 8 % 2 * 16));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kDown * kAcross; ++i) {
        auto const& left = a[i / kAcross];
        auto const* const right = b[i % kAcross / 2] + i % 2 * 2;
        float* const d = sums + i * 4;
        asm volatile("mma.sync.aligned.m16n8k" DG_TEXT(DG_MMA_K) ".row.col.f32." DG_TEXT(DG_PTX_A) "." DG_TEXT(DG_PTX_B)
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
      }
    }
  }
};

// Each thread has 8 x 8 elements, 16 rows and columns apart.
struct Fma {
  int row, column;

  CUTLASS_DEVICE explicit Fma(int thread) : row(thread / 16), column(thread % 16) {}

  CUTLASS_DEVICE int row_of(int i) const { return row + i / 8 * 16; }
  CUTLASS_DEVICE int column_of(int i) const { return column + i % 8 * 16; }

  CUTLASS_DEVICE void multiply(float (&sums)[kSums], char const* shared_a, char const* shared_b) const {
    CUTLASS_PRAGMA_UNROLL
    for (int byte = 0; byte < kRow; byte += 16) {
      float4 a[8];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) a[i] = *reinterpret_cast<float4 const*>(shared_a + place(row + i * 16, byte));
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 8; ++j) {
        float4 const b = *reinterpret_cast<float4 const*>(shared_b + place(column + j * 16, byte));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) {
          float& sum = sums[i * 8 + j];
          sum = fmaf(a[i].x, b.x, sum);
          sum = fmaf(a[i].y, b.y, sum);
          sum = fmaf(a[i].z, b.z, sum);
          sum = fmaf(a[i].w, b.w, sum);
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads) distgemm_plain(__grid_constant__ Params const params) {
  __shared__ alignas(128) char shared[2][2][kOperand];
  int const thread = threadIdx.x, first_row = blockIdx.x * kTile, first_column = blockIdx.y * kTile, l = blockIdx.z;
  Loader<Element, DG_A_ROW, DG_VECTOR_A> a(params.a, first_row, params.m, params.k, l, thread);
  Loader<ElementB, DG_B_ROW, DG_VECTOR_B> b(params.b, first_column, params.n, params.k, l, thread);
  std::conditional_t<fma, Fma, TensorCores> const mine(thread);
  float sums[kSums] = {};
  a.load(0);
  b.load(0);
  for (int left = params.k, stage = 0; left > 0; left -= kDepth, stage ^= 1) {
    a.store(shared[stage][0]);
    b.store(shared[stage][1]);
    __syncthreads();  // also: all have multiplied what the other stage had
    if (left > kDepth) {
      a.load(params.k - left + kDepth);
      b.load(params.k - left + kDepth);
    }
    mine.multiply(sums, shared[stage][0], shared[stage][1]);
  }
  float const factor = params.terms.factor();
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSums; ++i) {
    int const row = mine.row_of(i), column = mine.column_of(i);
    if (row >= params.m - first_row || column >= params.n - first_column) continue;
    store_element(
        params.terms, params.source, params.d, l, int64_t(first_row) + row, int64_t(first_column) + column,
        factor * sums[i]);
  }
}

DG_FACTS{
    DG_KERNEL(kThreads, 0),
    DG_FIELD(m),
    DG_FIELD(n),
    DG_FIELD(k),
    DG_FIELD(a),
    DG_FIELD(b),
    DG_FIELD(source),
    DG_FIELD(d),
    DG_FIELD(terms),
};

}  // namespace distgemm
