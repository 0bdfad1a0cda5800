// `facts` is a table of what the host must know of a kernel: numbers, and where fields of its only parameter lie. The
// compiler writes it into the cubin, and cubins.py reads it from the file.

#pragma once

#include <cstddef>
#include <cstdint>

namespace distgemm {

struct Fact {
  char name[52];
  uint32_t offset, size;  // of a field of Params, in bytes; a number has none
  uint32_t value;         // the number, or what the field always holds
};

}  // namespace distgemm

// Begins the table. The compiler would drop a constant, because no code reads it.
#define DG_FACTS __device__ ::distgemm::Fact facts[] =

#define DG_NUMBER(name, value) {name, 0, 0, uint32_t(value)}
#define DG_CONSTANT(field, value) \
  {#field, uint32_t(offsetof(Params, field)), uint32_t(sizeof(static_cast<Params*>(nullptr)->field)), uint32_t(value)}
#define DG_FIELD(field) DG_CONSTANT(field, 0)  // the host sets it

// What all kernels have.
#define DG_KERNEL(threads, shared_bytes)                                                                     \
  DG_NUMBER("size", sizeof(Params)), DG_NUMBER("alignment", alignof(Params)), DG_NUMBER("threads", threads), \
      DG_NUMBER("shared_bytes", shared_bytes)
