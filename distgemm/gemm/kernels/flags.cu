// A kernel of one warp that performs operations on flags, as a cubin.

#include "facts.cuh"
#include "flags.cuh"

namespace distgemm {

using Params = FlagOps;

extern "C" __global__ void distgemm_flags(__grid_constant__ Params const args) { perform(args); }

DG_FACTS{DG_KERNEL(32, 0)};

}  // namespace distgemm
