// Sums that are passed on from GPU to GPU, for gated.cuh: an epilogue that waits for what it adds, and tells of what it
// has stored; and tiles that are handed out, as such kernels wait for one another.

#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/pipeline/pipeline.hpp"
#include "gated.cuh"

namespace distgemm {

using namespace cute;

// An epilogue's tree. What is stored of its result, an array of `Element`, waits for its turn.
template <class Tree, class Element>
struct PacedTree : Tree {
  using Arguments = typename Tree::Arguments;
  struct Params : Tree::Params {
    Pace pace;
  };

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const& problem, Arguments const& args, void* workspace) {
    return {Tree::to_underlying_arguments(problem, args, workspace), {}};
  }

  CUTLASS_HOST_DEVICE PacedTree() {}
  CUTLASS_HOST_DEVICE PacedTree(Params const& params, typename Tree::SharedStorage const& storage)
      : Tree(params, storage), pace_(params.pace) {}

  // Of a thread for which the others wait before they store.
  template <class Base, int Bytes>
  struct Callbacks : Base {
    Pace pace;
    uint64_t turn = 0;

    CUTLASS_DEVICE Callbacks(Base base, Pace pace) : Base(base), pace(pace) {}

    CUTLASS_DEVICE void previsit(int m, int n, int iteration, bool loaded) {
      turn = pace.take(Bytes);
      Base::previsit(m, n, iteration, loaded);
    }
    CUTLASS_DEVICE void postreduce(int m, int n, int iteration, bool stores) {
      Base::postreduce(m, n, iteration, stores);
      Pace::wait_until(turn);
    }
  };

  template <bool ReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    auto callbacks = Tree::template get_consumer_store_callbacks<ReferenceSource>(args);
    constexpr int bytes = size(decltype(args.epi_tile){}) * sizeof(Element);
    return Callbacks<decltype(callbacks), bytes>(callbacks, {pace_.free, args.thread_idx == 0 ? pace_.per_kib : 0});
  }

 private:
  Pace pace_;
};

// What threads add to the accumulators that they hold, where results have several sources: all but the one that an
// epilogue loads through shared memory. The product is multiplied by its factors first, as the epilogue's are 1 then.
template <class Element>
struct FurtherSources {
  static constexpr int kAtOnce = 32;  // loads of each thread that are under way

  struct Params {
    bool any;
    Element const* data;
    int64_t stride, batch_stride;  // elements between rows, and between batches
    float alpha;
    float const *scale_a, *scale_b;
    int16_t first[kProducts], count[kProducts];
    Further further[kProducts];
  };

  static Params params(GatedArguments const& args) {
    Matrix const& source = args.base.source;
    Params found{};
    found.any = args.adds != 0;
    found.data = static_cast<Element const*>(source.data);
    found.stride = source.stride;
    found.batch_stride = source.batch_stride;
    found.alpha = args.base.alpha;
    found.scale_a = args.base.scale_a;
    found.scale_b = args.base.scale_b;
    for (int i = 0; i < kProducts; ++i) {
      found.first[i] = args.products[i].further;
      found.count[i] = args.products[i].sources;
      found.further[i] = args.further[i];
    }
    return found;
  }

  template <class Extents, class Block, class Coord, class Accumulators, class Mma>
  CUTLASS_DEVICE static void add(
      Params const& params, int number, Extents extents, Block block, Coord coord, Accumulators& sums, Mma mma,
      int thread) {
    using Pair = cutlass::AlignedArray<Element, 2>;  // neighbours in a row, which a thread holds
    constexpr int pairs = size(Accumulators{}) / 2, at_once = pairs < kAtOnce ? pairs : kAtOnce;
    float factor = params.alpha;
    if (params.scale_a) factor *= *params.scale_a;
    if (params.scale_b) factor *= *params.scale_b;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(sums); ++i) sums(i) *= factor;
    Tensor places = local_tile(make_identity_tensor(extents), block, coord);
    Tensor mine = mma.get_thread_slice(thread).partition_C(places);
    Further const* const begin = params.further + params.first[number];
    CUTLASS_PRAGMA_NO_UNROLL
    for (Further const* one = begin; one < begin + params.count[number]; ++one) {
      // One by one: the first ones are added while others are on their way.
      if (elect_one_sync()) wait_for(one->word);
      __syncwarp();
      Element const* const source = params.data + one->batch * params.batch_stride;
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < pairs; first += at_once) {
        Pair loaded[at_once];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < at_once; ++i) {
          loaded[i].clear();
          if (first + i == pairs) break;
          auto const place = mine(2 * (first + i));
          if (elem_less(place, extents)) {
            loaded[i] = *reinterpret_cast<Pair const*>(source + get<0>(place) * params.stride + get<1>(place));
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * at_once && first + i / 2 < pairs; ++i) {
          sums(2 * first + i) += float(loaded[i / 2][i % 2]);
        }
      }
    }
  }
};

// An epilogue whose loading warp waits for a product's source, and that tells, once all of a product is stored, so.
// Results lie here or elsewhere; those elsewhere are without bias, aux and further sources.
template <class Base>
class PassingEpilogue : public Base {
 public:
  using Sources = FurtherSources<typename Base::ElementC>;
  struct Params : Base::Params {
    typename Base::Params elsewhere;
    uint32_t* counters;
    uint32_t tiles;  // of a product
    uint64_t open;   // says that others' memory can be written
    Result results[kProducts];
    typename Sources::Params sources;
  };
  using Arguments = Params;

  template <class Problem>
  static Params to_underlying_arguments(Problem const&, Arguments const& args, void*) {
    return args;
  }
  template <class Problem>
  static size_t get_workspace_size(Problem const&, Arguments const&) {
    return 0;
  }

  template <class Storage>
  CUTLASS_HOST_DEVICE PassingEpilogue(Params const& params, Storage& storage)
      : Base(params, storage), params_(params), elsewhere_(params.elsewhere, storage) {}

  template <class Pipeline, class State, class Problem, class Block, class Coord, class... Rest>
  CUTLASS_DEVICE auto load(
      Pipeline pipeline, State state, Problem const& problem, Block block, Coord const& coord, Rest&&... rest) {
    auto [m, n, k, number] = coord;
    Result const& result = params_.results[number];
    if (result.source_word && number != open_ && elect_one_sync()) wait_for(result.source_word);
    open_ = number;
    return Base::load(
        pipeline, state, problem, block, make_coord(m, n, k, result.source), static_cast<Rest&&>(rest)...);
  }

  template <
      class Load, class LoadState, class Store, class StoreState, class Problem, class Block, class Coord,
      class Accumulators, class Mma, class... Rest>
  CUTLASS_DEVICE auto store(
      Load load, LoadState load_state, Store store, StoreState store_state, Problem const& problem, Block block,
      Coord const& coord, Accumulators const& accumulators, Mma mma, int thread, Rest&&... rest) {
    int32_t const number = get<3>(coord);
    Result const& result = params_.results[number];
    if (params_.sources.any && result.batch >= 0) {
      // They are the kernel's, to be zeroed by the next product.
      auto& sums = const_cast<Accumulators&>(accumulators);
      Sources::add(
          params_.sources, number, take<0, 2>(problem), take<0, 2>(block), take<0, 2>(coord), sums, mma, thread);
    }
    if (result.batch < 0 && !entered_) {
      if (params_.open && thread < cutlass::NumThreadsPerWarp && elect_one_sync()) wait_for(params_.open);
      __syncwarp();
      entered_ = true;
    }
    // Each tile ends with its tail, which leaves nothing to the next one: that may be stored by the other of the two.
    auto const by = [&](Base& epilogue, int32_t batch) {
      auto const states = epilogue.store(
          load, load_state, store, store_state, problem, block,
          make_coord(get<0>(coord), get<1>(coord), get<2>(coord), batch), accumulators, mma, thread,
          static_cast<Rest&&>(rest)...);
      return epilogue.store_tail(load, get<0>(states), store, get<1>(states));
    };
    auto const states = result.batch >= 0 ? by(*this, result.batch) : by(elsewhere_, ~result.batch);
    if (result.word && thread < cutlass::NumThreadsPerWarp) tell_(result.word, number);
    return states;
  }

  template <class Load, class LoadState, class Store, class StoreState>
  CUTLASS_DEVICE auto store_tail(Load, LoadState load_state, Store, StoreState store_state) {
    return make_tuple(load_state, store_state);
  }

 private:
  // By the warp that has issued the stores. Whoever stores the last tile tells, and leaves a zero for the next launch.
  CUTLASS_DEVICE void tell_(uint64_t word, int32_t number) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
    uint32_t* counter = params_.counters + number;
    if (elect_one_sync() && count(counter) == params_.tiles) tell(counter, word);
    __syncwarp();
  }

  Params const& params_;
  Base elsewhere_;
  int32_t open_ = -1;
  bool entered_ = false;
};

// ---------------------------------------------------------------- tiles that are handed out

// Tiles to whoever comes first, those of products that are abreast in turn, others product by product. Where products
// wait for other GPUs' kernels, which wait for this one, no tile may belong to a thread block that is not resident:
// blocks of other kernels, which wait for other GPUs too, may hold its SM. Of a cluster, the warp that loads takes a
// ticket when it has no more to load, and tells all blocks.
struct HandedOut {};

struct TileTickets {
  uint64_t arrived[kTickets];
  uint32_t tickets[kTickets + 1];  // the last is the first that a cluster takes

  // The names by which CUTLASS's kernels know a scheduler's shared memory.
  CUTLASS_DEVICE TileTickets* pipeline() { return this; }
  CUTLASS_DEVICE TileTickets* throttle_pipeline() { return nullptr; }
  CUTLASS_DEVICE TileTickets* data() { return this; }
};

// What CUTLASS's kernels call between warps. Nobody waits here: tickets are not asked for ahead, and never overwritten.
struct TicketPipeline {
  static constexpr int Stages = kTickets;
  using PipelineState = cutlass::PipelineState<Stages>;
  enum class ThreadCategory { Producer, Consumer, ProducerConsumer };
  struct Params {
    ThreadCategory role;
    uint32_t producer_blockid, producer_arv_count, consumer_arv_count, transaction_bytes, dst_blockid;
    int initializing_warp;
  };

  CUTLASS_DEVICE TicketPipeline(TileTickets* tickets, Params const&) {
    if (tickets && threadIdx.x == 0) {
      for (uint64_t& arrived : tickets->arrived) cutlass::arch::ClusterTransactionBarrier::init(&arrived, 1);
    }
    cutlass::arch::fence_barrier_init();
  }
  CUTLASS_DEVICE void producer_acquire(PipelineState const&) {}
  CUTLASS_DEVICE void producer_commit(PipelineState const&) {}
  CUTLASS_DEVICE void producer_tail(PipelineState const&) {}
  CUTLASS_DEVICE void consumer_wait(PipelineState const&) {}
  CUTLASS_DEVICE void consumer_release(PipelineState const&) {}
};

template <class ClusterShape>
class TicketScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  static constexpr bool IsDynamicPersistent = true;
  using Pipeline = TicketPipeline;
  using ThrottlePipeline = TicketPipeline;
  using SharedStorage = TileTickets;
  using CLCResponse = uint32_t;
  using WorkTileInfo = typename Base::WorkTileInfo;
  struct Arguments : Base::Arguments {
    uint32_t* tickets = nullptr;
    int16_t first[kProducts], abreast[kProducts];
  };
  struct Params : Base::Params {
    uint32_t* tickets;
    uint32_t clusters;  // for the tiles of a product
    int16_t first[kProducts], abreast[kProducts];
  };

  template <class Problem, class Tile, class Cluster, class... Rest>
  static Params to_underlying_arguments(
      Problem problem, Tile tile, Cluster cluster, cutlass::KernelHardwareInfo const& hardware, Arguments const& args,
      Rest... rest) {
    auto const base = Base::to_underlying_arguments(problem, tile, cluster, hardware, args, rest...);
    uint32_t const clusters = base.blocks_per_problem_ / kBlocks / get<3>(problem);
    Params params{base, args.tickets, clusters, {}, {}};
    for (int i = 0; i < kProducts; ++i) {
      params.first[i] = args.first[i];
      params.abreast[i] = args.abreast[i];
    }
    return params;
  }

  CUTLASS_DEVICE explicit TicketScheduler(Params const& params) : Base(params), params_(params), taken_(params.tickets) {}
  CUTLASS_DEVICE void set_data_ptr(TileTickets* tickets) { tickets_ = tickets; }

  // By all threads.
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) {
    // The pingpong kernel asks between its arrival at the cluster's barrier and its wait there.
    constexpr bool arrived = DG_SCHEDULE == DG_PINGPONG;
    if constexpr (kBlocks > 1 && arrived) cluster_wait();
    if (threadIdx.x == 0 && block_rank_in_cluster() == 0) {
      uint32_t const ticket = take_();
      if constexpr (kBlocks == 1) tickets_->tickets[kTickets] = ticket;
      for (uint32_t block = 0; kBlocks > 1 && block < kBlocks; ++block) {
        asm volatile(
            "{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; st.shared::cluster.u32 [at], %2; }" ::"r"(
                cast_smem_ptr_to_uint(&tickets_->tickets[kTickets])),
            "r"(block), "r"(ticket)
            : "memory");
      }
    }
    if constexpr (kBlocks > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      cutlass::arch::NamedBarrier::sync(blockDim.x, kBarrier);
    }
    uint32_t const ticket = tickets_->tickets[kTickets];
    if constexpr (kBlocks > 1 && arrived) cluster_arrive_relaxed();
    return tile_(ticket);
  }

  template <class State>
  CUTLASS_DEVICE State advance_to_next_work(TicketPipeline&, State const& state) {
    return state;
  }
  template <class State>
  CUTLASS_DEVICE void store_invalid_response(State const&) {}

  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const& work) { return make_tuple(work, true); }

  template <class State>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const& work, TicketPipeline&, State const& state) {
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp == kScheduling) return make_tuple(WorkTileInfo::invalid_work_tile(), true);
    if (warp == kLoading && block_rank_in_cluster() == 0) {
      if (cutlass::canonical_lane_idx() == 0) hand_out_(work.is_valid() ? take_() : kNone, state.index());
      __syncwarp();
    }
    cutlass::arch::ClusterTransactionBarrier::wait(&tickets_->arrived[state.index()], state.phase());
    return make_tuple(tile_(tickets_->tickets[state.index()]), true);
  }

 private:
  static constexpr uint32_t kBlocks = size(ClusterShape{});
  static constexpr uint32_t kNone = 0xffffffff;
  static constexpr uint32_t kBarrier = 7;
  static constexpr int kLoading = 0, kScheduling = 1;  // CUTLASS's warps

  // Every cluster takes one ticket for which there is no tile; the last one to do so leaves a zero.
  CUTLASS_DEVICE uint32_t take_() const {
    uint32_t const ticket = atomicAdd(taken_, 1u);
    uint32_t const clusters = gridDim.x * gridDim.y * gridDim.z / kBlocks;
    if (ticket == scheduler_params.blocks_per_problem_ / kBlocks + clusters - 1) atomicExch(taken_, 0u);
    return ticket;
  }

  CUTLASS_DEVICE void hand_out_(uint32_t ticket, int index) {
    if constexpr (kBlocks == 1) {
      tickets_->tickets[index] = ticket;
      cutlass::arch::ClusterBarrier::arrive(&tickets_->arrived[index]);
      return;
    }
    // Into the memory of other blocks, with what they wait for.
    uint32_t const to = cast_smem_ptr_to_uint(&tickets_->tickets[index]);
    uint32_t const arrived = cast_smem_ptr_to_uint(&tickets_->arrived[index]);
    for (uint32_t block = 0; block < kBlocks; ++block) {
      cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(
          &tickets_->arrived[index], sizeof(uint32_t), block, 1);
      asm volatile(
          "{ .reg .b32 at, arrived; mapa.shared::cluster.u32 at, %0, %2; mapa.shared::cluster.u32 arrived, %1, %2; "
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [at], %3, [arrived]; }" ::"r"(to),
          "r"(arrived), "r"(block), "r"(ticket)
          : "memory");
    }
  }

  CUTLASS_DEVICE WorkTileInfo tile_(uint32_t ticket) const {
    if (ticket < scheduler_params.blocks_per_problem_ / kBlocks) {
      uint32_t const number = ticket / params_.clusters, first = params_.first[number], abreast = params_.abreast[number];
      uint32_t const within = ticket - first * params_.clusters;
      ticket = (first + within % abreast) * params_.clusters + within / abreast;
    }
    auto const [m, n, l] = block_id_in_cluster();
    uint32_t const within = scheduler_params.raster_order_ == RasterOrder::AlongN
                                ? n * size<0>(ClusterShape{}) + m
                                : m * size<1>(ClusterShape{}) + n;
    return get_current_work_for_linear_idx(uint64_t(ticket) * kBlocks + within);
  }

  Params const& params_;
  uint32_t* taken_;
  TileTickets* tickets_ = nullptr;
};

}  // namespace distgemm

template <class Arch, class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<distgemm::HandedOut, Arch, Tile, Cluster, Stages> {
  using Scheduler = distgemm::TicketScheduler<Cluster>;
};
