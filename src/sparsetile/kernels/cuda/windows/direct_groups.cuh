// BRP-SpMM's groups of tiles straight from memory to registers: no ring, and nothing to search. For
// float32 tiles with one entry in each column, four tiles a group; included by fragment_items.cuh.
//
// With one entry in each column, a group is a list of 32 entries, and any eight of them are a tile:
// lane 4g + t takes entries 8t to 8t + 7 as k = t and k = t + 4 of four tiles. So their columns,
// rows and values are neighbours: five loads for a group. Of a row of B the lane loads columns 4g
// to 4g + 3 of each 32, which are its operands and those that a ring would give it. Its part of A
// is the entry's value, or zero, by one comparison with each of its two rows.
//
// Entries of the next group are loaded before the products of this one.
#pragma once

#include "windows/window_sums.cuh"

namespace fragments {

constexpr int kGroupTiles = 4;
constexpr int kLaneEntries = 2 * kGroupTiles;
constexpr int kSegmentsOfB = kCols / 32;                    // vectors of a lane in a row of B
constexpr int kRoundEntries = kLaneEntries / kSegmentsOfB;  // rows of B of a lane in flight

// The lane's entries of one group.
struct LaneEntries {
  u32 column[kLaneEntries];
  u32 value[kLaneEntries];
  u32 place[kLaneEntries / 4];  // a byte each: 8 * row + column in the tile

  __device__ __forceinline__ u32 row(int i) const { return place[i / 4] >> (8 * (i % 4) + 3) & 15; }
};

template <typename Params>
__device__ __forceinline__ LaneEntries load_entries(const Params& p, int tile, int t) {
  const i64 first = i64(tile) * 8 + t * kLaneEntries;
  LaneEntries found;
#pragma unroll
  for (int i = 0; i < kLaneEntries; i += 4) {
    const auto* columns = reinterpret_cast<const uint4*>(p.tile_columns + first + i);
    const uint4 four = ptx::load_nc(columns);
    found.column[i] = four.x, found.column[i + 1] = four.y;
    found.column[i + 2] = four.z, found.column[i + 3] = four.w;
    uint4 values = make_uint4(Mma<E>::kOne, Mma<E>::kOne, Mma<E>::kOne, Mma<E>::kOne);
    if constexpr (kWeighted) {
      values = ptx::load_nc(reinterpret_cast<const uint4*>(p.slot_values + first + i));
    }
    found.value[i] = values.x, found.value[i + 1] = values.y;
    found.value[i + 2] = values.z, found.value[i + 3] = values.w;
  }
  const uint2 places = ptx::load_nc(reinterpret_cast<const uint2*>(p.slot_ids + first));
  found.place[0] = places.x, found.place[1] = places.y;
  return found;
}

// Multiplies the groups of tiles `next` to `end`, one after the other.
struct DirectGroups {
  static constexpr int kTiles = kGroupTiles;

  const char* b;  // the lane's first column in row 0
  int next, end;
  LaneEntries entries;

  template <typename Params>
  __device__ __forceinline__ DirectGroups(const Params& p, const Place& at, int begin, int end_)
      : b(reinterpret_cast<const char*>(p.b + blockIdx.z * p.b_batch_stride + at.column +
                                        (4 * at.g < at.left ? 4 * at.g : 0))),
        next(begin),
        end(end_) {
    if (next < end) entries = load_entries(p, next, at.t);
  }

  template <typename Params>
  __device__ __forceinline__ void multiply_next(const Params& p, const Place& at, Tally& tally) {
    const LaneEntries mine = entries;
    next += kGroupTiles;
#pragma unroll
    for (int round = 0; round < kLaneEntries; round += kRoundEntries) {
      uint4 x[kRoundEntries][kSegmentsOfB];
#pragma unroll
      for (int i = 0; i < kRoundEntries; ++i) {
        const char* from = b + u64(mine.column[round + i]) * static_cast<u32>(p.b_row_bytes);
#pragma unroll
        for (int s = 0; s < kSegmentsOfB; ++s) {
          x[i][s] = make_uint4(0, 0, 0, 0);
          if (32 * s + 4 * at.g < at.left) {
            x[i][s] = ptx::load_nc(reinterpret_cast<const uint4*>(from + 128 * s));
          }
        }
      }
      if (round == 0 && next < end) entries = load_entries(p, next, at.t);
#pragma unroll
      for (int i = 0; i < kRoundEntries; i += 2) {
        const u32 low = mine.row(round + i), high = mine.row(round + i + 1), g = at.g;
        const u32 v = mine.value[round + i], w = mine.value[round + i + 1];
        const uint4 a = make_uint4(low == g ? v : 0, low == g + 8 ? v : 0, high == g ? w : 0,
                                   high == g + 8 ? w : 0);
#pragma unroll
        for (int s = 0; s < kSegmentsOfB; ++s) {
          multiply_tf32(a, x[i][s].x, x[i + 1][s].x, tally.sum[4 * s]);
          multiply_tf32(a, x[i][s].y, x[i + 1][s].y, tally.sum[4 * s + 1]);
          multiply_tf32(a, x[i][s].z, x[i + 1][s].z, tally.sum[4 * s + 2]);
          multiply_tf32(a, x[i][s].w, x[i + 1][s].w, tally.sum[4 * s + 3]);
        }
      }
    }
  }
};

}  // namespace fragments
