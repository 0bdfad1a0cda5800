// Several GEMMs by one persistent kernel, for gemm.cu. To CUTLASS the GEMMs are the mode L (batches) of one problem. A
// table says where each GEMM's matrices lie, and flags in memory say which of them have arrived.
//
// DG_GATHER:      GEMMs wait for A or B, which other ranks send; the kernel may send this rank's own shard.
// DG_REDUCE:      GEMMs wait for partial sums and add them; the kernel sets flags when results are stored.
// DG_REDUCE_SEND: as DG_REDUCE, and the kernel copies finished results to other ranks.
//
// The kernel may also perform the operations on flags that begin and end a replay (Handshake).
//
// Who does what in a thread block (warps of CUTLASS's producer warp group, then the consumer warp groups):
//
//   warp                    does                                        waits for
//   0 (loads A and B)       TMA loads of A and B                        the operand's flag (DG_GATHER)
//   1 (CUTLASS: scheduler)  copies within the rank (DG_REDUCE_SEND)     the flag of the copy's source
//   2 (loads C)             TMA loads of partial sums                   the partial sum's flag (DG_REDUCE, _SEND)
//   3 (otherwise idle)      entry of a replay; copies to peers          the flag of the copy's source; the start flag
//   consumer warp groups    wgmma, epilogue, stores, done flags         the start flag, before a remote store

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
constexpr int kReserved = 6;  // of the counters, the last: two of LinkPacing, one unused, three of Handshake
constexpr int kCopyWarps = DG_KIND == DG_REDUCE_SEND ? 2 : DG_SENDS ? 1 : 0;  // warps that CUTLASS leaves idle

// The tables below describe each GEMM ("product") and each copy ("send"). A flag is the address of a uint32: 0 means
// that nobody waits, else the flag becomes 1. Matrices of one kind lie in at most two allocations, as batches of two
// tensors: batch >= 0 is a batch of the first tensor, ~batch is one of the second.

// Which A and B a product multiplies. Read by the warp that loads them.
struct Operand {
  uint64_t flag;        // set when the operand has arrived; flags of further slices follow it
  int32_t batch;        // of the moving operand; second tensor: operands that are waited for
  int16_t other_batch;  // of the other operand, which is never waited for
  int16_t sliced;       // 0 if the operand arrives whole, with one flag, although others arrive in slices
};
// What a product adds, and where its D belongs. Read by the epilogue.
struct Result {
  uint64_t source_flag;  // set when the partial sum has arrived
  uint64_t done_flag;    // the kernel sets it when all of D is stored
  int32_t source_batch;  // of the partial sum; one behind the last batch: there is none, and TMA reads zeros
  int32_t batch;         // of D; second tensor: remote memory
};
// Consecutive products whose tiles are interleaved, or consecutive sends whose slices are.
struct Group {
  int16_t first;  // number of the first
  int16_t size;
};
// A partial sum of a product in addition to the one that CUTLASS's epilogue loads.
struct Addend {
  uint64_t flag;  // set when it has arrived
  int32_t batch;
};

// Rows of a matrix that are copied slice by slice; a slice is some bytes of every row. When a slice is stored, the
// kernel sets its flag. The flags of a send's slices are consecutive. The sends of a group alternate: the first slice
// of each leaves, then the second slice of each. They have equal slices, and may differ in rows.
struct Send {
  uint64_t source, target;
  uint64_t flag;       // of the first slice; 0: nobody waits
  uint64_t wait_flag;  // set when the source is ready; 0: it is ready
  int64_t source_pitch, target_pitch;  // bytes from row to row
  uint32_t rows, row_bytes, slice_bytes;
  uint32_t counter;  // the number of its first slice among all slices
  Group group;
};

// Counters of a kernel, in this order: tiles stored of each product, and tickets for tiles (both with partial sums
// only); tickets for pieces of each send queue; pieces stored of each slice; the last kReserved. All are 0 before and
// after a launch, except the two of LinkPacing.
using Counters = uint32_t*;

// ---------------------------------------------------------------- pacing, entry and exit

CUTLASS_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Limits the rate of stores to other GPUs. Stores that are issued faster than the link takes them fill this GPU's
// memory queues, and its loads wait in the same queues: a main loop beside them then gets as little as 1/14 of its
// data. So each store reserves time on the link, and waits until that time begins.
struct LinkPacing {
  static constexpr int kLinkFree = kCounters - kReserved;  // two counters, at a multiple of 8 bytes
  static constexpr uint64_t kTicks = 8;                    // per nanosecond: reservations are counted in ticks
  static constexpr uint64_t kMaxLead = 1'000'000'000;      // nanoseconds. A start further ahead means a reset clock

  Counters counters;             // at kLinkFree: the tick at which the last reservation ends
  uint32_t picoseconds_per_kib;  // 0: no pacing

  // Reserves the link for so many bytes. Returns the nanosecond at which they may be stored; 0: now.
  CUTLASS_DEVICE uint64_t reserve(uint32_t bytes) const {
    if (!picoseconds_per_kib) return 0;
    auto* const at = reinterpret_cast<unsigned long long*>(counters + kLinkFree);
    uint64_t const now = nanoseconds();
    atomicMax(at, now * kTicks);
    uint64_t const start = atomicAdd(at, ticks_(bytes)) / kTicks;
    if (start < now + kMaxLead) return start;
    atomicExch(at, now * kTicks);
    return now;
  }

  // The nanosecond at which `others` stores of so many bytes are done, if the first begins now.
  CUTLASS_DEVICE uint64_t after(uint32_t others, uint32_t bytes) const {
    return picoseconds_per_kib ? nanoseconds() + others * ticks_(bytes) / kTicks : 0;
  }

  static CUTLASS_DEVICE void wait_until(uint64_t start) {
    while (nanoseconds() < start) continue;
  }

 private:
  CUTLASS_DEVICE uint64_t ticks_(uint32_t bytes) const { return bytes * kTicks * picoseconds_per_kib / (1024 * 1000); }
};

// The operations on flags that begin and end a replay. The kernel performs the entry while it already multiplies, and
// the last warp to finish performs the exit. In each thread block warp 3, all warps that copy, and the first warp of
// each consumer warp group call leave().
struct Handshake {
  static constexpr int kEntered = kCounters - 3, kLeft = kCounters - 2, kStarted = kCounters - 1;
  static constexpr int kCallers = kCopyWarps > 1 ? kCopyWarps : 1;  // producer warps of a block that call leave()

  FlagOps entry, exit;  // without phases: nothing to do. Remote memory may be written after the entry's first phase
  Counters counters;

  // Waits until remote memory may be written. One thread calls it.
  CUTLASS_DEVICE static void wait_for_start(Counters counters) {
    wait_for(reinterpret_cast<uint64_t>(counters + kStarted));
  }

  // Warp 3 of each block calls it. The first one performs the entry: its block is resident.
  CUTLASS_DEVICE void enter() const {
    if (!entry.phases) return;
    bool const first = cutlass::canonical_lane_idx() == 0 && atomicAdd(counters + kEntered, 1u) == 0;
    if (!__shfl_sync(0xffffffff, first, 0)) return;
    perform(entry, 0, 1);
    if (cutlass::canonical_lane_idx() == 0) {
      asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(counters + kStarted) : "memory");
    }
    perform(entry, 1, entry.phases);
  }

  // Each of the warps calls it when it has nothing left to do. The last one performs the exit.
  CUTLASS_DEVICE void leave() const {
    if (!exit.phases) return;
    uint32_t const lane = cutlass::canonical_lane_idx();
    uint32_t const consumer_groups = blockDim.x / cutlass::NumThreadsPerWarpGroup - 1;
    uint32_t const warps = gridDim.x * gridDim.y * gridDim.z * (consumer_groups + kCallers);
    __syncwarp();
    bool last = false;
    if (lane == 0) {
      last = increment(counters + kLeft) == warps;
      asm volatile("fence.acq_rel.sys;" ::: "memory");
    }
    if (!__shfl_sync(0xffffffff, last, 0)) return;
    if (lane < 3) asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(counters + kEntered + lane) : "memory");
    __syncwarp();
    perform(exit, 0, exit.phases);
  }
};

// A set of product numbers.
class ProductSet {
 public:
  // Returns whether the number is new.
  CUTLASS_DEVICE bool insert(int32_t number) {
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

// ---------------------------------------------------------------- the order of tiles

// The tag by which CUTLASS selects InterleavedScheduler.
struct InterleavedTiles {};

// CUTLASS's static persistent scheduler, with the tiles of a group of products interleaved: the first tile of each,
// then the second tile of each. Tiles that multiply the same part of the operand that the products share are then
// computed at the same time, and that part is read once.
template <class ClusterShape>
class InterleavedScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  using WorkTileInfo = typename Base::WorkTileInfo;
  struct Params : Base::Params {
    uint32_t clusters;  // tiles of a product, in clusters
    Group groups[kProducts];
  };

  CUTLASS_DEVICE explicit InterleavedScheduler(Params const& params) : Base(params), params_(params) {
    uint32_t const block = params.raster_order_ == RasterOrder::AlongN ? blockIdx.x + blockIdx.y * gridDim.x
                                                                      : blockIdx.x * gridDim.y + blockIdx.y;
    next_ = block / kBlocks;
  }

  // The functions that CUTLASS's kernels call.
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) { return get_current_work(); }
  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return tile_(next_); }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { next_ += count * clusters_(); }

  template <class... Rest>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const&, Rest const&...) {
    advance_to_next_work();
    return make_tuple(get_current_work(), true);
  }
  bool is_last_tile(...) const = delete;  // CUTLASS's assumes its own order of tiles

 protected:
  static constexpr uint32_t kBlocks = size(ClusterShape{});

  // Clusters of the grid. All of them are resident.
  CUTLASS_DEVICE static uint32_t clusters_() { return gridDim.x * gridDim.y * gridDim.z / kBlocks; }

  // This block's tile, of those that a cluster computes together. `number` counts such sets of tiles.
  CUTLASS_DEVICE WorkTileInfo tile_(uint32_t number) const {
    if (number < scheduler_params.blocks_per_problem_ / kBlocks) {
      uint32_t const product = number / params_.clusters;
      uint32_t const first = params_.groups[product].first, size = params_.groups[product].size;
      uint32_t const within = number - first * params_.clusters;
      number = (first + within % size) * params_.clusters + within / size;
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

// ---------------------------------------------------------------- GEMMs that wait for operands

// A main loop whose loading warp waits for a product's flag before the product's first load, or for a slice's flag
// before the first load of the slice. The consumer warps need not wait: CUTLASS's pipeline makes them wait for the
// loads.
template <class Base>
class WaitingMainloop : public Base {
  // The loading warp is ahead of the others by at most its stages, for each mode along which the cluster multicasts,
  // and by a tile or two. So a ticket is read before another one overwrites it.
  static constexpr int kWays = DG_CLUSTER_M > 1 && DG_CLUSTER_N > 1 ? 2 : 1;
  static_assert(!DG_REDUCES || Base::DispatchPolicy::Stages * kWays + 3 < kTickets);

 public:
  struct Params : Base::Params {
    typename Base::Params received;  // for operands that are waited for
    int32_t moving;
    int32_t slice_tiles;  // tiles along k in a slice
    Operand operands[kProducts];
  };
  using Arguments = Params;

  template <class Pipeline, class State, class Inputs, class Coord, class Steps, class... Rest>
  CUTLASS_DEVICE void load(
      Params const& params, Pipeline pipeline, State state, Inputs const& inputs, Coord const& coord, Steps steps,
      int count, Rest&&... rest) {
    auto [m, n, k, number] = coord;
    Operand const& operand = params.operands[number];
    bool const waits = operand.flag && waited_.insert(number);
    bool const local = operand.batch >= 0;
    int32_t const batch = local ? operand.batch : ~operand.batch;
    // CUTLASS loads batch 0 below, so the tensors are shifted.
    Tensor a = shifted_(get<0>(inputs), params.moving == 0 ? batch : operand.other_batch);
    Tensor b = shifted_(get<1>(inputs), params.moving == 0 ? operand.other_batch : batch);
    typename Base::Params const& from = local ? static_cast<typename Base::Params const&>(params) : params.received;
    int const at_once = waits && operand.sliced ? params.slice_tiles : count;
    uint64_t flag = operand.flag;
    for (int rest_of_k = count; rest_of_k > 0; rest_of_k -= at_once, flag += sizeof(uint32_t)) {
      int const now = rest_of_k < at_once ? rest_of_k : at_once;
      if (waits && elect_one_sync()) wait_for(flag);
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

  ProductSet waited_;  // products whose operands have arrived
};

// An epilogue that takes the batch of D from a table. Results are local.
template <class Base>
class IndexedEpilogue : public Base {
 public:
  struct Params : Base::Params {
    Result results[kProducts];
  };
  using Arguments = Params;

  template <class Storage>
  CUTLASS_HOST_DEVICE IndexedEpilogue(Params const& params, Storage& storage) : Base(params, storage), params_(params) {}

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
    return make_coord(get<0>(coord), get<1>(coord), get<2>(coord), params_.results[get<3>(coord)].batch);
  }

  Params const& params_;
};

// ---------------------------------------------------------------- copies by otherwise idle warps

// Copies the data of all sends through shared memory, by one warp of each thread block. Sends that cross no link have a
// queue and a warp of their own. A queue is a sequence of pieces. The warps take pieces in order, by tickets: so all
// pieces leave, and in this order, however many blocks are resident. A warp whose piece is not ready waits for it, so
// no source may depend on a later piece.
class Sender {
  static constexpr int kQueues = 2, kFirstCounter = DG_REDUCES ? kProducts + 1 : 0;

 public:
  // A piece has kParts parts, one for each buffer. A part has units, one for each thread.
  static constexpr uint32_t kPart = 4096;  // bytes of a part, at most
  static constexpr int kParts = 4;
  static constexpr uint32_t kUnit = 2048;  // bytes of a unit, at most
  static constexpr uint32_t kPoll = 200;   // nanoseconds between two reads of a flag

  struct Storage {
    alignas(128) uint8_t buffers[kParts][kPart];
    alignas(8) uint64_t arrived[kParts];
  };

  struct Queue {
    int32_t begin, end;  // of its sends
    uint32_t pieces;
  };
  struct Params {
    Queue queues[kQueues];         // sends that cross a link, and sends that do not
    uint32_t picoseconds_per_kib;  // pacing of the former; 0: none
    uint32_t first[kSends];        // for each send, the first piece of its group
    uint32_t per_slice[kSends];    // pieces, as many as the send with most rows of the group needs
    Send sends[kSends];
  };

  CUTLASS_DEVICE Sender(Params const& params, Handshake const& handshake, int queue, Storage& storage)
      : params_(params),
        handshake_(handshake),
        queue_(params.queues[queue]),
        tickets_(handshake.counters + kFirstCounter + queue),
        pacing_{handshake.counters, queue == 0 ? params.picoseconds_per_kib : 0},
        storage_(storage),
        lane_(cutlass::canonical_lane_idx()) {}

  CUTLASS_DEVICE void operator()() {
    if (!queue_.pieces) return;
    if (handshake_.entry.phases && elect_one_sync()) Handshake::wait_for_start(handshake_.counters);
    __syncwarp();
    if (lane_ == 0) {
      for (int i = 0; i < kParts; ++i) Arrival::init(&storage_.arrived[i], cutlass::NumThreadsPerWarp);
    }
    cutlass::arch::fence_barrier_init();
    __syncwarp();
    uint32_t ticket = broadcast_(take_ticket_());
    Piece now = piece_(ticket);
    wait_until_ready_(now, ticket);
    uint64_t start = load_and_reserve_(now, ticket);
    // Blocks that begin at the same time reserve the link in another order than they take tickets. So that pieces leave
    // in order, each block's first piece starts by its number.
    if (start && ticket < gridDim.x * gridDim.y * gridDim.z) start = pacing_.after(ticket, kParts * kPart);
    for (uint32_t phase = 0; ticket < queue_.pieces; phase ^= 1) {
      LinkPacing::wait_until(start);
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kParts; ++i) {
        Arrival::wait(&storage_.arrived[i], phase);
        store_(now, i);
      }
      // No earlier: a ticket that this block cannot serve yet would delay a piece that another block could start.
      ticket = broadcast_(take_ticket_());
      Piece const next = piece_(ticket);
      bool const ready = is_ready_(next, ticket);
      if (ready) start = load_and_reserve_(next, ticket);
      finish_(now);  // before the wait for the next piece: peers wait for this one
      if (!ready) {
        wait_until_ready_(next, ticket);
        start = load_and_reserve_(next, ticket);
      }
      now = next;
    }
    // Every block takes one ticket beyond the last piece. The last block to do so sets the counter to 0 for the next
    // launch.
    if (lane_ == 0 && ticket == queue_.pieces + gridDim.x * gridDim.y * gridDim.z - 1) atomicExch(tickets_, 0u);
  }

 private:
  using Arrival = cutlass::arch::ClusterTransactionBarrier;

  // Units of a slice, from `unit` on. Each part takes as many as there are threads in the warp and as fit into a
  // buffer.
  struct Piece {
    int32_t send;
    uint32_t slice, unit;
  };
  // Contiguous bytes of a row.
  struct Unit {
    uint32_t row, column, bytes;
  };

  CUTLASS_DEVICE static uint32_t unit_bytes_(Send const& send) {
    return send.slice_bytes < kUnit ? send.slice_bytes : kUnit;
  }
  CUTLASS_DEVICE static uint32_t units_per_part_(Send const& send) {
    uint32_t const fitting = kPart / unit_bytes_(send);
    return fitting < cutlass::NumThreadsPerWarp ? fitting : cutlass::NumThreadsPerWarp;
  }
  CUTLASS_DEVICE static uint32_t across_(Send const& send) {
    return (send.slice_bytes + kUnit - 1) / kUnit;
  }
  CUTLASS_DEVICE Piece piece_(uint32_t number) const {
    int i = queue_.begin;
    while (i + 1 < queue_.end && number >= params_.first[i + 1]) ++i;
    Send const& last = params_.sends[i];
    uint32_t const within = number - params_.first[i], pieces = params_.per_slice[i], size = last.group.size;
    return {
        int32_t(last.group.first + within / pieces % size), within / (pieces * size),
        within % pieces * kParts * units_per_part_(last)};
  }

  // This thread's unit of a part; without bytes where there is none.
  CUTLASS_DEVICE Unit unit_(Piece const& piece, int part) const {
    Send const& send = params_.sends[piece.send];
    uint32_t const unit = piece.unit + part * units_per_part_(send) + lane_, row = unit / across_(send);
    if (lane_ >= units_per_part_(send) || row >= send.rows) return {0, 0, 0};
    uint32_t const column = piece.slice * send.slice_bytes + unit % across_(send) * kUnit;
    uint32_t const end = cute::min((piece.slice + 1) * send.slice_bytes, send.row_bytes);
    return {row, column, column < end ? cute::min(uint32_t(kUnit), end - column) : 0};
  }

  CUTLASS_DEVICE uint32_t take_ticket_() const { return lane_ == 0 ? atomicAdd(tickets_, 1u) : 0; }
  CUTLASS_DEVICE static uint32_t broadcast_(uint32_t first) { return __shfl_sync(0xffffffff, first, 0); }

  CUTLASS_DEVICE uint8_t* buffer_(Send const& send, int part) {
    return storage_.buffers[part] + lane_ * unit_bytes_(send);
  }

  // Whether the piece can be loaded, or does not exist. Returns the same to all threads.
  CUTLASS_DEVICE bool is_ready_(Piece const& piece, uint32_t number) {
    uint64_t const flag = number < queue_.pieces ? params_.sends[piece.send].wait_flag : 0;
    if (!flag) return true;
    bool const ready = __shfl_sync(0xffffffff, lane_ == 0 && is_set(flag), 0);
    if (ready) {
      __syncwarp();
      fence_for_tma();
    }
    return ready;
  }
  // Sleeps between two reads: all blocks may wait for one flag, while their other warps multiply.
  CUTLASS_DEVICE void wait_until_ready_(Piece const& piece, uint32_t number) {
    while (!is_ready_(piece, number)) __nanosleep(kPoll);
  }

  // Loads the piece, if it exists. Returns, to thread 0, when it may be stored; 0: now.
  CUTLASS_DEVICE uint64_t load_and_reserve_(Piece const& piece, uint32_t number) {
    if (number >= queue_.pieces) return 0;
    load_<0>(piece);
    return lane_ == 0 ? pacing_.reserve(kParts * kPart) : 0;
  }

  // Loads the parts from `Number` on. Each waits until the previous store from its buffer has read the buffer.
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

  // Waits until the piece is stored. The warp that stores the last piece of a slice sets the slice's flag.
  CUTLASS_DEVICE void finish_(Piece const& piece) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
    if (lane_ == 0) {
      Send const& send = params_.sends[piece.send];
      uint32_t* counter = handshake_.counters + kFirstCounter + kQueues + send.counter + piece.slice;
      if (send.flag && increment(counter) == params_.per_slice[piece.send]) {
        set_flag(counter, send.flag + piece.slice * sizeof(uint32_t));
      }
    }
  }

  Params const& params_;
  Handshake const& handshake_;
  Queue const queue_;
  uint32_t* const tickets_;
  LinkPacing const pacing_;
  Storage& storage_;
  uint32_t const lane_;
};

// ---------------------------------------------------------------- the kernel

// CUTLASS's kernel, and the work of the warps that it leaves idle: copies, and the entry and exit of a replay. These
// warps begin when CUTLASS's kernel returns for them.
template <class Base>
class FusedKernel : public Base {
  static constexpr int kStorageAt = (Base::SharedStorageSize + 127) / 128 * 128;

 public:
  struct Params : Base::Params {
    Sender::Params sender;
    Handshake handshake;
  };
  static constexpr int SharedStorageSize =
      DG_SENDS ? kStorageAt + kCopyWarps * sizeof(Sender::Storage) : Base::SharedStorageSize;
  static_assert(SharedStorageSize <= cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    Base::operator()(params, shared);
    int const warp = cutlass::canonical_warp_idx_sync();
    bool const copies_remote = warp == kRemoteCopyWarp, copies_local = kCopyWarps > 1 && warp == kLocalCopyWarp;
    bool const consumes = warp >= kGroup && warp % kGroup == 0;
    if (copies_remote) params.handshake.enter();
    if constexpr (DG_SENDS) {
      auto* const storage = reinterpret_cast<Sender::Storage*>(shared + kStorageAt);
      if (copies_remote || copies_local) Sender(params.sender, params.handshake, copies_local, storage[copies_local])();
    }
    if (copies_remote || copies_local || consumes) params.handshake.leave();
  }

 private:
  static constexpr int kRemoteCopyWarp = 3, kLocalCopyWarp = 1, kGroup = cutlass::NumWarpsPerWarpGroup;
};

}  // namespace distgemm

template <class Arch, class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<distgemm::InterleavedTiles, Arch, Tile, Cluster, Stages> {
  using Scheduler = distgemm::InterleavedScheduler<Cluster>;
};
