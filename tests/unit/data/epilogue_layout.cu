// A kernel, and a function that compares where its epilogue takes and puts values with CUTLASS's own layouts.

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
