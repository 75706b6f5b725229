// Entries of a window's rows that are in none of its tiles: one more partial sum of the window,
// from CUDA cores. Only kernels with kRest have them.
//
// A row with such entries is done by the lanes that cover the slab's columns, 16 bytes each; a warp
// has several rows at work. Their sums go through shared memory to the lanes that hold the
// window's.
#pragma once

#include "window_sums.cuh"

namespace fragments {

constexpr int kRestSide = kCols * kSize / 16 < 8 ? kCols * kSize / 16 : 8;  // lanes along a row
constexpr int kRestTimes = kCols * kSize / (16 * kRestSide);                // vectors of a lane
constexpr int kRestVec = 16 / kSize;
constexpr int kRestStride = kCols + 4;  // floats from one row to the next

// Sums of the window's rows in shared memory, zeros in rows without such entries.
template <typename Params>
__device__ __noinline__ void sum_rest(const Params& p, int slab, int begin, int end, float* sums) {
  const Place at(p, slab);
  __syncwarp();  // all lanes have read the last window's
  for (int i = at.lane; i < 16 * kRestStride; i += 32) sums[i] = 0.0f;
  __syncwarp();
  const int side = at.lane % kRestSide;
  constexpr int kStep = kRestSide * kRestVec;  // columns from one of a lane's vectors to its next
  const auto* b = p.b + blockIdx.z * p.b_batch_stride + at.column;
#pragma unroll 1
  for (int i = begin + at.lane / kRestSide; i < end; i += 32 / kRestSide) {
    const int row = __ldg(p.rest_rows + i);
    const int stop = __ldg(p.rest_offset + i + 1);
    float sum[kRestTimes][kRestVec] = {};
#pragma unroll 4
    for (int e = __ldg(p.rest_offset + i); e < stop; ++e) {
      const u64 k = static_cast<u32>(__ldg(p.rest_columns + e));
      const float weight = kWeighted ? E::widen(__ldg(p.rest_values + e)) : 1.0f;
      const auto* from = reinterpret_cast<const E::Storage*>(reinterpret_cast<const char*>(b) +
                                                             k * static_cast<u32>(p.b_row_bytes));
#pragma unroll
      for (int q = 0; q < kRestTimes; ++q) {
        const int column = q * kStep + side * kRestVec;
        if (column >= at.left) continue;
        const auto x = load_vector<E, kRestVec>(from + column);
#pragma unroll
        for (int v = 0; v < kRestVec; ++v) sum[q][v] = fmaf(weight, widen(x, v), sum[q][v]);
      }
    }
#pragma unroll
    for (int q = 0; q < kRestTimes; ++q) {
#pragma unroll
      for (int v = 0; v < kRestVec; ++v) {
        sums[row * kRestStride + q * kStep + side * kRestVec + v] = sum[q][v];
      }
    }
  }
  __syncwarp();
}

// Add the window's entries outside tiles to its sums.
template <typename Params>
__device__ __forceinline__ void add_rest(const Params& p, int slab, int window, Tally& tally) {
  const int begin = __ldg(p.window_rest + window), end = __ldg(p.window_rest + window + 1);
  if (begin == end) return;  // for all lanes
  __shared__ float s_rest[kThreads / 32][16 * kRestStride];
  float* sums = s_rest[threadIdx.x / 32];
  sum_rest(p, slab, begin, end, sums);
  const Place at(p, slab);
#pragma unroll
  for (int i = 0; i < kGroups * 4; ++i) {
    const int row = at.g + i % 4 / 2 * 8;
    tally.sum[i / 4][i % 4] += sums[row * kRestStride + column_of(at, i / 4, i % 2)];
  }
}

}  // namespace fragments
