// Edges of a graph that passes by, listed for products of rows: what systems/csr/blocks.py asks
// for. Stages, one launch each:
//
//     check  rows and columns of the edges in 32 bits; `flags` gets kOutside where one names no row
//            or column, kUnsorted where rows do not ascend
//     items  where each row begins among sorted rows, and an item of a schedule for it
//
// One kernel with the stage as a parameter, so that there is one to compile and to load. Atomics
// set bits: the same result in every run.
//
// Assumes: fewer than 2^31 edges and rows; `flags` is zero before `check`. Threads: kThreads; any
// grid; a thread has an edge, or a row (one more than there are).
#include "row_windows.cuh"

// Declared in kernels/blocks.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kCheck, kItems };
constexpr int kOutside = 1, kUnsorted = 2;

__device__ __forceinline__ void check_edge(const Params& p, i64 i) {
  const i64 row = p.targets[i], column = p.sources[i];
  int found = 0;
  if (row < 0 || row >= p.row_count || column < 0 || column >= p.column_count) found = kOutside;
  if (i > 0 && p.targets[i - 1] > row) found |= kUnsorted;
  if (found) atomicOr(p.flags, found);
  p.rows[i] = static_cast<int>(row);
  p.columns[i] = static_cast<int>(column);
}

__device__ __forceinline__ void write_item(const Params& p, i64 i) {
  const int row = static_cast<int>(i);
  const i64 begin = lower_bound(p.rows, 0, p.edges, row);
  p.indptr[i] = begin;
  if (row == p.row_count) return;
  const i64 end = lower_bound(p.rows, begin, p.edges, row + 1);
  p.items[i] = make_int4(row, static_cast<int>(begin), static_cast<int>(end), -1);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    list_block(const __grid_constant__ Params p) {
  const i64 step = i64(gridDim.x) * kThreads;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < p.work; i += step) {
    if (p.stage == kCheck) {
      check_edge(p, i);
    } else {
      write_item(p, i);
    }
  }
}
