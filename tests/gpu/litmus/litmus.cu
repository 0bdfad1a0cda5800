// A litmus test of how per-tile kernels pass data to another rank. In each round every block stores the number of the
// round at the peer, sets the peer's flags, waits for its own flags, loads what the peer stored, and compares. The flags
// are set and awaited by the functions of epochs.cuh, which these kernels call, too.
//
// The tile of a block has two parts, which two warp groups store. Each part has a flag, which holds an epoch. A round's
// data lies in one of two slots. There is one flag for each part of a slot, which nobody clears. So no block stores into
// a slot that is still read: before round n + 1, it has seen the peer's flags of round n, which the peer sets once it has
// read what came in round n - 1.
//
// Along the path of packets, threads store the packets of one-shot kernels, and wait for those of the peer. There are no
// flags: a packet has the epoch itself.
//
// Further blocks read and write more memory than L2 holds.

#include <cstdint>

#include "cutlass/cuda_host_adapter.hpp"

#include "../../../distgemm/gemm/kernels/epochs.cuh"

namespace litmus {

constexpr int kThreads = 256, kWarpGroups = 2, kWarpGroupThreads = kThreads / kWarpGroups;
constexpr int kRow = 256, kRowWords = kRow / 4;  // a tile is rows of so many bytes
constexpr int kSlots = 2;
constexpr int kUnroll = 16;
constexpr int kSharedBytes = 120 << 10;  // at least: more than half of what an SM has, so an SM has one block

// How data is stored at the peer, and read there.
enum Path : int32_t {
  kPiece,  // the lanes of a warp store by TMA. The lanes of a warp read flags, and one loads by TMA
  kPart,   // one thread stores by TMA. One thread reads flags and loads by TMA
  kSum,    // one thread stores by TMA. The lanes of each warp read flags and load without TMA
  kPacket,  // each thread stores packets, and loads them until they have the epoch
};
constexpr uint64_t kFirstEpoch = (1ull << 43) - (1 << 20);  // so that all bits change
// What is left out of the protocol.
enum Change : int32_t {
  kNothing,
  kNoRelease,  // the flag is written without a fence before it
  kNoWaitNoRelease,  // nor are the stores waited for
  kNoProxyFence,     // no fence between the flag and TMA's load
  kNoAcquire,        // the flag is read without acquire
  kOlderEpoch,       // any epoch ends a wait
  kHalves,           // a packet is stored in two halves, first that with the epoch
};

struct Result {
  uint64_t rounds;        // of all blocks
  uint64_t stale_rounds;  // in which a block loaded a word of an earlier round
  uint64_t stale_words;
  uint64_t newer_words;  // of a later round: two rounds in one slot at the same time
  uint32_t oldest;       // how many rounds the oldest stale word was behind
  uint32_t timeouts;     // blocks that gave up
};

struct Arguments {
  uint32_t *slots, *peer_slots;  // [kSlots][blocks][bytes / 4]
  uint64_t *flags, *peer_flags;  // [kSlots][blocks][parts]
  uint4 *read, *written;         // memory of the further blocks; at the peer, if there are two GPUs: written
  uint64_t units;                // of 16 bytes in each of the two, a power of two
  uint32_t* running;             // blocks that have not ended, the further ones not counted
  Result* result;
  uint64_t limit_ns;  // for the launch
  uint32_t first_round, rounds, seed;
  int32_t rank, blocks, further_blocks, bytes;  // bytes of a tile
  int32_t jitter_ns;  // delays are up to so long
};

struct Parameters {
  CUtensorMap slots;
  Arguments args;
};

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

__device__ inline uint32_t hash(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

__device__ inline uint32_t shared_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

template <Change change>
__device__ void wait_for_stores() {
  if constexpr (change != kNoWaitNoRelease) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

// Stores a warp group's part of a tile, and sets its flag to the epoch. A warp calls it.
template <Path path, Change change>
__device__ void pass_on(Arguments const& args, uint32_t const* from, int row, int rows, uint64_t flag, uint64_t epoch) {
  int const lane = threadIdx.x % 32, lanes = path == kPiece ? 32 : 1, step = path == kPiece ? 1 : rows;
  if (lane < lanes) {
    for (int i = lane * step; i < rows; i += lanes * step) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                       args.peer_slots + size_t(row + i) * kRowWords),
                   "r"(shared_address(from + i * kRowWords)), "r"(step * kRow)
                   : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    wait_for_stores<change>();
  }
  __syncwarp();
  if (lane == 0) {
    if constexpr (change != kNoRelease && change != kNoWaitNoRelease) {
      asm volatile("fence.acq_rel.sys;" ::: "memory");
    }
    distgemm::Workspaces::set(flag, epoch);
  }
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until the flags of all parts have the epoch, but not longer than until `deadline`. A warp calls it, or a thread.
template <Path path, Change change>
__device__ bool wait_for_epoch(uint64_t flags, uint64_t epoch, uint64_t deadline) {
  auto const has = [&](int part) {
    uint64_t const flag = flags + part * sizeof(uint64_t);
    uint64_t value;
    if constexpr (change == kNoAcquire) {
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    } else {
      value = distgemm::Workspaces::load(flag);
    }
    return change == kOlderEpoch || value == epoch;
  };
  for (uint32_t looks = 1;; ++looks) {
    bool all = true;
    if constexpr (path == kPart) {
      for (int part = 0; part < kWarpGroups; ++part) all = all && has(part);
    } else {
      all = __all_sync(0xffffffff, threadIdx.x % 32 >= kWarpGroups || has(threadIdx.x % 32));
    }
    if (all) break;
    if (looks % 256 == 0 && nanoseconds() > deadline) return false;
  }
  if constexpr (path != kPart) __syncwarp();
  if constexpr (path != kSum && change != kNoProxyFence) asm volatile("fence.proxy.async.global;" ::: "memory");
  return true;
}

__device__ inline void load_bulk(uint32_t const* from, uint32_t* to, uint64_t* arrived, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(arrived))
      : "memory");
}

__device__ inline void load(CUtensorMap const& map, uint32_t* to, uint64_t* arrived, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(shared_address(arrived)), "r"(0), "r"(row)
      : "memory");
}

__device__ inline void wait_for_load(uint64_t* arrived, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(
          shared_address(arrived)),
      "r"(parity)
      : "memory");
}

// Stores this thread's packets at the peer, and waits for the peer's. They go to shared memory, their rounds behind them.
template <Change change>
__device__ bool exchange_packets(Arguments const& args, uint32_t* in, size_t first, uint32_t round, uint64_t deadline) {
  uint32_t const first_epoch = uint32_t(kFirstEpoch), epoch = first_epoch + round;
  int const words = args.bytes / 4;
  for (int i = threadIdx.x * 4; i < words; i += kThreads * 4) {
    uint64_t const to = reinterpret_cast<uint64_t>(args.peer_slots + first + i);
    if constexpr (change == kHalves) {
      asm volatile(
          "st.relaxed.sys.global.v2.b32 [%0 + 8], {%1, %2};\n"
          "st.relaxed.sys.global.v2.b32 [%0], {%1, %1};" ::"l"(to), "r"(round), "r"(epoch)
          : "memory");
    } else {
      distgemm::Packet{{round, round, round}, epoch}.store(to);
    }
  }
  for (int i = threadIdx.x * 4; i < words; i += kThreads * 4) {
    distgemm::Packet found;
    for (uint32_t looks = 1;; ++looks) {
      found.load(reinterpret_cast<uint64_t>(args.slots + first + i));
      if (found.epoch == epoch || change == kOlderEpoch) break;
      if (looks % 256 == 0 && nanoseconds() > deadline) return false;
    }
    for (int word = 0; word < distgemm::Packet::kData; ++word) in[i + word] = found.data[word];
    in[i + 3] = found.epoch - first_epoch;
  }
  return true;
}

// Reads and writes until the other blocks have ended.
__device__ void press(Arguments const& args, uint64_t deadline) {
  uint64_t const threads = uint64_t(args.further_blocks) * kThreads;
  uint64_t at = uint64_t(blockIdx.x - args.blocks) * kThreads + threadIdx.x;
  for (;;) {
    uint4 units[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) units[i] = args.read[(at + i * threads) & (args.units - 1)];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      ++units[i].x;
      args.written[(at + i * threads) & (args.units - 1)] = units[i];
    }
    at += kUnroll * threads;
    uint32_t running;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(running) : "l"(args.running) : "memory");
    if (!running || nanoseconds() > deadline) return;
  }
}

template <Path path, Change change>
__global__ void __launch_bounds__(kThreads) litmus(__grid_constant__ Parameters const params) {
  extern __shared__ uint32_t shared[];
  __shared__ uint64_t arrived;
  __shared__ bool came;
  Arguments const& args = params.args;
  uint64_t const deadline = nanoseconds() + args.limit_ns;
  int const block = blockIdx.x;
  if (block >= args.blocks) {
    press(args, deadline);
    return;
  }
  // Dynamic shared memory begins at a multiple of 16 bytes, TMA with a tensor map wants 128.
  uint32_t* const out = shared + (128 - shared_address(shared) % 128) % 128 / 4;
  int const words = args.bytes / 4, rows = args.bytes / kRow, part = rows / kWarpGroups;
  uint32_t* const in = out + words;
  int const warp_group = threadIdx.x / kWarpGroupThreads;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  uint32_t number = 0;
  for (; number < args.rounds; ++number) {
    uint32_t const round = args.first_round + number;
    uint32_t const slot = round % kSlots;
    uint32_t const chance = hash(hash(round ^ args.seed) + uint32_t(block * kWarpGroups + warp_group) * 2 + args.rank);
    if (args.jitter_ns && chance % 8 == 0) {
      uint64_t const end = nanoseconds() + (chance >> 8) % args.jitter_ns;
      while (nanoseconds() < end) continue;
    }

    int const mine = int(slot * args.blocks + block) * rows + warp_group * part;  // the first row of this part
    for (int i = threadIdx.x; i < words; i += kThreads) out[i] = round;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    uint64_t const epoch = kFirstEpoch + round;
    size_t const first_flag = (size_t(slot) * args.blocks + block) * kWarpGroups;
    auto const flag_at = [&](uint64_t* flags, size_t number) { return reinterpret_cast<uint64_t>(flags + number); };
    if (path != kPacket && threadIdx.x % kWarpGroupThreads < 32) {
      pass_on<path, change>(args, out + warp_group * part * kRowWords, mine, part,
                            flag_at(args.peer_flags, first_flag + warp_group), epoch);
    }

    if constexpr (path == kPacket) {
      bool const mine_came =
          exchange_packets<change>(args, in, size_t(slot * args.blocks + block) * words, round, deadline);
      if (threadIdx.x == 0) came = true;
      __syncthreads();
      if (!mine_came) came = false;
    } else if constexpr (path == kSum) {
      bool const mine_came = wait_for_epoch<path, change>(flag_at(args.flags, first_flag), epoch, deadline);
      uint32_t const* const from = args.slots + size_t(slot * args.blocks + block) * words;
      for (int i = threadIdx.x * 4; mine_came && i < words; i += kThreads * 4) {
        asm volatile("{ .reg .b32 a, b, c, d; ld.relaxed.gpu.global.v4.b32 {a, b, c, d}, [%0];\n"
                     "st.shared.v4.b32 [%1], {a, b, c, d}; }" ::"l"(from + i),
                     "r"(shared_address(in + i))
                     : "memory");
      }
      if (threadIdx.x == 0) came = true;
      __syncthreads();
      if (!mine_came) came = false;
    } else {
      if (threadIdx.x < (path == kPiece ? 32 : 1)) {
        bool const now = wait_for_epoch<path, change>(flag_at(args.flags, first_flag), epoch, deadline);
        if (threadIdx.x == 0) {
          came = now;
          if (now) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&arrived)),
                         "r"(args.bytes)
                         : "memory");
            int const first = int(slot * args.blocks + block) * rows;
            for (int i = 0; i < kWarpGroups; ++i) {
              uint32_t* const to = in + i * part * kRowWords;
              if constexpr (path == kPiece) {
                load(params.slots, to, &arrived, first + i * part);
              } else {
                load_bulk(args.slots + size_t(first + i * part) * kRowWords, to, &arrived, part * kRow);
              }
            }
          }
        }
      }
    }
    __syncthreads();
    if (!came) break;
    if constexpr (path == kPiece || path == kPart) wait_for_load(&arrived, number % 2);
    uint32_t stale = 0, newer = 0, oldest = 0;
    for (int i = threadIdx.x; i < words; i += kThreads) {
      int32_t const behind = int32_t(round - in[i]);
      if (behind > 0) {
        ++stale;
        oldest = max(oldest, uint32_t(behind));
      }
      newer += behind < 0;
    }
    if (stale) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&args.result->stale_words), stale);
      atomicMax(&args.result->oldest, oldest);
    }
    if (newer) atomicAdd(reinterpret_cast<unsigned long long*>(&args.result->newer_words), newer);
    // Also lets no thread write or load anew before all have compared.
    if (__syncthreads_or(stale) && threadIdx.x == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&args.result->stale_rounds), 1);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&args.result->rounds), number);
    if (number < args.rounds) atomicAdd(&args.result->timeouts, 1);
    atomicSub(args.running, 1);
  }
}

// Of the slots of one rank, as rows; a box is a warp group's part of a tile.
CUresult encode(CUtensorMap* map, uint32_t* slots, Arguments const& args) {
  int const rows = args.bytes / kRow;
  uint64_t const extents[] = {kRowWords, uint64_t(kSlots) * args.blocks * rows}, strides[] = {kRow};
  uint32_t const box[] = {kRowWords, uint32_t(rows / kWarpGroups)}, steps[] = {1, 1};
  return cutlass::call_cuTensorMapEncodeTiled(
      map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, slots, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <Path path, Change change>
int launch(Parameters const& params, cudaStream_t stream) {
  Arguments const& args = params.args;
  int const bytes = max(kSharedBytes, 128 + 2 * args.bytes);
  cudaError_t error = cudaFuncSetAttribute(
      reinterpret_cast<void const*>(litmus<path, change>), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  litmus<path, change><<<args.blocks + args.further_blocks, kThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

extern "C" {

int litmus_arguments_size() { return sizeof(Arguments); }
int litmus_result_size() { return sizeof(Result); }
char const* litmus_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Launches one rank's kernel on the current device. Returns a cudaError_t; -1 for a path with such a change that is not
// compiled; -2 for a tensor map that the driver does not encode.
int litmus_launch(Arguments const* args, int path, int change, cudaStream_t stream) {
  Parameters params{{}, *args};
  if (encode(&params.slots, args->slots, *args) != CUDA_SUCCESS) return -2;
#define LITMUS_CASE(a_path, a_change) \
  if (path == a_path && change == a_change) return launch<a_path, a_change>(params, stream);
#define LITMUS_EPOCHS(a_path) \
  LITMUS_CASE(a_path, kNothing) \
  LITMUS_CASE(a_path, kNoRelease) \
  LITMUS_CASE(a_path, kNoWaitNoRelease) \
  LITMUS_CASE(a_path, kNoAcquire) \
  LITMUS_CASE(a_path, kNoProxyFence) \
  LITMUS_CASE(a_path, kOlderEpoch)
  LITMUS_EPOCHS(kPiece)
  LITMUS_EPOCHS(kPart)
  LITMUS_EPOCHS(kSum)
  LITMUS_CASE(kPacket, kNothing)
  LITMUS_CASE(kPacket, kOlderEpoch)
  LITMUS_CASE(kPacket, kHalves)
#undef LITMUS_EPOCHS
#undef LITMUS_CASE
  return -1;
}

}  // extern "C"

}  // namespace litmus
