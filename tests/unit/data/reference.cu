// A kernel, and host functions that compute with CUTLASS's own code what distgemm computes by itself: the kernel's
// parameter and grid, and where the epilogue takes and puts values.

#include <cstring>

#include "cutlass/cuda_host_adapter.hpp"

// What the driver would be asked to encode, in place of a descriptor.
struct Recorded {
  uint64_t address, extents[3], strides[2];
  uint32_t type, modes, box[3], steps[3], interleave, swizzle, promotion, fill;
};

inline CUresult recorded_cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, uint32_t modes, void* address, uint64_t const* extents,
    uint64_t const* strides, uint32_t const* box, uint32_t const* steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  Recorded const found{
      reinterpret_cast<uint64_t>(address),
      {extents[0], extents[1], extents[2]},
      {strides[0], strides[1]},
      uint32_t(type),
      modes,
      {box[0], box[1], box[2]},
      {steps[0], steps[1], steps[2]},
      uint32_t(interleave),
      uint32_t(swizzle),
      uint32_t(promotion),
      uint32_t(fill)};
  static_assert(sizeof(found) <= sizeof(*map));
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &found, sizeof(found));
  return CUDA_SUCCESS;
}

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) recorded_##function

#include "gemm.cu"

namespace distgemm {

template <class Subtile, int kHeight, int kWidth>
int misplaced_in_shared_memory() {
  using Element = typename Subtile::Element;
  auto const atom = cutlass::gemm::collective::detail::ss_smem_selector<
      GMMA::Major::K, Element, Int<kHeight>, Int<kWidth>>();
  auto const layout = as_position_independent_swizzle_layout(
      tile_to_shape(atom, Shape<Int<kHeight>, Int<kWidth>>{}, Step<_1, _2>{}));
  int found = 0;
  for (int row = 0; row < kHeight; ++row) {
    for (int column = 0; column < kWidth; ++column) {
      found += Subtile::at(0, row, column * sizeof(Element)) != int(layout(row, column)) * sizeof(Element);
    }
  }
  return found;
}

template <class Epilogue, class Mainloop>
int misplaced() {
  constexpr int height = Epilogue::kHeight, width = Epilogue::kWidth;
  typename Mainloop::TiledMma mma;
  int found = misplaced_in_shared_memory<typename Epilogue::Result, height, width>();
  if constexpr (has_source) found += misplaced_in_shared_memory<typename Epilogue::Source, height, width>();
  for (int thread = 0; thread < size(mma); ++thread) {
    auto const tile = make_identity_tensor(Shape<Int<DG_TILE_M>, Int<DG_TILE_N>>{});
    auto const places = mma.get_thread_slice(thread).partition_C(tile);
    for (int m = 0; m < Epilogue::kDown; ++m) {
      for (int n = 0; n < Epilogue::kAcross; ++n) {
        for (int i = 0; i < Epilogue::kValues; ++i) {
          auto const place = Epilogue::accumulator(places, m, n, i);
          found += get<0>(place) != m * height + Epilogue::row_of(thread) + i / 2 % 2 * 8;
          found += get<1>(place) != n * width + Epilogue::column_of(thread, i);
        }
      }
    }
  }
  return found;
}

}  // namespace distgemm

// How many values do not lie where CUTLASS's layouts say; -1: the kernel has no epilogue through TMA.
extern "C" int distgemm_misplaced() {
  if constexpr (distgemm::direct) {
    return -1;
  } else {
    return distgemm::misplaced<distgemm::TmaEpilogue, distgemm::Mainloop>();
  }
}

// ---------------------------------------------------------------- the parameter

namespace distgemm {

#if !DG_SCALE_ROWS_B
struct BlockScales {
  float const* data;
  int64_t stride, step;
  int32_t rows, block_rows;
};
#endif

// The structs of parameters.py.
struct Given {
  int32_t m, n, k, l;
  Matrix a, b, source, d;
  Terms terms;
  int32_t sm_count, raster, swizzle;
  BlockScales scales_a, scales_b;
};

template <class Stride>
Stride stride_of(Matrix const& matrix) {
  Stride stride{};
  if constexpr (is_constant<1, decltype(get<0>(Stride{}))>::value) {
    get<1>(stride) = matrix.stride;
  } else {
    get<0>(stride) = matrix.stride;
  }
  get<2>(stride) = matrix.batch_stride;
  return stride;
}

// The descriptors of both operands.
Collective::Params operands(Given const& given) {
  Collective::Params found = Collective::to_underlying_arguments(
      make_shape(given.m, given.n, given.k, given.l),
      {static_cast<Element const*>(given.a.data), stride_of<StrideA>(given.a),
       static_cast<ElementB const*>(given.b.data), stride_of<StrideB>(given.b)},
      nullptr);
  // Kernels for fp8 with TMA have a main loop of their own, which knows when to promote.
  [](auto& params) {
    if constexpr (promotes) params.mma_promotion_interval = 0;
  }(found);
  return found;
}

// The descriptor that CuTe makes for a matrix of which subtiles are copied.
template <class Copy, class Subtile, int kHeight, int kWidth>
TmaDescriptor descriptor(Matrix const& matrix, int rows, int columns, int batches) {
  using T = typename Subtile::Element;
  auto const atom =
      cutlass::gemm::collective::detail::ss_smem_selector<GMMA::Major::K, T, Int<kHeight>, Int<kWidth>>();
  auto const shared = tile_to_shape(atom, Shape<Int<kHeight>, Int<kWidth>>{}, Step<_1, _2>{});
  auto const tensor = make_tensor(
      make_gmem_ptr(static_cast<T const*>(matrix.data)), make_shape(rows, columns, batches),
      make_stride(matrix.stride, _1{}, matrix.batch_stride));
  auto const copy = make_tma_copy(Copy{}, tensor, shared, Shape<Int<kHeight>, Int<kWidth>>{}, _1{});
  return *copy.get_tma_descriptor();
}

template <class Params>
void set_results(Params& params, Given const& given) {
#if DG_EPILOGUE == DG_TMA
  constexpr int height = Epilogue::kHeight, width = Epilogue::kWidth;
  params.d = descriptor<SM90_TMA_STORE, Epilogue::Result, height, width>(given.d, given.m, given.n, given.l);
  if constexpr (has_source) {
    params.source =
        descriptor<SM90_TMA_LOAD, Epilogue::Source, height, width>(given.source, given.m, given.n, given.l);
  }
  params.tma_transaction_bytes = Epilogue::Source::kBytes;
#else
  params.source = given.source;
  params.d = given.d;
#endif
}

using TileParams = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params;

TileParams tile_order(Given const& given, cutlass::KernelHardwareInfo const& hardware) {
  using Order = cutlass::gemm::kernel::detail::RasterOrderOptions;
  cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90::Arguments arguments{};
  arguments.max_swizzle_size = given.swizzle;
  arguments.raster_order = given.raster == 1   ? Order::AlongM
                           : given.raster == 2 ? Order::AlongN
                                               : Order::Heuristic;
  return cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90::to_underlying_arguments(
      make_shape(given.m, given.n, given.k, given.l), Tile{}, Cluster{}, hardware, arguments);
}

void set(Params& params, void const* from) {
  auto const& given = *static_cast<Given const*>(from);
  params.problem_shape = {given.m, given.n, given.k, given.l};
  static_cast<Collective::Params&>(params.mainloop) = operands(given);
#if DG_SCALE_ROWS_B
  params.mainloop.scales_a = given.scales_a;
  params.mainloop.scales_b = given.scales_b;
#endif
  params.epilogue.terms = given.terms;
  set_results(params.epilogue, given);
  params.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  params.hw_info.sm_count = given.sm_count;
  params.scheduler = tile_order(given, params.hw_info);
}

// max_clusters: how many the GPU holds at once, as cudaOccupancyMaxActiveClusters says it; 0: not known.
dim3 grid(Params params, int max_clusters) {
  params.hw_info.max_active_clusters = max_clusters;
  return Kernel::get_grid_shape(params);
}

}  // namespace distgemm

extern "C" int distgemm_parameter_size() { return sizeof(distgemm::Params); }

// Fills the stack, from where functions copy padding between fields.
__attribute__((noinline)) void scribble(int value) {
  char buffer[1 << 16];
  std::memset(buffer, value, sizeof(buffer));
  asm volatile("" ::"r"(buffer) : "memory");
}

// Writes the parameter, with a Recorded for each descriptor, and the grid. Padding may be anything: what differs between
// two values of `padding` is padding.
extern "C" void distgemm_parameter(void const* given, void* out, uint32_t* grid, int padding, int max_clusters) {
  std::memset(out, padding, sizeof(distgemm::Params));
  scribble(padding);
  auto* const params = new (out) distgemm::Params;
  distgemm::set(*params, given);
  dim3 const found = distgemm::grid(*params, max_clusters);
  grid[0] = found.x;
  grid[1] = found.y;
  grid[2] = found.z;
}
