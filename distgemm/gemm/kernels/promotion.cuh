// The main loop of kernels for fp8 with TMA, for gemm.cu. Tensor cores add products of fp8 with fewer bits than float32
// has. So they sum up 128 columns of A and B, which is the depth of a tile, and then the consumer warps add this product
// to sums in float32. Operands are loaded as by CUTLASS's main loop for fp8.
//
// A thread has registers for its sums, and for the product of one wgmma: 64 rows of a warp group's part of the tile, and
// kWidth columns. So it computes a tile piece by piece.
//
// While a warp group waits for its product and adds it, the tensor cores need other work. In cooperative kernels the two
// warp groups take turns: one issues the wgmmas of a piece when half of the other's are done, and adds its product while
// those of the other one run. If both issued at the same time, both would add at the same time.

#pragma once

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
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
  static constexpr int kMostSums = 192;  // with those of a piece. The compiler spills more
  static constexpr bool kHalves = kSums + DG_TILE_N / 2 > kMostSums && DG_TILE_N % 16 == 0;
  static constexpr int kWidth = kHalves ? DG_TILE_N / 2 : DG_TILE_N;
  static constexpr int kTurnThreads = 256;

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
    int const group = __shfl_sync(0xffffffff, thread / 128, 0);
    TiledMma mma;
    auto const slice = mma.get_slice(group * 128);
    Tensor const a = slice.make_fragment_A(slice.partition_A(shared_a));  // (MMA, MMA_M, MMA_K, stages)
    Tensor const b = slice.make_fragment_B(slice.partition_B(shared_b));  // (MMA, MMA_N, MMA_K, stages)
    auto product = make_fragment_like(sums(_, 0, 0));                     // ((2, 2, kWidth / 8))
    constexpr int kSteps = size<2>(a), kDown = size<1>(Sums{}), kPieces = kDown * size<2>(Sums{});
    auto const issue = [&](int m, int n, int first, int end) CUTLASS_LAMBDA_FUNC_INLINE {
      CUTLASS_PRAGMA_UNROLL
      for (int i = first; i < end; ++i) {
        mma.accumulate_ = i ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
        cute::gemm(mma, a(_, m, i, state.index()), b(_, n, i, state.index()), product);
      }
      warpgroup_commit_batch();
    };
    clear(sums);
    begin_turns_(group);
    scales.load();
    while (true) {
      scales.take();
      if (count > 1) scales.load();
      CUTLASS_PRAGMA_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        int const m = piece % kDown, n = piece / kDown;
        // It is there. But without the branch, ptxas would let a group wait for its turn before it adds the last product.
        if (piece) pipeline.consumer_wait(state);
        wait_for_turn_(group);
        warpgroup_fence_operand(product);
        warpgroup_arrive();
        issue(m, n, 0, kSteps / 2);
        issue(m, n, kSteps / 2, kSteps);
        warpgroup_wait<1>();
        end_turn_(group);
        warpgroup_wait<0>();
        warpgroup_fence_operand(product);
        if (piece == kPieces - 1) {
          pipeline.consumer_release(state);
          ++state;
        }
        scales.add(sums, product, m, n);
      }
      if (--count == 0) break;
      pipeline.consumer_wait(state);
    }
  }

 private:
  // The first group has the first turn. The last turn of all ends for nobody.
  CUTLASS_DEVICE void begin_turns_(int group) {
    if (kGroups == 2 && group == 1 && !begun_) cutlass::arch::NamedBarrier::arrive(kTurnThreads, 0);
    begun_ = true;
  }
  CUTLASS_DEVICE static void wait_for_turn_(int group) {
    if (kGroups == 2) cutlass::arch::NamedBarrier::sync(kTurnThreads, group);
  }
  CUTLASS_DEVICE static void end_turn_(int group) {
    if (kGroups == 2) cutlass::arch::NamedBarrier::arrive(kTurnThreads, 1 - group);
  }

  bool begun_ = false;
};

}  // namespace distgemm
