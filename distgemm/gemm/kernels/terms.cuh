// Types of a GEMM's operands and results, and what is added to its products, for gemm.cu and plain.cu.

#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace distgemm {

using Element = DG_ELEMENT;     // of A
using ElementB = DG_ELEMENT_B;
using ElementD = DG_D;
using ElementSource = DG_SOURCE;  // void: there is none
using ElementAux = DG_AUX;        // of C beside a partial sum, if there is one
using ElementBias = DG_BIAS;

// A term that no GEMM of this kernel has still needs a type in declarations.
template <class T>
using OrD = std::conditional_t<std::is_void_v<T>, ElementD, T>;

struct Matrix {
  void const* data;
  int64_t stride;        // elements between rows (between columns, if column-major)
  int64_t batch_stride;  // elements between batches
};

// What is added to a product besides the source. A null pointer: it is absent, or 1.
struct Terms {
  float alpha, source_scale, aux_scale;
  int32_t scale_a_step, scale_b_step;  // 1: a scale for each row of A or B; 0: one for all
  float const* scale_a;
  float const* scale_b;
  OrD<ElementBias> const* bias;
  OrD<ElementAux> const* aux;
  int64_t aux_stride, aux_batch_stride;
  int64_t bias_stride, scale_a_stride, scale_b_stride;  // between batches

  // Whether there is more than alpha, the source and the scales of whole tensors.
  CUTLASS_DEVICE bool any() const { return bias || any_but_bias(); }
  CUTLASS_DEVICE bool any_but_bias() const { return scale_a_step || scale_b_step || aux; }

  // alpha and the scales of whole tensors.
  CUTLASS_DEVICE float factor() const {
    float found = alpha;
    if (scale_a && !scale_a_step) found *= *scale_a;
    if (scale_b && !scale_b_step) found *= *scale_b;
    return found;
  }
};

// Writes an element of D: `product` has been multiplied by the terms' factor.
CUTLASS_DEVICE void store_element(
    Terms const& terms, Matrix const& source, Matrix const& d, int64_t l, int64_t row, int64_t column, float product) {
  auto const at = [&](Matrix const& matrix) { return l * matrix.batch_stride + row * matrix.stride + column; };
  float value = product;
  if (terms.scale_a_step) value *= terms.scale_a[l * terms.scale_a_stride + row];
  if (terms.scale_b_step) value *= terms.scale_b[l * terms.scale_b_stride + column];
  if (terms.bias) value += float(terms.bias[l * terms.bias_stride + column]);
  if (terms.aux) {
    value += terms.aux_scale * float(terms.aux[l * terms.aux_batch_stride + row * terms.aux_stride + column]);
  }
  if (auto const* data = static_cast<OrD<ElementSource> const*>(source.data)) {
    value += terms.source_scale * float(data[at(source)]);
  }
  static_cast<ElementD*>(const_cast<void*>(d.data))[at(d)] = ElementD(value);
}

}  // namespace distgemm
