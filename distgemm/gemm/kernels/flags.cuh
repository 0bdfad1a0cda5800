// A flag is a uint32 in global memory, of this GPU or of a peer, that ranks signal through.
//
// Operations on flags are performed by one warp in phases. An operation waits until a flag has a value, or writes one.
// Whoever sees a write of the last phase also sees all that was written before it.

#pragma once

#include <cstdint>

namespace distgemm {

constexpr int kOperations = 192;
constexpr int kPhases = 8;

enum Kind : uint32_t { kWait = 0, kWrite = 1, kWriteDouble = 2 };

struct Operation {
  uint64_t address;
  uint32_t value;
  uint32_t kind;
};

struct FlagOps {
  int32_t phases;
  int32_t ends[kPhases];  // for each phase, the number of operations up to its end
  Operation operations[kOperations];
};

__device__ inline uint32_t load_flag(uint64_t address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// A released write is visible only after all earlier writes, also those of other threads. It takes microseconds, so
// only the last phase releases.
__device__ inline void write_flag(Operation const& operation, bool release) {
  uint64_t const value = operation.value;
  if (operation.kind == kWriteDouble) {
    if (release) {
      asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(operation.address), "l"(value) : "memory");
    } else {
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(operation.address), "l"(value) : "memory");
    }
  } else if (release) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(operation.address), "r"(operation.value) : "memory");
  } else {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(operation.address), "r"(operation.value) : "memory");
  }
}

// Performs the phases. All threads of a warp call it.
__device__ inline void perform(FlagOps const& ops) {
  int begin = 0;
  for (int phase = 0; phase < ops.phases; ++phase) {
    for (int i = begin + threadIdx.x % 32; i < ops.ends[phase]; i += 32) {
      Operation const& operation = ops.operations[i];
      if (operation.kind == kWait) {
        while (load_flag(operation.address) != operation.value) __nanosleep(20);
      } else {
        write_flag(operation, phase + 1 == ops.phases);
      }
    }
    begin = ops.ends[phase];
    __syncwarp();
  }
}

}  // namespace distgemm
