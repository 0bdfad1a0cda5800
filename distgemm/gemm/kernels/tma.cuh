// Remembers a TMA descriptor that cannot be encoded. CUTLASS encodes descriptors where it makes a kernel's parameters.
// Of a failure it only prints a message, and it asserts, which NDEBUG removes. So this header takes the place of
// CUTLASS's call of the driver.

#pragma once

#include <cstdint>

#include "cutlass/cuda_host_adapter.hpp"

namespace distgemm {

// What the driver was asked to encode.
struct Descriptor {
  uint64_t address;
  uint64_t extents[5];  // elements, the contiguous mode first
  uint64_t strides[4];  // bytes, of all modes but the first
  int32_t modes;
  int32_t type;   // a CUtensorMapDataType
  int32_t error;  // a CUresult
};

// The first failure of this thread since it was last cleared.
inline thread_local Descriptor first_failure{};

// Reports success to CUTLASS. distgemm_encode reports the failure.
template <class... Rest>
CUresult remembering_cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, uint32_t modes, void* address, uint64_t const* extents,
    uint64_t const* strides, Rest... rest) {
  CUresult const error = cutlass::call_cuTensorMapEncodeTiled(map, type, modes, address, extents, strides, rest...);
  if (error != CUDA_SUCCESS && first_failure.error == CUDA_SUCCESS) {
    first_failure = {reinterpret_cast<uint64_t>(address), {}, {}, int32_t(modes), int32_t(type), int32_t(error)};
    for (uint32_t i = 0; i < modes; ++i) first_failure.extents[i] = extents[i];
    for (uint32_t i = 0; i + 1 < modes; ++i) first_failure.strides[i] = strides[i];
  }
  return CUDA_SUCCESS;
}

}  // namespace distgemm

#ifndef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#error "this CUTLASS calls the driver by another macro: failures to encode TMA descriptors would be lost"
#endif
#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) ::distgemm::remembering_##function
