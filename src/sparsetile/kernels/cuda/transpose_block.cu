// Entries of a short-lived graph, by column: a stable sort in one launch of one thread block. Edges
// that come out of order are put in order by the same kernel, by row.
//
//     order[j]   the entry that comes j-th when entries are sorted by column, as they came else
//     sorted[j]  its column
//     ends[c]    where column c ends among them
//
// Counts of the columns become places by a running sum; atomics give each entry of a column some
// place of it, and its number among the column's entries gives it its own: the same in every run.
// That last part compares entries of a column with each other, so that the host gives few enough
// entries (kernels/blocks.py) for one column that has them all.
//
// Threads: kThreads, one block. Shared memory: a running sum. Assumes: columns below column_count.
#include "ptx.cuh"

// Declared in kernels/blocks.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kWarps = kThreads / 32;

// Sum of `value` over the threads before this one.
__device__ __forceinline__ int sum_before(int value) {
  __shared__ int of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_sync(kWarp, sum, lane - step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  for (int other = 0; other < warp; ++other) sum += of_warp[other];
  return sum - value;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    transpose_block(const __grid_constant__ Params p) {
  const int thread = threadIdx.x;
  for (int c = thread; c < p.column_count; c += kThreads) p.ends[c] = 0;
  __syncthreads();
  for (int i = thread; i < p.edges; i += kThreads) atomicAdd(&p.ends[p.columns[i]], 1);
  __syncthreads();
  // Each thread has neighbouring columns.
  const int each = (p.column_count + kThreads - 1) / kThreads;
  const int begin = min(thread * each, p.column_count);
  const int end = min(begin + each, p.column_count);
  int count = 0;
  for (int c = begin; c < end; ++c) count += p.ends[c];
  int place = sum_before(count);
  for (int c = begin; c < end; ++c) {
    const int here = p.ends[c];
    p.ends[c] = place;
    place += here;
  }
  __syncthreads();
  for (int i = thread; i < p.edges; i += kThreads) {
    const int column = p.columns[i], at = atomicAdd(&p.ends[column], 1);
    p.unsorted[at] = i;
    p.sorted[at] = column;
  }
  __syncthreads();
  // By now ends[c] is what its name says, and where the next column begins.
  for (int at = thread; at < p.edges; at += kThreads) {
    const int entry = p.unsorted[at], column = p.sorted[at];
    const int first = column == 0 ? 0 : p.ends[column - 1], last = p.ends[column];
    int before = first;
    for (int other = first; other < last; ++other) before += p.unsorted[other] < entry;
    p.order[before] = entry;
  }
}
