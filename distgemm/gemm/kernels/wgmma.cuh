// The wgmmas of a kernel: 64 rows, kWidth columns, 32 bytes of k, sums in float32. CUTLASS has them for all widths, types
// and majors at once, and that header takes longer to compile than a kernel. Here the macros say types and majors, and
// CUTLASS's selectors return these wgmmas.

#pragma once

#include <cstdint>

#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cute/tensor.hpp"

namespace distgemm {

// Adds a product to the sums d of a thread, or sets them if `adds` is 0. A comes from shared memory, or from registers if
// CUTLASS's main loop transposes it.
template <int kWidth, bool kFromRegisters>
struct Wgmma;

#define DG_TEXT_(x) #x
#define DG_TEXT(x) DG_TEXT_(x)
#define DG_INSTRUCTION(width) \
  "wgmma.mma_async.sync.aligned.m64n" #width "k" DG_TEXT(DG_MMA_K) ".f32." DG_TEXT(DG_PTX_A) "." DG_TEXT(DG_PTX_B)
// Operands of 16 bits alone may be column-major in shared memory.
#if DG_MMA_K != 16
#define DG_MAJORS ""
#elif DG_A_ROW && DG_B_ROW
#define DG_MAJORS ", 0, 0"
#elif DG_A_ROW
#define DG_MAJORS ", 0, 1"
#elif DG_B_ROW
#define DG_MAJORS ", 1, 0"
#else
#define DG_MAJORS ", 1, 1"
#endif

// The sums of so many columns as operands, and their names.
#define DG_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DG_SUMS_8 DG_FOUR(0)
#define DG_NAMES_8 "%0, %1, %2, %3"
#define DG_SUMS_16 DG_SUMS_8, DG_FOUR(4)
#define DG_NAMES_16 DG_NAMES_8 ", %4, %5, %6, %7"
#define DG_SUMS_24 DG_SUMS_16, DG_FOUR(8)
#define DG_NAMES_24 DG_NAMES_16 ", %8, %9, %10, %11"
#define DG_SUMS_32 DG_SUMS_24, DG_FOUR(12)
#define DG_NAMES_32 DG_NAMES_24 ", %12, %13, %14, %15"
#define DG_SUMS_40 DG_SUMS_32, DG_FOUR(16)
#define DG_NAMES_40 DG_NAMES_32 ", %16, %17, %18, %19"
#define DG_SUMS_48 DG_SUMS_40, DG_FOUR(20)
#define DG_NAMES_48 DG_NAMES_40 ", %20, %21, %22, %23"
#define DG_SUMS_56 DG_SUMS_48, DG_FOUR(24)
#define DG_NAMES_56 DG_NAMES_48 ", %24, %25, %26, %27"
#define DG_SUMS_64 DG_SUMS_56, DG_FOUR(28)
#define DG_NAMES_64 DG_NAMES_56 ", %28, %29, %30, %31"
#define DG_SUMS_72 DG_SUMS_64, DG_FOUR(32)
#define DG_NAMES_72 DG_NAMES_64 ", %32, %33, %34, %35"
#define DG_SUMS_80 DG_SUMS_72, DG_FOUR(36)
#define DG_NAMES_80 DG_NAMES_72 ", %36, %37, %38, %39"
#define DG_SUMS_88 DG_SUMS_80, DG_FOUR(40)
#define DG_NAMES_88 DG_NAMES_80 ", %40, %41, %42, %43"
#define DG_SUMS_96 DG_SUMS_88, DG_FOUR(44)
#define DG_NAMES_96 DG_NAMES_88 ", %44, %45, %46, %47"
#define DG_SUMS_104 DG_SUMS_96, DG_FOUR(48)
#define DG_NAMES_104 DG_NAMES_96 ", %48, %49, %50, %51"
#define DG_SUMS_112 DG_SUMS_104, DG_FOUR(52)
#define DG_NAMES_112 DG_NAMES_104 ", %52, %53, %54, %55"
#define DG_SUMS_120 DG_SUMS_112, DG_FOUR(56)
#define DG_NAMES_120 DG_NAMES_112 ", %56, %57, %58, %59"
#define DG_SUMS_128 DG_SUMS_120, DG_FOUR(60)
#define DG_NAMES_128 DG_NAMES_120 ", %60, %61, %62, %63"
#define DG_SUMS_136 DG_SUMS_128, DG_FOUR(64)
#define DG_NAMES_136 DG_NAMES_128 ", %64, %65, %66, %67"
#define DG_SUMS_144 DG_SUMS_136, DG_FOUR(68)
#define DG_NAMES_144 DG_NAMES_136 ", %68, %69, %70, %71"
#define DG_SUMS_152 DG_SUMS_144, DG_FOUR(72)
#define DG_NAMES_152 DG_NAMES_144 ", %72, %73, %74, %75"
#define DG_SUMS_160 DG_SUMS_152, DG_FOUR(76)
#define DG_NAMES_160 DG_NAMES_152 ", %76, %77, %78, %79"
#define DG_SUMS_168 DG_SUMS_160, DG_FOUR(80)
#define DG_NAMES_168 DG_NAMES_160 ", %80, %81, %82, %83"
#define DG_SUMS_176 DG_SUMS_168, DG_FOUR(84)
#define DG_NAMES_176 DG_NAMES_168 ", %84, %85, %86, %87"
#define DG_SUMS_184 DG_SUMS_176, DG_FOUR(88)
#define DG_NAMES_184 DG_NAMES_176 ", %88, %89, %90, %91"
#define DG_SUMS_192 DG_SUMS_184, DG_FOUR(92)
#define DG_NAMES_192 DG_NAMES_184 ", %92, %93, %94, %95"
#define DG_SUMS_200 DG_SUMS_192, DG_FOUR(96)
#define DG_NAMES_200 DG_NAMES_192 ", %96, %97, %98, %99"
#define DG_SUMS_208 DG_SUMS_200, DG_FOUR(100)
#define DG_NAMES_208 DG_NAMES_200 ", %100, %101, %102, %103"
#define DG_SUMS_216 DG_SUMS_208, DG_FOUR(104)
#define DG_NAMES_216 DG_NAMES_208 ", %104, %105, %106, %107"
#define DG_SUMS_224 DG_SUMS_216, DG_FOUR(108)
#define DG_NAMES_224 DG_NAMES_216 ", %108, %109, %110, %111"
#define DG_SUMS_232 DG_SUMS_224, DG_FOUR(112)
#define DG_NAMES_232 DG_NAMES_224 ", %112, %113, %114, %115"
#define DG_SUMS_240 DG_SUMS_232, DG_FOUR(116)
#define DG_NAMES_240 DG_NAMES_232 ", %116, %117, %118, %119"
#define DG_SUMS_248 DG_SUMS_240, DG_FOUR(120)
#define DG_NAMES_248 DG_NAMES_240 ", %120, %121, %122, %123"
#define DG_SUMS_256 DG_SUMS_248, DG_FOUR(124)
#define DG_NAMES_256 DG_NAMES_248 ", %124, %125, %126, %127"

// o0 .. o5: names of the operands behind the sums.
#define DG_WGMMA(width, o0, o1, o2, o3, o4, o5)                                                                        \
  template <>                                                                                                          \
  struct Wgmma<width, false> {                                                                                         \
    CUTE_DEVICE static void multiply(float* d, uint64_t a, uint64_t b, int32_t adds) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2 ", 0;\n"                                                     \
                   DG_INSTRUCTION(width) " {" DG_NAMES_##width "}, " o0 ", " o1 ", p, 1, 1" DG_MAJORS ";\n}\n"         \
                   : DG_SUMS_##width                                                                                   \
                   : "l"(a), "l"(b), "r"(adds));                                                                       \
    }                                                                                                                  \
  };                                                                                                                   \
  template <>                                                                                                          \
  struct Wgmma<width, true> {                                                                                          \
    CUTE_DEVICE static void multiply(float* d, uint32_t const (&a)[4], uint64_t b, int32_t adds) {                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o5 ", 0;\n"                                                     \
                   DG_INSTRUCTION(width) " {" DG_NAMES_##width "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", p, 1, 1;\n}\n" \
                   : DG_SUMS_##width                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                                   \
    }                                                                                                                  \
  };

DG_WGMMA(8, "%4", "%5", "%6", "%7", "%8", "%9")
DG_WGMMA(16, "%8", "%9", "%10", "%11", "%12", "%13")
DG_WGMMA(24, "%12", "%13", "%14", "%15", "%16", "%17")
DG_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21")
DG_WGMMA(40, "%20", "%21", "%22", "%23", "%24", "%25")
DG_WGMMA(48, "%24", "%25", "%26", "%27", "%28", "%29")
DG_WGMMA(56, "%28", "%29", "%30", "%31", "%32", "%33")
DG_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37")
DG_WGMMA(72, "%36", "%37", "%38", "%39", "%40", "%41")
DG_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45")
DG_WGMMA(88, "%44", "%45", "%46", "%47", "%48", "%49")
DG_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53")
DG_WGMMA(104, "%52", "%53", "%54", "%55", "%56", "%57")
DG_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61")
DG_WGMMA(120, "%60", "%61", "%62", "%63", "%64", "%65")
DG_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69")
DG_WGMMA(136, "%68", "%69", "%70", "%71", "%72", "%73")
DG_WGMMA(144, "%72", "%73", "%74", "%75", "%76", "%77")
DG_WGMMA(152, "%76", "%77", "%78", "%79", "%80", "%81")
DG_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85")
DG_WGMMA(168, "%84", "%85", "%86", "%87", "%88", "%89")
DG_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93")
DG_WGMMA(184, "%92", "%93", "%94", "%95", "%96", "%97")
DG_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101")
DG_WGMMA(200, "%100", "%101", "%102", "%103", "%104", "%105")
DG_WGMMA(208, "%104", "%105", "%106", "%107", "%108", "%109")
DG_WGMMA(216, "%108", "%109", "%110", "%111", "%112", "%113")
DG_WGMMA(224, "%112", "%113", "%114", "%115", "%116", "%117")
DG_WGMMA(232, "%116", "%117", "%118", "%119", "%120", "%121")
DG_WGMMA(240, "%120", "%121", "%122", "%123", "%124", "%125")
DG_WGMMA(248, "%124", "%125", "%126", "%127", "%128", "%129")
DG_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133")

template <int kWidth, bool kFromRegisters, class D, class A, class B>
CUTE_DEVICE void multiply(D& d, A const& a, B const& b, int32_t adds) {
  static_assert(cosize_v<typename D::layout_type> == kWidth / 2, "the sums of a wgmma are neighbours");
  float* const sums = cute::raw_pointer_cast(d.data());
  if constexpr (kFromRegisters) {
    auto const words = cute::recast<uint32_t>(a);
    uint32_t const four[] = {words(0), words(1), words(2), words(3)};
    Wgmma<kWidth, true>::multiply(sums, four, b(0), adds);
  } else {
    Wgmma<kWidth, false>::multiply(sums, a(0), b(0), adds);
  }
}

constexpr GMMA::Major major_a = DG_A_ROW ? GMMA::Major::K : GMMA::Major::MN;
constexpr GMMA::Major major_b = DG_B_ROW ? GMMA::Major::K : GMMA::Major::MN;

}  // namespace distgemm

namespace cute {

template <int kWidth>
struct MMA_Traits<distgemm::Wgmma<kWidth, false>> {
  using ValTypeA = distgemm::Element;
  using ValTypeB = distgemm::ElementB;
  using ValTypeC = float;
  using ValTypeD = float;
  using FrgTypeA = GMMA::smem_desc<distgemm::major_a>;
  using FrgTypeB = GMMA::smem_desc<distgemm::major_b>;
  using Shape_MNK = Shape<_64, Int<kWidth>, Int<DG_MMA_K>>;
  using ThrID = Layout<_128>;
  using ALayout = GMMA::ABLayout<64, DG_MMA_K>;
  using BLayout = GMMA::ABLayout<kWidth, DG_MMA_K>;
  using CLayout = GMMA::CLayout_64xN<kWidth>;
  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

// tfloat32, transposed: both are K-major in shared memory.
template <int kWidth>
struct MMA_Traits<distgemm::Wgmma<kWidth, true>> {
  using ValTypeA = distgemm::Element;
  using ValTypeB = distgemm::ElementB;
  using ValTypeC = float;
  using ValTypeD = float;
  using FrgTypeB = GMMA::smem_desc<GMMA::Major::K>;
  using Shape_MNK = Shape<_64, Int<kWidth>, Int<DG_MMA_K>>;
  using ThrID = Layout<_128>;
  using ALayout = GMMA::ALayout_64x8;
  using BLayout = GMMA::ABLayout<kWidth, DG_MMA_K>;
  using CLayout = GMMA::CLayout_64xN<kWidth>;
  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

template <int kWidth, bool kFromRegisters, class TD, class LD, class TA, class LA, class TB, class LB, class TC, class LC>
CUTE_HOST_DEVICE constexpr void mma_unpack(
    MMA_Traits<distgemm::Wgmma<kWidth, kFromRegisters>> const& traits, Tensor<TD, LD>& d, Tensor<TA, LA> const& a,
    Tensor<TB, LB> const& b, Tensor<TC, LC> const&) {
  distgemm::multiply<kWidth, kFromRegisters>(d, a, b, int32_t(traits.accumulate_));
}

namespace SM90::GMMA {

#define DG_SELECT(selector, rows, width, major_a, major_b, from_registers)                              \
  template <>                                                                                           \
  CUTE_HOST_DEVICE constexpr auto selector<                                                             \
      distgemm::Element, distgemm::ElementB, float, Shape<Int<rows>, Int<width>, Int<DG_TILE_K>>, major_a, major_b>() { \
    return distgemm::Wgmma<width, from_registers>{};                                                    \
  }
DG_SELECT(ss_op_selector, DG_TILE_M, DG_TILE_N, distgemm::major_a, distgemm::major_b, false)
#if DG_MMA_K == 8
DG_SELECT(rs_op_selector, DG_TILE_M, DG_TILE_N, Major::K, Major::K, true)
#elif DG_MMA_K == 32
// Pieces of promotion.cuh.
#if DG_TILE_M != 64
DG_SELECT(ss_op_selector, 64, DG_TILE_N, Major::K, Major::K, false)
#endif
#if DG_TILE_N % 16 == 0
DG_SELECT(ss_op_selector, 64, DG_TILE_N / 2, Major::K, Major::K, false)
#endif
#endif

}  // namespace SM90::GMMA
}  // namespace cute
