// The kernel's entry, and its facts: see facts.cuh. gemm.cu includes this file.
//
// CUTLASS's host code would set the kernel's parameter. It takes as long to compile as the kernel, and it would make
// the kernel depend on the host's processor and C library. parameters.py sets the parameter instead.

#pragma once

#include "facts.cuh"

namespace distgemm {

extern "C" __global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
#if DG_CLUSTER_M * DG_CLUSTER_N > 1
    __cluster_dims__(DG_CLUSTER_M, DG_CLUSTER_N, 1)
#endif
        distgemm_gemm(__grid_constant__ Params const params) {
  extern __shared__ char shared_memory[];
  Kernel{}(params, shared_memory);
}

// What a TMA descriptor says besides the address, the extents and the strides.
struct TmaBox {
  uint32_t type, swizzle, element_bytes;  // a CUtensorMapDataType, a CUtensorMapSwizzle
  uint32_t extents[3];                    // elements: the contiguous mode, rows (columns if column-major), batches

  template <class T>
  static constexpr uint32_t type_of() {
    if constexpr (std::is_same_v<T, half_t>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    else if constexpr (std::is_same_v<T, bfloat16_t>) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    else if constexpr (std::is_same_v<T, tfloat32_t>) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
    else if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    else if constexpr (sizeof(T) == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    else if constexpr (sizeof(T) == 2) return CU_TENSOR_MAP_DATA_TYPE_UINT16;
    else return CU_TENSOR_MAP_DATA_TYPE_UINT32;
  }

  // Of the copy that CuTe makes for an operand. Each of `sharing` thread blocks loads a part, as CuTe divides it.
  template <class Copy, bool kRowMajor>
  static constexpr TmaBox of_operand(uint32_t sharing) {
    using T = typename Copy::ValType;
    using Basis = remove_cvref_t<typename Copy::AuxParams::TmaGmemBasis>;
    using Swizzled = remove_cvref_t<typename Copy::AuxParams::TmaSwizzle>;
    using Modes = remove_cvref_t<decltype(flatten(stride(Basis{})))>;
    using Contiguous = std::conditional_t<kRowMajor, E<1>, E<0>>;
    using Other = std::conditional_t<kRowMajor, E<0>, E<1>>;
    static_assert(std::is_same_v<Modes, cute::tuple<Contiguous, Other, E<2>>>, "the host takes modes in this order");
    using Strides = remove_cvref_t<decltype(typename Copy::AuxParams{}.g_stride_)>;
    static_assert(is_static<Strides>::value, "the host sets nothing but the descriptor");
    static_assert(Swizzled::num_base == 4, "the host names swizzles of 16 bytes");
    TmaBox box{
        type_of<T>(), Swizzled::num_bits, sizeof(T),
        {uint32_t(size<0>(Basis{})), uint32_t(size<1>(Basis{})), uint32_t(size<2>(Basis{}))}};
    for (int i = 2; sharing > 1; --i) {
      uint32_t const whole = box.extents[i];
      box.extents[i] = ceil_div(whole, sharing);
      sharing = ceil_div(sharing, whole);
    }
    return box;
  }

  template <class T, int kHeight, int kWidth>
  static constexpr TmaBox of(Subtile<T, kHeight, kWidth> const&) {
    return {type_of<T>(), Subtile<T, kHeight, kWidth>::kSwizzle, sizeof(T), {kWidth, kHeight, 1}};
  }
};

#define DG_BOX(name, box)                                                                               \
  DG_NUMBER(name ".type", box.type), DG_NUMBER(name ".swizzle", box.swizzle),                           \
      DG_NUMBER(name ".element_bytes", box.element_bytes), DG_NUMBER(name ".box_0", box.extents[0]),    \
      DG_NUMBER(name ".box_1", box.extents[1]), DG_NUMBER(name ".box_2", box.extents[2])
#define DG_DIVISION(field) \
  DG_FIELD(field.divisor), DG_FIELD(field.multiplier), DG_FIELD(field.shift_right), DG_FIELD(field.round_up)
#define DG_SHIFT(field) DG_FIELD(field.divisor), DG_FIELD(field.shift_right)
#define DG_OPERANDS(mainloop)                                                              \
  DG_FIELD(mainloop.tma_load_a.tma_desc_), DG_FIELD(mainloop.tma_load_b.tma_desc_),        \
      DG_CONSTANT(mainloop.tma_transaction_bytes, Mainloop::TmaTransactionBytes),          \
      DG_CONSTANT(mainloop.tma_transaction_bytes_mk, Mainloop::TmaTransactionBytesMK),     \
      DG_CONSTANT(mainloop.tma_transaction_bytes_nk, Mainloop::TmaTransactionBytesNK)
#define DG_RESULTS(epilogue)                                                     \
  DG_FIELD(epilogue.terms), DG_FIELD(epilogue.source), DG_FIELD(epilogue.d),     \
      DG_CONSTANT(epilogue.tma_transaction_bytes, Epilogue::Source::kBytes)

static_assert(!cutlass::gemm::kernel::detail::Has_SwapAB_v<Mainloop>, "the host does not exchange A and B");
constexpr TmaBox box_a = TmaBox::of_operand<typename Mainloop::Params::TMA_A, DG_A_ROW>(DG_CLUSTER_N);
constexpr TmaBox box_b = TmaBox::of_operand<typename Mainloop::Params::TMA_B, DG_B_ROW>(DG_CLUSTER_M);
static_assert(box_a.extents[0] == Collective::LoadA::kWidth && box_a.extents[1] == Collective::LoadA::kPart);
static_assert(box_b.extents[0] == Collective::LoadB::kWidth && box_b.extents[1] == Collective::LoadB::kPart);
#if DG_EPILOGUE == DG_TMA
constexpr TmaBox box_source = TmaBox::of(Epilogue::Source{});
constexpr TmaBox box_d = TmaBox::of(Epilogue::Result{});
#endif

// Params are no standard-layout classes, because they inherit. nvcc knows the offsets of their fields all the same.
#pragma nv_diag_suppress 1427
DG_FACTS{
    DG_KERNEL(Kernel::MaxThreadsPerBlock, Kernel::SharedStorageSize),
    DG_NUMBER("begins_early", DG_BEGINS_EARLY),
    DG_FIELD(problem_shape),
#if DG_EPILOGUE == DG_TMA
    DG_NUMBER("has_source", has_source),
    DG_BOX("source", box_source),
    DG_BOX("d", box_d),
    DG_RESULTS(epilogue),
#else
    DG_FIELD(epilogue.terms),
    DG_FIELD(epilogue.source),
    DG_FIELD(epilogue.d),
#endif
    DG_CONSTANT(mode, cutlass::gemm::GemmUniversalMode::kGemm),
    DG_NUMBER("a_row_major", DG_A_ROW),
    DG_NUMBER("b_row_major", DG_B_ROW),
    DG_BOX("a", box_a),
    DG_BOX("b", box_b),
    DG_OPERANDS(mainloop),
#if DG_SCALE_ROWS_B
    DG_FIELD(mainloop.scales_a),
    DG_FIELD(mainloop.scales_b),
#endif
    DG_FIELD(hw_info.sm_count),
    DG_SHIFT(scheduler.divmod_cluster_shape_major_),
    DG_SHIFT(scheduler.divmod_cluster_shape_minor_),
    DG_DIVISION(scheduler.divmod_batch_),
    DG_DIVISION(scheduler.divmod_cluster_blk_major_),
    DG_FIELD(scheduler.blocks_per_problem_),
    DG_FIELD(scheduler.log_swizzle_size_),
    DG_FIELD(scheduler.raster_order_),
    DG_FIELD(scheduler.problem_tiles_m_),
    DG_FIELD(scheduler.problem_tiles_n_),
    DG_FIELD(scheduler.problem_tiles_l_),
    DG_CONSTANT(scheduler.cluster_shape_m_, DG_CLUSTER_M),
    DG_CONSTANT(scheduler.cluster_shape_n_, DG_CLUSTER_N),
};

}  // namespace distgemm
