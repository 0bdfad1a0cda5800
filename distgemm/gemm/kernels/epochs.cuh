// How kernels of different ranks wait for each other, for per_tile.cu. docs/per_tile.md has the protocol.
//
// The replays of a workspace are numbered: epochs. A flag is a uint64 in its reader's memory. It guards one slot, and
// holds the last epoch in which the slot was filled. So nobody resets flags, and what other plans left in them is an
// older epoch.

#pragma once

#include <cstdint>

#include "cute/config.hpp"
#include "tile_order.cuh"

namespace distgemm {

// The word from which clusters take tickets for tiles, and learn the replay's epoch.
struct Clock {
  uint64_t word;

  static constexpr int kTicketBits = 18;
  CUTE_HOST_DEVICE uint32_t ticket() const { return word & ((1u << kTicketBits) - 1); }
  CUTE_HOST_DEVICE uint64_t epoch() const { return word >> kTicketBits; }
  CUTE_HOST_DEVICE uint32_t buffer() const { return epoch() & 1; }  // of the workspace
};

// 1, in lane 0. Where lanes add a constant that the compiler sees, it makes one atomic addition for all of them, and waits
// for its result at once.
CUTE_DEVICE uint32_t hidden_one() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane + 1;
}

// How a workspace dies. The watchdog writes NaN to all slots after the first value, and then the second one.
enum Death : uint32_t {
  kMute = 1,  // kernels that begin send nothing, and their results are NaN
  kFree = 2,  // all waits end
};

// What a rank's workspace begins with.
struct Control {
  uint64_t clock;
  uint64_t link_free;  // when the last reservation of the link ends
  uint32_t counter;    // of pieces that are sent, or of results that are taken; 0 between replays
  uint32_t dead;       // 0, or a value of Death
  uint32_t running;    // thread blocks that work; 0 between replays. The watchdog reads it
  uint32_t executable; // whose replay began last. The watchdog reads it
  uint64_t unused[12];
  uint64_t begun[kRanks];  // the last epoch that each rank has begun. The watchdog reads it
};

// A packet of a one-shot kernel: three quarters are of a partial sum, and one is the lowest 32 bits of the epoch. Loads
// and stores of a packet are atomic, so a thread that finds the epoch has the rest.
struct Packet {
  static constexpr int kData = 3;
  uint32_t data[kData], epoch;

  CUTE_DEVICE void load(uint64_t from) {
    asm volatile(
        "{ .reg .b128 packet; .reg .b64 low, high; ld.relaxed.sys.global.b128 packet, [%4];\n"
        "mov.b128 {low, high}, packet; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
        : "=r"(data[0]), "=r"(data[1]), "=r"(data[2]), "=r"(epoch)
        : "l"(from)
        : "memory");
  }
  CUTE_DEVICE void store(uint64_t to) const {
    asm volatile(
        "{ .reg .b128 packet; .reg .b64 low, high; mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4};\n"
        "mov.b128 packet, {low, high}; st.relaxed.sys.global.b128 [%0], packet; }" ::"l"(to),
        "r"(data[0]), "r"(data[1]), "r"(data[2]), "r"(epoch)
        : "memory");
  }
};
// Where the workspaces of all ranks are. All have one layout: the control, then flags, slots and packets of both buffers.
struct Workspaces {
  uint64_t base[kRanks];
  uint64_t flags, flags_of_buffer;  // offset of the first flag; bytes of those of a buffer
  uint64_t slots, slots_of_buffer;
  uint64_t packets, packets_of_buffer;  // of partial sums that carry their epochs: nothing else is ever stored there
  uint32_t rank;
  uint32_t executable;
  uint32_t ranks;
  uint32_t epochs_a_replay;  // 1; 0 in benchmarks, whose flags are set before

  CUTE_DEVICE Control& control(uint32_t at) const { return *reinterpret_cast<Control*>(base[at]); }
  CUTE_DEVICE uint64_t flag(uint32_t at, uint32_t buffer, uint32_t number) const {
    return base[at] + flags + buffer * flags_of_buffer + uint64_t(number) * sizeof(uint64_t);
  }
  CUTE_DEVICE uint64_t slot(uint32_t at, uint32_t buffer, uint64_t offset) const {
    return base[at] + slots + buffer * slots_of_buffer + offset;
  }
  CUTE_DEVICE uint64_t packet(uint32_t at, uint32_t buffer, uint64_t offset) const {
    return base[at] + packets + buffer * packets_of_buffer + offset;
  }

  // Takes a ticket: lane 0. Nothing waits for it before its first use.
  CUTE_DEVICE Clock take() const {
    Clock now;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(now.word)
                 : "l"(&control(rank).clock), "l"(uint64_t(hidden_one()))
                 : "memory");
    return now;
  }

  // Whoever takes the last ticket of a replay calls it: makes the clock ready for the next replay.
  CUTE_DEVICE void renew(Clock now) const {
    *static_cast<uint64_t volatile*>(&control(rank).clock) = (now.epoch() + epochs_a_replay) << Clock::kTicketBits;
  }

  // Tells the watchdogs of all ranks that this rank has begun the epoch. It orders nothing.
  CUTE_DEVICE void tell_begun(uint64_t epoch) const {
    *static_cast<uint32_t volatile*>(&control(rank).executable) = executable;
    for (uint32_t i = 0; i < ranks; ++i) {
      set(reinterpret_cast<uint64_t>(&control((rank + i) % ranks).begun[rank]), epoch);
    }
  }

  CUTE_DEVICE static uint64_t load(uint64_t flag) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
  }

  // Waits until a flag has this epoch. What TMA reads then is what was stored before the flag.
  CUTE_DEVICE void wait(uint64_t flag, uint64_t epoch) const {
    for (uint32_t spins = 1; load(flag) != epoch && !ends_(spins); ++spins) continue;
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

  // Whether the workspace has died so far. Nothing waits for the answer before its first use.
  CUTE_DEVICE bool dead(Death far) const {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(&control(rank).dead) : "memory");
    return value >= far;
  }

  // Whether a wait has spun for some time, and the workspace is dead.
  CUTE_DEVICE bool ends_(uint32_t spins) const {
    if (spins % 256 || !dead(kFree)) return false;
    asm volatile("fence.acq_rel.sys;" ::: "memory");  // the slots that are read now are NaN
    return true;
  }

  // Sets flags behind stores of this thread that are complete.
  CUTE_DEVICE static void set(uint64_t flag, uint64_t epoch) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
  }
};

// Limits the rate of stores to other GPUs. Stores that are issued faster than the link takes them fill this GPU's
// memory queues, and its loads wait in the same queues. So each store reserves time on the link, and waits for it.
struct LinkPacing {
  static constexpr uint64_t kTicks = 8;                // per nanosecond: reservations are counted in ticks
  static constexpr uint64_t kMaxLead = 1'000'000'000;  // nanoseconds. A start further ahead means a reset clock

  uint64_t* link_free;           // the tick at which the last reservation ends
  uint32_t picoseconds_per_kib;  // 0: no pacing

  // Waits until so many bytes may be stored.
  CUTE_DEVICE void wait(uint32_t bytes) const {
    if (!picoseconds_per_kib) return;
    auto* const at = reinterpret_cast<unsigned long long*>(link_free);
    uint64_t const now = nanoseconds_();
    atomicMax(at, now * kTicks);
    uint64_t const start = atomicAdd(at, bytes * kTicks * picoseconds_per_kib / (1024 * 1000)) / kTicks;
    if (start >= now + kMaxLead) {
      atomicExch(at, now * kTicks);
      return;
    }
    while (nanoseconds_() < start) continue;
  }

 private:
  CUTE_DEVICE static uint64_t nanoseconds_() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
  }
};

}  // namespace distgemm
