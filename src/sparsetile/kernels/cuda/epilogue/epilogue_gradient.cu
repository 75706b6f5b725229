// The gradient of a product's epilogue, from one read of the operands:
//
//   masked[r, c] = grad[r, c] unless C[r, c] <= 0, else 0      (kRelu; as torch, NaN passes it on)
//   sums[c]      = sum over rows of masked[r, c], or of grad[r, c]: the bias's gradient
//
// A thread block has a slab of kLanes * kVec columns and every gridDim.x-th set of kRows rows; a
// thread has one vector of columns and kUnroll rows at a time. Sums, in float32, of all blocks are
// added as in column_sums.cuh.
//
// Threads: kThreads per block; grid.x = chunks of rows, grid.y = slabs. Shared memory: that of
// column_sums.cuh.
//
// Assumes: n, strides and addresses multiples of kVec elements; arrivals all zero, as they are
// left.
#include "epilogue/column_sums.cuh"
#include "ptx/element.cuh"

using E = ELEMENT;

// Declared in kernels/columns.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kRows = kThreads / kLanes;  // rows that a block reads side by side
constexpr int kSlab = kLanes * kVec;

// The thread's own rows.
__device__ __forceinline__ void add_rows(const Params& p, int column, float (&sum)[1][kVec]) {
  const i64 step = i64(gridDim.x) * kRows;
#pragma unroll 1
  for (i64 at = i64(blockIdx.x) * kRows + threadIdx.x / kLanes; at < p.rows; at += step * kUnroll) {
    Packed<E, kVec> grad[kUnroll], c[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Past the last row this one is read again and not used.
      const i64 row = at + u * step < p.rows ? at + u * step : at;
      grad[u] = load_vector<E, kVec>(p.grad + row * p.grad_stride + column);
      if constexpr (kRelu) c[u] = load_vector<E, kVec>(p.c + row * p.c_stride + column);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * step >= p.rows) continue;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        if constexpr (kRelu) {
          if (widen(c[u], v) <= 0.0f) grad[u].element[v] = 0;
        }
        sum[0][v] += widen(grad[u], v);
      }
      if constexpr (kRelu) {
        using Word = typename Packed<E, kVec>::Word;
        *reinterpret_cast<Word*>(p.masked + (at + u * step) * p.n + column) = grad[u].word;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    epilogue_gradient(const __grid_constant__ Params p) {
  const int column = blockIdx.y * kSlab + threadIdx.x % kLanes * kVec;
  float sum[1][kVec] = {};
  if (column < p.n) add_rows(p, column, sum);
  add_up_columns<kLanes, kThreads>(sum, p.partials, p.arrivals, [&](int i, float total) {
    const int to = blockIdx.y * kSlab + i;
    if (to < p.n) p.sums[to] = total;
  });
}
