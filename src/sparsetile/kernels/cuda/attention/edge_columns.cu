// Gradient of the weights that map edges' features, sums over all entries (t, s) of A:
//
//   out[d, c] = vector[c] * sum over entries of weight[entry, head of c] * derivative(z[entry, c])
//                           * features[entry, d]            for kSums neighbouring d
//
// with z = left[t] + right[s] + edge as in edge_scores.cu, computed again.
//
// A thread block has a slab of kLanes * kVec columns and every gridDim.x-th set of kRows entries; a
// thread has one vector of columns and adds kUnroll entries at a time. Sums of all blocks are added
// as in column_sums.cuh.
//
// Threads: kThreads per block; grid.x = chunks of entries, grid.y = slabs. Shared memory: that of
// column_sums.cuh.
//
// Assumes: as edge_scores.cu; arrivals all zero, as they are left.
#include "attention/gat.cuh"
#include "epilogue/column_sums.cuh"

using E = ELEMENT;

// Declared in kernels/edge_attention.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kRows = kThreads / kLanes;  // entries that a block reads side by side
constexpr int kSlab = kLanes * kVec;

// The thread's own entries.
__device__ __forceinline__ void add_entries(const Params& p, int column,
                                            float (&sum)[kSums][kVec]) {
  const float slope = static_cast<float>(p.slope);
  const int head = column / p.width;
  const i64 step = i64(gridDim.x) * kRows;
#pragma unroll 1
  for (i64 at = i64(blockIdx.x) * kRows + threadIdx.x / kLanes; at < p.count;
       at += step * kUnroll) {
    Packed<E, kVec> x[kUnroll], y[kUnroll];
    float weight[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Past the last entry this one is read again and not used.
      const i64 entry = at + u * step < p.count ? at + u * step : at;
      const i64 target = __ldg(p.rows + entry);
      const i64 source = static_cast<u32>(__ldg(p.columns + entry));
      x[u] = load_vector<E, kVec>(p.left + target * p.n + column);
      y[u] = load_vector<E, kVec>(p.right + source * p.n + column);
      weight[u] = __ldg(p.weight + entry * p.heads + head);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const i64 entry = at + u * step;
      if (entry >= p.count) continue;
      float pull[kVec] = {};
      gat::add_edge<kVec>(p, entry, column, pull);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float z = widen(x[u], v) + widen(y[u], v) + pull[v];
        pull[v] = weight[u] * gat::derivative(z, slope);
      }
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        const float feature = __ldg(p.chunk + entry * p.dims + s);
#pragma unroll
        for (int v = 0; v < kVec; ++v) sum[s][v] += feature * pull[v];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    edge_columns(const __grid_constant__ Params p) {
  const int wanted = blockIdx.y * kSlab + threadIdx.x % kLanes * kVec;
  float sum[kSums][kVec] = {};
  add_entries(p, wanted < p.n ? wanted : 0, sum);
  add_up_columns<kLanes, kThreads>(sum, p.partials, p.arrivals, [&](int i, float total) {
    const int column = blockIdx.y * kSlab + i % kSlab;
    if (column < p.n) p.out[i64(i / kSlab) * p.n + column] = __ldg(p.vector + column) * total;
  });
}
