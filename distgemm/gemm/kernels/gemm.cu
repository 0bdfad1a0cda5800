// One GEMM kernel from CUTLASS 3.x collectives, as a cubin. The macros below select it; CutlassProvider passes them to
// nvcc. It computes, with a row-major D and sums in float32:
//
//   D = alpha * scale_a * scale_b * A B^T + bias + source_scale * source + aux_scale * aux
//
// A is (m, k), B is (n, k), all others (m, n); bias is a row of n. A scale is one number, or one for each row of A or
// B.

#define DG_COOPERATIVE 0  // TMA and wgmma, two warp groups share a tile
#define DG_PINGPONG 1     // TMA and wgmma, two warp groups alternate: one multiplies while the other stores
#define DG_TMA 0          // results are stored through shared memory and TMA
#define DG_DIRECT 1       // results are stored from registers, element by element: any alignment

// Blocks may begin while the kernel before them on the stream ends: CUTLASS's loading warps then wait until it has ended
// (griddepcontrol.wait), and no other warp touches global memory before a load has come. For fp8, others read scales.
#define DG_BEGINS_EARLY (DG_MMA_K != 32)
#if DG_BEGINS_EARLY
#define CUTLASS_ENABLE_GDC_FOR_SM90 1
#endif

#include <cstdint>
#include <type_traits>

#include "cutlass/cutlass.h"

#include "cute/tensor.hpp"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/detail.hpp"
// Narrower headers than CUTLASS's own, which take longer to compile: they bring all kernels of all architectures.
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"
#if !DG_A_ROW || !DG_B_ROW
// For operands of 4 bytes that are not contiguous along k.
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_rs_warpspecialized.hpp"
#endif
#if DG_MMA_K == 32
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized_fp8.hpp"
#else
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#endif
#include "cutlass/gemm/kernel/gemm_universal_decl.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#if DG_SCHEDULE == DG_PINGPONG
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp"
#else
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp"
#endif

#ifndef DG_ELEMENT
#error "DG_ELEMENT, DG_ELEMENT_B, DG_D, DG_SOURCE, DG_AUX, DG_BIAS, DG_A_ROW, DG_B_ROW, DG_TILE_M, DG_TILE_N, \
DG_TILE_K, DG_CLUSTER_M, DG_CLUSTER_N, DG_SCHEDULE, DG_EPILOGUE, DG_SCALE_ROWS_B, DG_MMA_K, DG_PTX_A and DG_PTX_B \
are needed"
#endif

#include "terms.cuh"

#if DG_BEGINS_EARLY && defined(__CUDA_ARCH__)
static_assert(cutlass::arch::IsGdcGloballyEnabled, "the kernel does not wait for the one before it");
#endif

namespace distgemm {

using namespace cute;

using Accumulator = float;
using Tile = Shape<Int<DG_TILE_M>, Int<DG_TILE_N>, Int<DG_TILE_K>>;
using Cluster = Shape<Int<DG_CLUSTER_M>, Int<DG_CLUSTER_N>, _1>;

constexpr bool has_source = !std::is_void_v<ElementSource>;
constexpr bool direct = DG_EPILOGUE == DG_DIRECT;
constexpr bool promotes = sizeof(Element) == 1;  // products of fp8 are added to sums in float32
constexpr bool blockwise = DG_SCALE_ROWS_B != 0;  // a scale for each block of A and B; rows of a block of B
static_assert(!blockwise || promotes, "scales of blocks have a main loop of their own");

template <bool RowMajor>
using LayoutOf = std::conditional_t<RowMajor, cutlass::layout::RowMajor, cutlass::layout::ColumnMajor>;
using LayoutA = LayoutOf<DG_A_ROW>;
using LayoutB = LayoutOf<!DG_B_ROW>;  // CUTLASS's B is (k, n)
using LayoutD = cutlass::layout::RowMajor;
using StrideA = cutlass::detail::TagToStrideA_t<LayoutA>;
using StrideB = cutlass::detail::TagToStrideB_t<LayoutB>;
using StrideD = cutlass::detail::TagToStrideC_t<LayoutD>;

}  // namespace distgemm

#include "loads.cuh"
#include "wgmma.cuh"
#include "promotion.cuh"
#if DG_SCALE_ROWS_B
#include "blockwise.cuh"
#endif
#include "epilogue.cuh"

namespace distgemm {

// ---------------------------------------------------------------- epilogue from registers

// Each thread stores its own elements, under a predicate.
class DirectEpilogue {
 public:
  struct Params {
    Terms terms;
    Matrix source, d;
  };
  // The names that CUTLASS's kernels expect of an epilogue.
  using EpilogueSchedule = cutlass::gemm::EpilogueDefault;
  using DispatchPolicy = EpilogueSchedule;
  using ElementAccumulator = Accumulator;
  using ElementCompute = Accumulator;
  using ElementScalar = float;
  using ElementOutput = distgemm::ElementD;
  using ElementC = distgemm::ElementD;
  using StrideC = distgemm::StrideD;
  using ElementD = distgemm::ElementD;
  using StrideD = distgemm::StrideD;
  using GmemTiledCopyC = void;
  using GmemTiledCopyD = void;
  struct SharedStorage {};
  using TensorStorage = SharedStorage;
  using Arguments = Params;
  struct ThreadEpilogueOp {
    using ElementOutput = distgemm::ElementD;
    using ElementAccumulator = Accumulator;
    using ElementCompute = Accumulator;
    using ElementD = distgemm::ElementD;
    static constexpr int kCount = 1;
  };
  static constexpr int kOutputAlignment = 1;
  using AlignmentType = typename uint_bit<sizeof_bits<ElementD>::value>::type;

  CUTLASS_HOST_DEVICE DirectEpilogue(Params const& params, SharedStorage const& = SharedStorage()) : params_(params) {}
  CUTLASS_DEVICE bool is_source_needed() { return false; }

  template <class ProblemShape, class BlockShape, class BlockCoord, class Engine, class Layout, class Mma, class Residue>
  CUTLASS_DEVICE void operator()(
      ProblemShape problem, BlockShape block, BlockCoord coord, Tensor<Engine, Layout> const& accumulators, Mma mma,
      Residue, int thread, char*) {
    int const M = get<0>(problem), N = get<1>(problem), l = get<3>(coord);
    Tensor coords = local_tile(
        make_identity_tensor(make_shape(M, N)), take<0, 2>(block), make_coord(get<0>(coord), get<1>(coord)));
    Tensor mine = mma.get_thread_slice(thread).partition_C(coords);
    float const factor = params_.terms.factor();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(accumulators); ++i) {
      auto coord_mn = mine(i);
      if (!elem_less(coord_mn, make_coord(M, N))) continue;
      store_element(
          params_.terms, params_.source, params_.d, l, get<0>(coord_mn), get<1>(coord_mn), factor * accumulators(i));
    }
  }

 private:
  Params params_;
};

using Epilogue = std::conditional_t<
    direct, cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<DirectEpilogue>, TmaEpilogue>;

// ---------------------------------------------------------------- main loop

constexpr int kTileBytes = blockwise ? 512 : 0;  // BlockwiseMainloop's coordinates of tiles
using Schedule = std::conditional_t<
    DG_SCHEDULE == DG_PINGPONG, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
using Collective = LoadingMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, 16 / sizeof(Element), ElementB, LayoutB,
    16 / sizeof(ElementB), Accumulator, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage)) + kTileBytes>,
    Schedule>::CollectiveOp>;
#if DG_SCALE_ROWS_B
using Mainloop = BlockwiseMainloop<Collective>;
#else
using Mainloop = std::conditional_t<promotes, PromotingMainloop<Collective>, Collective>;
#endif

using Kernel = cutlass::gemm::kernel::GemmUniversal<
    Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>;
static_assert(Kernel::SharedStorageSize <= cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);
using Params = typename Kernel::Params;

}  // namespace distgemm

#include "gemm_facts.cuh"
