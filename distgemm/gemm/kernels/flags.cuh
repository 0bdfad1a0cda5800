// FlagOps that ranks signal through, by one warp: waits until words have values, and writes of words, in phases. What is
// written in one phase is seen by everybody who has seen a write of the last one.

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
  int32_t ends[kPhases];  // of each phase, the number of operations up to its end
  Operation operations[kOperations];
};

__device__ inline uint32_t load_word(uint64_t address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Released writes are seen after all that came before, also that of other threads. They take microseconds: one phase of
// them is enough, the last.
__device__ inline void write_word(Operation const& operation, bool released) {
  uint64_t const value = operation.value;
  if (operation.kind == kWriteDouble) {
    if (released) {
      asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(operation.address), "l"(value) : "memory");
    } else {
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(operation.address), "l"(value) : "memory");
    }
  } else if (released) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(operation.address), "r"(operation.value) : "memory");
  } else {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(operation.address), "r"(operation.value) : "memory");
  }
}

// Phases up to `end`, by all threads of a warp.
__device__ inline void perform(FlagOps const& words, int phase, int end) {
  int begin = phase ? words.ends[phase - 1] : 0;
  for (; phase < end; ++phase) {
    for (int i = begin + threadIdx.x % 32; i < words.ends[phase]; i += 32) {
      Operation const& operation = words.operations[i];
      if (operation.kind == kWait) {
        while (load_word(operation.address) != operation.value) __nanosleep(20);
      } else {
        write_word(operation, phase + 1 == words.phases);
      }
    }
    begin = words.ends[phase];
    __syncwarp();
  }
}

}  // namespace distgemm
