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

struct TileOrder {
  uint32_t ranks;
  uint32_t blocks, columns;   // of clusters in a shard
  uint32_t group;             // rows of clusters that are multiplied in turn
  uint32_t lead;              // by so many units own tiles come earlier (a gather) or later (a reduction) than others
  uint8_t distances[kRanks];  // of the other shards, in order

  CUTE_HOST_DEVICE uint32_t units() const { return blocks * columns; }
  CUTE_HOST_DEVICE uint32_t clusters() const { return ranks * units(); }

  template <bool kOwnFirst>
  CUTE_HOST_DEVICE TileCluster at(uint32_t ticket) const {
    uint32_t const others = ranks - 1, alone = kOwnFirst ? lead : lead * others, both = (units() - lead) * ranks;
    if (ticket < alone) return kOwnFirst ? own_(ticket) : other_(ticket / others, ticket % others);
    ticket -= alone;
    if (ticket < both) {
      uint32_t const unit = ticket / ranks, i = ticket % ranks;
      if (kOwnFirst) return i < others ? other_(unit, i) : own_(unit + lead);
      return i < others ? other_(unit + lead, i) : own_(unit);
    }
    ticket -= both;
    uint32_t const rest = units() - lead;
    return kOwnFirst ? other_(rest + ticket / others, ticket % others) : own_(rest + ticket);
  }

  CUTE_HOST_DEVICE TileCluster of_unit(uint32_t distance, uint32_t unit) const {
    uint32_t const first = unit / (group * columns) * group, left = blocks - first;
    uint32_t const rows = group < left ? group : left, within = unit - first * columns;
    return {distance, first + within % rows, within / rows};
  }

 private:
  CUTE_HOST_DEVICE TileCluster own_(uint32_t unit) const { return of_unit(0, unit); }
  CUTE_HOST_DEVICE TileCluster other_(uint32_t unit, uint32_t i) const { return of_unit(distances[i], unit); }
};

// A piece of a rank's shard, for one receiver: a slice along k of a row of tiles.
struct Piece {
  uint32_t distance, row, slice;  // the receiver is the rank so far before the sender
};

struct PieceOrder {
  uint32_t rows, slices;  // rows of tiles in a shard, and slices of each
  uint32_t group;         // rows of tiles whose slices are sent in turn

  CUTE_HOST_DEVICE uint32_t pieces(TileOrder const& order) const { return (order.ranks - 1) * rows * slices; }

  CUTE_HOST_DEVICE Piece at(TileOrder const& order, uint32_t number) const {
    uint32_t const others = order.ranks - 1, receiver = number % others, place = number / others;
    uint32_t const first = place / (group * slices) * group, left = rows - first;
    uint32_t const size = group < left ? group : left, within = place - first * slices;
    return {order.distances[receiver], first + within % size, within / size};
  }
};

}  // namespace distgemm
