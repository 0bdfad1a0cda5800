// GEMMs that add partial sums and set flags when results are stored, for fused.cuh: an epilogue that waits for the
// sums, and a dynamic tile scheduler, which kernels that wait for each other need.

#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/pipeline.hpp"
#include "epilogue.cuh"
#include "fused.cuh"

namespace distgemm {

using namespace cute;

// Adds all partial sums of a product but the last, which `Base`, CUTLASS's epilogue, adds. They arrive through the
// epilogue's load pipeline and shared memory, one partial sum after the other, subtile by subtile. The accumulators are
// multiplied by alpha and the scales before, and the epilogue's factors are then 1.
//
// CUTLASS advances a pipeline's state per tile by the steps of one source. So the steps of all addends are rounded up
// to a multiple of the pipeline's period, after which its state is the same again; the additional steps load nothing.
template <class Base>
struct AddendPipeline {
  struct Params {
    int32_t any;  // 0: no product has addends
    float alpha;
    float const *scale_a, *scale_b;
    int16_t first[kProducts], count[kProducts];  // for each product, its range of `addends`
    Addend addends[kProducts];
  };

  // The loading warp calls it. `load_one` waits for the flag of one addend and loads it.
  template <class LoadOne>
  CUTLASS_DEVICE static void load(
      Params const& params, int number, typename Base::LoadPipeline& pipeline, typename Base::LoadPipelineState& state,
      LoadOne load_one) {
    int const count = params.count[number];
    Addend const* const first = params.addends + params.first[number];
    for (int i = 0; i < count; ++i) load_one(first[i].flag, first[i].batch);
    for (int i = padding_(count); i > 0; --i, ++state) {
      pipeline.producer_acquire(state);
      pipeline.producer_commit(state);
    }
  }

  // The consumer warps call it before the epilogue. `state` is the epilogue's pipeline state, which is the same
  // afterwards.
  template <class Accumulators, class Storage>
  CUTLASS_DEVICE static void add(
      Params const& params, int number, typename Base::LoadPipeline& pipeline, typename Base::LoadPipelineState state,
      Accumulators& sums, int thread, Storage& storage) {
    float factor = params.alpha;
    if (params.scale_a) factor *= *params.scale_a;
    if (params.scale_b) factor *= *params.scale_b;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(sums); ++i) sums(i) *= factor;

    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = params.count[number]; i > 0; --i) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < Base::kAcross; ++n) {
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < Base::kDown; ++m) {
          pipeline.consumer_wait(state);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Base::kValues; i += Base::kPiece) {
            typename Base::Piece values;
            Base::read_source(storage, state.index(), thread, i, values);
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < Base::kPiece; ++j) Base::accumulator(sums, m, n, i + j) += values[j];
          }
          release_(pipeline, state);
        }
      }
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = padding_(params.count[number]); i > 0; --i) {
      pipeline.consumer_wait(state);
      release_(pipeline, state);
    }
  }

 private:
  static constexpr int kStages = Base::kSourceStages;
  static constexpr int kSteps = Base::kDown * Base::kAcross;  // of one addend

  // Pipeline steps without data, after those of so many addends.
  CUTLASS_DEVICE static int padding_(int count) {
    constexpr int period = 2 * kStages;
    return (period - count * kSteps % period) % period;
  }

  CUTLASS_DEVICE static void release_(
      typename Base::LoadPipeline& pipeline, typename Base::LoadPipelineState& state) {
    cutlass::arch::fence_view_async_shared();  // the reads come before the next load into the buffer
    pipeline.consumer_release(state);
    ++state;
  }
};

// An epilogue that adds partial sums and sets flags. Its loading warp waits for the flag of each partial sum. The warp
// that stores the last tile of a product sets the product's done flag. Results are local or remote. Remote results have
// no bias, no aux and no addends.
template <class Base>
class ReducingEpilogue : public Base {
 public:
  using Addends = AddendPipeline<Base>;
  struct Params : Base::Params {
    typename Base::Params remote;
    Counters counters;
    uint32_t tiles;           // of a product, with those outside of D that complete clusters
    int32_t waits_for_start;  // 0: remote memory may be written
    Result results[kProducts];
    typename Addends::Params addends;
  };
  using Arguments = Params;

  template <class Storage>
  CUTLASS_HOST_DEVICE ReducingEpilogue(Params const& params, Storage& storage)
      : Base(params, storage), params_(params), remote_(params.remote, storage), storage_(storage) {}

  template <class Pipeline, class State, class Problem, class Block, class Coord, class... Rest>
  CUTLASS_DEVICE auto load(
      Pipeline pipeline, State state, Problem const& problem, Block block, Coord const& coord, Rest&&... rest) {
    int32_t const number = get<3>(coord);
    Result const& result = params_.results[number];
    bool const waits = waited_.insert(number);
    auto const load_one = [&](uint64_t flag, int32_t batch) {
      if (waits && flag && elect_one_sync()) wait_for(flag);
      auto const at = make_coord(get<0>(coord), get<1>(coord), get<2>(coord), batch);
      state = Base::load(pipeline, state, problem, block, at, rest...);
    };
    Addends::load(params_.addends, number, pipeline, state, load_one);
    load_one(result.source_flag, result.source_batch);
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
    if (params_.addends.any && result.batch >= 0) {
      // The accumulators are variables of CUTLASS's kernel, which zeroes them before the next tile.
      auto& sums = const_cast<Accumulators&>(accumulators);
      Addends::add(params_.addends, number, load, load_state, sums, thread, storage_);
    }
    if (result.batch < 0 && !started_) {
      if (params_.waits_for_start && thread < cutlass::NumThreadsPerWarp && elect_one_sync()) {
        Handshake::wait_for_start(params_.counters);
      }
      __syncwarp();
      started_ = true;
    }
    // Each tile waits for its own stores (store_tail): the next tile may be stored by the other of the two epilogues.
    auto const store_by = [&](Base& epilogue, int32_t batch) {
      auto const states = epilogue.store(
          load, load_state, store, store_state, problem, block,
          make_coord(get<0>(coord), get<1>(coord), get<2>(coord), batch), accumulators, mma, thread,
          static_cast<Rest&&>(rest)...);
      return epilogue.store_tail(load, get<0>(states), store, get<1>(states));
    };
    auto const states = result.batch >= 0 ? store_by(*this, result.batch) : store_by(remote_, ~result.batch);
    if (result.done_flag && thread < cutlass::NumThreadsPerWarp) finish_(result.done_flag, number);
    return states;
  }

  template <class Load, class LoadState, class Store, class StoreState>
  CUTLASS_DEVICE auto store_tail(Load, LoadState load_state, Store, StoreState store_state) {
    return make_tuple(load_state, store_state);
  }

 private:
  // The warp that issued the stores calls it.
  CUTLASS_DEVICE void finish_(uint64_t flag, int32_t number) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
    uint32_t* counter = params_.counters + number;
    if (elect_one_sync() && increment(counter) == params_.tiles) set_flag(counter, flag);
    __syncwarp();
  }

  Params const& params_;
  Base remote_;
  typename Base::TensorStorage& storage_;
  ProductSet waited_;  // products whose partial sums have arrived
  bool started_ = false;
};

// ---------------------------------------------------------------- the dynamic tile scheduler

// The tag by which CUTLASS selects TicketScheduler.
struct TicketTiles {};

// A cluster's tickets. A ticket is the number of a tile, taken from a counter in global memory.
struct TileTickets {
  uint64_t arrived[kTickets];
  uint32_t tickets[kTickets + 1];  // a ring; behind it the first ticket that the cluster takes

  // The functions that CUTLASS's kernels call on a scheduler's shared memory.
  CUTLASS_DEVICE TileTickets* pipeline() { return this; }
  CUTLASS_DEVICE TileTickets* throttle_pipeline() { return nullptr; }
  CUTLASS_DEVICE TileTickets* data() { return this; }
};

// CUTLASS's kernels want a pipeline between the scheduler's warp and the others. This one does nothing: tickets are not
// taken ahead, and none is overwritten before it is read.
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

// InterleavedScheduler's tiles, each computed by the first cluster that is free. Products wait for kernels of other
// GPUs, and those for this kernel. So no tile may belong to a thread block that is not resident: its SM may be occupied
// by a block of another kernel that waits, too. The loading warp of a cluster's first block takes a ticket when it has
// no more to load, and passes it to all warps of all blocks of the cluster.
template <class ClusterShape>
class TicketScheduler : public InterleavedScheduler<ClusterShape> {
  using Base = InterleavedScheduler<ClusterShape>;
  using Base::kBlocks;

 public:
  static constexpr bool IsDynamicPersistent = true;
  using Pipeline = TicketPipeline;
  using ThrottlePipeline = TicketPipeline;
  using SharedStorage = TileTickets;
  using CLCResponse = uint32_t;
  using WorkTileInfo = typename Base::WorkTileInfo;
  struct Params : Base::Params {
    Counters counters;
  };

  CUTLASS_DEVICE explicit TicketScheduler(Params const& params) : Base(params), counter_(params.counters + kProducts) {}
  CUTLASS_DEVICE void set_data_ptr(TileTickets* tickets) { tickets_ = tickets; }

  // All threads call it.
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) {
    // The pingpong kernel calls this function between its arrival at the cluster's barrier and its wait there.
    constexpr bool arrived = DG_SCHEDULE == DG_PINGPONG;
    if constexpr (kBlocks > 1 && arrived) cluster_wait();
    if (threadIdx.x == 0 && block_rank_in_cluster() == 0) {
      uint32_t const ticket = take_ticket_();
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
    if (warp == kSchedulerWarp) return make_tuple(WorkTileInfo::invalid_work_tile(), true);
    if (warp == kLoadWarp && block_rank_in_cluster() == 0) {
      if (cutlass::canonical_lane_idx() == 0) pass_on_(work.is_valid() ? take_ticket_() : kNone, state.index());
      __syncwarp();
    }
    cutlass::arch::ClusterTransactionBarrier::wait(&tickets_->arrived[state.index()], state.phase());
    return make_tuple(this->tile_(tickets_->tickets[state.index()]), true);
  }

 private:
  static constexpr uint32_t kNone = 0xffffffff;
  static constexpr uint32_t kBarrier = 7;
  static constexpr int kLoadWarp = 0, kSchedulerWarp = 1;  // of CUTLASS's kernel

  // Every cluster takes one ticket beyond the last tile. The last cluster to do so sets the counter to 0.
  CUTLASS_DEVICE uint32_t take_ticket_() const {
    uint32_t const ticket = atomicAdd(counter_, 1u);
    uint64_t const last = this->scheduler_params.blocks_per_problem_ / kBlocks + this->clusters_() - 1;
    if (ticket == last) atomicExch(counter_, 0u);
    return ticket;
  }

  CUTLASS_DEVICE void pass_on_(uint32_t ticket, int index) {
    if constexpr (kBlocks == 1) {
      tickets_->tickets[index] = ticket;
      cutlass::arch::ClusterBarrier::arrive(&tickets_->arrived[index]);
      return;
    }
    // Writes the ticket to each block's shared memory, and completes the barrier that the block waits at.
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

  uint32_t* counter_;
  TileTickets* tickets_ = nullptr;
};

}  // namespace distgemm

template <class Arch, class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<distgemm::TicketTiles, Arch, Tile, Cluster, Stages> {
  using Scheduler = distgemm::TicketScheduler<Cluster>;
};
