// The order in which a rank multiplies its tiles and sends its shard, for per_tile.cu.
// distgemm/gemm/per_tile/order.py has the same in Python, with the reasons.

#pragma once

#include <cstdint>

#include "cute/config.hpp"

namespace distgemm {

constexpr int kRanks = 72;

// Tiles that a cluster multiplies together.
struct TileCluster {
  uint32_t distance;       // the shard is that of the rank so far behind this one
  uint32_t block, column;  // row and column of clusters in the shard
};

// n / d, both less than 2^18: (n + 0.5) / d is so far from the next integer that rounding does not matter. An integer
// division takes twice as long, and a replay begins with some of them.
CUTE_HOST_DEVICE uint32_t divide(uint32_t n, uint32_t d) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(float(d)));
  return uint32_t((float(n) + 0.5f) * inverse);
#else
  return n / d;
#endif
}

struct TileOrder {
  uint32_t shards;            // whose tiles are multiplied: of all ranks, or one alone
  uint32_t blocks, columns;   // of clusters in a shard
  uint32_t group;             // rows of clusters that are multiplied in turn
  uint32_t lead;              // by so many units own tiles come earlier (a gather) or later (a reduction) than others
  uint8_t distances[kRanks];  // of the other shards, in order

  CUTE_HOST_DEVICE uint32_t units() const { return blocks * columns; }
  CUTE_HOST_DEVICE uint32_t clusters() const { return shards * units(); }

  template <bool kOwnFirst>
  CUTE_HOST_DEVICE TileCluster at(uint32_t ticket) const {
    uint32_t const others = shards - 1, alone = kOwnFirst ? lead : lead * others, both = (units() - lead) * shards;
    if (ticket < alone) return kOwnFirst ? own_(ticket) : others_(0, ticket);
    ticket -= alone;
    if (ticket < both) {
      uint32_t const unit = divide(ticket, shards), i = ticket - unit * shards;
      if (kOwnFirst) return i < others ? other_(unit, i) : own_(unit + lead);
      return i < others ? other_(unit + lead, i) : own_(unit);
    }
    ticket -= both;
    uint32_t const rest = units() - lead;
    return kOwnFirst ? others_(rest, ticket) : own_(rest + ticket);
  }

  CUTE_HOST_DEVICE TileCluster of_unit(uint32_t distance, uint32_t unit) const {
    uint32_t const first = divide(unit, group * columns) * group, left = blocks - first;
    uint32_t const rows = group < left ? group : left, within = unit - first * columns;
    uint32_t const column = divide(within, rows);
    return {distance, first + within - column * rows, column};
  }

 private:
  // Number `number` of the tiles of other shards, from a unit on.
  CUTE_HOST_DEVICE TileCluster others_(uint32_t unit, uint32_t number) const {
    uint32_t const units = divide(number, shards - 1);
    return other_(unit + units, number - units * (shards - 1));
  }
  CUTE_HOST_DEVICE TileCluster own_(uint32_t unit) const { return of_unit(0, unit); }
  CUTE_HOST_DEVICE TileCluster other_(uint32_t unit, uint32_t i) const { return of_unit(distances[i], unit); }
};

// A piece of a rank's shard, for one receiver: a slice along k of some rows.
struct Piece {
  uint32_t distance, row, slice;  // the receiver is the rank so far before the sender, or the sender itself
};

// A slice along k of a tile's sum.
struct Slice {
  uint32_t distance, number;  // whose columns of A it has: those of the rank so far behind this one; and which of them
};

struct PieceOrder {
  uint32_t rows, slices;  // rows of pieces in a shard, and slices of each
  uint32_t group;         // rows of pieces whose slices are sent in turn
  uint32_t receivers;
  uint8_t distances[kRanks];  // of the receivers: the other ranks; and behind them 0, this one, where tiles span shards

  CUTE_HOST_DEVICE uint32_t pieces() const { return receivers * rows * slices; }

  CUTE_HOST_DEVICE Piece at(uint32_t number) const {
    uint32_t const receiver = number % receivers, place = number / receivers;
    uint32_t const first = place / (group * slices) * group, left = rows - first;
    uint32_t const size = group < left ? group : left, within = place - first * slices;
    return {distances[receiver], first + within % size, within / size};
  }

  // Number `number` of the slices of a sum over the columns of all ranks: own ones, then others as they are sent.
  CUTE_HOST_DEVICE Slice slice_of_sum(uint32_t number) const {
    if (number < slices) return {0, number};
    uint32_t const slice = divide(number - slices, receivers);
    return {distances[number - slices - slice * receivers], slice};
  }

  // Number `number` of the stages of such a sum: whose columns it has, and which of their stages it is. Each rank's have
  // `depth` stages, and `size` of them are a slice; the last slice may have fewer.
  CUTE_HOST_DEVICE Slice stage_of_sum(uint32_t depth, uint32_t size, uint32_t number) const {
    if (number < depth) return {0, number};
    uint32_t const rest = number - depth, first = rest / (receivers * size) * size;
    uint32_t const left = depth - first, stages = size < left ? size : left;
    uint32_t const within = rest - first * receivers, peer = within / stages;
    return {distances[peer], first + within - peer * stages};
  }
};

}  // namespace distgemm
