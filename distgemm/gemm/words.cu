// Words that ranks signal through, by a kernel of one warp: waits until words have values, and writes of words, in
// phases. What is written in one phase is seen by everybody who has seen a write of the last one.

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

struct Arguments {
  int32_t phases;
  int32_t ends[kPhases];  // of each phase, the number of operations up to its end
  Operation operations[kOperations];
};

__device__ uint32_t load(uint64_t address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Released writes are seen after all that came before, also that of other threads. They take microseconds: one phase of
// them is enough, the last.
__device__ void write(Operation const& operation, bool released) {
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

__global__ void words(__grid_constant__ Arguments const args) {
  int begin = 0;
  for (int phase = 0; phase < args.phases; ++phase) {
    for (int i = begin + threadIdx.x; i < args.ends[phase]; i += 32) {
      Operation const& operation = args.operations[i];
      if (operation.kind == kWait) {
        while (load(operation.address) != operation.value) __nanosleep(20);
      } else {
        write(operation, phase + 1 == args.phases);
      }
    }
    begin = args.ends[phase];
    __syncwarp();
  }
}

extern "C" {

int distgemm_arguments_size() { return sizeof(Arguments); }

// Loads the kernel on the current device. Returns a cudaError_t.
int distgemm_load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(words));
}

// Returns a cudaError_t.
int distgemm_launch(Arguments const* args, cudaStream_t stream) {
  words<<<1, 32, 0, stream>>>(*args);
  return cudaGetLastError();
}

char const* distgemm_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"

}  // namespace distgemm
