// Non-finite elements of C, recomputed only from A's entries, for B and C of any strides;
// row_items.cuh repairs row-major ones. A product made with blocks may have multiplied an Inf or
// NaN of B with a cell that has no entry of A.
//
// Threads stride over the elements; neighbouring threads have neighbouring elements of C. Nothing
// is read while *flag is 0: the product before saw only finite sums. It is slow because it is rare.
//
// Assumes: indptr and columns of A with fewer than 2^31 entries; beta is 0.
#include "epilogue/epilogue.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;

// Declared in kernels/repair.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void __launch_bounds__(kThreads)
    repair_strided(const __grid_constant__ Params p) {
  if (*p.flag == 0) return;
  const bool rows_first = p.c_row_stride < p.c_column_stride;
  const i64 fast = rows_first ? p.rows : p.n, count = i64(p.rows) * p.n;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += i64(gridDim.x) * kThreads) {
    const i64 slow = i / fast, rest = i - slow * fast;
    const i64 row = rows_first ? rest : slow, column = rows_first ? slow : rest;
    Out::Storage* c = p.c + row * p.c_row_stride + column * p.c_column_stride;
    const float now = Out::widen(*c);
    if (now - now == 0.0f) continue;
    const E::Storage* b = p.b + column * p.b_column_stride;
    float sum[1] = {};
    const int end = static_cast<int>(__ldg(p.indptr + row + 1));
    for (int at = static_cast<int>(__ldg(p.indptr + row)); at < end; ++at) {
      const float weight = kWeighted ? E::widen(__ldg(p.values + at)) : 1.0f;
      sum[0] = fmaf(weight, E::widen(b[__ldg(p.columns + at) * p.b_row_stride]), sum[0]);
    }
    apply_epilogue<Out>(p, row_terms<float>(p, static_cast<int>(row)), static_cast<int>(column), 1,
                        c, 1, sum);
    *c = Out::narrow(sum[0]);
  }
}
