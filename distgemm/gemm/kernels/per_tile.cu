// One persistent kernel does all work of a rank: it multiplies the tiles of D, and moves data tile by tile. It waits
// for flags that peers set, and sets flags at peers. docs/per_tile.md has the reasons, and docs/per_tile_measured.md
// the measurements. This page says how to read the file.
//
// What a rank does with a tile depends on the pattern, and on whose shard the tile is in:
//
//   pattern            tile of another shard                       own tile
//   DG_GATHER          A comes from slots, slice by slice          A is this rank's shard, which warp 1 sends to peers
//   DG_REDUCE_SCATTER  its partial sum goes to a slot at the       adds the partial sums of all peers from this rank's
//                      peer whose tile it is                       slots, and stores to D
//   DG_ALL_REDUCE      the same; warp 1 takes the result to D      the same, and stores the result to slots at all
//                      once the owner has stored it in a slot      peers
//   DG_ONE_SHOT        there is none                               its partial sum goes to all peers in packets; adds those
//                                                                  of all ranks, and stores to D
//   DG_TO_OWNERS       its result goes to a slot at the peer       stores to D; warp 1 takes to D what peers made of
//                      that has its columns of D                   their rows
//   DG_FROM_HOLDERS    there is none                               A's columns of other ranks come from slots, slice by
//                                                                  slice; warp 1 sends peers their rows of A
//
// With few rows a tile may span shards (spans_()): it has rows of several ranks, and all of D is one shard. A gather then
// has all of A in slots, this rank's rows, too. A reduce-scatter stores 16 rows of a sum at a time at their owner, and
// then adds the sums of peers to those that this rank owns.
//
// A thread block has 12 warps. Each role is a function, and a section of this file:
//
//   warp        function         does                                           waits for
//   0           load_operands_   takes tickets; loads A and B                   flags of slices; free stages
//   1           send_            sends pieces of A                              time on the link
//               take_results_    takes peers' results to D                      flags of results
//   2           initialise_      sets barriers up
//   3           store_           stores tiles to D or at peers; sets flags      written subtiles; time on the link
//   4..7, 8..11 multiply_        multiply, add partial sums and terms, write    loaded stages; flags of partial sums;
//                                subtiles of tiles to shared memory             free subtiles
//
// Warps 4 to 11 are two warp groups. Pingpong: each has tiles of its own, and one multiplies while the other adds and
// writes. Otherwise (cooperative) they share each tile, and have 64 rows of it in turn. A warp group's share of a tile
// is a part. A part of a partial sum or result has a slot and a flag.
//
// The way of a tile through a cluster of thread blocks:
//
//   1. The cluster's first block adds 1 to the clock in global memory. The old value has the number of the tile, the
//      ticket, and the epoch and the buffer of the workspace. The ticket goes to all blocks, into a ring in shared
//      memory, from which each warp reads all tickets in order. TileOrder says which tile it is (tile_order.cuh).
//   2. Warp 0 fills stages of A and B by TMA, shared by the cluster: barriers `full` and `empty`.
//   3. A warp group multiplies, adds, and writes subtiles of 8 KiB: barriers `free` and `written`.
//   4. Warp 3 stores subtiles by TMA. Once all that it stored at a peer is there, it sets the flag of the part.
//
// With DG_SPLIT the blocks of a cluster split k: each multiplies all tiles of the cluster, with a part of the stages of k.
// The first blocks finish a tile each, as above, and the other ones send them their sums: barriers `summed` and `taken`.
//
// A flag has the epoch in which its slot was filled last. A wait ends if it is the epoch of the ticket (epochs.cuh).
// All waits end: a tile waits only for tiles with lower tickets on other ranks, or for warps 1, which wait for no tile.
// So it does not matter how many clusters run at a time. docs/per_tile.md lists each word that one thread writes and
// another one reads, and what orders them.

#include <cstdint>

// Without this macro CUTLASS builds tiles of other widths than these from narrow wgmmas. It is not defined for all
// kernels, as the instructions of all widths take long to compile.
#if DG_TILE_N % 64 && DG_TILE_N != 96
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass/numeric_conversion.h"
#include "epochs.cuh"
#include "facts.cuh"
#include "tile_order.cuh"

#define DG_GATHER 1
#define DG_REDUCE_SCATTER 2
#define DG_ALL_REDUCE 3
#define DG_TO_OWNERS 4     // a GEMM, and an all-to-all
#define DG_FROM_HOLDERS 5  // an all-to-all, and a GEMM
#define DG_ONE_SHOT 6      // an all-reduce in which every rank owns all tiles

namespace distgemm {

using namespace cute;

// ---------------------------------------------------------------- what the macros say

using Element = DG_ELEMENT;  // of A and B
using Result = DG_RESULT;    // of D, bias and C
using Partial = DG_PARTIAL;  // of partial sums

constexpr int kPattern = DG_PATTERN;
constexpr bool kFromHolders = kPattern == DG_FROM_HOLDERS, kToOwners = kPattern == DG_TO_OWNERS;
constexpr bool kGathers = kPattern == DG_GATHER || kFromHolders;  // slices of A, from slots
constexpr bool kAllReduces = kPattern == DG_ALL_REDUCE, kOneShot = kPattern == DG_ONE_SHOT;
constexpr bool kReduces = kPattern == DG_REDUCE_SCATTER || kAllReduces;                // with slots for sums
constexpr bool kTakes = kAllReduces || kToOwners;                                  // results from peers
constexpr bool kOneD = kPattern == DG_REDUCE_SCATTER || kFromHolders || kOneShot;  // D has the rows of one shard
constexpr bool kMaySpan = kPattern == DG_GATHER || kPattern == DG_REDUCE_SCATTER;  // tiles may have rows of several ranks
constexpr bool kPingpong = DG_PINGPONG;  // each warp group has tiles of its own. Otherwise both share each tile
constexpr int kTileM = DG_TILE_M, kTileN = DG_TILE_N, kTileK = 128 / sizeof(Element);
constexpr int kClusterM = DG_CLUSTER_M, kClusterN = DG_CLUSTER_N, kTiles = kClusterM * kClusterN;  // tiles of a cluster
constexpr int kSplit = DG_SPLIT;  // blocks of a cluster that split k, and multiply all tiles. 1: each block has a tile
constexpr bool kSplits = kSplit > 1;
constexpr int kCluster = kSplits ? kSplit : kTiles;  // thread blocks
constexpr int kSharesM = kSplits ? 1 : kClusterM, kSharesN = kSplits ? 1 : kClusterN;  // of loads of B, and of A
constexpr int kBlockM = kTileM * kClusterM / kSharesM, kBlockN = kTileN * kClusterN / kSharesN;  // what a block multiplies
static_assert(kTiles <= kCluster && (!kSplits || (kPingpong && !kTakes && !kFromHolders)));
constexpr int kStages = DG_STAGES;                   // of operands
constexpr int kEpilogueStages = DG_EPILOGUE_STAGES;  // of each warp group, for subtiles that are stored

constexpr int kWarpGroups = 2, kWarpGroupThreads = 128;
constexpr int kThreads = kWarpGroupThreads * (kWarpGroups + 1);
constexpr int kLoadRegisters = 56, kMultiplyRegisters = 224;  // of each thread
constexpr int kAddRegisters = 208;                           // of these, for sums and what is added to them
constexpr int kParts = kPingpong ? 1 : kWarpGroups;  // a warp group's share of a tile
constexpr int kPartM = kTileM / kParts, kPartN = kTileN;
constexpr int kHeight = 64;  // rows of a subtile: those of one wgmma
constexpr int kDown = kPartM / kHeight;
constexpr int kLine = 128;  // bytes of a subtile's row
constexpr int kSubtile = kHeight * kLine;
// Columns of B in a stage. Where columns of B are contiguous, boxes have 64 of them.
constexpr int kLoadedN = DG_B_K_MAJOR ? kBlockN : (kBlockN + kTileK - 1) / kTileK * kTileK;
constexpr int kStageA = kBlockM * kLine, kStageB = kLoadedN * kLine;

// A part of a result is stored in subtiles. The last ones may overlap those before them: what both have is equal.
constexpr int kColumns = kLine / sizeof(Result);  // of a subtile
constexpr int kAcross = (kPartN + kColumns - 1) / kColumns;
constexpr int kResults = kDown * kAcross;  // subtiles
CUTE_HOST_DEVICE constexpr int subtile_column(int subtile) {
  return cute::min(subtile / kDown * kColumns, kPartN - kColumns);
}

// A part of a partial sum is stored as threads hold it: packs of 16 bytes of each thread. A subtile has those of each
// warp one behind the other, so 16 rows come before the next ones.
constexpr int kPacks = kSubtile / (kWarpGroupThreads * 16);  // of a thread in a subtile
constexpr int kSums = (kPartM * kPartN * sizeof(Partial) + kSubtile - 1) / kSubtile;  // subtiles
constexpr int kSumsOfRows = kSums / kDown;                                             // those that have the same rows
static_assert(!kReduces || kPartN * sizeof(Partial) % kLine == 0, "rows of a sum have whole lines of subtiles");
constexpr int kPartPacks = kSums * kPacks;
constexpr int kWarpRows = 16;            // of a subtile
constexpr uint32_t kWarpPack = 32 * 16;  // bytes of a warp's pack
// Bytes from the first pack of a thread to one of its packs.
CUTE_HOST_DEVICE constexpr uint32_t pack_offset(int pack) { return pack / kPacks * kSubtile + pack % kPacks * kWarpPack; }
CUTE_DEVICE uint32_t first_pack(uint32_t thread) { return thread / 32 * kPacks * kWarpPack + thread % 32 * 16; }

constexpr int kPartBytes = kSums * kSubtile;  // of a slot
static_assert(!kTakes || kResults <= kSums);

// A piece of a shard that is sent: so many rows, and so many bytes of each.
constexpr int kPieceRows = 32, kPieceBytes = 512, kPieceK = kPieceBytes / sizeof(Element);
constexpr int kPiecesDown = kBlockM / kPieceRows;  // of the rows of a block
static_assert(kBlockM % kPieceRows == 0);
constexpr int kCopyRows = 16, kCopyBytes = kCopyRows * kPieceBytes;  // what is copied at a time
constexpr int kSliceTiles = kPieceK / kTileK;  // stages of a slice

constexpr bool kCopies = DG_SENDS || kTakes;  // whether warp 1 copies
constexpr bool kHandsOut = kGathers && DG_A_K_MAJOR;  // whether a call may want all of A

// A warp of the cluster may be so many tickets behind the last one. A block loads as many tiles ahead as it has stages.
// In clusters of 2x2 the first block shares stages with its neighbours only, and these with the last block: twice that.
// Behind the tiles that are multiplied, each warp group has one in its epilogue, and others wait in epilogue stages. If k is
// split, each warp group of a block is up to a tile ahead of that of another block which also finishes tiles.
constexpr int kSteps = kSharesM > 1 && kSharesN > 1 ? 2 : 1;
constexpr int kBehind = kSteps * kStages + (kPingpong ? 2 : 1) * (1 + kEpilogueStages / cute::min(kResults, kSums)) +
    (kSplits && kTiles > 1 ? 2 : 0);
constexpr int kRing = 32;
static_assert(kBehind < kRing, "a ticket is overwritten before it is read");
static_assert(DG_SENDS == 0 || kGathers);
static_assert(!kToOwners || kPartN % kColumns == 0, "terms are added twice where subtiles overlap");

struct Terms {
  float alpha, beta;
  Result const* bias;
  Result const* c;
  int64_t c_stride;
};

struct alignas(128) Params {
  // TMA descriptors, each of (contiguous mode, other mode, number of the matrix)
  CUtensorMap a, b, d;
  CUtensorMap received[2];  // slices of shards of A, in the slots of each buffer of the workspace
  CUtensorMap gathered;     // all of A, in a tensor of the caller
  TileOrder order;
  PieceOrder pieces;
  Workspaces workspaces;
  Terms terms;
  Element const* shard;  // what is sent
  Element* gathered_at;  // null: the caller does not want all of A
  int64_t shard_stride, gathered_stride;  // elements
  int32_t m, n, k;       // rows of a shard, columns of D, and columns of A on this rank
  int32_t rank_rows;     // of m: those of a rank, where tiles span shards. Otherwise m
  int32_t box_m, loaded_m;  // rows of A in a box, and from one to the next: fewer than in a tile if a shard has fewer
  uint32_t slices;       // of these columns
  uint32_t picoseconds_per_kib;
  uint32_t by_columns;  // all-reduce: m is rows of D, and n columns of a shard
};

constexpr uint32_t kPacketBytes = 32 * sizeof(Packet);  // of a warp

// What the blocks of a cluster learn of a ticket.
struct alignas(16) Ticket {
  Clock clock;
  uint32_t place;  // distance, and column of clusters from bit 8 on
  uint32_t block;

  CUTE_DEVICE TileCluster cluster() const { return {place & 0xff, block, place >> 8}; }
};

constexpr int kAlignment = 1024;  // of swizzled tiles

struct alignas(kAlignment) Storage {
  uint8_t a[kStages][kStageA];
  uint8_t b[kStages][kStageB];
  uint8_t subtiles[kWarpGroups][kEpilogueStages][kSubtile];
  uint8_t copied[kCopies ? 2 : 0][kCopyBytes];
  float sums[kSplits ? kSplit : 0][kTileM * kTileN];  // of the tile that this block finishes, from all blocks
  uint64_t full[kStages], empty[kStages];
  uint64_t written[kWarpGroups][kEpilogueStages], free[kWarpGroups][kEpilogueStages];
  uint64_t arrived[2];
  uint64_t summed, taken;
  uint64_t ticket_arrived[kRing];
  Ticket tickets[kRing];
};
static_assert(sizeof(Storage) + kAlignment <= 227 * 1024, "the stages do not fit");
static_assert(kCopyBytes == kSubtile);

// ---------------------------------------------------------------- barriers and copies

CUTE_DEVICE uint32_t lane() { return threadIdx.x % 32; }

struct Barrier {
  CUTE_DEVICE static uint32_t at(uint64_t& barrier) { return cast_smem_ptr_to_uint(&barrier); }
  CUTE_DEVICE static void init(uint64_t& barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(barrier)), "r"(arrivals));
  }
  CUTE_DEVICE static void arrive(uint64_t& barrier, uint32_t arrivals = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(at(barrier)), "r"(arrivals) : "memory");
  }
  CUTE_DEVICE static void expect(uint64_t& barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(barrier)), "r"(bytes) : "memory");
  }
  // At the same barrier of a block of the cluster. It orders no memory: a wider scope would flush caches.
  template <bool kOfCluster = false>  // whether the block sees what was stored, or has been read, before
  CUTE_DEVICE static void arrive_at(uint64_t& barrier, uint32_t block) {
    if constexpr (kOfCluster) {
      asm volatile(
          "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
          "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(at(barrier)),
          "r"(block)
          : "memory");
    } else {
      asm volatile(
          "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
          "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(at(barrier)),
          "r"(block)
          : "memory");
    }
  }
  CUTE_DEVICE static bool test(uint64_t& barrier, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(at(barrier)), "r"(phase & 1)
        : "memory");
    return done;
  }
  template <bool kOfCluster = false>  // whether to see what other blocks have stored before they arrived
  CUTE_DEVICE static void wait(uint64_t& barrier, uint32_t phase) {
    if constexpr (kOfCluster) {
      asm volatile(
          "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
          "@done bra DONE; bra AGAIN; DONE: }" ::"r"(at(barrier)),
          "r"(phase & 1)
          : "memory");
    } else {
      asm volatile(
          "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
          "@done bra DONE; bra AGAIN; DONE: }" ::"r"(at(barrier)),
          "r"(phase & 1)
          : "memory");
    }
  }
};

// A ring of barriers, and how often they were used.
template <int kSize>
struct Uses {
  uint32_t count = 0;
  CUTE_DEVICE uint32_t index() const { return count % kSize; }
  CUTE_DEVICE uint32_t phase() const { return count / kSize; }  // its lowest bit
};

// The stage of operands that comes next, and the phase of its barriers.
struct Stage {
  uint32_t index = 0, phase = 0;
  CUTE_DEVICE void advance() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
  CUTE_DEVICE void advance(uint32_t by) {
    index += by;
    phase ^= index / kStages & 1;
    index %= kStages;
  }
};

CUTE_DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
CUTE_DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
CUTE_DEVICE void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
CUTE_DEVICE void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
CUTE_DEVICE void release_to_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// The tickets that a warp reads one after the other.
struct Tickets {
  Storage& storage;
  Uses<kRing> uses;

  CUTE_DEVICE Ticket next() {
    Barrier::wait(storage.ticket_arrived[uses.index()], uses.phase());
    Ticket const ticket = storage.tickets[uses.index()];
    ++uses.count;
    return ticket;
  }
  // The same, where all lanes of a warp call it. They read equal tickets. ptxas knows that they are equal only if lane 0
  // gives its ticket to the others. multiply_ and load_operands_ have the reasons.
  CUTE_DEVICE Ticket next_of_warp() {
    Ticket const ticket = next();
    auto const of_first = [](auto value) { return __shfl_sync(0xffffffff, value, 0); };
    return {{of_first(ticket.clock.word)}, of_first(ticket.place), of_first(ticket.block)};
  }
};

// A tile of this block; or all that it multiplies, which is a tile unless k is split.
struct Tile {
  uint32_t distance, row, column;  // row and column of tiles in the shard

  CUTE_DEVICE static Tile of(TileCluster const& cluster, uint32_t block) {
    return {
        cluster.distance, cluster.block * kClusterM + block % kClusterM,
        cluster.column * kClusterN + block / kClusterM};
  }
};

class Kernel {
 public:
  CUTE_DEVICE Kernel(Params const& params, Storage& storage)
      : params_(params), order_(params.order), spaces_(params.workspaces), storage_(storage),
        block_(kCluster > 1 ? block_rank_in_cluster() : 0),
        clusters_(gridDim.x / kCluster),
        shard_depth_((params.k + kTileK - 1) / kTileK),
        first_(kSplits ? shard_depth_ * block_ / kSplit : 0),
        depth_(kSplits ? shard_depth_ * (block_ + 1) / kSplit - first_ : shard_depth_ * (kFromHolders ? spaces_.ranks : 1)) {}

  CUTE_DEVICE void run() {
    uint32_t const warp = cutlass::canonical_warp_idx_sync();
    bool const counts = threadIdx.x == 0, leads = counts && block_ == 0;
    if (warp == 2 && lane() == 0) initialise_();
    if (warp == 1 && lane() == 0) {
      prefetch_tma_descriptor(&params_.a);
      prefetch_tma_descriptor(&params_.b);
      prefetch_tma_descriptor(&params_.d);
      if constexpr (kGathers) for (auto const& map : params_.received) prefetch_tma_descriptor(&map);
    }
    Clock first{};
    if (leads) first = spaces_.take();
    if (counts) atomicAdd(&spaces_.control(spaces_.rank).running, 1u);
    mute_ = spaces_.dead(kMute);
    __syncwarp();
    if constexpr (kCluster > 1) cluster_arrive_relaxed();
    if (warp == 3 && elect_one_sync()) fetch_first_();
    __syncwarp();
    if constexpr (kCluster > 1) {
      cluster_wait();
    } else {
      __syncthreads();
    }
    if (leads) pass_on_(first, 0);
    if (warp < kWarpGroupThreads / 32) {
      cutlass::arch::warpgroup_reg_dealloc<kLoadRegisters>();
      if (warp == 0) load_operands_();
      if constexpr (DG_SENDS) {
        if (warp == 1) send_();
      }
      if constexpr (kTakes) {
        if (warp == 1 && (kToOwners || lane() == 0)) take_results_();
      }
      if (warp == 3 && lane() == 0 && finishes_()) store_();
    } else {
      cutlass::arch::warpgroup_reg_alloc<kMultiplyRegisters>();
      multiply_(warp);
    }
    __syncwarp();
    __syncthreads();
    if (counts) atomicSub(&spaces_.control(spaces_.rank).running, 1u);
  }

 private:
  CUTE_DEVICE void initialise_() {
    constexpr int sharing = kSharesM + kSharesN - 1;  // blocks that load into one stage
    for (int i = 0; i < kStages; ++i) {
      Barrier::init(storage_.full[i], 1);
      Barrier::init(storage_.empty[i], sharing * kParts * 4);
    }
    for (int group = 0; group < kWarpGroups; ++group) {
      for (int i = 0; i < kEpilogueStages; ++i) {
        Barrier::init(storage_.written[group][i], 4);
        Barrier::init(storage_.free[group][i], 1);
      }
    }
    for (int i = 0; i < 2; ++i) Barrier::init(storage_.arrived[i], 1);
    Barrier::init(storage_.summed, kCluster * 4);
    Barrier::init(storage_.taken, kTiles * 4);
    for (int i = 0; i < kRing; ++i) Barrier::init(storage_.ticket_arrived[i], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // Fetches the first stages of B into L2 before it is known which tile comes first: all clusters together take the
  // first tickets, and fetch what these need.
  CUTE_DEVICE void fetch_first_() const {
    uint32_t const number = blockIdx.x / kCluster;
    if (!DG_B_K_MAJOR || number >= order_.clusters()) return;
    TileCluster const first = order_.at<kGathers>(number);
    Tile const tile = product_of_(first);
    uint32_t const share = kSplits ? 0 : block_ % kClusterM, rows = kBlockN / kSharesM;
    int32_t const row = tile.column * kBlockN + share * rows;
    int32_t const matrix = b_of_(rank_at_(kFromHolders ? 0 : tile.distance));
    uint32_t const end = first_ + cute::min(depth_, uint32_t(kStages));
    CUTE_NO_UNROLL
    for (uint32_t k = first_; k < end; ++k) SM90_TMA_LOAD_3D::PREFETCH::copy(&params_.b, int32_t(k * kTileK), row, matrix);
  }

  // ---------------------------------------------------------------- tickets

  // Gives a ticket to all blocks of the cluster, as the ticket of this number. Each cluster takes one beyond the last
  // tile, and then no more.
  CUTE_DEVICE void pass_on_(Clock clock, uint32_t number) {
    uint32_t const index = number % kRing;
    Ticket ticket{clock, 0, 0};
    if (clock.ticket() < order_.clusters()) {
      TileCluster const found = order_.at<kGathers>(clock.ticket());
      ticket.place = found.distance | found.column << 8;
      ticket.block = found.block;
    }
    if constexpr (kCluster == 1) {
      storage_.tickets[index] = ticket;
      Barrier::arrive(storage_.ticket_arrived[index]);
    } else {
      for (uint32_t block = 0; block < kCluster; ++block) {
        asm volatile(
            "{ .reg .b32 there, arrived; mapa.shared::cluster.u32 there, %0, %2;\n"
            "mapa.shared::cluster.u32 arrived, %1, %2;\n"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [there], {%3, %4}, [arrived]; }" ::"r"(
                cast_smem_ptr_to_uint(&storage_.tickets[index])),
            "r"(Barrier::at(storage_.ticket_arrived[index])), "r"(block), "l"(clock.word),
            "l"(uint64_t(ticket.block) << 32 | ticket.place)
            : "memory");
      }
    }
    if (clock.ticket() == order_.clusters() + clusters_ - 1) spaces_.renew(clock);
  }

  CUTE_DEVICE bool exists_(Ticket const& ticket) const { return ticket.clock.ticket() < order_.clusters(); }
  CUTE_DEVICE Tile tile_(Ticket const& ticket) const { return Tile::of(ticket.cluster(), block_); }
  // What this block multiplies: row and column count by kBlockM and kBlockN.
  CUTE_DEVICE Tile product_(Ticket const& ticket) const { return product_of_(ticket.cluster()); }
  CUTE_DEVICE Tile product_of_(TileCluster const& cluster) const {
    if constexpr (!kSplits) return Tile::of(cluster, block_);
    return {cluster.distance, cluster.block, cluster.column};
  }
  CUTE_DEVICE bool finishes_() const { return block_ < kTiles; }  // a tile

  // The number of a counter, which lane 0 raises by one. Nothing waits for it before its first use.
  CUTE_DEVICE static uint32_t take_(uint32_t& counter) {
    uint32_t number;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(number)
                 : "l"(&counter), "r"(hidden_one())
                 : "memory");
    return number;
  }

  // Each lane knows a flag that exists, or none. Waits until those of the first lanes have been set, and returns which
  // lanes' flags have: a bit for each. A lane without a flag has its bit.
  CUTE_DEVICE uint32_t wait_for_flags_(Clock clock, bool exists, uint32_t number, uint32_t first_lanes) const {
    uint64_t const flag = spaces_.flag(spaces_.rank, clock.buffer(), number);
    uint32_t arrived = 0;
    for (uint32_t spins = 1; (arrived & first_lanes) != first_lanes; ++spins) {
      bool const ends = spaces_.ends_(spins);
      arrived = __ballot_sync(0xffffffff, !exists || ends || Workspaces::load(flag) == clock.epoch());
    }
    __syncwarp();
    return arrived;
  }

  // Whether tiles have rows of several ranks, and all of D is one shard.
  CUTE_DEVICE bool spans_() const { return kMaySpan && params_.rank_rows < params_.m; }
  // Whether the sums of such tiles are scattered. This rank's first row then, and how many of some rows it owns.
  CUTE_DEVICE bool scatters_() const { return kReduces && spans_(); }
  CUTE_DEVICE int32_t first_own_row_() const { return scatters_() ? spaces_.rank * params_.rank_rows : 0; }
  CUTE_DEVICE int32_t own_rows_(int32_t first, int32_t count) const {
    int32_t const begin = cute::max(first, first_own_row_());
    return cute::max(0, cute::min(first + count, first_own_row_() + params_.rank_rows) - begin);
  }
  // Whether shards of D are columns, and not rows.
  CUTE_DEVICE bool by_columns_() const { return kAllReduces && params_.by_columns; }
  CUTE_DEVICE uint32_t rank_at_(uint32_t distance) const { return (spaces_.rank + distance) % spaces_.ranks; }
  // Which of the matrices of B's descriptor is that of a rank's shard.
  CUTE_DEVICE uint32_t b_of_(uint32_t rank) const { return kToOwners || kFromHolders || by_columns_() ? rank : 0; }
  // Which of the matrices of a descriptor, one for each shard, is that of the rank so far behind this one.
  CUTE_DEVICE int32_t matrix_(uint32_t distance) const { return spans_() ? 0 : rank_at_(distance); }

  // The number of a part of a tile among those of a shard.
  CUTE_DEVICE uint32_t part_(Tile const& tile, uint32_t part) const {
    return (tile.row * order_.columns * kClusterN + tile.column) * kParts + part;
  }
  CUTE_DEVICE uint32_t parts_() const {
    return order_.blocks * kClusterM * order_.columns * kClusterN * kParts;
  }
  // Flag and slot of a part that a rank receives: of the sums from a distance, and behind them of their results. Where
  // there are no sums, results have their slots.
  CUTE_DEVICE uint32_t sum_slot_(uint32_t distance, uint32_t part) const {
    return (distance - 1) * parts_() + part;
  }
  CUTE_DEVICE uint32_t result_slot_(uint32_t distance, uint32_t part) const {
    return sum_slot_(distance + (kAllReduces ? spaces_.ranks - 1 : 0), part);
  }
  // The number of a shard among those that a rank receives: of the rank so far behind the receiver, or, where tiles span
  // shards, of the sender, as in A.
  CUTE_DEVICE uint32_t received_(uint32_t distance, uint32_t sender = 0) const {
    return spans_() ? sender : distance - 1;
  }
  // The slot of a row of a slice of a matrix that a rank receives. A piece is contiguous.
  CUTE_DEVICE uint64_t received_at_(uint32_t matrix, uint32_t slice, uint32_t row) const {
    return ((uint64_t(matrix) * params_.slices + slice) * params_.m + row) * kPieceBytes;
  }
  // The flag of a piece of a shard that a rank receives.
  CUTE_DEVICE uint32_t piece_slot_(uint32_t shard, uint32_t row, uint32_t slice) const {
    return (shard * params_.pieces.rows + row) * params_.slices + slice;
  }
  // A slice of a tile's sum, in the order in which the tile adds them.
  CUTE_DEVICE Slice slice_(Tile const& tile, uint32_t number) const {
    if constexpr (kFromHolders) return params_.pieces.slice_of_sum(number);
    return {tile.distance, number};
  }

  // ---------------------------------------------------------------- warp 0

  // TMA takes its operands from uniform registers, too (multiply_). So all lanes go through the loop, and one of them loads.
  CUTE_DEVICE void load_operands_() {
    Tickets tickets{storage_};
    Stage stage;
    uint32_t number = 1;
    bool const elected = elect_one_sync();
    auto const next = [&] {
      if (kCluster > 1 && elected) Barrier::expect(storage_.ticket_arrived[tickets.uses.index()], sizeof(Ticket));
      __syncwarp();
      return tickets.next_of_warp();
    };
    Ticket ticket = next();
    for (; exists_(ticket); ticket = next(), ++number) {
      Clock const clock = ticket.clock;
      Tile const tile = product_(ticket);
      int32_t const rows = params_.m - int32_t(tile.row * kBlockM);  // of A, from the first one of the tile on
      bool const inside = rows > 0;
      // Which of the blocks that share a tile's rows of A load some: those whose first row exists. The others' rows of
      // the stage have anything.
      uint32_t const share_a = kSplits ? 0 : block_ / kClusterM, share_b = kSplits ? 0 : block_ % kClusterM;
      bool const loads_a = !DG_A_K_MAJOR || int32_t(share_a) * params_.loaded_m < rows;
      uint32_t bytes_a = kStageA;
      if constexpr (DG_A_K_MAJOR) {
        bytes_a = 0;
        for (int i = 0; i < kSharesN; ++i) bytes_a += i * params_.loaded_m < rows ? params_.box_m * kLine : 0;
      }
      uint32_t const of_tile = rank_at_(tile.distance);
      uint32_t const slices =
          kSplits ? (first_ + depth_ - 1) / kSliceTiles + 1 : params_.slices * (kFromHolders ? spaces_.ranks : 1);
      uint32_t arrived = 0, first_slice = 0;  // slices from the first on that have arrived, as bits
      // The next ticket arrives while the last slices are loaded.
      Clock taken{};
      uint32_t const ahead = 2 * kStages / kSliceTiles + 1;
      uint32_t const take_at = slices > ahead ? slices - ahead : 0;
      uint32_t const pass_at = cute::min(take_at + ahead / 2, slices - 1);
      for (uint32_t slice = first_ / kSliceTiles; slice < slices; ++slice) {
        Slice const from = slice_(tile, slice);
        bool const receives = kGathers && (from.distance || spans_());
        CUtensorMap const& map_a = receives ? params_.received[clock.buffer()] : params_.a;
        uint32_t const of_shard = kFromHolders ? rank_at_(from.distance) : of_tile;
        // This rank has A of all shards.
        bool const of_all = kFromHolders || (kReduces && !by_columns_() && !spans_());
        uint32_t const matrix_a =
            receives ? received_(from.distance) * params_.slices + from.number : of_all ? of_shard : 0;
        uint32_t const first_of_a = receives ? from.number * kSliceTiles : 0;  // a matrix of the received A is a slice
        uint32_t const matrix_b = b_of_(of_shard);
        bool const known = slice < first_slice + 32 && arrived >> (slice - first_slice) & 1;
        if (receives && inside && !known) {
          first_slice = slice;
          arrived = wait_for_slices_(clock, tile, slice);
        }
        if (elected && block_ == 0 && slice == take_at) taken = spaces_.take();
        uint32_t const begin = cute::max(from.number * kSliceTiles, first_);
        uint32_t const end = cute::min((from.number + 1) * kSliceTiles, kSplits ? first_ + depth_ : shard_depth_);
        CUTE_NO_UNROLL
        for (uint32_t k = begin; k < end; ++k) {
          uint64_t& full = storage_.full[stage.index];
          Barrier::wait(storage_.empty[stage.index], stage.phase ^ 1);
          if (elected) {
            Barrier::expect(full, bytes_a + kStageB);
            if (loads_a) {
              load_<kSharesN, kBlockM, kBlockM, DG_A_K_MAJOR>(
                  map_a, storage_.a[stage.index], full, params_.loaded_m, share_a, share_b, kClusterM, k - first_of_a,
                  tile.row, matrix_a);
            }
            load_<kSharesM, kBlockN, kLoadedN, DG_B_K_MAJOR>(
                params_.b, storage_.b[stage.index], full, kBlockN / kSharesM, share_b, share_a * kClusterM, 1, k,
                tile.column, matrix_b);
          }
          __syncwarp();
          stage.advance();
        }
        if (elected && block_ == 0 && slice == pass_at) pass_on_(taken, number);
        __syncwarp();
      }
    }
    // Other blocks arrive at these barriers: this one ends only when they have.
    for (int i = 0; elected && i < kStages; ++i, stage.advance()) {
      Barrier::wait(storage_.empty[stage.index], stage.phase ^ 1);
    }
  }

  // Waits until a slice of a tile's rows has arrived. Returns which of the slices from there on have: a bit for each.
  // Lanes read the flags of all rows of pieces of a slice, then those of the next one, as far as there are lanes. Where
  // tiles span shards, a tile waits for all rows of a shard.
  CUTE_DEVICE uint32_t wait_for_slices_(Clock clock, Tile const& tile, uint32_t slice) const {
    uint32_t const rows = params_.pieces.rows;
    uint32_t first = tile.row * kPiecesDown, down = kPiecesDown;
    if (spans_()) {
      uint32_t const begin = tile.row * kBlockM, end = cute::min(begin + kBlockM, uint32_t(params_.m));
      first = begin / params_.rank_rows * rows;
      down = ((end - 1) / params_.rank_rows + 1) * rows - first;
    }
    uint32_t const row = first + lane() % down, ahead = lane() / down, polled = 32 / down;
    Slice const wanted = slice_(tile, slice + ahead);
    bool const exists = (row < rows || spans_()) && ahead < polled && wanted.number < params_.slices;
    uint32_t const every = (1ull << down) - 1, number = piece_slot_(received_(wanted.distance), row, wanted.number);
    uint32_t const arrived = wait_for_flags_(clock, exists, number, every);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return __ballot_sync(0xffffffff, lane() < polled && (arrived >> lane() * down & every) == every);
  }

  // Loads this block's share of a stage of an operand, and gives it to all blocks that need it. The share is one of
  // kShares: so many rows, each share that many behind the one before; or of k, where columns are contiguous, which are loaded in
  // boxes, kLoaded of them. The blocks are `first`, `first + distance`, ...
  template <int kShares, int kRows, int kLoaded, bool kMajor>
  CUTE_DEVICE void load_(
      CUtensorMap const& map, uint8_t* to, uint64_t& full, int32_t rows, uint32_t share, uint32_t first,
      uint32_t distance, uint32_t k, uint32_t row, uint32_t matrix) {
    auto const hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    uint16_t mask = 0;
    for (int i = 0; i < kShares; ++i) mask |= 1 << (first + i * distance);
    auto const copy = [&](uint8_t* at, int32_t x, int32_t y) {
      if constexpr (kShares == 1) {
        SM90_TMA_LOAD_3D::copy(&map, &full, hint, at, x, y, int32_t(matrix));
      } else {
        SM90_TMA_LOAD_MULTICAST_3D::copy(&map, &full, mask, hint, at, x, y, int32_t(matrix));
      }
    };
    int32_t const begin = row * kRows, depth = k * kTileK;
    if constexpr (kMajor) {
      int32_t const first_row = share * rows;
      copy(to + first_row * kLine, depth, begin + first_row);
    } else {
      constexpr int lines = kTileK / kShares;  // of a box
      CUTE_UNROLL
      for (int i = 0; i < kLoaded; i += kTileK) {
        copy(to + (i + share * lines) * kLine, begin + i, depth + share * lines);
      }
    }
  }

  // ---------------------------------------------------------------- warp 1

  // Sends the shard, or each peer's rows of it, piece by piece.
  CUTE_DEVICE void send_() {
    Tickets tickets{storage_};
    Clock const clock = tickets.next().clock;
    if (__any_sync(0xffffffff, mute_)) return;
    uint32_t& counter = spaces_.control(spaces_.rank).counter;
    LinkPacing const pacing{&spaces_.control(spaces_.rank).link_free, params_.picoseconds_per_kib};
    uint32_t const count = params_.pieces.pieces();
    Uses<2> uses;
    int64_t const row_bytes = int64_t(params_.k) * sizeof(Element), pitch = params_.shard_stride * sizeof(Element);
    uint32_t taken = lane() == 0 ? take_(counter) : 0;
    for (;;) {
      uint32_t const ticket = __shfl_sync(0xffffffff, taken, 0);
      if (ticket >= count) {
        if (lane() == 0 && ticket == count + gridDim.x - 1) atomicExch(&counter, 0u);
        return;
      }
      if (lane() == 0) taken = take_(counter);
      auto const piece = params_.pieces.at(ticket);
      uint32_t const peer = rank_at_(spaces_.ranks - piece.distance);
      int64_t const column = int64_t(piece.slice) * kPieceBytes;
      uint32_t const bytes = cute::min(int64_t(kPieceBytes), row_bytes - column);
      int32_t const begin = piece.row * kPieceRows, end = cute::min(begin + kPieceRows, params_.rank_rows);
      int64_t const first_row = kFromHolders ? int64_t(peer) * params_.m : 0;
      auto const* const from = reinterpret_cast<uint8_t const*>(params_.shard) + first_row * pitch + column;
      uint32_t const shard = received_(piece.distance, spaces_.rank);
      uint64_t const to = spaces_.slot(
          peer, clock.buffer(), spans_() ? received_at_(0, piece.slice, shard * params_.rank_rows) : received_at_(shard, piece.slice, 0));
      auto const load = [&](int32_t row, uint32_t use) {
        int32_t const rows = cute::min(int32_t(kCopyRows), end - row);
        if (bytes < kPieceBytes) clear_behind_(storage_.copied[use % 2], bytes);
        if (lane() == 0) Barrier::expect(storage_.arrived[use % 2], rows * bytes);
        __syncwarp();
        if (int32_t(lane()) < rows) {
          SM90_BULK_COPY_G2S::copy(
              from + (row + lane()) * pitch, &storage_.arrived[use % 2],
              storage_.copied[use % 2] + lane() * kPieceBytes, bytes);
        }
      };
      load(begin, uses.count);
      for (int32_t row = begin; row < end; row += kCopyRows, ++uses.count) {
        if (row + kCopyRows < end) {
          wait_until_read<0>();
          __syncwarp();
          load(row + kCopyRows, uses.count + 1);
        }
        if (lane() == 0 && row == begin && piece.distance) pacing.wait((end - begin) * bytes);
        Barrier::wait(storage_.arrived[uses.index()], uses.phase());
        if (lane() == 0) {
          SM90_BULK_COPY_S2G::copy(
              storage_.copied[uses.index()], reinterpret_cast<void*>(to + row * kPieceBytes),
              cute::min(int32_t(kCopyRows), end - row) * kPieceBytes);
        }
        commit();
      }
      wait_until_stored();
      __syncwarp();
      if (lane() == 0) {
        release_to_system();
        Workspaces::set(spaces_.flag(peer, clock.buffer(), piece_slot_(shard, piece.row, piece.slice)), clock.epoch());
      }
    }
  }

  // Clears what lies behind so many bytes of each row of a piece. B is 0 there, but 0 times NaN is NaN.
  CUTE_DEVICE static void clear_behind_(uint8_t* rows, uint32_t bytes) {
    if (lane() < kCopyRows) {
      for (uint32_t at = lane() * kPieceBytes + bytes; at < (lane() + 1) * kPieceBytes; at += 16) {
        *reinterpret_cast<uint4*>(rows + at) = {0, 0, 0, 0};
      }
    }
    fence_shared();
  }

  // Takes peers' results from slots to D, two subtiles at a time. One thread; where it adds terms, a warp.
  CUTE_DEVICE void take_results_() {
    constexpr uint32_t takes = (kResults + 1) / 2;  // of a part
    Tickets tickets{storage_};
    Clock const clock = tickets.next().clock;
    uint32_t& counter = spaces_.control(spaces_.rank).counter;
    uint32_t const peers = spaces_.ranks - 1, count = peers * parts_() * takes;
    uint32_t phase = 0;
    bool const leads = lane() == 0, mute = kToOwners ? __any_sync(0xffffffff, mute_) : mute_;
    bool const adds = kToOwners && !mute && (params_.terms.bias || params_.terms.c);
    if (leads && mute) {  // what comes now may be of an earlier replay
      auto* const words = reinterpret_cast<uint32_t*>(storage_.copied);
      for (int i = 0; i < 2 * kSubtile / 4; ++i) words[i] = 0xffffffff;
      fence_shared();
    }
    // A mute warp has a share of its own: warps that did not send left the counter as it was.
    uint32_t ticket = mute ? blockIdx.x : leads ? take_(counter) : 0;
    if constexpr (kToOwners) ticket = __shfl_sync(0xffffffff, ticket, 0);
    while (ticket < count) {
      uint32_t const next = mute ? ticket + gridDim.x : leads ? take_(counter) : 0;
      // The owners finish their tiles in the order of units.
      uint32_t const distance = ticket % peers + 1, number = ticket / peers, first = number % takes * 2;
      uint32_t const group = number / takes % kParts, block = number / (takes * kParts);
      Tile const tile = Tile::of(order_.of_unit(distance, block / kCluster), block % kCluster);
      uint32_t const slot = result_slot_(distance, part_(tile, group));
      if (leads && !mute) {
        spaces_.wait(spaces_.flag(spaces_.rank, clock.buffer(), slot), clock.epoch());
        uint64_t const from = spaces_.slot(spaces_.rank, clock.buffer(), uint64_t(slot) * kPartBytes);
        wait_until_read<0>();
        for (uint32_t i = 0; i < 2 && first + i < kResults; ++i) {
          Barrier::expect(storage_.arrived[i], kSubtile);
          SM90_BULK_COPY_G2S::copy(
              reinterpret_cast<void const*>(from + (first + i) * kSubtile), &storage_.arrived[i], storage_.copied[i],
              kSubtile);
        }
      }
      for (uint32_t i = 0; i < 2 && first + i < kResults; ++i) {
        if (!mute) {
          Barrier::wait(storage_.arrived[i], phase >> i);
          phase ^= 1 << i;
        }
        if (adds) add_terms_to_subtile_(storage_.copied[i], tile, group, first + i);
        if (leads) store_result_(storage_.copied[i], tile, group, first + i);
      }
      commit();
      ticket = kToOwners ? __shfl_sync(0xffffffff, next, 0) : next;
    }
    if (leads && !mute && ticket == count + gridDim.x - 1) atomicExch(&counter, 0u);
    wait_until_read<0>();
  }

  // Adds the bias and C to a subtile of a result of a peer, which has been rounded.
  CUTE_DEVICE void add_terms_to_subtile_(uint8_t* subtile, Tile const& tile, int part, int number) const {
    Terms const& terms = params_.terms;
    constexpr int chunks = kLine / 16, size = 16 / sizeof(Result);
    int32_t const first_row = tile.row * kTileM + (number % kDown * kParts + part) * kHeight;
    int32_t const first_column = tile.column * kTileN + subtile_column(number);
    int64_t const in_d = int64_t(rank_at_(tile.distance)) * params_.m;
    for (uint32_t i = lane(); i < kHeight * chunks; i += 32) {
      uint32_t const row = i / chunks, chunk = i % chunks;
      int32_t const in_shard = first_row + row, column = first_column + chunk * size;
      if (in_shard >= params_.m || column >= params_.n) continue;
      auto& values = *reinterpret_cast<cutlass::Array<Result, size>*>(subtile + row * kLine + (chunk ^ row % 8) * 16);
      Result const* const c = terms.c ? terms.c + (in_d + in_shard) * terms.c_stride : nullptr;
      CUTE_UNROLL
      for (int j = 0; j < size; ++j) {
        float sum = float(values[j]);
        if (terms.bias) sum += float(terms.bias[column + j]);
        if (c) sum += terms.beta * float(c[column + j]);
        values[j] = Result(sum);
      }
    }
    fence_shared();
    __syncwarp();
  }

  // ---------------------------------------------------------------- warp 3

  // Stores finished tiles. One thread.
  CUTE_DEVICE void store_() {
    Tickets tickets{storage_};
    Uses<kEpilogueStages> uses, others;  // of this tile's warp groups. Pingpong: of the other one
    LinkPacing const pacing{&spaces_.control(spaces_.rank).link_free, params_.picoseconds_per_kib};
    uint32_t const peers = spaces_.ranks - 1;
    bool const sends = !kGathers && !kOneShot && !mute_;
    uint32_t number = 0;
    uint64_t* stored = nullptr;  // the barrier of a stage from which a store may still read
    auto const release = [&] {
      if (!stored) return;
      wait_until_read<0>();
      Barrier::arrive(*stored);
      stored = nullptr;
    };
    for (Ticket ticket = tickets.next(); exists_(ticket); ticket = tickets.next(), ++number) {
      Clock const clock = ticket.clock;
      if (clock.ticket() == 0 && block_ == 0) spaces_.tell_begun(clock.epoch());
      Tile const tile = tile_(ticket);
      bool const remote = !kGathers && tile.distance;
      int const first = kPingpong ? number % kWarpGroups : 0;
      uint32_t const part = part_(tile, 0), peer = rank_at_(tile.distance);
      uint32_t const slot = remote ? sum_slot_(spaces_.ranks - tile.distance, part) : 0;
      // Where a part that goes to several ranks lies at the one so far before this one.
      auto const slot_at = [&](uint32_t distance, int j) {
        return kAllReduces ? result_slot_(distance, part + j) : sum_slot_(distance, part + j);
      };
      // A kernel whose tiles span shards stores the sum of each tile, and then the result, if any rows of it are its own.
      int32_t const own_rows = scatters_() ? own_rows_(tile.row * kTileM, kTileM) : 0;
      for (int pass = 0; pass < 2; ++pass) {
        bool const is_sum = pass == 0, divides = scatters_() && is_sum;
        if (scatters_() ? !is_sum && !own_rows : is_sum != (kReduces && remote)) continue;
        int const subtiles = is_sum ? kSums : kResults;
        bool const spreads = kAllReduces && !remote;  // to several ranks
        bool const leaves = sends && (remote || spreads || divides);
        CUTE_NO_UNROLL
        for (int i = 0; i < subtiles; ++i) {
          CUTE_UNROLL
          for (int j = 0; j < kParts; ++j) {
            int32_t const size = bytes_(tile, j, i, is_sum);
            int const group = first + j;
            uint64_t& written = storage_.written[group][uses.index()];
            uint8_t* const from = storage_.subtiles[group][uses.index()];
            if (!Barrier::test(written, uses.phase())) {
              release();
              Barrier::wait(written, uses.phase());
            }
            if (!remote && !divides) store_result_(from, tile, j, i);
            if (leaves && i == 0 && j == 0) {
              uint32_t const kept = own_rows * kTileN * sizeof(Partial);
              pacing.wait((tile_bytes_(tile, is_sum) - kept) * (remote || divides ? 1 : peers));
            }
            if (leaves && divides) store_at_owners_(tile, clock.buffer(), j, i, from);
            if (leaves && remote && size) store_at_(peer, clock.buffer(), slot + j, i, from, size);
            for (uint32_t distance = 1; leaves && spreads && size && distance <= peers; ++distance) {
              uint32_t const to = rank_at_(spaces_.ranks - distance);
              store_at_(to, clock.buffer(), slot_at(distance, j), i, from, size);
            }
            commit();
            if (stored) {  // the one before this one
              wait_until_read<1>();
              Barrier::arrive(*stored);
            }
            stored = &storage_.free[group][uses.index()];
          }
          ++uses.count;
        }
        if (!leaves) continue;
        release();
        wait_until_stored();
        release_to_system();
        for (int j = 0; j < kParts; ++j) {
          if (remote) Workspaces::set(spaces_.flag(peer, clock.buffer(), slot + j), clock.epoch());
          for (uint32_t distance = 1; (spreads || divides) && distance <= peers; ++distance) {
            uint32_t const to = rank_at_(spaces_.ranks - distance);
            Workspaces::set(spaces_.flag(to, clock.buffer(), slot_at(distance, j)), clock.epoch());
          }
        }
      }
      if constexpr (kPingpong) {
        auto const now = uses;
        uses = others;
        others = now;
      }
    }
    wait_until_read<0>();  // the end of the kernel waits for the rest
  }

  // Stores a subtile of a sum at the owners of its rows: those of each warp, which has 16, at one owner.
  CUTE_DEVICE void store_at_owners_(Tile const& tile, uint32_t buffer, int part, int subtile, uint8_t* from) {
    int32_t const first = tile.row * kTileM + (subtile / kSumsOfRows * kParts + part) * kHeight;
    constexpr int32_t bytes = kWarpRows * kLine;
    CUTE_NO_UNROLL
    for (int32_t warp = 0; warp < kHeight / kWarpRows; ++warp) {
      uint32_t const owner = (first + warp * kWarpRows) / params_.rank_rows;
      if (owner >= spaces_.ranks || owner == spaces_.rank) continue;
      uint32_t const distance = (spaces_.rank + spaces_.ranks - owner) % spaces_.ranks;
      uint64_t const at = uint64_t(sum_slot_(distance, part_(tile, part))) * kPartBytes + subtile * kSubtile + warp * bytes;
      SM90_BULK_COPY_S2G::copy(
          from + warp * bytes, reinterpret_cast<void*>(spaces_.slot(owner, buffer, at)), bytes);
    }
  }

  // Bytes of a subtile that are stored at a peer: not those behind the last row, by 16 rows in a partial sum.
  CUTE_DEVICE int32_t bytes_(Tile const& tile, int part, int subtile, bool is_sum) const {
    int const down = is_sum ? subtile / kSumsOfRows : subtile % kDown;
    int32_t const rows = params_.m - int32_t(tile.row * kTileM + (down * kParts + part) * kHeight);
    if (rows >= kHeight) return kSubtile;
    if (rows <= 0) return 0;
    return is_sum ? kSubtile / 4 * ((rows + kWarpRows - 1) / kWarpRows) : rows * kLine;
  }
  // The same, of all parts of a tile.
  CUTE_DEVICE uint32_t tile_bytes_(Tile const& tile, bool is_sum) const {
    if (int32_t((tile.row + 1) * kTileM) <= params_.m) return (is_sum ? kSums : kResults) * kSubtile * kParts;
    uint32_t bytes = 0;
    CUTE_NO_UNROLL
    for (int i = 0; i < (is_sum ? kSums : kResults) * kParts; ++i) {
      bytes += bytes_(tile, i % kParts, i / kParts, is_sum);
    }
    return bytes;
  }

  CUTE_DEVICE void store_at_(
      uint32_t rank, uint32_t buffer, uint32_t slot, int subtile, uint8_t* from, int32_t bytes) {
    uint64_t const to = spaces_.slot(rank, buffer, uint64_t(slot) * kPartBytes + subtile * kSubtile);
    SM90_BULK_COPY_S2G::copy(from, reinterpret_cast<void*>(to), bytes);
  }

  // Stores a subtile to D; where spanned shards are scattered, the rows that this rank owns, by those of a warp.
  CUTE_DEVICE void store_result_(uint8_t* from, Tile const& tile, int part, int subtile) {
    int32_t const column = tile.column * kTileN + subtile_column(subtile);
    int32_t const row = tile.row * kTileM + (subtile % kDown * kParts + part) * kHeight;
    if (!scatters_()) {
      SM90_TMA_STORE_3D::copy(&params_.d, from, column, row, kOneD ? 0 : matrix_(tile.distance));
      return;
    }
    CUTE_NO_UNROLL
    for (int32_t i = 0; i < kHeight; i += kWarpRows) {
      if (!own_rows_(row + i, kWarpRows)) continue;
      SM90_TMA_STORE_3D::copy(&params_.d, from + i * kLine, column, row + i - first_own_row_(), 0);
    }
  }

  // ---------------------------------------------------------------- the warps that multiply

  static constexpr auto kMajorA = DG_A_K_MAJOR ? GMMA::Major::K : GMMA::Major::MN;
  static constexpr auto kMajorB = DG_B_K_MAJOR ? GMMA::Major::K : GMMA::Major::MN;
  template <int kWidth>
  using MmaOf = decltype(make_tiled_mma(
      GMMA::ss_op_selector<
          Element, Element, float, Shape<Int<kBlockM / kParts>, Int<kWidth>, Int<kTileK>>, kMajorA, kMajorB>(),
      Layout<Shape<Int<kParts>, _1, _1>>{}));
  using Mma = MmaOf<kBlockN>;

  template <bool kMajor, int kRows>
  static constexpr auto stages_() {
    auto const shape = Shape<Int<kRows>, Int<kTileK>, Int<kStages>>{};
    if constexpr (kMajor) {
      return tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, shape);
    } else {
      return tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{}, shape, Step<_2, _1, _3>{});
    }
  }

  // ptxas keeps descriptors of shared memory in uniform registers, from which wgmmas take them, if it can prove that all
  // lanes of a warp have the same values and take the same branches. Otherwise up to four more instructions copy the
  // descriptors of each wgmma. So nothing here that decides where a warp goes, or which descriptors it has, comes from
  // the thread's index or from shared memory; ptxas knows that lanes agree on what __shfl_sync returns.
  CUTE_DEVICE void multiply_(uint32_t warp) {
    int const thread = threadIdx.x % kWarpGroupThreads, group = warp / 4 - 1;
    bool const leads_group = warp % 4 == 0;
    Mma mma;
    int const of_parts = kPingpong ? 0 : group * kWarpGroupThreads;  // descriptors are those of a whole warp group
    auto const slice = mma.get_slice(of_parts);
    Tensor a = slice.make_fragment_A(slice.partition_A(make_tensor(
        make_smem_ptr(reinterpret_cast<Element*>(storage_.a)), stages_<DG_A_K_MAJOR, kBlockM>())));
    // A descriptor does not say how many columns are read: the fragments are those of all columns of a stage.
    auto const slice_b = MmaOf<kLoadedN>{}.get_slice(of_parts);
    Tensor b = slice_b.make_fragment_B(slice_b.partition_B(make_tensor(
        make_smem_ptr(reinterpret_cast<Element*>(storage_.b)), stages_<DG_B_K_MAJOR, kLoadedN>())));
    Tensor sums = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});

    Tickets tickets{storage_};
    Stage stage;
    Uses<kEpilogueStages> uses;
    if (kPingpong && group == 1) turn_arrive_(0);
    uint32_t number = 0;
    for (Ticket ticket = tickets.next_of_warp(); exists_(ticket); ticket = tickets.next_of_warp(), ++number) {
      if (kPingpong && int(number % kWarpGroups) != group) {
        stage.advance(depth_);
        continue;
      }
      Tile const product = product_(ticket);
      // Each column of tiles reads all of A. They take turns to hand out their rows of it, stage by stage.
      bool const hands_out = kHandsOut && params_.gathered_at && (kPingpong || group == 0) && leads_group;
      uint32_t next_handed_out = product.column;
      if (kHandsOut && hands_out && mute_) spoil_gathered_(product);
      if constexpr (kPingpong) turn_wait_(group);
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      uint32_t last = 0;
      CUTE_NO_UNROLL
      for (uint32_t k = 0; k < depth_; ++k) {
        uint32_t const now = stage.index;
        Barrier::wait(storage_.full[now], stage.phase);
        if (kHandsOut && hands_out) {
          bool const turn = k == next_handed_out;
          if (turn) next_handed_out += order_.columns * kClusterN * kTileN / kBlockN;
          hand_out_(product, first_ + k, now, turn);
        }
        warpgroup_fence_operand(sums);
        warpgroup_arrive();
        CUTE_UNROLL
        for (int i = 0; i < size<2>(a); ++i) {
          gemm(mma, a(_, _, i, now), b(_, _, i, now), sums);
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        warpgroup_fence_operand(sums);
        if (kHandsOut && hands_out) wait_until_handed_out_<1>();
        if (k) release_(last);
        last = now;
        stage.advance();
      }
      if constexpr (kPingpong && !kSplits) turn_arrive_(1 - group);
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      if (kHandsOut && hands_out) wait_until_handed_out_<0>();
      release_(last);
      if constexpr (kSplits) {
        Tensor own = partition_fragment_C(MmaOf<kTileN>{}, Shape<Int<kTileM>, Int<kTileN>>{});
        exchange_parts_(sums, own, number, group, thread);
        if (finishes_()) finish_(own, ticket, group, uses, thread);
      } else {
        finish_(sums, ticket, group, uses, thread);
      }
    }
    // Other blocks arrive there until then. The warp group that had the last tile knows the phase.
    if (kSplits && int(number % kWarpGroups) != group) Barrier::wait(storage_.taken, number + 1);
  }

  // Sends the sums of each tile of the cluster to the block that finishes it. If this is one, it adds those of all blocks,
  // in their order. A block sends once all that it sent before has been added. The other warp group has its turn only then:
  // otherwise it might wait for `taken` two phases ahead, whose parity is that of a phase that has passed.
  template <class Sums, class Own>
  CUTE_DEVICE void exchange_parts_(Sums const& sums, Own& own, uint32_t number, int group, int thread) {
    constexpr int values = kTileM * kTileN / kWarpGroupThreads, of_rows = kTileN / 2;  // of a thread; in 64 rows
    Barrier::wait<true>(storage_.taken, number + 1);
    turn_arrive_(1 - group);
    float* const own_part = &storage_.sums[block_][thread * 4];
    CUTE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float* there;
      asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own_part), "r"(tile));
      float* const to = tile == int(block_) ? own_part : there;
      auto const value = [&](int i) {
        return at_(sums, tile % kClusterM * kDown + i / of_rows, tile / kClusterM * kTileN, i % of_rows);
      };
      CUTE_UNROLL
      for (int i = 0; i < values; i += 4) {
        *reinterpret_cast<float4*>(to + i * kWarpGroupThreads) = {value(i), value(i + 1), value(i + 2), value(i + 3)};
      }
    }
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
    __syncwarp();
    if (lane() < kTiles) Barrier::arrive_at<true>(storage_.summed, lane());
    if (!finishes_()) return;
    clear(own);
    Barrier::wait<true>(storage_.summed, number);
    CUTE_NO_UNROLL
    for (auto const& part : storage_.sums) {
      CUTE_UNROLL
      for (int i = 0; i < values; i += 4) {
        float4 found;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
                     : "r"(cast_smem_ptr_to_uint(&part[i * kWarpGroupThreads + thread * 4]))
                     : "memory");
        float* const to = &at_(own, i / of_rows, 0, i % of_rows);
        to[0] += found.x, to[1] += found.y, to[2] += found.z, to[3] += found.w;
      }
    }
    __syncwarp();
    if (lane() < kCluster) Barrier::arrive_at<true>(storage_.taken, lane());
  }

  // What is done with the sum of a tile, or of a part of it.
  template <class Sums>
  CUTE_DEVICE void finish_(Sums& sums, Ticket const& ticket, int group, Uses<kEpilogueStages>& uses, int thread) {
    Tile const tile = tile_(ticket);
    int const part = kPingpong ? 0 : group;
    scale_(sums);
    if constexpr (kOneShot) exchange_sums_(sums, ticket.clock, tile, part, thread);
    bool const leaves = kReduces && (tile.distance || spans_());
    if constexpr (kReduces) {
      if (leaves) write_sums_(sums, group, uses, thread);
    }
    if (!leaves || (scatters_() && own_rows_(tile.row * kTileM, kTileM))) {
      if constexpr (kReduces) {
        if (!scatters_() || owns_some_(tile, part, thread / 32)) add_sums_(sums, ticket.clock, part_(tile, part), thread);
      }
      if (!kToOwners || !tile.distance) add_terms_(sums, tile, part, thread);
      write_results_(sums, group, uses, thread);
    }
  }

  // Whether this rank owns some of a warp's rows of a part.
  CUTE_DEVICE bool owns_some_(Tile const& tile, int part, int warp) const {
    bool found = false;
    for (int down = 0; down < kDown; ++down) {
      found |= own_rows_(tile.row * kTileM + (down * kParts + part) * kHeight + warp * kWarpRows, kWarpRows) > 0;
    }
    return found;
  }

  // Stores a stage of A to the tensor for all of A, if it is this tile's turn.
  CUTE_DEVICE void hand_out_(Tile const& tile, uint32_t k, uint32_t stage, bool turn) const {
    if (lane() == 0) {
      if (turn && !mute_) {
        auto const& pieces = params_.pieces;
        Slice const from =
            kFromHolders ? pieces.stage_of_sum(shard_depth_, kSliceTiles, k) : Slice{tile.distance, k};
        SM90_TMA_STORE_3D::copy(
            &params_.gathered, storage_.a[stage], int32_t(from.number * kTileK), int32_t(tile.row * kBlockM),
            matrix_(from.distance));
      }
      commit();
    }
    __syncwarp();
  }
  // Waits until all stages but the last kPending ones have been read.
  template <int kPending>
  CUTE_DEVICE static void wait_until_handed_out_() {
    wait_until_read<kPending>();
    __syncwarp();
  }
  // A tile's rows of all of A become NaN: what comes now may be of an earlier replay. Each mute lane does it.
  CUTE_DEVICE void spoil_gathered_(Tile const& tile) const {
    Element const nan(__int_as_float(0x7fffffff));
    for (int32_t row = tile.row * kBlockM; row < cute::min(int32_t(tile.row + 1) * kBlockM, params_.m); ++row) {
      int64_t const at = kFromHolders ? row : int64_t(matrix_(tile.distance)) * params_.m + row;
      int64_t const columns = int64_t(params_.k) * (kFromHolders ? spaces_.ranks : 1);
      for (int64_t k = 0; k < columns; ++k) params_.gathered_at[at * params_.gathered_stride + k] = nan;
    }
  }

  // The warp groups take turns to issue wgmmas: each has the tensor cores for a whole tile.
  CUTE_DEVICE static void turn_wait_(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kWarpGroups * kWarpGroupThreads) : "memory");
  }
  CUTE_DEVICE static void turn_arrive_(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(group + 1), "n"(kWarpGroups * kWarpGroupThreads) : "memory");
  }

  // Tells all blocks that load into a stage that this warp has read it.
  CUTE_DEVICE void release_(uint32_t stage) {
    if constexpr (kSharesM * kSharesN == 1) {
      if (lane() == 0) Barrier::arrive(storage_.empty[stage]);
    } else {
      uint32_t const m = block_ % kClusterM, n = block_ / kClusterM, i = lane();
      if (i < kClusterM) {
        Barrier::arrive_at(storage_.empty[stage], i + n * kClusterM);
      } else if (i < kClusterM + kClusterN - 1) {
        uint32_t const other = i - kClusterM;
        Barrier::arrive_at(storage_.empty[stage], m + (other + (other >= n)) * kClusterM);
      }
    }
  }

  // ---------------------------------------------------------------- the epilogue

  // The sum of value i of a thread in the m-th 64 rows of a part, from a multiple of 8 columns on.
  template <class Sums>
  CUTE_DEVICE static auto& at_(Sums& sums, int m, int first, int i) {
    constexpr int width = 2 * size<0>(typename Sums::layout_type{});  // columns of one wgmma
    int const column = first + i / 4 * 8;
    return sums(column % width / 2 + i % 4, m, column / width);
  }

  // The address of a 16-byte chunk of a subtile's row, swizzled as TMA does.
  CUTE_DEVICE static uint32_t chunk_(uint8_t* subtile, uint32_t row, uint32_t chunk) {
    return cast_smem_ptr_to_uint(subtile) + row * kLine + (chunk ^ row % 8) * 16;
  }

  template <class Sums>
  CUTE_DEVICE void scale_(Sums& sums) const {
    float const factor = mute_ ? __int_as_float(0x7fffffff) : params_.terms.alpha;
    if (factor == 1.0f) return;
    CUTE_UNROLL
    for (int i = 0; i < size(sums); ++i) sums(i) *= factor;
  }

  static constexpr int kPacked = 16 / sizeof(Partial);
  using Pack = cutlass::Array<Partial, kPacked>;
  // Packs that are loaded at a time: as many as there are registers for, and equal numbers.
  static constexpr int packs_ahead_() {
    constexpr int most = cute::min(16, (kAddRegisters - kPartM * kPartN / kWarpGroupThreads) / 4);
    int ahead = most;
    while (kPartPacks % ahead) --ahead;
    return ahead;
  }

  // Adds the partial sums of all peers, in the order of distances. While those of a rank are added, the next ones are
  // under way.
  template <class Sums>
  CUTE_DEVICE void add_sums_(Sums& sums, Clock clock, uint32_t part, int thread) {
    constexpr int ahead = packs_ahead_();
    static_assert(kPartPacks * kPacked == size(typename Sums::layout_type{}));
    uint64_t const slots = spaces_.slot(spaces_.rank, clock.buffer(), first_pack(thread));
    uint4 found[ahead];
    auto const load = [&](uint32_t i, int pack) {
      uint4& to = found[pack % ahead];
      asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                   : "l"(slots + uint64_t(sum_slot_(i, part)) * kPartBytes + pack_offset(pack))
                   : "memory");
    };
    uint32_t first = 1, arrived = 0;  // of those that come next, from the first on, as bits
    auto const wait = [&](uint32_t i) {
      if (i < first + 32 && arrived >> (i - first) & 1) return;
      first = i;
      uint32_t const next = i + lane();
      arrived = wait_for_flags_(clock, next < spaces_.ranks, sum_slot_(next, part), 1);
    };
    if (spaces_.ranks == 1) return;
    wait(1);
    CUTE_UNROLL
    for (int pack = 0; pack < ahead; ++pack) load(1, pack);
    CUTE_NO_UNROLL
    for (uint32_t i = 1; i < spaces_.ranks; ++i) {
      bool const last = i + 1 == spaces_.ranks;
      if (!last) wait(i + 1);
      CUTE_UNROLL
      for (int pack = 0; pack < kPartPacks; ++pack) {
        auto const& values = reinterpret_cast<Pack const&>(found[pack % ahead]);
        CUTE_UNROLL
        for (int j = 0; j < kPacked; ++j) sums(pack * kPacked + j) += float(values[j]);
        if (pack + ahead < kPartPacks) {
          load(i, pack + ahead);
        } else if (!last) {
          load(i + 1, pack + ahead - kPartPacks);
        }
      }
    }
  }

  // One-shot: stores the partial sum of a tile at all peers, and adds those of all ranks, in the order of ranks: so all
  // have the same bits. A packet comes as a whole, so it needs no flag, and no fence. Rows that do not exist have none.
  template <class Sums>
  CUTE_DEVICE void exchange_sums_(Sums& sums, Clock clock, Tile const& tile, int part, int thread) const {
    // Partial sums in 4 bytes, which are a quarter of a packet; such quarters that a thread has in a row of the tile.
    constexpr int of_quarter = 4 / sizeof(Partial), quarters = kPartN / 4 / of_quarter;
    constexpr int packets = (quarters + Packet::kData - 1) / Packet::kData;
    // Ranks whose packets are on their way: as many as there are registers for. A block that multiplies several tiles has fewer.
    constexpr int halves = kDown * 2, ahead = cute::max(1, (kBlockM * kBlockN > kTileM * kTileN ? 18 : 24) / (halves * packets));
    using Quarter = cutlass::Array<Partial, of_quarter>;
    using Convert = cutlass::NumericArrayConverter<Partial, float, of_quarter>;
    uint32_t const epoch = clock.epoch(), groups = (cute::min(int32_t(kTileM), params_.m) + 7) / 8;  // of 8 rows, of a tile
    uint64_t const of_rank = uint64_t(parts_() / kParts) * groups * packets * kPacketBytes;
    auto const first_row = [&](int half) { return (half / 2 * kParts + part) * kHeight + thread / 32 * 16 + half % 2 * 8; };
    auto const exists = [&](int half) {
      return int32_t(tile.row * kTileM + first_row(half) + lane() / 4) < params_.m;
    };
    auto const at = [&](uint32_t rank, uint32_t source, int half, int packet) {
      uint64_t const number = (uint64_t(part_(tile, 0) / kParts) * groups + first_row(half) / 8) * packets + packet;
      return spaces_.packet(rank, clock.buffer(), source * of_rank + number * kPacketBytes + lane() * sizeof(Packet));
    };
    auto const value = [&](int half, int number) -> float& {
      return at_(sums, half / 2, number / 2 * 8, half % 2 * 2 + number % 2);
    };
    // Quarters that are left over have the epoch, and are compared, too: ptxas splits the load of a packet if a quarter
    // in its middle is not used.
    uint32_t own[halves][packets * Packet::kData];
    CUTE_UNROLL
    for (int half = 0; half < halves; ++half) {
      CUTE_UNROLL
      for (int quarter = quarters; quarter < packets * Packet::kData; ++quarter) own[half][quarter] = epoch;
      CUTE_UNROLL
      for (int quarter = 0; quarter < quarters; ++quarter) {
        cutlass::Array<float, of_quarter> exact;
        CUTE_UNROLL
        for (int i = 0; i < of_quarter; ++i) exact[i] = value(half, quarter * of_quarter + i);
        auto const rounded = Convert::convert(exact);
        own[half][quarter] = reinterpret_cast<uint32_t const&>(rounded);
      }
    }
    for (uint32_t distance = 1; distance < spaces_.ranks && !mute_; ++distance) {
      CUTE_UNROLL
      for (int half = 0; half < halves; ++half) {
        if (!exists(half)) continue;
        CUTE_UNROLL
        for (int packet = 0; packet < packets; ++packet) {
          uint32_t const* const of_packet = &own[half][packet * Packet::kData];
          Packet{of_packet[0], of_packet[1], of_packet[2], epoch}.store(
              at(rank_at_(distance), spaces_.rank, half, packet));
        }
      }
    }
    // A thread loads all that a rank has sent at once: what it waits for is one trip to memory, and not one for each half.
    Packet found[ahead][halves][packets];
    auto const load = [&](uint32_t source, auto& of_rank) {
      if (source >= spaces_.ranks || source == spaces_.rank) return;
      CUTE_UNROLL
      for (int half = 0; half < halves; ++half) {
        if (!exists(half)) continue;
        CUTE_UNROLL
        for (int packet = 0; packet < packets; ++packet) {
          of_rank[half][packet].load(at(spaces_.rank, source, half, packet));
        }
      }
    };
    auto const arrived = [&](auto const& of_rank) {
      bool every = true;
      CUTE_UNROLL
      for (int half = 0; half < halves; ++half) {
        bool of_half = true;
        CUTE_UNROLL
        for (auto const& packet : of_rank[half]) of_half &= packet.epoch == epoch;
        CUTE_UNROLL
        for (int quarter = quarters; quarter < packets * Packet::kData; ++quarter) {
          of_half &= of_rank[half][quarter / Packet::kData].data[quarter % Packet::kData] == epoch;
        }
        every &= of_half || !exists(half);
      }
      return every;
    };
    clear(sums);
    CUTE_UNROLL
    for (uint32_t i = 0; i < ahead; ++i) load(i, found[i]);
    CUTE_NO_UNROLL
    for (uint32_t first = 0; first < spaces_.ranks; first += ahead) {
      CUTE_UNROLL
      for (uint32_t i = 0; i < ahead; ++i) {
        uint32_t const source = first + i;
        if (source >= spaces_.ranks) break;
        bool const received = source != spaces_.rank;
        bool lost = false;
        for (uint32_t spins = 1; received && !lost && !arrived(found[i]); ++spins) {
          lost = spaces_.ends_(spins);
          load(source, found[i]);
        }
        CUTE_UNROLL
        for (int half = 0; half < halves; ++half) {
          if (!exists(half)) continue;
          CUTE_UNROLL
          for (int quarter = 0; quarter < quarters; ++quarter) {
            auto const& packet = found[i][half][quarter / Packet::kData];
            uint32_t const bits = received ? packet.data[quarter % Packet::kData] : own[half][quarter];
            auto const& addends = reinterpret_cast<Quarter const&>(bits);
            CUTE_UNROLL
            for (int j = 0; j < of_quarter; ++j) {
              value(half, quarter * of_quarter + j) += lost ? __int_as_float(0x7fffffff) : float(addends[j]);
            }
          }
        }
        load(source + ahead, found[i]);
      }
    }
  }

  // Writes a partial sum to epilogue stages, from which it is stored.
  template <class Sums>
  CUTE_DEVICE void write_sums_(Sums& sums, int group, Uses<kEpilogueStages>& uses, int thread) {
    CUTE_UNROLL
    for (int subtile = 0; subtile < kSums; ++subtile) {
      uint8_t* const to = begin_write_(group, uses) + first_pack(thread);
      CUTE_UNROLL
      for (int pack = subtile * kPacks; pack < (subtile + 1) * kPacks; ++pack) {
        cutlass::Array<float, kPacked> values;
        CUTE_UNROLL
        for (int i = 0; i < kPacked; ++i) values[i] = sums(pack * kPacked + i);
        *reinterpret_cast<Pack*>(to + pack_offset(pack % kPacks)) =
            cutlass::NumericArrayConverter<Partial, float, kPacked>::convert(values);
      }
      end_write_(group, uses);
    }
  }

  // The next epilogue stage, when it is free.
  CUTE_DEVICE uint8_t* begin_write_(int group, Uses<kEpilogueStages> const& uses) {
    Barrier::wait(storage_.free[group][uses.index()], uses.phase() ^ 1);
    return storage_.subtiles[group][uses.index()];
  }
  CUTE_DEVICE void end_write_(int group, Uses<kEpilogueStages>& uses) {
    fence_shared();
    __syncwarp();
    if (lane() == 0) Barrier::arrive(storage_.written[group][uses.index()]);
    ++uses.count;
  }

  // Where value i and the next one lie, if they have four bytes each.
  CUTE_DEVICE static uint32_t pair_(uint8_t* subtile, int thread, int i) {
    uint32_t const row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
    return chunk_(subtile, row, i / 4 * 2 + thread % 4 / 2) + thread % 2 * 8;
  }

  // Adds what belongs to D: the bias, and C.
  template <class Sums>
  CUTE_DEVICE void add_terms_(Sums& sums, Tile const& tile, int part, int thread) const {
    Terms const& terms = params_.terms;
    if (!terms.bias && !terms.c) return;
    int32_t const first_row = kOneD || by_columns_() ? -first_own_row_() : matrix_(tile.distance) * params_.m;
    int64_t const shift = by_columns_() ? int64_t(rank_at_(tile.distance)) * params_.n : 0;  // of columns
    int32_t const first = tile.row * kTileM + part * kHeight + thread / 32 * 16 + thread % 32 / 4;
    int32_t const first_column = tile.column * kTileN + thread % 4 * 2;
    auto const row_of = [&](int j) { return first + j / 2 * kParts * kHeight + j % 2 * 8; };  // 8 apart, of each subtile
    bool is_in_d[kDown * 2];
    CUTE_UNROLL
    for (int j = 0; j < kDown * 2; ++j) is_in_d[j] = scatters_() ? own_rows_(row_of(j), 1) : row_of(j) < params_.m;
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 4; ++i) {  // two neighbours in every 8 columns
      int32_t const column = first_column + i / 2 * 8 + i % 2;
      if (column >= params_.n) continue;
      float const bias = terms.bias ? float(terms.bias[shift + column]) : 0.0f;
      CUTE_UNROLL
      for (int j = 0; j < kDown * 2; ++j) {
        float& sum = at_(sums, j / 2, i / 2 * 8, j % 2 * 2 + i % 2);
        sum += bias;
        if (terms.c && is_in_d[j]) {
          sum += terms.beta * float(terms.c[(first_row + row_of(j)) * terms.c_stride + shift + column]);
        }
      }
    }
  }

  // Writes a part of a result to epilogue stages, as TMA stores it.
  template <class Sums>
  CUTE_DEVICE void write_results_(Sums& sums, int group, Uses<kEpilogueStages>& uses, int thread) {
    int const row = thread / 32 * 16 + thread % 16, beside = thread % 32 / 16;
    CUTE_UNROLL
    for (int number = 0; number < kResults; ++number) {
      int const m = number % kDown, first = subtile_column(number);
      uint8_t* const to = begin_write_(group, uses);
      if constexpr (sizeof(Result) == 2) {
        CUTE_UNROLL
        for (int i = 0; i < kColumns / 2; i += 8) {
          cutlass::Array<float, 8> values;
          CUTE_UNROLL
          for (int j = 0; j < 8; ++j) values[j] = at_(sums, m, first, i + j);
          auto const results = cutlass::NumericArrayConverter<Result, float, 8>::convert(values);
          auto const& words = reinterpret_cast<uint32_t const(&)[4]>(results);
          asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                           chunk_(to, row, i / 4 + beside)),
                       "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                       : "memory");
        }
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kColumns / 2; i += 2) {
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(pair_(to, thread, i)),
                       "f"(at_(sums, m, first, i)), "f"(at_(sums, m, first, i + 1))
                       : "memory");
        }
      }
      end_write_(group, uses);
    }
  }

  Params const& params_;
  TileOrder const& order_;
  Workspaces const& spaces_;
  Storage& storage_;
  uint32_t const block_, clusters_, shard_depth_;  // stages of this rank's columns of A
  uint32_t const first_, depth_;                   // the first stage of this block's sum, and how many it has
  bool mute_ = false;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    distgemm_per_tile(Params const __grid_constant__ params) {
  extern __shared__ uint8_t memory[];
  uint64_t const aligned = (reinterpret_cast<uint64_t>(memory) + kAlignment - 1) / kAlignment * kAlignment;
  Kernel(params, *reinterpret_cast<Storage*>(aligned)).run();
}

DG_FACTS{
    DG_KERNEL(kThreads, sizeof(Storage) + kAlignment),
    // params.py has the same structs.
    DG_FIELD(received), DG_FIELD(gathered), DG_FIELD(order.lead), DG_FIELD(order.distances), DG_FIELD(pieces.distances),
    DG_FIELD(workspaces.packets_of_buffer), DG_FIELD(workspaces.executable), DG_FIELD(workspaces.epochs_a_replay),
    DG_FIELD(terms.beta), DG_FIELD(terms.c_stride), DG_FIELD(shard), DG_FIELD(gathered_at), DG_FIELD(gathered_stride), DG_FIELD(k),
    DG_FIELD(rank_rows), DG_FIELD(box_m), DG_FIELD(loaded_m),
    DG_FIELD(slices), DG_FIELD(picoseconds_per_kib), DG_FIELD(by_columns),
    DG_NUMBER("control.dead", offsetof(Control, dead)), DG_NUMBER("control.begun", offsetof(Control, begun)),
    DG_NUMBER("control", sizeof(Control))};

}  // namespace distgemm
