// The main loop of kernels whose operands have scales of blocks, for gemm.cu. A block has 128 columns, and 1 or 128
// rows:
//
//   D = sum over blocks j of columns: scale_a[row, j] * scale_b[column, j] * A[row, block j] B[column, block j]^T
//
// A tile is as deep as a block: before its product is added to the sums, it is multiplied by the scales. The consumer
// warps read the scales from global memory one tile ahead. So scales may lie in any order and need no alignment, and
// the stages have no room for them.
//
// CUTLASS does not tell the consumer warps which tile they compute. The loading warp writes the tile's coordinates to
// shared memory before it loads the tile's first stage, and the barrier of that stage publishes them.

#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "promotion.cuh"

namespace distgemm {

using namespace cute;

constexpr int kBlock = 128;  // columns that share a scale, and the most rows

// The scales of an operand. data[row / block_rows * stride + column / 128 * step] is that of an element.
struct BlockScales {
  float const* data;
  int64_t stride, step;  // floats
  int32_t rows, block_rows;

  // The scale of the first column. Rows outside of the operand get that of its last row; their results are not stored.
  CUTLASS_DEVICE float const* of_row(int32_t row) const {
    return data + cute::min(row, rows - 1) / block_rows * stride;
  }
};

// The scales that a thread multiplies with, for one block of columns at a time. The thread has in each 64 rows of its
// tile two rows, 8 rows apart, and in each 8 columns two neighbours, as wgmma leaves them.
template <int kDown>
class ThreadScales {
  static constexpr int kTileN = DG_TILE_N;
  static constexpr bool kOfColumns = DG_SCALE_ROWS_B == 1;             // each column has scales of its own
  static constexpr int kOffset = kBlock - cute::gcd(kBlock, kTileN);   // of a tile in a block of B's rows, at most
  static constexpr int kBlocks = (kOffset + kTileN - 8) / kBlock + 1;  // of B's rows, in which a tile may lie
  static constexpr int kLoads = kOfColumns ? cute::ceil_div(kTileN, 32) : kBlocks;
  static_assert(DG_SCALE_ROWS_B == 1 || DG_SCALE_ROWS_B == kBlock);

 public:
  // `rows` are those of the thread, as kDown pairs, and `column` is the first one of the tile.
  CUTLASS_DEVICE ThreadScales(
      BlockScales const& a, BlockScales const& b, int32_t const (&rows)[kDown][2], int32_t column)
      : step_a_(a.step), step_b_(b.step), offset_(kOffset ? column % kBlock : 0) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kDown * 2; ++i) a_[i / 2][i % 2] = a.of_row(rows[i / 2][i % 2]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      b_[i] = b.of_row(kOfColumns ? column + lane_() + 32 * i : column / kBlock * kBlock + kBlock * i);
    }
  }

  // Loads the scales of the next block of columns. The kernel before this one may have written them while this one set
  // itself up, so they are not read as constants.
  CUTLASS_DEVICE void load() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kDown * 2; ++i) {
      next_a_[i / 2][i % 2] = *a_[i / 2][i % 2];
      a_[i / 2][i % 2] += step_a_;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      next_b_[i] = *b_[i];
      b_[i] += step_b_;
    }
  }

  // Takes the scales that were loaded.
  CUTLASS_DEVICE void take() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kDown * 2; ++i) now_a_[i / 2][i % 2] = next_a_[i / 2][i % 2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLoads; ++i) now_b_[i] = next_b_[i];
  }

  // Multiplies a product by its scales, and adds it to the sums in rows and columns of piece (m, n). All threads of a
  // warp call it.
  template <class Sums, class Product>
  CUTLASS_DEVICE void add(Sums& sums, Product const& product, int m, int n) const {
    constexpr int kWidth = size(Product{}) * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(product); i += 4) {
      auto const of_columns = of_columns_(n * kWidth + i * 2);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) sums(i + j, m, n) += product(i + j) * (now_a_[m][j / 2] * of_columns.of[j % 2]);
    }
  }

 private:
  CUTLASS_DEVICE static int lane_() { return threadIdx.x % 32; }

  // Scales of the thread's two columns of the 8 that begin at `column` of the tile.
  struct Pair {
    float of[2];
  };
  CUTLASS_DEVICE Pair of_columns_(int column) const {
    if constexpr (kOfColumns) {  // each lane has loaded the scales of every 32nd column
      int const first = column % 32 + lane_() % 4 * 2;
      float const loaded = now_b_[column / 32];
      return {__shfl_sync(0xffffffff, loaded, first), __shfl_sync(0xffffffff, loaded, first + 1)};
    } else {
      // So many columns are in one block. The compiler selects and multiplies once for all of them.
      constexpr int kAlike = cute::gcd(kBlock, kTileN);
      float found = now_b_[0];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < kBlocks; ++i) {
        if (offset_ + column / kAlike * kAlike >= kBlock * i) found = now_b_[i];
      }
      return {found, found};
    }
  }

  float const *a_[kDown][2], *b_[kLoads];
  int64_t step_a_, step_b_;
  int32_t offset_;
  float next_a_[kDown][2], next_b_[kLoads], now_a_[kDown][2], now_b_[kLoads];
};

template <class Base>
class BlockwiseMainloop : public PromotingMainloop<Base> {
  static_assert(DG_TILE_K == kBlock, "a tile is as deep as a block");

 public:
  struct Params : Base::Params {
    BlockScales scales_a, scales_b;
  };
  using Arguments = Params;
  struct TensorStorage : Base::TensorStorage {
    // Coordinates of the tiles whose first stage is in the pipeline. A stage has two: that of its last use may not have
    // been read when the loading warp writes the next one.
    int2 tiles[2][Base::DispatchPolicy::Stages];
  };

  template <class Pipeline, class State, class Inputs, class Coord, class Steps>
  CUTLASS_DEVICE void load(
      Params const& params, Pipeline pipeline, State state, Inputs const& inputs, Coord const& coord, Steps steps,
      int count, int lane, uint32_t block, TensorStorage& storage) {
    // The phase of whoever loads is the other one.
    if (elect_one_sync()) storage.tiles[state.phase() ^ 1][state.index()] = {get<0>(coord), get<1>(coord)};
    __syncwarp();
    Base::load(params, pipeline, state, inputs, coord, steps, count, lane, block, storage);
  }

  template <class Pipeline, class State, class Sums>
  CUTLASS_DEVICE void mma(
      Pipeline pipeline, State state, Sums& sums, int count, int thread, TensorStorage& storage, Params const& params) {
    pipeline.consumer_wait(state);
    int2 const tile = read_(storage.tiles[state.phase()][state.index()]);
    constexpr int kDown = size<1>(Sums{});
    typename PromotingMainloop<Base>::TiledMma mma;
    Tensor const places =
        mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<DG_TILE_M>, Int<DG_TILE_N>>{}));
    int32_t rows[kDown][2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kDown * 2; ++i) {
      rows[i / 2][i % 2] = tile.x * DG_TILE_M + get<0>(places(make_coord(0, i % 2, 0), i / 2, 0));
    }
    ThreadScales<kDown> scales(params.scales_a, params.scales_b, rows, tile.y * DG_TILE_N);
    this->multiply(pipeline, state, sums, count, thread, storage, scales);
  }

 private:
  // CUTLASS's wait does not tell the compiler that memory has changed, so that it could move an ordinary load up.
  CUTLASS_DEVICE static int2 read_(int2 const& shared) {
    int2 found;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(found.x), "=r"(found.y)
                 : "r"(cast_smem_ptr_to_uint(&shared))
                 : "memory");
    return found;
  }
};

}  // namespace distgemm
