// How the loading warp of a kernel loads tiles of A and B, for gemm.cu. CUTLASS's main loop does the same with layouts
// that CuTe derives, which takes a third of a kernel's compile time.

#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace distgemm {

using namespace cute;

// A tile of an operand in shared memory: blocks that are as wide as the swizzle, side by side along the contiguous mode.
// Each of kSharing thread blocks loads a part of each block, for all of them.
template <class Atom, bool kRowMajor, int kRows, int kSharing>
struct Operand {
  static constexpr int kLength = kRowMajor ? DG_TILE_K : kRows, kOther = kRowMajor ? kRows : DG_TILE_K;
  static constexpr int kWidth = size<kRowMajor ? 1 : 0>(Atom{}), kPart = kOther / kSharing;
  static_assert(kLength % kWidth == 0 && kOther % kSharing == 0);

  template <class T>
  CUTLASS_DEVICE static void load(
      TmaDescriptor const* descriptor, uint64_t* barrier, uint16_t blocks, T* shared, int part, int row, int k, int l) {
    constexpr auto hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    int const along = kRowMajor ? k : row, across = (kRowMajor ? row : k) + part * kPart;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLength; i += kWidth) {
      T* const to = shared + i * kOther + part * kPart * kWidth;
      if constexpr (kSharing == 1) {
        SM90_TMA_LOAD::copy(descriptor, barrier, hint, to, along + i, across, l);
      } else {
        SM90_TMA_LOAD_MULTICAST::copy(descriptor, barrier, blocks, hint, to, along + i, across, l);
      }
    }
  }
};

template <class Base>
class LoadingMainloop : public Base {
 public:
  // Thread blocks of a cluster along n share their rows of A, those along m their rows of B.
  using LoadA = Operand<typename Base::SmemLayoutAtomA, DG_A_ROW, DG_TILE_M, DG_CLUSTER_N>;
  using LoadB = Operand<typename Base::SmemLayoutAtomB, DG_B_ROW, DG_TILE_N, DG_CLUSTER_M>;

  // CUTLASS's kernels take numbers of tiles from the shapes of these tensors, and nothing else.
  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, typename Base::Params const&) const {
    int const steps = ceil_div(get<2>(problem), DG_TILE_K), batches = get<3>(problem);
    auto const tiles = [&](int count) {
      return make_tensor(static_cast<Element const*>(nullptr), make_shape(_1{}, _1{}, count, steps, batches));
    };
    return make_tuple(tiles(ceil_div(get<0>(problem), DG_TILE_M)), tiles(ceil_div(get<1>(problem), DG_TILE_N)));
  }

  template <class Pipeline, class State, class Inputs, class Coord, class Steps>
  CUTLASS_DEVICE void load(
      typename Base::Params const& params, Pipeline pipeline, State state, Inputs const&, Coord const& coord,
      Steps step, int count, int, uint32_t block, typename Base::TensorStorage& storage) {
    if (!elect_one_sync()) return;
    // The number of a thread block in its cluster, along m and n.
    uint32_t const x = block % DG_CLUSTER_M, y = block / DG_CLUSTER_M;
    constexpr uint16_t along_m = (1 << DG_CLUSTER_M) - 1;
    uint16_t along_n = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < DG_CLUSTER_N; ++i) along_n |= 1 << i * DG_CLUSTER_M;
    int const row_a = get<0>(coord) * DG_TILE_M, row_b = get<1>(coord) * DG_TILE_N, l = get<3>(coord);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = *step * DG_TILE_K; count > 0; --count, k += DG_TILE_K, ++state) {
      pipeline.producer_acquire(state);
      uint64_t* const barrier = pipeline.producer_get_barrier(state);
      LoadA::load(
          params.tma_load_a.get_tma_descriptor(), barrier, along_n << x,
          storage.smem_A.data() + state.index() * (DG_TILE_M * DG_TILE_K), y, row_a, k, l);
      LoadB::load(
          params.tma_load_b.get_tma_descriptor(), barrier, along_m << y * DG_CLUSTER_M,
          storage.smem_B.data() + state.index() * (DG_TILE_N * DG_TILE_K), x, row_b, k, l);
    }
  }
};

}  // namespace distgemm
