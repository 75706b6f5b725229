// epilogue.cuh: a block a position, a thread kVec columns.
#include "epilogue/epilogue.cuh"

using Out = OUTPUT;
using Acc = ACC;

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void epilogue(const __grid_constant__ Params p) {
  const int row = row_of(p, blockIdx.x), column = threadIdx.x * kCount;
  if (row < 0) return;
  Acc sum[kCount];
  for (int v = 0; v < kCount; ++v) {
    sum[v] = column + v < p.n ? p.sums[i64(blockIdx.x) * p.n + column + v] : Acc(0);
  }
  Out::Storage* c = c_row(p, row) + column;
  const int inside = p.n - column;
  if (p.epilogue) apply_epilogue<Out>(p, row_terms<Acc>(p, row), column, inside, c, 1, sum);
  store_columns<Out, kVec, kStream>(c, inside, sum);
}
