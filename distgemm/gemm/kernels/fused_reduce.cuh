// Sums that are passed on from GPU to GPU, for fused.cuh: an epilogue that waits for what it adds, and tells of what it
// has stored; and tiles that are handed out, as such kernels wait for one another.

#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/pipeline/pipeline.hpp"
#include "fused.cuh"

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

// Where results have several sources, all but the last one, which `Base`, an epilogue of CUTLASS, adds by itself. They
// come by its pipeline, and buffers: first one source, subtile by subtile, then the next. The sums are multiplied by
// their factors before, as the epilogue's are 1 then.
//
// CUTLASS counts the pipelines' steps of a tile as those of one source. So further ones take a multiple of the steps
// after which a pipeline's state is what it was: the last steps are idle.
template <class Base>
struct FurtherSources {
  struct Params {
    bool any;
    float alpha;
    float const *scale_a, *scale_b;
    int16_t first[kProducts], count[kProducts];
    Further further[kProducts];
  };

  static Params params(FusedArguments const& args) {
    Params found{};
    found.any = args.adds != 0;
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

  // By the loading warp, for which `load_one` loads each.
  template <class LoadOne>
  CUTLASS_DEVICE static void load(
      Params const& params, int number, typename Base::LoadPipeline& pipeline, typename Base::LoadPipelineState& state,
      LoadOne load_one) {
    int const count = params.count[number];
    Further const* const first = params.further + params.first[number];
    for (int i = 0; i < count; ++i) load_one(first[i].word, first[i].batch);
    for (int i = idle_(count); i > 0; --i, ++state) {
      pipeline.producer_acquire(state);
      pipeline.producer_commit(state);
    }
  }

  // By those that have multiplied. `state` is where the epilogue's is, too, before and afterwards.
  template <class Accumulators, class Mma, class Storage>
  CUTLASS_DEVICE static void add(
      Params const& params, int number, typename Base::LoadPipeline& pipeline, typename Base::LoadPipelineState state,
      Accumulators& sums, Mma mma, int thread, Storage& storage) {
    float factor = params.alpha;
    if (params.scale_a) factor *= *params.scale_a;
    if (params.scale_b) factor *= *params.scale_b;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(sums); ++i) sums(i) *= factor;

    // As the epilogue takes a subtile to registers.
    using Buffers = decltype(tile_to_shape(
        typename Base::SmemLayoutAtomC{}, append<3>(shape(Subtile{}), Int<kStages>{}), Step<_1, _2, _3>{}));
    Tensor buffers = cute::as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(storage.collective.smem_C.begin()), Buffers{}));
    auto const atom = make_tiled_copy_C_atom(typename Base::CopyAtomC{}, mma);
    auto const results = make_tiled_copy_S(Copy_Atom<typename Base::CopyOpR2S, typename Base::ElementD>{}, atom);
    auto const sources = make_tiled_copy_S(Copy_Atom<typename Base::CopyOpS2R, Element>{}, atom);
    auto const mine = results.get_slice(thread);
    auto const from = sources.get_slice(thread);
    Tensor there = from.partition_S(buffers);  // (copy, m, n, stage)
    Tensor loaded = make_tensor<Element>(shape(mine.partition_S(make_identity_tensor(shape(Subtile{})))));
    Tensor here = from.retile_D(loaded);
    Tensor held = mine.retile_S(sums);  // (copy, m, n) of multiplications
    constexpr int mma_n = size<1>(Tile{}) / size<2>(held), per_mma = mma_n / kWidth;
    static_assert(size<0>(Tile{}) / size<1>(held) == kHeight && mma_n % kWidth == 0, "a subtile is a part of one");

    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = params.count[number]; i > 0; --i) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < size<1>(Tile{}) / kWidth; ++n) {
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < size<0>(Tile{}) / kHeight; ++m) {
          pipeline.consumer_wait(state);
          copy(sources, there(_, _, _, state.index()), here);
          release_(pipeline, state);
          Tensor summed = held(_, m, n / per_mma);
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < size(loaded); ++e) summed(n % per_mma * size(loaded) + e) += float(loaded(e));
        }
      }
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = idle_(params.count[number]); i > 0; --i) {
      pipeline.consumer_wait(state);
      release_(pipeline, state);
    }
  }

 private:
  using Element = typename Base::ElementC;
  using Subtile = typename Base::EpilogueTile;
  static constexpr int kHeight = size<0>(Subtile{}), kWidth = size<1>(Subtile{});
  static constexpr int kStages = Base::DispatchPolicy::StagesC;
  static constexpr int kSteps = Base::get_load_pipe_increment(Tile{});  // of one source

  CUTLASS_DEVICE static int idle_(int count) {
    constexpr int period = 2 * kStages;
    return (period - count * kSteps % period) % period;
  }

  CUTLASS_DEVICE static void release_(
      typename Base::LoadPipeline& pipeline, typename Base::LoadPipelineState& state) {
    cutlass::arch::fence_view_async_shared();  // what is read is not overwritten
    pipeline.consumer_release(state);
    ++state;
  }
};

// An epilogue whose loading warp waits for a product's source, and that tells, once all of a product is stored, so.
// Results lie here or elsewhere; those elsewhere are without bias, aux and further sources.
template <class Base>
class PassingEpilogue : public Base {
 public:
  using Sources = FurtherSources<Base>;
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
      : Base(params, storage), params_(params), elsewhere_(params.elsewhere, storage), storage_(storage) {}

  template <class Pipeline, class State, class Problem, class Block, class Coord, class... Rest>
  CUTLASS_DEVICE auto load(
      Pipeline pipeline, State state, Problem const& problem, Block block, Coord const& coord, Rest&&... rest) {
    auto [m, n, k, number] = coord;
    Result const& result = params_.results[number];
    bool const waits = opened_.add(number);
    auto const load_one = [&](uint64_t word, int32_t batch) {
      if (waits && word && elect_one_sync()) wait_for(word);
      state = Base::load(pipeline, state, problem, block, make_coord(m, n, k, batch), rest...);
    };
    Sources::load(params_.sources, number, pipeline, state, load_one);
    load_one(result.source_word, result.source);
    return state;
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
      Sources::add(params_.sources, number, load, load_state, sums, mma, thread, storage_);
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
  typename Base::TensorStorage& storage_;
  Numbers opened_;  // products for whose sources have been waited
  bool entered_ = false;
};

// ---------------------------------------------------------------- tiles that are handed out

// TurnScheduler's tiles, to whoever comes first. Where products wait for other GPUs' kernels, which wait for this one, no
// tile may belong to a thread block that is not resident: blocks of other kernels, which wait for other GPUs too, may hold
// its SM. Of a cluster, the warp that loads takes a ticket when it has no more to load, and tells all blocks.
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
class TicketScheduler : public TurnScheduler<ClusterShape> {
  using Base = TurnScheduler<ClusterShape>;
  using Base::kBlocks;

 public:
  static constexpr bool IsDynamicPersistent = true;
  using Pipeline = TicketPipeline;
  using ThrottlePipeline = TicketPipeline;
  using SharedStorage = TileTickets;
  using CLCResponse = uint32_t;
  using WorkTileInfo = typename Base::WorkTileInfo;
  struct Arguments : Base::Arguments {
    uint32_t* tickets = nullptr;
  };
  struct Params : Base::Params {
    uint32_t* tickets;
  };

  template <class Problem, class Tile, class Cluster, class... Rest>
  static Params to_underlying_arguments(
      Problem problem, Tile tile, Cluster cluster, cutlass::KernelHardwareInfo const& hardware, Arguments const& args,
      Rest... rest) {
    return {Base::to_underlying_arguments(problem, tile, cluster, hardware, args, rest...), args.tickets};
  }

  CUTLASS_DEVICE explicit TicketScheduler(Params const& params) : Base(params), taken_(params.tickets) {}
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
    return this->tile_(ticket);
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
    return make_tuple(this->tile_(tickets_->tickets[state.index()]), true);
  }

 private:
  static constexpr uint32_t kNone = 0xffffffff;
  static constexpr uint32_t kBarrier = 7;
  static constexpr int kLoading = 0, kScheduling = 1;  // CUTLASS's warps

  // Every cluster takes one ticket for which there is no tile; the last one to do so leaves a zero.
  CUTLASS_DEVICE uint32_t take_() const {
    uint32_t const ticket = atomicAdd(taken_, 1u);
    if (ticket == this->scheduler_params.blocks_per_problem_ / kBlocks + this->clusters_() - 1) atomicExch(taken_, 0u);
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

  uint32_t* taken_;
  TileTickets* tickets_ = nullptr;
};

}  // namespace distgemm

template <class Arch, class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<distgemm::HandedOut, Arch, Tile, Cluster, Stages> {
  using Scheduler = distgemm::TicketScheduler<Cluster>;
};
