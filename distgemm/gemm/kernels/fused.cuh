// Several products by one kernel, for kernel.cu. To CUTLASS they are the mode L, of which tiles are taken in turn.
//
// Either their operands are waited for, and this rank's are sent to others (DG_OPERANDS); or partial sums are, which the
// products add, and others are told of results (DG_RESULTS), or finished ones are sent on, too (DG_DELIVERIES). FlagOps in
// memory say what has come. The kernel also does, if told so, what ranks say to each other before and behind a replay.

#pragma once

#include <cstdint>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "flags.cuh"

namespace distgemm {

using namespace cute;

constexpr int kProducts = 128;
constexpr int kSends = 128;
constexpr int kTickets = 32;
constexpr int kCounters = 2048;
constexpr int kCopyingWarps = DG_FUSED == DG_DELIVERIES ? 2 : DG_SENDS ? 1 : 0;  // of those that CUTLASS leaves idle

// One of several products, in parts, by who reads them. A word is an address: 0 where nobody waits, else it becomes 1. Of
// what lies in two memories, ~batch is one of the other memory.
struct Operand {
  uint64_t word;   // says that A (or B) has come; the words behind it that further slices have
  int32_t batch;   // of the operand that moves
  int16_t other;   // batch of the other one, which is there
  int16_t sliced;  // 0 where the operand that is waited for comes as a whole
};
struct Result {
  uint64_t source_word;  // says that the source has come
  uint64_t word;         // is told that the result is stored
  int32_t source;        // batch of the source; behind the last: there is none
  int32_t batch;         // of D
};
struct Product {
  Operand operand;
  Result result;
  int16_t first;  // tiles of so many products from this one on are computed in turn
  int16_t tile_interleave;
  int16_t further;  // so many further sources from this one on
  int16_t sources;
};
// A source of a result beside the one that CUTLASS's epilogue loads.
struct Further {
  uint64_t word;  // says that it has come
  int32_t batch;
};

// Rows of a matrix that go to another place, slice by slice, each of so many bytes of every row. When all of a slice is
// there, its word becomes 1: the words of the slices follow one another. Of sends tile_interleave, which differ in rows at most,
// the first slices leave first, then the second ones.
struct Send {
  uint64_t source, target;
  uint64_t word;     // 0: nobody is told
  uint64_t awaited;  // a word that says that the source has come; 0: it is there
  int64_t source_pitch, target_pitch;  // bytes from row to row
  uint32_t rows, row_bytes, slice_bytes;
  uint32_t counter;  // the number of its first slice's
  int16_t first;     // slices of so many sends from this one on leave in turn
  int16_t tile_interleave;
};

// Several products; `base` describes one of them, with the number of products as `l`.
struct FusedArguments {
  Arguments base;
  Matrix operand_elsewhere, d_elsewhere;
  int32_t moving;  // 0 if A moves, 1 if B does; the other one is one of so many others
  int32_t operands_here, operands_elsewhere, others, sources, results_here, results_elsewhere;
  int32_t slice;       // elements of k in a slice of an operand that is waited for, each with a word; a multiple of a tile's
  uint32_t* counters;  // zeros, which are zeros again afterwards: of each product, and tickets, where sums are passed on;
                       // then tickets of pieces, and of each slice sent; the last are a Passage's and, never zero
                       // again, a Pace's
  uint32_t pace;       // of what goes to other GPUs, picoseconds for each KiB
  FlagOps entry, exit;   // of a replay: its first phase comes before anything is written at a peer; and behind all else
  Product products[kProducts];
  int32_t adds;  // whether there are further sources
  Further further[kProducts];
  uint64_t opens;      // a word that says that something may be sent; 0: it may, behind the entry
  int32_t sent, taken;  // how many sends cross a link; how many behind them do not
  Send sends[kSends];
};

// ---------------------------------------------------------------- several products that wait for their operands

CUTLASS_DEVICE bool has_come(uint64_t word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value == 1;
}

// Of what has come, which was written by others than TMA, before TMA reads it.
CUTLASS_DEVICE void fence_for_tma() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

CUTLASS_DEVICE void wait_for(uint64_t word) {
  while (!has_come(word)) continue;
  fence_for_tma();
}

// How many have counted, this one included.
CUTLASS_DEVICE uint32_t count(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before + 1;
}

// By the last one, for whom all is there that the others have written before they counted: leaves a zero for the next
// launch, and tells who waits.
CUTLASS_DEVICE void tell(uint32_t* counter, uint64_t word) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(counter) : "memory");
  asm volatile("st.relaxed.sys.global.u32 [%0], 1;" ::"l"(word) : "memory");
}

CUTLASS_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Turns on the link to other GPUs. Stores that come faster than it takes them fill the queues of this GPU, in which its
// loads then stand, too: a main loop beside them gets as little as a fourteenth of its data. So each waits for its turn.
struct Pace {
  static constexpr int kTurns = kCounters - 6;        // at a multiple of 8 bytes
  static constexpr uint64_t kFine = 8;                // turns are counted in eighths of a nanosecond
  static constexpr uint64_t kLongest = 1'000'000'000;  // no turn is so many nanoseconds ahead, unless a clock was put back

  uint64_t* free;    // when the last turn that was taken ends
  uint32_t per_kib;  // picoseconds; 0: nobody waits

  static CUTLASS_HOST_DEVICE Pace of(uint32_t* counters, uint32_t per_kib) {
    return {reinterpret_cast<uint64_t*>(counters + kTurns), per_kib};
  }

  // When the turn of so many bytes begins; for who asks now.
  CUTLASS_DEVICE uint64_t take(uint32_t bytes) const {
    if (!per_kib) return 0;
    auto* const at = reinterpret_cast<unsigned long long*>(free);
    uint64_t const now = nanoseconds();
    atomicMax(at, now * kFine);
    uint64_t const turn = atomicAdd(at, fine_(bytes)) / kFine;
    if (turn < now + kLongest) return turn;
    atomicExch(at, now * kFine);
    return now;
  }

  // When so many others of as many bytes have had their turn, if all begin now.
  CUTLASS_DEVICE uint64_t after(uint32_t others, uint32_t bytes) const {
    return per_kib ? nanoseconds() + others * fine_(bytes) / kFine : 0;
  }

  static CUTLASS_DEVICE void wait_until(uint64_t turn) {
    while (nanoseconds() < turn) continue;
  }

 private:
  CUTLASS_DEVICE uint64_t fine_(uint32_t bytes) const { return bytes * kFine * per_kib / (1024 * 1000); }
};

// How a kernel enters a replay while it multiplies already, and leaves it with its last thread block. An idle warp of
// each block, 3, all that copy, and the first of each group that multiplies take part.
struct Passage {
  static constexpr int kBegun = kCounters - 3, kEnded = kCounters - 2, kOpen = kCounters - 1;
  static constexpr int kCopying = kCopyingWarps > 1 ? kCopyingWarps : 1;  // warps of a block that take part besides

  FlagOps entry, exit;  // without phases: nothing to be done. Peers can be written behind the first phase of the entry
  uint32_t* counters;

  // The word that is 1 once peers can be written; 0 where they can be from the beginning.
  CUTLASS_HOST_DEVICE uint64_t open() const {
    return entry.phases ? reinterpret_cast<uint64_t>(counters + kOpen) : 0;
  }

  // By the idle warp; the first one to come does it, for its block is resident.
  CUTLASS_DEVICE void enter() const {
    if (!entry.phases) return;
    bool const first = cutlass::canonical_lane_idx() == 0 && atomicAdd(counters + kBegun, 1u) == 0;
    if (!__shfl_sync(0xffffffff, first, 0)) return;
    perform(entry, 0, 1);
    if (cutlass::canonical_lane_idx() == 0) {
      asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(counters + kOpen) : "memory");
    }
    perform(entry, 1, entry.phases);
  }

  // By each of these warps, with nothing left to do; the last one to come does it.
  CUTLASS_DEVICE void leave() const {
    if (!exit.phases) return;
    uint32_t const lane = cutlass::canonical_lane_idx();
    uint32_t const groups = blockDim.x / cutlass::NumThreadsPerWarpGroup - 1;  // that multiply
    uint32_t const warps = gridDim.x * gridDim.y * gridDim.z * (groups + kCopying);
    __syncwarp();
    bool last = false;
    if (lane == 0) {
      last = count(counters + kEnded) == warps;
      asm volatile("fence.acq_rel.sys;" ::: "memory");
    }
    if (!__shfl_sync(0xffffffff, last, 0)) return;
    if (lane < 3) asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(counters + kBegun + lane) : "memory");
    __syncwarp();
    perform(exit, 0, exit.phases);
  }
};

// Numbers of products.
class Numbers {
 public:
  // Whether it was not among them.
  CUTLASS_DEVICE bool add(int32_t number) {
    bool const low = number < 64;
    uint64_t const bit = uint64_t(1) << number % 64, before = low ? low_ : high_;
    if (low) {
      low_ |= bit;
    } else {
      high_ |= bit;
    }
    return !(before & bit);
  }

 private:
  static_assert(kProducts <= 128);
  uint64_t low_ = 0, high_ = 0;
};

// Tiles of products that are tile_interleave in turn, others product by product. So those that are multiplied by the same part of
// the operand that they share do so at the same time, and it is read once.
struct InTurn {};

template <class ClusterShape>
class TurnScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  using WorkTileInfo = typename Base::WorkTileInfo;
  struct Turns {
    int16_t first[kProducts], tile_interleave[kProducts];
  };
  struct Arguments : Base::Arguments {
    Turns turns;
  };
  struct Params : Base::Params {
    uint32_t clusters;  // for the tiles of a product
    Turns turns;
  };

  template <class Problem, class Tile, class Cluster, class... Rest>
  static Params to_underlying_arguments(
      Problem problem, Tile tile, Cluster cluster, cutlass::KernelHardwareInfo const& hardware, Arguments const& args,
      Rest... rest) {
    auto const base = Base::to_underlying_arguments(problem, tile, cluster, hardware, args, rest...);
    return {base, uint32_t(base.blocks_per_problem_ / kBlocks / get<3>(problem)), args.turns};
  }

  CUTLASS_DEVICE explicit TurnScheduler(Params const& params) : Base(params), params_(params) {
    uint32_t const block = params.raster_order_ == RasterOrder::AlongN ? blockIdx.x + blockIdx.y * gridDim.x
                                                                      : blockIdx.x * gridDim.y + blockIdx.y;
    next_ = block / kBlocks;
  }

  // The names by which CUTLASS's kernels know a scheduler's functions.
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) { return get_current_work(); }
  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return tile_(next_); }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { next_ += count * clusters_(); }

  template <class... Rest>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const&, Rest const&...) {
    advance_to_next_work();
    return make_tuple(get_current_work(), true);
  }
  bool is_last_tile(...) const = delete;  // CUTLASS's would look at its own order

 protected:
  static constexpr uint32_t kBlocks = size(ClusterShape{});

  // That are resident, all of them.
  CUTLASS_DEVICE static uint32_t clusters_() { return gridDim.x * gridDim.y * gridDim.z / kBlocks; }

  // This block's tile of those that a cluster computes, by their number.
  CUTLASS_DEVICE WorkTileInfo tile_(uint32_t number) const {
    if (number < scheduler_params.blocks_per_problem_ / kBlocks) {
      uint32_t const product = number / params_.clusters;
      uint32_t const first = params_.turns.first[product], tile_interleave = params_.turns.tile_interleave[product];
      uint32_t const within = number - first * params_.clusters;
      number = (first + within % tile_interleave) * params_.clusters + within / tile_interleave;
    }
    auto const [m, n, l] = block_id_in_cluster();
    uint32_t const block = scheduler_params.raster_order_ == RasterOrder::AlongN
                               ? n * size<0>(ClusterShape{}) + m
                               : m * size<1>(ClusterShape{}) + n;
    return get_current_work_for_linear_idx(uint64_t(number) * kBlocks + block);
  }

  Params const& params_;

 private:
  uint32_t next_;
};

// A main loop whose loading warp, before the first load of a product, or of a slice of it, waits for its word. Nobody else
// does: the others wait for what it loads.
template <class Base>
class GatedMainloop : public Base {
  // The warp that loads is ahead of others by its stages at most, each way through a cluster, and a tile or two.
  static constexpr int kWays = DG_CLUSTER_M > 1 && DG_CLUSTER_N > 1 ? 2 : 1;
  static_assert(!DG_PASSES || Base::DispatchPolicy::Stages * kWays + 3 < kTickets);

 public:
  struct Params : Base::Params {
    typename Base::Params elsewhere;
    int32_t moving;
    int32_t slice_tiles;  // along k
    Operand operands[kProducts];
  };
  using Arguments = Params;

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const&, Arguments const& args, void*) {
    return args;
  }

  template <class Pipeline, class State, class Inputs, class Coord, class Steps, class... Rest>
  CUTLASS_DEVICE void load(
      Params const& params, Pipeline pipeline, State state, Inputs const& inputs, Coord const& coord, Steps steps,
      int count, Rest&&... rest) {
    auto [m, n, k, number] = coord;
    Operand const& operand = params.operands[number];
    bool const waits = operand.word && opened_.add(number);
    bool const here = operand.batch >= 0;
    int32_t const batch = here ? operand.batch : ~operand.batch;
    // What the coordinate says is batch 0.
    Tensor a = shifted_(get<0>(inputs), params.moving == 0 ? batch : operand.other);
    Tensor b = shifted_(get<1>(inputs), params.moving == 0 ? operand.other : batch);
    typename Base::Params const& from = here ? static_cast<typename Base::Params const&>(params) : params.elsewhere;
    int const at_once = waits && operand.sliced ? params.slice_tiles : count;
    uint64_t word = operand.word;
    for (int rest_of_k = count; rest_of_k > 0; rest_of_k -= at_once, word += sizeof(uint32_t)) {
      int const now = rest_of_k < at_once ? rest_of_k : at_once;
      if (waits && elect_one_sync()) wait_for(word);
      Base::load(
          from, pipeline, state, make_tuple(a, b), make_coord(m, n, k, 0), steps, now, static_cast<Rest&&>(rest)...);
      state.advance(now);
      for (int i = 0; i < now; ++i) ++steps;
    }
  }

 private:
  template <class Tiles>
  CUTLASS_DEVICE static auto shifted_(Tiles const& tiles, int32_t batch) {
    return domain_offset(make_coord(_0{}, _0{}, _0{}, _0{}, batch), tiles);
  }

  Numbers opened_;  // products for whose operands has been waited
};

// An epilogue that looks up where a product's result belongs.
template <class Base>
class GatedEpilogue : public Base {
 public:
  struct Arguments : Base::Arguments {
    int32_t results[kProducts];
  };
  struct Params : Base::Params {
    int32_t results[kProducts];
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args, void* workspace) {
    Params params{Base::to_underlying_arguments(problem, args, workspace), {}};
    for (int i = 0; i < kProducts; ++i) params.results[i] = args.results[i];
    return params;
  }

  template <class Storage>
  CUTLASS_HOST_DEVICE GatedEpilogue(Params const& params, Storage& storage) : Base(params, storage), params_(params) {}

  template <class Pipeline, class State, class Problem, class Block, class Coord, class... Rest>
  CUTLASS_DEVICE auto load(
      Pipeline pipeline, State state, Problem const& problem, Block block, Coord const& coord, Rest&&... rest) {
    return Base::load(pipeline, state, problem, block, place_(coord), static_cast<Rest&&>(rest)...);
  }

  template <
      class Load, class LoadState, class Store, class StoreState, class Problem, class Block, class Coord, class... Rest>
  CUTLASS_DEVICE auto store(
      Load load, LoadState load_state, Store store, StoreState store_state, Problem const& problem, Block block,
      Coord const& coord, Rest&&... rest) {
    return Base::store(
        load, load_state, store, store_state, problem, block, place_(coord), static_cast<Rest&&>(rest)...);
  }

 private:
  template <class Coord>
  CUTLASS_DEVICE auto place_(Coord const& coord) const {
    return make_coord(get<0>(coord), get<1>(coord), get<2>(coord), params_.results[get<3>(coord)]);
  }

  Params const& params_;
};

// ---------------------------------------------------------------- copies by warps that have nothing else to do

// Copies of all sends by one warp of each thread block, through shared memory; of what crosses no link, by another one.
// Pieces are taken in order, by whoever comes first: so they all leave, and in this order, however many blocks are
// resident. Whoever has taken a piece of what has not come yet waits for it: what is awaited must not need a later one.
class Sender {
  static constexpr int kQueues = 2, kCountersAt = DG_PASSES ? kProducts + 1 : 0;

 public:
  static constexpr uint32_t kPart = 4096;  // bytes at most, of a piece, that go through one buffer
  static constexpr int kParts = 4;
  static constexpr uint32_t kUnit = 2048;  // of a part, that one thread moves
  static constexpr uint32_t kPoll = 200;   // nanoseconds from one look at a word to the next

  struct Storage {
    alignas(128) uint8_t buffers[kParts][kPart];
    alignas(8) uint64_t arrived[kParts];
  };

  // Sends from one on up to another.
  struct Queue {
    int32_t begin, end;
    uint32_t pieces;
  };
  struct Params {
    Queue queues[kQueues];       // what crosses a link, and what does not
    Pace pace;                   // of the former
    uint64_t opens;              // the word that says that others' memory can be written; 0: it can
    uint32_t* counters;          // pieces taken of each queue; then of each slice of each send, pieces stored
    uint32_t first[kSends];      // of each send, the first piece of it and those tile_interleave
    uint32_t per_slice[kSends];  // pieces; where those tile_interleave have fewer rows, their last ones are empty
    Send sends[kSends];
  };

  static Params params(FusedArguments const& args) {
    Params found{};
    found.counters = args.counters + kCountersAt;
    found.pace = Pace::of(args.counters, args.pace);
    found.queues[0] = {0, args.sent, 0};
    found.queues[1] = {args.sent, args.sent + args.taken, 0};
    for (Queue& queue : found.queues) {
      for (int i = queue.begin; i < queue.end; ++i) {
        Send const& send = found.sends[i] = args.sends[i];
        uint32_t most = 0;
        for (int j = send.first; j < send.first + send.tile_interleave; ++j) most = cute::max(most, pieces_(args.sends[j]));
        found.first[i] = i == send.first ? queue.pieces : found.first[send.first];
        found.per_slice[i] = most;
        if (i == send.first) queue.pieces += slices_(send) * most * send.tile_interleave;
      }
    }
    return found;
  }

  CUTLASS_DEVICE Sender(Params const& params, int queue, Storage& storage)
      : params_(params),
        queue_(params.queues[queue]),
        tickets_(params.counters + queue),
        pace_{params.pace.free, queue == 0 ? params.pace.per_kib : 0},
        storage_(storage),
        lane_(cutlass::canonical_lane_idx()) {}

  CUTLASS_DEVICE void operator()() {
    if (!queue_.pieces) return;
    if (params_.opens && elect_one_sync()) wait_for(params_.opens);
    __syncwarp();
    if (lane_ == 0) {
      for (int i = 0; i < kParts; ++i) Arrival::init(&storage_.arrived[i], cutlass::NumThreadsPerWarp);
    }
    cutlass::arch::fence_barrier_init();
    __syncwarp();
    uint32_t taken = everyone_(take_());
    Piece now = piece_(taken);
    await_(now, taken);
    uint64_t turn = begin_(now, taken);
    // Blocks that begin at once ask for turns in another order than for pieces. So that pieces leave in order, the turns
    // of the first ones, one for each block, go by their numbers.
    if (turn && taken < gridDim.x * gridDim.y * gridDim.z) turn = pace_.after(taken, kParts * kPart);
    for (uint32_t phase = 0; taken < queue_.pieces; phase ^= 1) {
      Pace::wait_until(turn);
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kParts; ++i) {
        Arrival::wait(&storage_.arrived[i], phase);
        store_(now, i);
      }
      // Not earlier: who comes late would find that others have taken what is needed first, and not begun with it.
      taken = everyone_(take_());
      Piece const next = piece_(taken);
      bool const come = come_(next, taken);
      if (come) turn = begin_(next, taken);
      count_(now);  // peers wait for it: not behind what this one waits for
      if (!come) {
        await_(next, taken);
        turn = begin_(next, taken);
      }
      now = next;
    }
    // Every block has taken one piece that there is not; the last one to do so leaves a zero.
    if (lane_ == 0 && taken == queue_.pieces + gridDim.x * gridDim.y * gridDim.z - 1) atomicExch(tickets_, 0u);
  }

 private:
  using Arrival = cutlass::arch::ClusterTransactionBarrier;

  // Units of a slice, from `unit` on: one for each thread of the warp, as far as they fit into a buffer; then more.
  struct Piece {
    int32_t send;
    uint32_t slice, unit;
  };
  // A part of a row.
  struct Unit {
    uint32_t row, column, bytes;
  };

  CUTLASS_HOST_DEVICE static uint32_t unit_bytes_(Send const& send) {
    return send.slice_bytes < kUnit ? send.slice_bytes : kUnit;
  }
  CUTLASS_HOST_DEVICE static uint32_t at_once_(Send const& send) {
    uint32_t const fitting = kPart / unit_bytes_(send);
    return fitting < cutlass::NumThreadsPerWarp ? fitting : cutlass::NumThreadsPerWarp;
  }
  CUTLASS_HOST_DEVICE static uint32_t slices_(Send const& send) {
    return (send.row_bytes + send.slice_bytes - 1) / send.slice_bytes;
  }
  CUTLASS_HOST_DEVICE static uint32_t across_(Send const& send) {
    return (send.slice_bytes + kUnit - 1) / kUnit;
  }
  CUTLASS_HOST_DEVICE static uint32_t pieces_(Send const& send) {
    uint32_t const units = kParts * at_once_(send);
    return (send.rows * across_(send) + units - 1) / units;
  }

  CUTLASS_DEVICE Piece piece_(uint32_t number) const {
    int i = queue_.begin;
    while (i + 1 < queue_.end && number >= params_.first[i + 1]) ++i;
    Send const& last = params_.sends[i];
    uint32_t const within = number - params_.first[i], pieces = params_.per_slice[i], tile_interleave = last.tile_interleave;
    return {
        int32_t(last.first + within / pieces % tile_interleave), within / (pieces * tile_interleave),
        within % pieces * kParts * at_once_(last)};
  }

  // That of this thread in a part.
  CUTLASS_DEVICE Unit unit_(Piece const& piece, int part) const {
    Send const& send = params_.sends[piece.send];
    uint32_t const unit = piece.unit + part * at_once_(send) + lane_, row = unit / across_(send);
    if (lane_ >= at_once_(send) || row >= send.rows) return {0, 0, 0};
    uint32_t const column = piece.slice * send.slice_bytes + unit % across_(send) * kUnit;
    uint32_t const end = cute::min((piece.slice + 1) * send.slice_bytes, send.row_bytes);
    return {row, column, column < end ? cute::min(uint32_t(kUnit), end - column) : 0};
  }

  CUTLASS_DEVICE uint32_t take_() const { return lane_ == 0 ? atomicAdd(tickets_, 1u) : 0; }
  CUTLASS_DEVICE static uint32_t everyone_(uint32_t first) { return __shfl_sync(0xffffffff, first, 0); }

  CUTLASS_DEVICE uint8_t* buffer_(Send const& send, int part) {
    return storage_.buffers[part] + lane_ * unit_bytes_(send);
  }

  // Whether there is something to load, for all threads.
  CUTLASS_DEVICE bool come_(Piece const& piece, uint32_t number) {
    uint64_t const word = number < queue_.pieces ? params_.sends[piece.send].awaited : 0;
    if (!word) return true;
    bool const come = __shfl_sync(0xffffffff, lane_ == 0 && has_come(word), 0);
    if (come) {
      __syncwarp();
      fence_for_tma();
    }
    return come;
  }
  // All blocks may be waiting, for one word, while others of their warps multiply.
  CUTLASS_DEVICE void await_(Piece const& piece, uint32_t number) {
    while (!come_(piece, number)) __nanosleep(kPoll);
  }

  // Loads the piece, if there is one. Returns, to one thread, its turn on the link; 0: now.
  CUTLASS_DEVICE uint64_t begin_(Piece const& piece, uint32_t number) {
    if (number >= queue_.pieces) return 0;
    load_<0>(piece);
    return lane_ == 0 ? pace_.take(kParts * kPart) : 0;
  }

  // Parts from `Number` on, each once the store that was before in its buffer has read it.
  template <int Number>
  CUTLASS_DEVICE void load_(Piece const& piece) {
    if constexpr (Number < kParts) {
      tma_store_wait<kParts - 1 - Number>();
      __syncwarp();
      Send const& send = params_.sends[piece.send];
      Unit const unit = unit_(piece, Number);
      Arrival::arrive_and_expect_tx(&storage_.arrived[Number], unit.bytes);
      if (unit.bytes) {
        uint64_t const from = send.source + int64_t(unit.row) * send.source_pitch + unit.column;
        SM90_BULK_COPY_G2S::copy(
            reinterpret_cast<void const*>(from), &storage_.arrived[Number], buffer_(send, Number), unit.bytes);
      }
      load_<Number + 1>(piece);
    }
  }

  CUTLASS_DEVICE void store_(Piece const& piece, int part) {
    Send const& send = params_.sends[piece.send];
    Unit const unit = unit_(piece, part);
    if (unit.bytes) {
      uint64_t const to = send.target + int64_t(unit.row) * send.target_pitch + unit.column;
      SM90_BULK_COPY_S2G::copy(buffer_(send, part), reinterpret_cast<void*>(to), unit.bytes);
    }
    tma_store_arrive();
  }

  // Once the piece is stored. Whoever has stored the last one of a slice tells.
  CUTLASS_DEVICE void count_(Piece const& piece) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
    if (lane_ == 0) {
      Send const& send = params_.sends[piece.send];
      uint32_t* counter = params_.counters + kQueues + send.counter + piece.slice;
      if (send.word && count(counter) == params_.per_slice[piece.send]) {
        tell(counter, send.word + piece.slice * sizeof(uint32_t));
      }
    }
  }

  Params const& params_;
  Queue const queue_;
  uint32_t* const tickets_;
  Pace const pace_;
  Storage& storage_;
  uint32_t const lane_;
};

// What CUTLASS's kernel does, and what warps that it leaves idle do besides: sends, and the way into a replay. They
// begin when CUTLASS's kernel has nothing for them to do.
template <class Base>
class GatedKernel : public Base {
  static constexpr int kStorageAt = (Base::SharedStorageSize + 127) / 128 * 128;

 public:
  struct Arguments : Base::Arguments {
    Sender::Params sender;
    Passage passage;
  };
  struct Params : Base::Params {
    Sender::Params sender;
    Passage passage;
  };
  static constexpr int SharedStorageSize =
      DG_SENDS ? kStorageAt + kCopyingWarps * sizeof(Sender::Storage) : Base::SharedStorageSize;
  static_assert(SharedStorageSize <= cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);

  static Params to_underlying_arguments(Arguments const& args, void* workspace) {
    return {Base::to_underlying_arguments(args, workspace), args.sender, args.passage};
  }

  // All SMs send, also where there are fewer tiles.
  static dim3 get_grid_shape(Params const& params) {
    if (!(params.sender.queues[0].pieces + params.sender.queues[1].pieces)) return Base::get_grid_shape(params);
    typename Base::Params larger = params;
    get<3>(larger.problem_shape) = cute::max(get<3>(larger.problem_shape), larger.hw_info.sm_count);
    return Base::get_grid_shape(larger);
  }

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    Base::operator()(params, shared);
    int const warp = cutlass::canonical_warp_idx_sync();
    bool const idle = warp == kIdle, takes = kCopyingWarps > 1 && warp == kTaking;
    bool const multiplies = warp >= kGroup && warp % kGroup == 0;
    if (idle) params.passage.enter();
    if constexpr (DG_SENDS) {
      auto* const storage = reinterpret_cast<Sender::Storage*>(shared + kStorageAt);
      if (idle || takes) Sender(params.sender, takes, storage[takes])();
    }
    if (idle || takes || multiplies) params.passage.leave();
  }

 private:
  static constexpr int kIdle = 3, kTaking = 1, kGroup = cutlass::NumWarpsPerWarpGroup;
};

}  // namespace distgemm

template <class Arch, class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<distgemm::InTurn, Arch, Tile, Cluster, Stages> {
  using Scheduler = distgemm::TurnScheduler<Cluster>;
};
