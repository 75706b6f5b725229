// Entries of a window that are in none of its tiles: one more partial sum of the window, from CUDA
// cores. Only kernels with kRest have them.
//
//   window_rest   first of each window's entries below, which are sorted by rows
//   rest_rows     0 to 15, a byte an entry
//   rest_columns, rest_values
//
// A part of a window takes the same share of them as of the window's tiles. Lanes that cover the
// slab's columns, 16 bytes each, are a group. The groups of a warp share a part's entries evenly,
// across rows, and each has kRestFlight of them in flight: with one at a time, and rows as shares,
// an entry took a microsecond (docs/explanation/notes/brp.md). Sums go through shared memory to the
// lanes that hold the window's. The group that begins a row writes its sum; groups that continue it
// store theirs separately, and these are added in order.
#pragma once

#include "windows/window_sums.cuh"

namespace fragments {

constexpr int kRestSide = kCols * kSize / 16 < 8 ? kCols * kSize / 16 : 8;  // lanes along a row
constexpr int kRestGroups = 32 / kRestSide;
constexpr int kRestTimes = kCols * kSize / (16 * kRestSide);  // vectors of a lane
constexpr int kRestVec = 16 / kSize;
constexpr int kRestStep = kRestSide * kRestVec;  // columns from one of a lane's vectors to its next
constexpr int kRestFlight = 4;                   // entries of a group at a time
constexpr int kRestStride = kCols + 4;           // floats from one row to the next

struct RestSums {
  float row[16][kRestStride];
  float carried[kRestGroups][kRestStride];
  int carried_row[kRestGroups];  // -1: none
};

// Sums of entries `begin` to `end` by rows, in shared memory; zeros in rows without such entries.
template <typename Params>
__device__ __forceinline__ void sum_rest(const Params& p, int slab, int begin, int end,
                                         RestSums& sums) {
  const Place at(p, slab);
  const int side = at.lane % kRestSide, group = at.lane / kRestSide;
  __syncwarp();  // all lanes have read the last window's
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    for (int c = at.lane; c < kCols; c += 32) sums.row[r][c] = 0.0f;
  }
  if (side == 0) sums.carried_row[group] = -1;
  __syncwarp();
  const auto* b = reinterpret_cast<const char*>(p.b + blockIdx.z * p.b_batch_stride + at.column);
  const int count = end - begin;
  const int first = begin + group * count / kRestGroups;
  const int stop = begin + (group + 1) * count / kRestGroups;
  int row = first < stop ? __ldg(p.rest_rows + first) : 0;
  bool continued = first > begin && first < stop && __ldg(p.rest_rows + first - 1) == row;
  float sum[kRestTimes][kRestVec] = {};
  const auto deliver = [&] {
    if (continued && side == 0) sums.carried_row[group] = row;
    float* to = continued ? sums.carried[group] : sums.row[row];
#pragma unroll
    for (int q = 0; q < kRestTimes; ++q) {
#pragma unroll
      for (int v = 0; v < kRestVec; ++v) {
        to[q * kRestStep + side * kRestVec + v] = sum[q][v];
        sum[q][v] = 0.0f;
      }
    }
    continued = false;
  };
#pragma unroll 1
  for (int e = first; e < stop; e += kRestFlight) {
    int column[kRestFlight], rows[kRestFlight];
    float weight[kRestFlight];
    Packed<E, kRestVec> x[kRestFlight][kRestTimes];
#pragma unroll
    for (int i = 0; i < kRestFlight; ++i) {
      const int at_entry = e + i < stop ? e + i : stop - 1;
      column[i] = __ldg(p.rest_columns + at_entry);
      rows[i] = __ldg(p.rest_rows + at_entry);
      weight[i] = kWeighted ? E::widen(__ldg(p.rest_values + at_entry)) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kRestFlight; ++i) {
      const char* from = b + u64(static_cast<u32>(column[i])) * static_cast<u32>(p.b_row_bytes);
#pragma unroll
      for (int q = 0; q < kRestTimes; ++q) {
        const int offset = q * kRestStep + side * kRestVec;
        x[i][q] = {};
        if (offset < at.left) {
          x[i][q] = load_vector<E, kRestVec>(reinterpret_cast<const E::Storage*>(from) + offset);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRestFlight; ++i) {
      if (e + i >= stop) break;
      if (rows[i] != row) {
        deliver();
        row = rows[i];
      }
#pragma unroll
      for (int q = 0; q < kRestTimes; ++q) {
#pragma unroll
        for (int v = 0; v < kRestVec; ++v) {
          sum[q][v] = fmaf(weight[i], widen(x[i][q], v), sum[q][v]);
        }
      }
    }
  }
  if (first < stop) deliver();
  __syncwarp();
#pragma unroll 1
  for (int other = 1; other < kRestGroups; ++other) {
    const int its_row = sums.carried_row[other];
    if (its_row < 0) continue;
    for (int c = at.lane; c < kCols; c += 32) sums.row[its_row][c] += sums.carried[other][c];
  }
  __syncwarp();
}

// Add entries `from` to `to` to a window's sums. Not inlined, and the sums go through local memory,
// once per window: the loop over steps has no spare registers.
template <typename Params>
__device__ __noinline__ void add_entries(const Params& p, int slab, int from, int to,
                                         Tally& tally) {
  __shared__ RestSums s_rest[kThreads / 32];
  RestSums& sums = s_rest[threadIdx.x / 32];
  sum_rest(p, slab, from, to, sums);
  const Place at(p, slab);
#pragma unroll
  for (int i = 0; i < kGroups * 4; ++i) {
    const int row = at.g + i % 4 / 2 * 8;
    tally.sum[i / 4][i % 4] += sums.row[row][column_of(at, i / 4, i % 2)];
  }
}

// Add the entries outside tiles that belong to tiles `begin` to `end` of a window to its sums.
template <typename Params>
__device__ __forceinline__ void add_rest(const Params& p, int slab, int window, int begin, int end,
                                         Tally& tally) {
  const int first = __ldg(p.window_rest + window);
  const int count = __ldg(p.window_rest + window + 1) - first;
  if (count == 0) return;  // for all lanes
  const int tile = __ldg(p.row_window_offset + window);
  const int tiles = __ldg(p.row_window_offset + window + 1) - tile;
  const int from = first + static_cast<int>(i64(begin - tile) * count / tiles);
  const int to = first + static_cast<int>(i64(end - tile) * count / tiles);
  if (from == to) return;
  Tally sums = tally;
  add_entries(p, slab, from, to, sums);
  tally = sums;
}

// All of them.
template <typename Params>
__device__ __forceinline__ void add_rest(const Params& p, int slab, int window, Tally& tally) {
  add_rest(p, slab, window, __ldg(p.row_window_offset + window),
           __ldg(p.row_window_offset + window + 1), tally);
}

}  // namespace fragments
