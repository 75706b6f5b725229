// Gradients of a graph attention layer's vectors, sums over its nodes, from one read of the
// operands:
//
//   d_first[c]  = sum over nodes of d_source[node, head of c] * messages[node, c]
//   d_second[c] = the same with d_target
//   d_bias[c]   = sum over nodes of grad[node, c]      (kBias)
//
// A thread block has a slab of kLanes * kVec columns and every gridDim.x-th set of kRows nodes; a
// thread has one vector of columns and adds kUnroll nodes at a time. Sums of all blocks are added
// as in column_sums.cuh.
//
// Threads: kThreads per block; grid.x = chunks of nodes, grid.y = slabs. Shared memory: that of
// column_sums.cuh.
//
// Assumes: all arrays contiguous; head width and addresses multiples of kVec elements; arrivals all
// zero, as they are left.
#include "attention/gat.cuh"
#include "epilogue/column_sums.cuh"

using E = ELEMENT;

// Declared in kernels/gat.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kRows = kThreads / kLanes;  // nodes that a block reads side by side
constexpr int kSums = kBias ? 3 : 2;
constexpr int kSlab = kLanes * kVec;

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

// Stores number i of a block's sums.
__device__ __forceinline__ void store(const Params& p, int i, float sum) {
  const int column = blockIdx.y * kSlab + i % kSlab;
  if (column >= p.n) return;
  float* const out = i < kSlab ? p.d_first : i < 2 * kSlab ? p.d_second : p.d_bias;
  out[column] = sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    gat_vectors(const __grid_constant__ Params p) {
  const int wanted = blockIdx.y * kSlab + threadIdx.x % kLanes * kVec;
  float sum[kSums][kVec] = {};
  add_nodes(p, wanted < p.n ? wanted : 0, sum);
  add_up_columns<kLanes, kThreads>(sum, p.partials, p.arrivals,
                                   [&](int i, float total) { store(p, i, total); });
}
