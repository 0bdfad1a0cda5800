// A kernel of one warp that performs operations on flags, with a C interface.

#include "flags.cuh"

namespace distgemm {

__global__ void flag_ops(__grid_constant__ FlagOps const args) { perform(args, 0, args.phases); }

extern "C" {

int distgemm_arguments_size() { return sizeof(FlagOps); }

// Loads the kernel on the current device. Returns a cudaError_t.
int distgemm_load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(flag_ops));
}

// Returns a cudaError_t.
int distgemm_launch(FlagOps const* args, cudaStream_t stream) {
  flag_ops<<<1, 32, 0, stream>>>(*args);
  return cudaGetLastError();
}

char const* distgemm_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"

}  // namespace distgemm
