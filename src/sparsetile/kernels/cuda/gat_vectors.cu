// Gradients of a graph attention layer's vectors, sums over its nodes, from one read of what they
// are made of:
//
//   d_first[c]  = sum over nodes of d_source[node, head of c] * messages[node, c]
//   d_second[c] = the same with d_target
//   d_bias[c]   = sum over nodes of grad[node, c]      (kBias)
//
// A thread block has a slab of kLanes * kVec columns and every gridDim.x-th set of kRows nodes; a
// thread has one vector of columns and adds kUnroll nodes at a time. Sums of a block are added by
// shuffles and in shared memory; the last block of a slab to arrive adds those of all blocks in
// their order. Which one that is depends on timing, the order of the additions does not.
//
// Threads: kThreads per block; grid.x = chunks of nodes, grid.y = slabs. Shared memory: kWarps *
// kSums * kLanes * kVec floats.
//
// Assumes: all arrays contiguous; head width and addresses multiples of kVec elements; arrivals all
// zero, which they are again afterwards.
#include "gat.cuh"

using E = ELEMENT;

// Declared in kernels/gat.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kWarps = kThreads / 32;
constexpr int kRows = kThreads / kLanes;  // nodes that a block reads side by side
constexpr int kSums = kBias ? 3 : 2;
constexpr int kSlab = kLanes * kVec;
constexpr int kCount = kSums * kSlab;  // sums of a block
constexpr int kAhead = 8;              // blocks whose sums are under way at once

static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "lanes of a node must not straddle warps");

// The thread's own nodes.
__device__ __forceinline__ void add_nodes(const Params& p, int column, float (&sum)[kSums][kVec]) {
  const int head = column / p.width;
  const i64 step = i64(gridDim.x) * kRows;
#pragma unroll 1
  for (i64 at = i64(blockIdx.x) * kRows + threadIdx.x / kLanes; at < p.nodes;
       at += step * kUnroll) {
    Packed<E, kVec> message[kUnroll], grad[kUnroll];
    float source[kUnroll], target[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Past the last node this one is read again and not used.
      const i64 node = at + u * step < p.nodes ? at + u * step : at;
      message[u] = load_vector<E, kVec>(p.messages + node * p.n + column);
      if constexpr (kBias) grad[u] = load_vector<E, kVec>(p.grad + node * p.n + column);
      source[u] = __ldg(p.d_source + node * p.heads + head);
      target[u] = __ldg(p.d_target + node * p.heads + head);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * step >= p.nodes) continue;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float x = widen(message[u], v);
        sum[0][v] += source[u] * x;
        sum[1][v] += target[u] * x;
        if constexpr (kBias) sum[2][v] += widen(grad[u], v);
      }
    }
  }
}

// Where number i of a block's sums belongs.
__device__ __forceinline__ void store(const Params& p, int i, float sum) {
  const int column = blockIdx.y * kSlab + i % kSlab;
  if (column >= p.n) return;
  float* const out = i < kSlab ? p.d_first : i < 2 * kSlab ? p.d_second : p.d_bias;
  out[column] = sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    gat_vectors(const __grid_constant__ Params p) {
  __shared__ float s_sum[kWarps][kCount];
  __shared__ int s_arrived;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % kLanes;
  const int wanted = blockIdx.y * kSlab + lane * kVec;
  float sum[kSums][kVec] = {};
  add_nodes(p, wanted < p.n ? wanted : 0, sum);
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
  float* const partials = p.partials + i64(blockIdx.y) * gridDim.x * kCount;
  for (int i = threadIdx.x; i < kCount; i += kThreads) {
    float total = s_sum[0][i];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += s_sum[w][i];
    if (gridDim.x == 1) {
      store(p, i, total);
    } else {
      __stcg(partials + i64(blockIdx.x) * kCount + i, total);
    }
  }
  if (gridDim.x == 1) return;
  __threadfence();  // the block's sums are visible before its arrival is
  __syncthreads();
  if (threadIdx.x == 0) s_arrived = atomicAdd(p.arrivals + blockIdx.y, 1);
  __syncthreads();
  if (s_arrived != gridDim.x - 1) return;
  if (threadIdx.x == 0) p.arrivals[blockIdx.y] = 0;
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
    store(p, i, total);
  }
}
