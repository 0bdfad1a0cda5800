// One GEMM kernel from CUTLASS 3.x collectives, as a cubin. The macros below select it; CutlassProvider passes them to
// nvcc. It computes, with a row-major D and sums in float32:
//
//   D = alpha * scale_a * scale_b * A B^T + bias + source_scale * source + aux_scale * aux
//
// A is (m, k), B is (n, k), all others (m, n); bias is a row of n. A scale is one number, or one for each row of A or
// B.

#include <cstdint>
#include <type_traits>

// Without this macro CUTLASS builds tiles of other widths than these from narrow wgmmas, some at half the rate. It is
// not defined for all kernels, as the instructions of all widths take long to compile.
#if (DG_TILE_N & (DG_TILE_N - 1)) && DG_TILE_N != 96 && DG_TILE_N != 192
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif

#include "cutlass/cutlass.h"

#include "cute/tensor.hpp"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/detail.hpp"
// Narrower headers than CUTLASS's own, which take longer to compile: they bring all kernels of all architectures.
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"
#include "cutlass/gemm/collective/sm70_mma_twostage.hpp"
#if !DG_A_ROW || !DG_B_ROW
// For operands of 4 bytes that are not contiguous along k.
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_rs_warpspecialized.hpp"
#endif
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized_fp8.hpp"
#include "cutlass/gemm/kernel/gemm_universal_decl.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/gemm/kernel/sm70_gemm.hpp"
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp"
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp"

#define DG_COOPERATIVE 0  // TMA and wgmma, two warp groups share a tile
#define DG_PINGPONG 1     // TMA and wgmma, two warp groups alternate: one multiplies while the other stores
#define DG_PLAIN 2        // ordinary loads and mma.sync (float32: FMA): any alignment
#define DG_TMA 0          // results are stored through shared memory and TMA
#define DG_DIRECT 1       // results are stored from registers, element by element: any alignment

#ifndef DG_ELEMENT
#error "DG_ELEMENT, DG_ELEMENT_B, DG_D, DG_SOURCE, DG_AUX, DG_BIAS, DG_A_ROW, DG_B_ROW, DG_TILE_M, DG_TILE_N, \
DG_TILE_K, DG_CLUSTER_M, DG_CLUSTER_N, DG_SCHEDULE, DG_EPILOGUE, DG_VECTOR_A, DG_VECTOR_B and \
DG_SCALE_ROWS_B are needed"
#endif

namespace distgemm {

using namespace cute;

using Element = DG_ELEMENT;     // of A
using ElementB = DG_ELEMENT_B;
using ElementD = DG_D;
using ElementSource = DG_SOURCE;  // void: there is none
using ElementAux = DG_AUX;        // of C beside a partial sum, if there is one
using ElementBias = DG_BIAS;
using Accumulator = float;
using Tile = Shape<Int<DG_TILE_M>, Int<DG_TILE_N>, Int<DG_TILE_K>>;
using Cluster = Shape<Int<DG_CLUSTER_M>, Int<DG_CLUSTER_N>, _1>;

constexpr bool has_source = !std::is_void_v<ElementSource>;
constexpr bool plain = DG_SCHEDULE == DG_PLAIN;
constexpr bool direct = DG_EPILOGUE == DG_DIRECT;
constexpr bool promotes = sizeof(Element) == 1 && !plain;  // products of fp8 are added to sums in float32
constexpr bool blockwise = DG_SCALE_ROWS_B != 0;  // a scale for each block of A and B; rows of a block of B
static_assert(direct || !plain, "kernels without TMA store results directly");
static_assert(!blockwise || promotes, "scales of blocks have a main loop of their own");

template <bool RowMajor>
using LayoutOf = std::conditional_t<RowMajor, cutlass::layout::RowMajor, cutlass::layout::ColumnMajor>;
using LayoutA = LayoutOf<DG_A_ROW>;
using LayoutB = LayoutOf<!DG_B_ROW>;  // CUTLASS's B is (k, n)
using LayoutD = cutlass::layout::RowMajor;
using StrideA = cutlass::detail::TagToStrideA_t<LayoutA>;
using StrideB = cutlass::detail::TagToStrideB_t<LayoutB>;
using StrideD = cutlass::detail::TagToStrideC_t<LayoutD>;

struct Matrix {
  void const* data;
  int64_t stride;        // elements between rows (between columns, if column-major)
  int64_t batch_stride;  // elements between batches
};

// A term that no GEMM of this kernel has still needs a type in declarations.
template <class T>
using OrD = std::conditional_t<std::is_void_v<T>, ElementD, T>;

}  // namespace distgemm

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
    Terms const& terms = params_.terms;
    float const factor = terms.factor();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(accumulators); ++i) {
      auto coord_mn = mine(i);
      if (!elem_less(coord_mn, make_coord(M, N))) continue;
      int64_t const row = get<0>(coord_mn), column = get<1>(coord_mn);
      auto const at = [&](Matrix const& matrix) { return l * matrix.batch_stride + row * matrix.stride + column; };
      float value = factor * accumulators(i);
      if (terms.scale_a_step) value *= terms.scale_a[l * terms.scale_a_stride + row];
      if (terms.scale_b_step) value *= terms.scale_b[l * terms.scale_b_stride + column];
      if (terms.bias) value += float(terms.bias[l * terms.bias_stride + column]);
      if (terms.aux) {
        value += terms.aux_scale * float(terms.aux[l * terms.aux_batch_stride + row * terms.aux_stride + column]);
      }
      if (auto const* source = static_cast<OrD<ElementSource> const*>(params_.source.data)) {
        value += terms.source_scale * float(source[at(params_.source)]);
      }
      auto* const d = static_cast<ElementD*>(const_cast<void*>(params_.d.data));
      d[at(params_.d)] = cutlass::NumericConverter<ElementD, float>::convert(value);
    }
  }

 private:
  Params params_;
};

using Epilogue = std::conditional_t<
    !direct, TmaEpilogue,
    std::conditional_t<
        plain, DirectEpilogue, cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<DirectEpilogue>>>;

// ---------------------------------------------------------------- main loops

template <class Element, class ElementB, class Epilogue>
struct TmaMainloop {
  static constexpr int kTileBytes = blockwise ? 512 : 0;  // BlockwiseMainloop's coordinates of tiles
  static constexpr int kCarveout = sizeof(typename Epilogue::SharedStorage) + kTileBytes;
  using Schedule = std::conditional_t<
      DG_SCHEDULE == DG_PINGPONG, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, 16 / sizeof(Element), ElementB,
      LayoutB, 16 / sizeof(ElementB), Accumulator, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<kCarveout>,
      Schedule>::CollectiveOp;
};

// Ordinary loads through registers into K-major shared memory. float32 is multiplied by FMA, all else by mma.sync.
template <class Element, class ElementB>
struct PlainMainloop {
  static constexpr int kThreads = 256;
  static constexpr int kDepth = DG_TILE_K;
  static constexpr bool fma = std::is_same_v<Element, float>;

  template <class T>
  static constexpr auto atom() {
    using cutlass::float_e4m3_t, cutlass::float_e5m2_t;
    constexpr bool e5m2_b = std::is_same_v<ElementB, float_e5m2_t>;
    if constexpr (std::is_same_v<T, cutlass::bfloat16_t>) return SM80_16x8x16_F32BF16BF16F32_TN{};
    else if constexpr (std::is_same_v<T, cutlass::half_t>) return SM80_16x8x16_F32F16F16F32_TN{};
    else if constexpr (std::is_same_v<T, cutlass::tfloat32_t>) return SM80_16x8x8_F32TF32TF32F32_TN{};
    else if constexpr (std::is_same_v<T, float_e4m3_t> && e5m2_b) return SM89_16x8x32_F32E4M3E5M2F32_TN{};
    else if constexpr (std::is_same_v<T, float_e4m3_t>) return SM89_16x8x32_F32E4M3E4M3F32_TN{};
    else if constexpr (std::is_same_v<T, float_e5m2_t> && e5m2_b) return SM89_16x8x32_F32E5M2E5M2F32_TN{};
    else if constexpr (std::is_same_v<T, float_e5m2_t>) return SM89_16x8x32_F32E5M2E4M3F32_TN{};
    else return UniversalFMA<float, float, float, float>{};
  }
  static constexpr auto mma() {
    if constexpr (fma) {
      // Thread i of 16 owns rows 4i..4i+3, so that it reads four at once.
      using Four = Layout<Shape<_16, _4>, Stride<_4, _1>>;
      return TiledMMA<MMA_Atom<decltype(atom<Element>())>, Layout<Shape<_16, _16, _1>>, cute::Tile<Four, Four, _1>>{};
    } else {
      return TiledMMA<MMA_Atom<decltype(atom<Element>())>, Layout<Shape<_4, _2, _1>>, cute::Tile<_64, _32, Underscore>>{};
    }
  }
  using Mma = decltype(mma());

  // For ldmatrix: eight rows of 64 bytes, with 16-byte pieces swizzled against bank conflicts. For FMA: columns, padded
  // by four elements.
  template <int Rows>
  static constexpr auto smem_atom() {
    if constexpr (fma) {
      return Layout<Shape<Int<Rows>, Int<kDepth>>, Stride<_1, Int<Rows + 4>>>{};
    } else {
      constexpr int piece = 16 / sizeof(Element);
      static_assert(kDepth * sizeof(Element) == 64, "a row of a tile takes 64 bytes");
      constexpr int bits = piece == 16 ? 4 : piece == 8 ? 3 : 2;
      return composition(Swizzle<2, bits, 3>{}, Layout<Shape<_8, Int<kDepth>>, Stride<Int<kDepth>, _1>>{});
    }
  }
  using SmemCopy = std::conditional_t<fma, Copy_Atom<DefaultCopy, Element>, Copy_Atom<SM75_U32x4_LDSM_N, Element>>;
  using SmemCopyB = std::conditional_t<fma, Copy_Atom<DefaultCopy, ElementB>, Copy_Atom<SM75_U32x2_LDSM_N, ElementB>>;

  // Neighbouring threads load neighbouring elements of the contiguous mode.
  template <class T, bool AlongK, int Vector, int Rows>
  static constexpr auto gmem_copy() {
    using Load = Copy_Atom<UniversalCopy<uint_bit_t<Vector * sizeof_bits_v<T>>>, T>;
    if constexpr (AlongK) {
      constexpr int across = kDepth / Vector;
      return make_tiled_copy(
          Load{}, Layout<Shape<Int<kThreads / across>, Int<across>>, Stride<Int<across>, _1>>{}, Layout<Shape<_1, Int<Vector>>>{});
    } else {
      static_assert(Vector == 1, "several elements at once are loaded along K only");
      constexpr int along = Rows < kThreads ? Rows : kThreads;
      return make_tiled_copy(
          Load{}, Layout<Shape<Int<along>, Int<kThreads / along>>, Stride<_1, Int<along>>>{}, Layout<Shape<_1, _1>>{});
    }
  }

  using Collective = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm70TwoStage, Tile, Element, StrideA, ElementB, StrideB, Mma,
      decltype(gmem_copy<Element, DG_A_ROW, DG_VECTOR_A, size<0>(Tile{})>()), decltype(smem_atom<size<0>(Tile{})>()), SmemCopy,
      cute::identity, decltype(gmem_copy<ElementB, DG_B_ROW, DG_VECTOR_B, size<1>(Tile{})>()),
      decltype(smem_atom<size<1>(Tile{})>()), SmemCopyB, cute::identity>;
};

using Collective =
    typename std::conditional_t<
        plain, PlainMainloop<Element, ElementB>, TmaMainloop<Element, ElementB, Epilogue>>::Collective;
#if DG_SCALE_ROWS_B
using Mainloop = BlockwiseMainloop<Collective>;
#else
using Mainloop = std::conditional_t<promotes, PromotingMainloop<Collective>, Collective>;
#endif

using Kernel = cutlass::gemm::kernel::GemmUniversal<
    Shape<int, int, int, int>, Mainloop, Epilogue,
    std::conditional_t<plain, void, cutlass::gemm::PersistentScheduler>>;
static_assert(plain || Kernel::SharedStorageSize <= cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);
using Params = typename Kernel::Params;

}  // namespace distgemm

#include "gemm_facts.cuh"
