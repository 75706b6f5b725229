// Sums of columns over all thread blocks of a slab (blockIdx.y), in a fixed order.
//
// A slab has kLanes * kVec columns, and kSums sums of each. A thread has those of one vector of
// columns, lanes of a row side by side; gridDim.x blocks share the rows. Sums of a block are added
// by shuffles and in shared memory; the last block of a slab to arrive adds those of all blocks in
// their order. Timing decides which block that is, but not the order of the additions.
//
// Shared memory: kThreads / 32 * kSums * kLanes * kVec floats.
//
// Assumes: partials for kSums * kLanes * kVec floats of each block; arrivals all zero, as they are
// left; neither is read if gridDim.x is 1.
#pragma once

#include "ptx/ptx.cuh"

// store(i, total) gets sum number i / (kLanes * kVec) of column i % (kLanes * kVec) of the slab.
template <int kLanes, int kThreads, int kSums, int kVec, typename Store>
__device__ __forceinline__ void add_up_columns(float (&sum)[kSums][kVec], float* all_partials,
                                               int* arrivals, const Store& store) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kSlab = kLanes * kVec;
  constexpr int kCount = kSums * kSlab;  // sums of a block
  constexpr int kAhead = 8;              // blocks whose sums are in flight at once
  static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "lanes of a row must not straddle warps");
  __shared__ float s_sum[kWarps][kCount];
  __shared__ int s_arrived;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % kLanes;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
#pragma unroll
      for (int step = kLanes; step < 32; step *= 2) {
        sum[s][v] += __shfl_xor_sync(kWarp, sum[s][v], step);
      }
      if (threadIdx.x % 32 < kLanes) s_sum[warp][s * kSlab + lane * kVec + v] = sum[s][v];
    }
  }
  __syncthreads();
  float* const partials = all_partials + i64(blockIdx.y) * gridDim.x * kCount;
  for (int i = threadIdx.x; i < kCount; i += kThreads) {
    float total = s_sum[0][i];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += s_sum[w][i];
    if (gridDim.x == 1) {
      store(i, total);
    } else {
      __stcg(partials + i64(blockIdx.x) * kCount + i, total);
    }
  }
  if (gridDim.x == 1) return;
  __threadfence();  // the block's sums are visible before its arrival is
  __syncthreads();
  if (threadIdx.x == 0) s_arrived = atomicAdd(arrivals + blockIdx.y, 1);
  __syncthreads();
  if (s_arrived != gridDim.x - 1) return;
  if (threadIdx.x == 0) arrivals[blockIdx.y] = 0;
  __threadfence();  // the other blocks' sums are read after their arrivals
  for (int i = threadIdx.x; i < kCount; i += kThreads) {
    float total = 0.0f;
#pragma unroll 1
    for (int first = 0; first < gridDim.x; first += kAhead) {
      float part[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        part[a] = __ldcg(partials + i64(min(first + a, int(gridDim.x) - 1)) * kCount + i);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (first + a < gridDim.x) total += part[a];
      }
    }
    store(i, total);
  }
}
