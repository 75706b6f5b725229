// What follows a dense product of a sparse matrix: sums become C, by the epilogue and in C's type,
// and those that met an Inf or NaN of B with an explicit zero of A are recomputed from A's entries.
//
// A number of B that is not finite reaches every row of its column of sums, because 0 times it is
// NaN. So where C is the sums as they are, one row tells whether there is anything to do: a thread
// block looks at the first of its rows and ends if that is finite. It reads n numbers, not all of
// its rows, and none that another thread block writes. (A sum that is not finite because of A or
// overflows has the rows of its thread block read: slower, and the same result.)
//
// A thread has kVec neighbouring columns of a row, then others further on. The lanes of a warp
// recompute the elements that need it one after the other, every 32nd entry of the row each: by one
// thread 36 rows of 17,685 entries took 3 ms.
//
// Threads: kThreads; any grid. Where C is the sums, a thread block has neighbouring rows, else
// groups of kVec columns a whole grid apart.
// Assumes: sums and C contiguous, n a multiple of kVec, fewer than 2^31 elements; beta is 0.
#include "epilogue/epilogue.cuh"

using E = ELEMENT;
using Acc = E::Acc;
using Sum = SUMS;
using Out = E;

// Declared in kernels/finish.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

__device__ __forceinline__ bool finite(Acc value) { return value - value == Acc(0); }

// Whether a row of sums is finite; for all threads of the block together.
__device__ __forceinline__ bool row_is_finite(const Params& p, i64 row) {
  bool spoilt = false;
  for (int column = threadIdx.x; column < p.n; column += kThreads) {
    spoilt |= !finite(Sum::widen(p.sums[row * p.n + column]));
  }
  return !__syncthreads_or(spoilt);
}

// An element of C from A's entries, by all lanes: the same sum in each of them.
__device__ __forceinline__ Acc recomputed(const Params& p, int row, int column) {
  Acc sum[1] = {};
  const i64 end = __ldg(p.indptr + row + 1);
#pragma unroll 4
  for (i64 at = __ldg(p.indptr + row) + threadIdx.x % 32; at < end; at += 32) {
    const Acc weight = kWeighted ? E::widen(__ldg(p.values + at)) : Acc(1);
    const Acc x[1] = {E::widen(p.b[__ldg(p.columns + at) * p.b_row_stride + column])};
    ptx::fma_if<1>(true, weight, x, sum);
  }
  for (int apart = 16; apart > 0; apart /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], apart);
  return sum[0];
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    finish_dense(const __grid_constant__ Params p) {
  ptx::wait_previous();
  ptx::let_next_start();
  const u32 groups = static_cast<u32>(p.n) / kVec;
  u32 begin = blockIdx.x * kThreads, end = static_cast<u32>(p.rows) * groups;
  u32 step = gridDim.x * kThreads;
  if (kPlain) {
    const u32 own = (p.rows + gridDim.x - 1) / gridDim.x, first = blockIdx.x * own;
    if (first >= p.rows || row_is_finite(p, first)) return;
    begin = first * groups, step = kThreads;
    if (first + own < p.rows) end = (first + own) * groups;
  }
  // The lanes of a warp go on together, those past the end without a group.
  const u32 lane = threadIdx.x % 32;
  for (u32 of_warp = begin + threadIdx.x - lane; of_warp < end; of_warp += step) {
    const u32 i = of_warp + lane;
    const int row = i / groups, column = (i - row * groups) * kVec;
    const i64 at = i64(row) * p.n + column;
    Acc sum[kVec] = {};
    if (i < end) {
      using Read = Packed<Sum, kVec>;
      Read read;
      read.word = *reinterpret_cast<const typename Read::Word*>(p.sums + at);
#pragma unroll
      for (int v = 0; v < kVec; ++v) sum[v] = Sum::widen(read.element[v]);
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      u32 spoilt = __ballot_sync(~0u, !finite(sum[v]));
      while (spoilt != 0) {
        const int other = __ffs(spoilt) - 1;
        spoilt &= spoilt - 1;
        const Acc now =
            recomputed(p, __shfl_sync(~0u, row, other), __shfl_sync(~0u, column, other) + v);
        if (lane == other) sum[v] = now;
      }
    }
    if (i >= end) continue;
    Out::Storage* c = p.c + at;
    if (!kPlain && p.epilogue) {
      apply_epilogue<Out>(p, row_terms<Acc>(p, row), column, kVec, c, 1, sum);
    }
    store_columns<Out, kVec, false>(c, kVec, sum);
  }
}
