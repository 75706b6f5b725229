// Gathers rows of a matrix: to[i, :] = b[rows[i], :]. Ranks pack the rows that they send.
//
// A warp has 32 rows of the result and reads their numbers at once. Groups of kLanes lanes copy a
// row each, in words of 16 bytes, and kUnroll rows are in flight before the first is stored,
// because rows are short.
//
// Assumes: addresses and rows of both matrices at multiples of 16 bytes, `words` words per row.
// Threads: kThreads.
#include "ptx/ptx.cuh"

// Declared in kernels/gather.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kGroups = 32 / kLanes;
static_assert(32 % (kGroups * kUnroll) == 0, "a warp has whole batches");

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_rows(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32;
  const i64 first = (i64(blockIdx.x) * kThreads + threadIdx.x) / 32 * 32;
  if (first >= p.count) return;
  const int number = first + lane < p.count ? __ldg(p.rows + first + lane) : 0;
#pragma unroll 1
  for (int word = lane % kLanes; word - lane % kLanes < p.words; word += kLanes) {
#pragma unroll 1
    for (int from = lane / kLanes; from < 32; from += kGroups * kUnroll) {
      uint4 held[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int source = __shfl_sync(0xffffffffu, number, from + j * kGroups);
        const uint4* row = reinterpret_cast<const uint4*>(p.b + source * p.b_row_bytes);
        if (word < p.words) held[j] = ptx::load_nc(row + word);
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const i64 at = first + from + j * kGroups;
        uint4* row = reinterpret_cast<uint4*>(p.to + at * p.to_row_bytes);
        if (word < p.words && at < p.count) row[word] = held[j];
      }
    }
  }
}
