// The main loop of kernels for fp8 with TMA, for gemm.cu. Tensor cores add products of fp8 with fewer bits than float32
// has. So they sum up 128 columns of A and B, which is the depth of a tile, and then the consumer warps add this product
// to sums in float32. Operands are loaded as by CUTLASS's main loop for fp8.
//
// A tile is computed piece by piece: 64 rows of a warp group's part of the tile, and all of its columns or half of them.
// While tensor cores compute one piece, a warp adds the one before. So a thread has registers for its sums and for the
// products of two pieces. For the largest tiles there are only registers for one, and while a warp group adds it, only
// the other group's is computed.

#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace distgemm {

using namespace cute;

// Factors of products: none.
struct NoScales {
  CUTLASS_DEVICE void load() {}
  CUTLASS_DEVICE void take() {}
  // Adds a product to the sums in rows and columns of piece (m, n).
  template <class Sums, class Product>
  CUTLASS_DEVICE void add(Sums& sums, Product const& product, int m, int n) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(product); ++i) sums(i, m, n) += product(i);
  }
};

template <class Base>
class PromotingMainloop : public Base {
  static constexpr int kGroups = DG_SCHEDULE == DG_COOPERATIVE ? 2 : 1;  // warp groups that share a tile
  static constexpr int kSums = DG_TILE_M * DG_TILE_N / (kGroups * 128);
  // The most registers for sums and two products; the compiler spills more. Scales of columns take the most beside them.
  static constexpr int kMostOfTwo = DG_SCALE_ROWS_B == 1 ? 144 : 192;
  // Whether there is room for two products of all columns, or of half of them. Halves read A from shared memory twice.
  // With scales of blocks, they took longer than one whole product at a time.
  static constexpr bool fits(int parts) {
    return DG_TILE_M == kGroups * 64 && DG_TILE_N % (8 * parts) == 0 && kSums + DG_TILE_N / parts <= kMostOfTwo &&
           (parts == 1 || !blockwise);
  }
  static constexpr bool kTwo = fits(1) || fits(2);
  static constexpr bool kHalves = kTwo ? !fits(1) : kSums + DG_TILE_N / 2 > 192 && DG_TILE_N % 16 == 0;
  static constexpr int kWidth = kHalves ? DG_TILE_N / 2 : DG_TILE_N;

 public:
  // CUTLASS's kernels and the epilogue take the layout of sums from it.
  using TiledMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<
          Element, ElementB, Accumulator, Shape<_64, Int<kWidth>, Int<DG_TILE_K>>, GMMA::Major::K, GMMA::Major::K>(),
      Layout<Shape<Int<kGroups>, _1, _1>>{}));

  template <class Pipeline, class State, class Sums>
  CUTLASS_DEVICE void mma(
      Pipeline pipeline, State state, Sums& sums, int count, int thread, typename Base::TensorStorage& storage,
      typename Base::Params const&) {
    NoScales scales;
    pipeline.consumer_wait(state);
    multiply(pipeline, state, sums, count, thread, storage, scales);
  }

  // mma() has released all stages.
  template <class Pipeline, class State>
  CUTLASS_DEVICE void mma_tail(Pipeline, State, int) {}

 protected:
  // Computes the sums of a tile whose first stage is there.
  template <class Pipeline, class State, class Sums, class Scales>
  CUTLASS_DEVICE void multiply(
      Pipeline& pipeline, State& state, Sums& sums, int count, int thread, typename Base::TensorStorage& storage,
      Scales& scales) {
    Tensor const shared_a = make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{});
    Tensor const shared_b = make_tensor(make_smem_ptr(storage.smem_B.data()), typename Base::SmemLayoutB{});
    TiledMma mma;
    auto const slice = mma.get_slice(__shfl_sync(0xffffffff, thread / 128, 0) * 128);
    Tensor const a = slice.make_fragment_A(slice.partition_A(shared_a));  // (MMA, MMA_M, MMA_K, stages)
    Tensor const b = slice.make_fragment_B(slice.partition_B(shared_b));  // (MMA, MMA_N, MMA_K, stages)
    auto product = make_fragment_like(sums(_, 0, 0));                     // ((2, 2, kWidth / 8))
    constexpr int kSteps = size<2>(a), kDown = size<1>(Sums{}), kPieces = kDown * size<2>(Sums{});
    auto const start = [&](auto& into, int m, int n) CUTLASS_LAMBDA_FUNC_INLINE {
      warpgroup_fence_operand(into);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        mma.accumulate_ = i ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
        cute::gemm(mma, a(_, m, i, state.index()), b(_, n, i, state.index()), into);
      }
      warpgroup_commit_batch();
    };
    auto read = state;
    auto const release = [&] {
      pipeline.consumer_release(read);
      ++read;
    };
    clear(sums);
    scales.load();
    if constexpr (kTwo) {
      auto other = make_fragment_like(product);
      auto const add = [&](auto& from, int piece) CUTLASS_LAMBDA_FUNC_INLINE {
        warpgroup_fence_operand(from);
        if (piece == kPieces - 1) release();
        if (piece == 0) {
          scales.take();
          if (count) scales.load();
        }
        scales.add(sums, from, piece % kDown, piece / kDown);
      };
      // Begins a piece, and adds the one before.
      auto const follow = [&](auto& earlier, auto& later, int piece) CUTLASS_LAMBDA_FUNC_INLINE {
        start(later, piece % kDown, piece / kDown);
        warpgroup_wait<1>();
        add(earlier, piece ? piece - 1 : kPieces - 1);
      };
      // Computes the pieces of a stage behind the first one, and waits for the next stage. Without one, adds the last
      // piece and returns true.
      auto const ends = [&](auto& first, auto& second) CUTLASS_LAMBDA_FUNC_INLINE {
        --count;
        CUTLASS_PRAGMA_UNROLL
        for (int piece = 1; piece < kPieces; ++piece) {
          follow(piece % 2 ? first : second, piece % 2 ? second : first, piece);
        }
        ++state;
        if (count) {
          pipeline.consumer_wait(state);
          return false;
        }
        warpgroup_wait<0>();
        add(kPieces % 2 ? first : second, kPieces - 1);
        return true;
      };
      // Otherwise ptxas would initialise them while wgmmas run.
      warpgroup_fence_operand(sums);
      warpgroup_fence_operand(other);
      start(product, 0, 0);
      constexpr bool kOdd = kPieces % 2;
      while (true) {
        if (ends(product, other)) break;
        follow(kOdd ? product : other, kOdd ? other : product, 0);
        if (ends(kOdd ? other : product, kOdd ? product : other)) break;
        follow(other, product, 0);
      }
    } else {
      while (true) {
        CUTLASS_PRAGMA_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) {
          int const m = piece % kDown, n = piece / kDown;
          // It is there. But without the branch, ptxas would begin this piece before it adds the last one.
          if (piece) pipeline.consumer_wait(state);
          start(product, m, n);
          if (piece == 0) {
            scales.take();
            if (count > 1) scales.load();
          }
          warpgroup_wait<0>();
          warpgroup_fence_operand(product);
          if (piece == kPieces - 1) release();
          scales.add(sums, product, m, n);
        }
        ++state;
        if (--count == 0) break;
        pipeline.consumer_wait(state);
      }
    }
  }
};

}  // namespace distgemm
