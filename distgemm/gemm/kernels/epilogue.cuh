// The epilogue of kernels that store D through TMA, for gemm.cu: a collective as CUTLASS's kernels expect it. CUTLASS's
// own one, with its visitor tree, takes longer to compile than all else in a kernel, and is another kernel for each set
// of terms.
//
// A warp loads subtiles of the source, the other warps add the terms to the accumulators and write subtiles of D to
// shared memory, and the first of these warps stores them:
//
//   accumulators -> value in float32 -> (stmatrix) shared memory -> (TMA) D
//   source -> (TMA) shared memory -> (ldmatrix) ----^
//
// A subtile has kHeight rows and kWidth columns. A thread has two rows of it, 8 rows apart, and in every 8 columns two
// neighbours, as wgmma leaves them.

#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/pipeline/pipeline.hpp"
#include "terms.cuh"

namespace distgemm {

using namespace cute;

// What a copy of the epilogue's code adds besides alpha, the source and the scales of whole tensors.
enum class Extra { kNone, kBias, kAny };

// A subtile in shared memory: the 16-byte pieces of its rows are swizzled as TMA does.
template <class T, int kHeight, int kWidth>
struct Subtile {
  using Element = T;
  static constexpr int kRow = kWidth * sizeof(T);                      // bytes of a row
  static constexpr int kBytes = kHeight * kRow;
  static constexpr int kAlignment = cute::max(kRow * 8, 128);
  static_assert(kRow == 16 || kRow == 32 || kRow == 64 || kRow == 128, "TMA has no swizzle for such rows");
  static constexpr CUtensorMapSwizzle kSwizzle = kRow == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                                 : kRow == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                 : kRow == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                              : CU_TENSOR_MAP_SWIZZLE_NONE;

  // The address of a byte of a row.
  CUTLASS_HOST_DEVICE static uint32_t at(uint32_t base, uint32_t row, uint32_t byte) {
    return base + row * kRow + (byte ^ (row * kRow / 128 % (kRow / 16) * 16));
  }
};

// A collective epilogue, as CUTLASS's kernels expect it.
class TmaEpilogue {
  static constexpr int kFirstGroupBarrier = 2;
  static constexpr bool kPingpong = DG_SCHEDULE == DG_PINGPONG;
  // The two warp groups of a cooperative kernel for fp8 do not wait for each other in the main loop. So each stores its
  // own rows, when it is ready.
  static constexpr bool kSplits = promotes && !kPingpong && !has_source;
  // A warp reads scales and bias of a tile while it is multiplied, so that they are in L1 afterwards.
  static constexpr bool kFetches = promotes && !has_source;

 public:
  static constexpr int kRows = kPingpong ? 64 : 128;  // of one wgmma of all warp groups that share a tile
  static constexpr int kHeight = kSplits ? 64 : kRows, kWidth = cute::gcd(32, DG_TILE_N);
  static constexpr int kDown = DG_TILE_M / kRows, kAcross = DG_TILE_N / kWidth;  // subtiles of a tile, for each thread
  static constexpr int kValues = kWidth / 2;                                       // of a subtile, in a thread
  static constexpr int kPiece = kWidth % 16 == 0 ? 8 : 4;  // values that pass through registers at a time
  using Piece = float[kPiece];
  // Whether C beside a partial sum is loaded ahead. The widest tiles have no registers for that.
  static constexpr bool kAhead = DG_TILE_M * DG_TILE_N / (kRows * 2) <= 160;
  static constexpr int kPart = kAhead ? cute::min(kValues, 16) : kPiece;  // values that get their terms at a time

 private:
  static constexpr int kSubtiles = kDown * kAcross;
  // A buffer of the source becomes one of D.
  static constexpr bool kReuses = has_source && sizeof(OrD<ElementSource>) == sizeof(ElementD);
  // A store of a subtile is delayed, and overlaps with the values of the next one.
  static constexpr bool kDelays = !has_source;
  static constexpr int kStoring = kSplits ? 3 : cute::min(kSubtiles, 2);  // subtiles of D that are stored at a time

 public:
  static constexpr int kSourceStages = cute::max(cute::min(kSubtiles, 4), kReuses ? kStoring + 1 : 1);

  // The names that CUTLASS's kernels expect of an epilogue.
  using ElementC = ElementSource;
  using StrideC = distgemm::StrideD;
  using ElementD = distgemm::ElementD;
  using StrideD = distgemm::StrideD;
  using LoadPipeline = cutlass::PipelineTransactionAsync<kSourceStages>;
  using LoadPipelineState = cutlass::PipelineState<kSourceStages>;
  using StorePipeline = std::conditional_t<
      kReuses, cutlass::PipelineTmaStore<kSourceStages, kStoring - 1>,
      cutlass::PipelineTmaStore<kStoring, kSplits ? kStoring - 2 : kStoring - 1>>;
  using StorePipelineState = cutlass::PipelineState<kReuses ? kSourceStages : kStoring>;
  static constexpr bool RequiresTransactionBytes = true;

  using Source = Subtile<OrD<ElementSource>, kHeight, kWidth>;
  using Result = Subtile<ElementD, kHeight, kWidth>;

  struct TensorStorage {
    static constexpr int kResults = (kReuses ? kSourceStages : kStoring) * (kSplits ? 2 : 1) * Result::kBytes;
    static constexpr int kSources = has_source && !kReuses ? kSourceStages * Source::kBytes : 0;
    alignas(cute::max(Source::kAlignment, Result::kAlignment)) uint8_t buffers[kResults + kSources];

    CUTLASS_DEVICE uint8_t* result(int stage) { return buffers + stage * Result::kBytes; }
    CUTLASS_DEVICE uint8_t* source(int stage) { return buffers + (kReuses ? 0 : kResults) + stage * Source::kBytes; }
  };
  using PipelineStorage = typename LoadPipeline::SharedStorage;
  struct SharedStorage {
    TensorStorage tensors;
    PipelineStorage pipeline;
  };

  struct Params {
    Terms terms;
    TmaDescriptor source, d;
    uint32_t tma_transaction_bytes;
  };
  using Arguments = Params;

  template <class Block>
  CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(Block const&) {
    return kSubtiles;
  }
  template <class Block>
  CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(Block const&) {
    return kSubtiles;
  }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    if constexpr (has_source) cute::prefetch_tma_descriptor(&params.source);
    cute::prefetch_tma_descriptor(&params.d);
  }
  CUTLASS_DEVICE bool is_producer_load_needed() const { return has_source || (kFetches && params_.terms.any()); }

  CUTLASS_HOST_DEVICE TmaEpilogue(Params const& params, TensorStorage&) : params_(params) {}

  // One warp calls it.
  template <class Problem, class Block, class Coord, class Mma>
  CUTLASS_DEVICE auto load(
      LoadPipeline pipeline, LoadPipelineState state, Problem const& problem, Block, Coord const& coord, Mma, int lane,
      TensorStorage& storage, int = -1) {
    if constexpr (kFetches) {
      Terms const& terms = params_.terms;
      int const m = get<0>(problem), n = get<1>(problem);
      if (terms.scale_a_step) fetch_(terms.scale_a, row_(coord, 0), DG_TILE_M, m, lane);
      if (terms.scale_b_step) fetch_(terms.scale_b, column_(coord, 0), DG_TILE_N, n, lane);
      if (terms.bias) fetch_(terms.bias + get<3>(coord) * terms.bias_stride, column_(coord, 0), DG_TILE_N, n, lane);
      return state;
    }
    bool const loads = elect_one_sync();
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kAcross; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kDown; ++m, ++state) {
        pipeline.producer_acquire(state);
        if (loads) {
          SM90_TMA_LOAD::copy(
              &params_.source, pipeline.producer_get_barrier(state),
              static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL), storage.source(state.index()),
              column_(coord, n), row_(coord, m), get<3>(coord));
          pipeline.producer_expect_transaction(state);
        }
        pipeline.producer_commit(state);
      }
    }
    return state;
  }

  CUTLASS_DEVICE auto load_tail(LoadPipeline pipeline, LoadPipelineState state) {
    if (!kFetches && elect_one_sync()) pipeline.producer_tail(state);
    return state;
  }

  // All consumer warps call it.
  template <class Problem, class Block, class Coord, class Accumulators, class Mma>
  CUTLASS_DEVICE auto store(
      LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
      StorePipelineState store_state, Problem const& problem, Block, Coord const& coord,
      Accumulators const& accumulators, Mma, int thread, TensorStorage& storage, int = -1) {
    auto const run = [&](auto extra) CUTLASS_LAMBDA_FUNC_INLINE {
      return store_<decltype(extra)::value>(
          load_pipeline, load_state, store_pipeline, store_state, problem, coord, accumulators, thread, storage);
    };
    using None = cute::constant<Extra, Extra::kNone>;
    using Bias = cute::constant<Extra, Extra::kBias>;
    using Any = cute::constant<Extra, Extra::kAny>;
    // Copies of the code without branches: one warp of each scheduler is here, and waits for each branch.
    Terms const& terms = params_.terms;
    if constexpr (!blockwise || has_source) {
      if (terms.any_but_bias()) return run(Any{});
    }
    return terms.bias ? run(Bias{}) : run(None{});
  }

  CUTLASS_DEVICE auto store_tail(
      LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
      StorePipelineState store_state) {
    store_pipeline.producer_tail(store_state);
    sent_ = 0;
    if constexpr (kReuses) {
      constexpr int held = cute::min(int(StorePipeline::UnacquiredStages), kSubtiles);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < held; ++i, ++load_state) load_pipeline.consumer_release(load_state);
    }
    return make_tuple(load_state, store_state);
  }

  // This thread's values i and following of the source, from a buffer.
  CUTLASS_DEVICE static void read_source(TensorStorage& storage, int stage, int thread, int i, Piece& values) {
    uint32_t const base = cast_smem_ptr_to_uint(storage.source(stage));
    if constexpr (sizeof(typename Source::Element) == 2) {
      uint32_t pairs[kPiece / 2];
      uint32_t const from = matrix_<Source>(base, thread, i);
      if constexpr (kPiece == 8) {
        asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                     : "r"(from)
                     : "memory");
      } else {
        asm volatile("ldmatrix.sync.aligned.x2.m8n8.shared.b16 {%0, %1}, [%2];"
                     : "=r"(pairs[0]), "=r"(pairs[1])
                     : "r"(from)
                     : "memory");
      }
      auto const& found = reinterpret_cast<cutlass::Array<typename Source::Element, kPiece> const&>(pairs);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kPiece; ++j) values[j] = float(found[j]);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kPiece; j += 2) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(values[j]), "=f"(values[j + 1])
                     : "r"(pair_<Source>(base, thread, i + j))
                     : "memory");
      }
    }
  }

  // The first row of this thread's values in a subtile; the second is 8 rows below. And the column of its value i.
  CUTLASS_HOST_DEVICE static int row_of(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
  CUTLASS_HOST_DEVICE static int column_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

  // The accumulator of one of this thread's values of a subtile.
  template <class Accumulators>
  CUTLASS_HOST_DEVICE static decltype(auto) accumulator(Accumulators& accumulators, int m, int n, int i) {
    using Layout = typename Accumulators::layout_type;
    constexpr int width = DG_TILE_N / size<2>(Layout{});  // columns of one wgmma
    static_assert(DG_TILE_M / size<1>(Layout{}) == kRows);
    int const column = n * kWidth + i / 4 * 8;
    return accumulators(column % width / 2 + i % 4, m, column / width);
  }

 private:
  // Reads a byte of every 128 bytes of some elements.
  template <class T>
  CUTLASS_DEVICE static void fetch_(T const* data, int first, int count, int end, int lane) {
    static_assert(cute::max(DG_TILE_M, DG_TILE_N) * sizeof(T) < 128 * cutlass::NumThreadsPerWarp);
    int const last = cute::min(first + count, end) - 1, own = first + lane * int(128 / sizeof(T));
    if (first > last || own >= last + int(128 / sizeof(T))) return;
    uint32_t unused;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(unused) : "l"(data + cute::min(own, last)));
  }

  template <class Coord>
  CUTLASS_DEVICE static int row_(Coord const& coord, int m) {
    return int(get<0>(coord)) * DG_TILE_M + m * kRows;
  }
  template <class Coord>
  CUTLASS_DEVICE static int column_(Coord const& coord, int n) {
    return int(get<1>(coord)) * DG_TILE_N + n * kWidth;
  }

  CUTLASS_DEVICE static void synchronize_(int group) {
    if constexpr (kSplits) {
      cutlass::arch::NamedBarrier::sync(128, kFirstGroupBarrier + group);
    } else {
      cutlass::arch::NamedBarrier::sync(
          kHeight * 2, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);  // 16 rows for each warp
    }
  }

  // Where this thread's row of the matrices for values i and following begins, for stmatrix and ldmatrix.
  template <class Kind>
  CUTLASS_DEVICE static uint32_t matrix_(uint32_t base, int thread, int i) {
    int const beside = kPiece == 8 ? thread % 32 / 16 : 0;
    return Kind::at(base, thread / 32 * 16 + thread % 16, (i / 4 + beside) * 16);
  }
  // Where values i and i + 1 lie.
  template <class Kind>
  CUTLASS_DEVICE static uint32_t pair_(uint32_t base, int thread, int i) {
    return Kind::at(
        base, row_of(thread) + i / 2 % 2 * 8, column_of(thread, i) * sizeof(typename Kind::Element));
  }

  template <Extra kExtra, class Problem, class Coord, class Accumulators>
  CUTLASS_DEVICE auto store_(
      LoadPipeline& load_pipeline, LoadPipelineState load_state, StorePipeline& store_pipeline,
      StorePipelineState store_state, Problem const& problem, Coord const& coord, Accumulators const& accumulators,
      int thread, TensorStorage& storage) {
    Terms const& terms = params_.terms;
    constexpr bool extra = kExtra != Extra::kNone;
    Loaded<kExtra == Extra::kAny> loaded;
    if (extra) loaded.begin(terms, problem, coord, thread);
    if (kAhead && extra) loaded.load_aux(terms, problem, coord, Part::of(0), thread);
    int const group = kSplits ? __shfl_sync(0xffffffff, thread / 128, 0) : 0, in_group = thread - group * 128;
    bool const stores = in_group < cutlass::NumThreadsPerWarp;
    float const factor = terms.factor();
    auto const buffer = [&] { return store_state.index() + group * kStoring; };
    LoadPipelineState wait_state = load_state;
    if constexpr (kReuses) {
      // Buffers of the source become those of D, and are released when they are stored.
      wait_state = {store_state.index(), store_state.phase() ^ 1, store_state.count()};
    }

    auto const send = [&](int m, int n) CUTLASS_LAMBDA_FUNC_INLINE {
      cutlass::arch::fence_view_async_shared();
      // The buffer that is written next, too, is free behind this barrier.
      if (kSplits && stores) store_pipeline.producer_acquire(store_state);
      synchronize_(group);
      if (stores) {
        if (elect_one_sync()) {
          SM90_TMA_STORE::copy(
              &params_.d, storage.result(buffer()), column_(coord, n), row_(coord, m) + group * kHeight,
              get<3>(coord));
        }
        __syncwarp();
        store_pipeline.producer_commit(store_state);
      }
      ++store_state;
      ++sent_;
      if constexpr (!kSplits) {
        if (stores) store_pipeline.producer_acquire(store_state);
        synchronize_(group);
      }
      if constexpr (kReuses) {
        if (sent_ > StorePipeline::UnacquiredStages) {
          load_pipeline.consumer_release(load_state);
          ++load_state;
        }
      }
    };

    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kAcross; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kDown; ++m) {
        if constexpr (has_source) load_pipeline.consumer_wait(wait_state);
        uint32_t words[kValues / kPiece][kPiece * sizeof(ElementD) / 4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues; i += kPart) {
          float values[kPart];
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kPart; ++j) values[j] = factor * accumulator(accumulators, m, n, i + j);
          if (extra) {
            int const number = ((n * kDown + m) * kValues + i) / kPart;
            loaded.add_to(values, terms, problem, coord, Part::of(number), thread);
            // The next part arrives while this one is stored.
            if (kAhead && number + 1 < kSubtiles * kValues / kPart) {
              loaded.load_aux(terms, problem, coord, Part::of(number + 1), thread);
            }
          }
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kPart; j += kPiece) {
            auto& piece = reinterpret_cast<Piece&>(values[j]);
            if constexpr (has_source) {
              Piece source;
              read_source(storage, wait_state.index(), thread, i + j, source);
              CUTLASS_PRAGMA_UNROLL
              for (int p = 0; p < kPiece; ++p) piece[p] += terms.source_scale * source[p];
            }
            auto& results = reinterpret_cast<cutlass::Array<ElementD, kPiece>&>(words[(i + j) / kPiece]);
            results = cutlass::NumericArrayConverter<ElementD, float, kPiece>::convert(
                reinterpret_cast<cutlass::Array<float, kPiece> const&>(piece));
          }
        }
        if constexpr (has_source) {
          if constexpr (!kReuses) {
            cutlass::arch::fence_view_async_shared();
            load_pipeline.consumer_release(load_state);
            ++load_state;
          }
          ++wait_state;
        }
        // A delayed store overlaps with the values of the next subtile.
        if constexpr (kDelays) {
          if (m + n > 0) send(m ? m - 1 : kDown - 1, m ? n : n - 1);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues / kPiece; ++i) write_(storage, buffer(), in_group, i * kPiece, words[i]);
        if constexpr (!kDelays) send(m, n);
      }
    }
    if constexpr (kDelays) send(kDown - 1, kAcross - 1);
    // Behind this barrier ptxas knows that the lanes of a warp are at the same place. Otherwise it does not keep
    // descriptors of shared memory in uniform registers, and copies them before each wgmma of the main loop.
    if (kSplits) synchronize_(group);
    return make_tuple(load_state, store_state);
  }

  // kPart values of each thread: where they are in a tile.
  struct Part {
    int m, n, value;  // the subtile, and the first value of it

    CUTLASS_DEVICE static Part of(int number) {
      constexpr int parts = kValues / kPart;  // of a subtile
      return {number / parts % kDown, number / parts / kDown, number % parts * kPart};
    }
  };

  // Values of two neighbouring columns in an integer: separate ones would take more registers, and wait for the load.
  template <class T>
  struct Pair {
    using Bits = uint_bit_t<sizeof_bits_v<T>>;
    using Both = uint_bit_t<2 * sizeof_bits_v<T>>;
    Both both;

    CUTLASS_DEVICE float operator[](int i) const {
      Bits const bits = static_cast<Bits>(both >> (i % 2 * sizeof_bits_v<T>));
      return float(reinterpret_cast<T const&>(bits));
    }

    // Whether all pairs of such rows are aligned, and none is only half in D.
    CUTLASS_DEVICE static bool whole(T const* data, int64_t stride, int columns) {
      uint64_t const places = reinterpret_cast<uint64_t>(data) | stride * sizeof(T);
      return columns % 2 == 0 && places % sizeof(Both) == 0;
    }

    // Loads it from a place with so many columns left; 0 outside of D.
    CUTLASS_DEVICE void load(T const* data, int left, bool whole) {
      auto const* const from = reinterpret_cast<Bits const*>(data);
      both = 0;
      if (whole) {
        if (left > 0) both = *reinterpret_cast<Both const*>(data);
      } else {
        if (left > 0) both = from[0];
        if (left > 1) both |= static_cast<Both>(from[1]) << sizeof_bits_v<T>;
      }
    }
  };

  // A value for each column of the tile. Of every 32 pairs each lane of a warp holds one, and gives it to the others.
  template <class T>
  struct Row {
    static constexpr int kPairs = ceil_div(DG_TILE_N / 2, cutlass::NumThreadsPerWarp);
    T const* data;  // of the tile's first column
    int columns;    // from there to the end of D
    cute::array<Pair<T>, kPairs> pairs;

    CUTLASS_DEVICE void begin(T const* row, int first, int end) {
      data = row + first;
      columns = end - first;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        pairs[i] = load_((i * cutlass::NumThreadsPerWarp + cutlass::canonical_lane_idx()) * 2);
      }
    }

    // This thread's pair in the 8 columns from `column` of the tile. All threads of a warp call it.
    CUTLASS_DEVICE Pair<T> at(int column) const {
      int const own = cutlass::canonical_lane_idx() % 4;
      int const pair = column / 2;
      return {__shfl_sync(
          0xffffffff, pairs[pair / cutlass::NumThreadsPerWarp].both, pair % cutlass::NumThreadsPerWarp + own)};
    }

   private:
    CUTLASS_DEVICE Pair<T> load_(int column) const {
      Pair<T> pair;
      pair.load(data + column, columns - column, Pair<T>::whole(data, 0, columns));
      return pair;
    }
  };

  // The terms of a thread's values, but the source: all that there are, or the bias.
  template <bool kAll>
  struct Loaded {
    static constexpr bool kAux = kAll && has_source;
    float scale_a[kDown][2];
    Row<float> scale_b;
    Row<OrD<ElementBias>> bias;
    Pair<OrD<ElementAux>> aux[kPart / 2];  // of a part of a subtile

    // Loads what belongs to rows and columns of the tile.
    template <class Problem, class Coord>
    CUTLASS_DEVICE void begin(Terms const& terms, Problem const& problem, Coord const& coord, int thread) {
      int const rows = get<0>(problem), columns = get<1>(problem);
      int64_t const batch = get<3>(coord);
      if (!kAll || terms.bias) bias.begin(terms.bias + batch * terms.bias_stride, column_(coord, 0), columns);
      if (kAll && terms.scale_b_step) {
        scale_b.begin(terms.scale_b + batch * terms.scale_b_stride, column_(coord, 0), columns);
      }
      if (kAll && terms.scale_a_step) {
        float const* const scales = terms.scale_a + batch * terms.scale_a_stride;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kDown * 2; ++i) {
          int const row = row_(coord, i / 2) + row_of(thread) + i % 2 * 8;
          scale_a[i / 2][i % 2] = row < rows ? scales[row] : 0.0f;
        }
      }
    }

    // A thread's pair of C in a part of the tile.
    template <class Problem, class Coord>
    CUTLASS_DEVICE static Pair<OrD<ElementAux>> aux_pair(
        Terms const& terms, Problem const& problem, Coord const& coord, Part part, int thread, int i) {
      int const rows = get<0>(problem), columns = get<1>(problem);
      int const row = row_(coord, part.m) + row_of(thread) + i % 2 * 8;
      int const column = column_(coord, part.n) + column_of(thread, part.value) + i / 2 * 8;
      auto const* const data = terms.aux + int64_t(get<3>(coord)) * terms.aux_batch_stride;
      Pair<OrD<ElementAux>> pair;
      pair.load(
          data + row * terms.aux_stride + column, row < rows ? columns - column : 0,
          Pair<OrD<ElementAux>>::whole(data, terms.aux_stride, columns));
      return pair;
    }

    template <class Problem, class Coord>
    CUTLASS_DEVICE void load_aux(
        Terms const& terms, Problem const& problem, Coord const& coord, Part part, int thread) {
      if (kAux && terms.aux) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPart / 2; ++i) aux[i] = aux_pair(terms, problem, coord, part, thread, i);
      }
    }

    // Adds the terms to the values of a part.
    template <class Problem, class Coord>
    CUTLASS_DEVICE void add_to(
        float (&values)[kPart], Terms const& terms, Problem const& problem, Coord const& coord, Part part,
        int thread) const {
      auto const of_columns = [&](auto const& row, auto&& change) CUTLASS_LAMBDA_FUNC_INLINE {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPart; i += 4) {
          auto const pair = row.at(part.n * kWidth + (part.value + i) * 2);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4; ++j) change(values[i + j], pair[j % 2]);
        }
      };
      if (kAll && terms.scale_a_step) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPart; ++i) values[i] *= scale_a[part.m][i / 2 % 2];
      }
      if (kAll && terms.scale_b_step) {
        of_columns(scale_b, [](float& value, float scale) CUTLASS_LAMBDA_FUNC_INLINE { value *= scale; });
      }
      if (!kAll || terms.bias) {
        of_columns(bias, [](float& value, float term) CUTLASS_LAMBDA_FUNC_INLINE { value += term; });
      }
      if (kAux && terms.aux) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPart / 2; ++i) {
          auto const pair = kAhead ? aux[i] : aux_pair(terms, problem, coord, part, thread, i);
          values[i * 2] += terms.aux_scale * pair[0];
          values[i * 2 + 1] += terms.aux_scale * pair[1];
        }
      }
    }
  };

  // Writes values i and following to a buffer of D.
  CUTLASS_DEVICE static void write_(
      TensorStorage& storage, int stage, int thread, int i, uint32_t const (&words)[kPiece * sizeof(ElementD) / 4]) {
    uint32_t const base = cast_smem_ptr_to_uint(storage.result(stage));
    if constexpr (sizeof(ElementD) == 2) {
      uint32_t const to = matrix_<Result>(base, thread, i);
      if constexpr (kPiece == 8) {
        asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
      } else {
        asm volatile("stmatrix.sync.aligned.x2.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(words[0]), "r"(words[1])
                     : "memory");
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kPiece; j += 2) {
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(pair_<Result>(base, thread, i + j)), "r"(words[j]),
                     "r"(words[j + 1])
                     : "memory");
      }
    }
  }

  Params const& params_;
  int sent_ = 0;  // subtiles, since the last tail
};

}  // namespace distgemm
