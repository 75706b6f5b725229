// C = A . B for a short-lived graph: sums or means over each row's entries, with bias and ReLU,
// only from the entries' rows, which ascend, and columns.
//
// The first product of a graph has `targets` and `sources`, its edges as given, and checks them:
// `found` gets kOutside if one names no row or column, kUnsorted if rows do not ascend, and kLoops
// if row and column are the same. With one of the first two C is undefined. Without columns (n = 0)
// rows are still walked if `lengths` is given. Later ones read `rows` and `columns`, the copies in
// 32 bits that the first one writes.
//
// A group of kLanes lanes has a row and a slab of kLanes * kVec columns. It searches the row's
// first entry with kLanes probes per step, unless `ends` has the end of the row before, and walks
// while entries are of its row. All groups of the thread block share the entries after the first
// kAlone, and add in their order. So the order of all additions depends only on the entries.
//
// With `divisors` each row of B counts 1 / divisors[its number]: the gradient of a mean, for which
// the forward product writes `lengths`, the entries of each row. With `order` the column of entry i
// is columns[order[i]].
//
// Threads: kThreads per block; grid.x = any number of thread blocks, which stride over sets of
// kGroups rows, grid.y = slabs, at least one. Shared memory: sums and places that groups share.
//
// Assumes: B row-major with unit column stride, C without gaps; addresses aligned to kVec elements
// and n a multiple of kVec; fewer than 2^31 rows, columns and entries; `found` zero before; copies
// of edges that were found right. Atomics set bits: the same result in every run.
#include "ptx/element.cuh"

using E = ELEMENT;
using Out = E;
using Acc = E::Acc;

// Declared in kernels/blocks.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

#include "epilogue/epilogue.cuh"

constexpr int kGroups = kThreads / kLanes;
constexpr int kUnroll = 4;  // rows of B in flight
constexpr u32 kAllLanes = kLanes == 32 ? kWarp : (1u << kLanes) - 1;

constexpr int kOutside = 1, kUnsorted = 2, kLoops = 4;

__device__ __forceinline__ bool inside(i64 number, int count) {
  return number >= 0 && number < count;
}

__device__ __forceinline__ void check_edges(const Params& p) {
  const i64 step = i64(gridDim.x) * kThreads;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < p.edges; i += step) {
    const i64 row = p.targets[i], column = p.sources[i];
    int found = inside(row, p.row_count) && inside(column, p.column_count) ? 0 : kOutside;
    if (i > 0 && p.targets[i - 1] > row) found |= kUnsorted;
    if (row == column) found |= kLoops;
    if (found) atomicOr(p.found, found);
    p.rows[i] = static_cast<int>(row);
    p.columns[i] = static_cast<int>(column);
  }
}

__device__ __forceinline__ i64 row_of_entry(const Params& p, i64 entry) {
  return p.targets == nullptr ? i64(p.rows[entry]) : p.targets[entry];
}

// Its column; -1 if B has no such row.
__device__ __forceinline__ int column_of_entry(const Params& p, i64 entry) {
  if (p.targets == nullptr) return p.columns[p.order == nullptr ? entry : p.order[entry]];
  const i64 column = p.sources[entry];
  return inside(column, p.column_count) ? static_cast<int>(column) : -1;
}

// Votes of a group's lanes; every lane of the warp takes part.
__device__ __forceinline__ u32 group_votes(bool vote) {
  return __ballot_sync(kWarp, vote) >> (threadIdx.x % 32 / kLanes * kLanes) & kAllLanes;
}

// Number of leading lanes that voted for it.
__device__ __forceinline__ int leading(u32 votes) {
  return votes == kAllLanes ? kLanes : __ffs(~votes) - 1;
}

// First entry from `low` on whose row is not less; the number of entries without one.
__device__ __forceinline__ i64 first_entry(const Params& p, i64 low, int row) {
  const int lane = threadIdx.x % kLanes;
  i64 high = p.edges;
  while (__any_sync(kWarp, low < high)) {
    const i64 step = (high - low + kLanes - 1) / kLanes;
    const i64 probe = low + (lane + 1) * step - 1;
    const int less = leading(group_votes(probe < high && row_of_entry(p, probe) < row));
    const i64 next = low + (less + 1) * step - 1;
    low += less * step;
    if (less < kLanes && next < high) high = next;
    if (low > high) low = high;
  }
  return low;
}

// End of a row; the number of entries past the last row.
__device__ __forceinline__ i64 end_of_row(const Params& p, int row) {
  return row < 0 ? 0 : row < p.row_count ? i64(p.ends[row]) : p.edges;
}

// Add the rows of B of a row's entries from `at` to `end`; return the first entry of another row.
__device__ __forceinline__ i64 walk(const Params& p, int row, i64 at, i64 end, int column,
                                    Acc (&sum)[kVec]) {
  const int lane = threadIdx.x % kLanes;
  const auto* slab = reinterpret_cast<const char*>(p.b + column);
  bool more = at < end;
  while (__any_sync(kWarp, more)) {
    const i64 entry = at + lane;
    const bool mine = more && entry < end && row_of_entry(p, entry) == row;
    int of_b = -1;
    Acc weight = 1;
    if (mine) {
      of_b = column_of_entry(p, entry);
      if (p.divisors != nullptr) weight = Acc(1) / Acc(max(p.divisors[of_b], 1));
    }
    const int count = leading(group_votes(mine));
    for (int first = 0; __any_sync(kWarp, first < count); first += kUnroll) {
      Packed<E, kVec> x[kUnroll];
      Acc scale[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int from = __shfl_sync(kWarp, of_b, first + u, kLanes);
        scale[u] = __shfl_sync(kWarp, weight, first + u, kLanes);
        // Zeros if there is nothing to add.
        x[u].word = {};
        if (first + u < count && from >= 0 && column < p.n) {
          x[u] = load_vector<E, kVec>(slab + from * p.b_row_bytes);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) sum[v] += scale[u] * widen(x[u], v);
      }
    }
    at += count;
    more = count == kLanes && at < end;
  }
  return at;
}

// The rows of one set, one per group.
__device__ __forceinline__ void multiply_set(const Params& p, int first_row) {
  __shared__ i64 rest[kGroups];
  __shared__ Acc shares[kGroups][kLanes * kVec];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int row = first_row + group;
  const int column = (blockIdx.y * kLanes + lane) * kVec;
  Acc sum[kVec] = {};
  const i64 begin = p.ends == nullptr ? first_entry(p, 0, row) : end_of_row(p, row - 1);
  const i64 alone = begin + kAlone < p.edges ? begin + kAlone : p.edges;
  i64 end = walk(p, row, begin, alone, column, sum);
  if (lane == 0) {
    rest[group] = end == alone && end < p.edges && row_of_entry(p, end) == row ? end : -1;
  }
  __syncthreads();
  for (int other = 0; other < kGroups; ++other) {
    const i64 from = rest[other];
    if (from < 0) continue;
    const i64 last = p.ends == nullptr ? first_entry(p, from, first_row + other + 1)
                                       : end_of_row(p, first_row + other);
    const i64 share = (last - from + kGroups - 1) / kGroups;
    const i64 mine = from + group * share;
    Acc part[kVec] = {};
    walk(p, first_row + other, mine, mine + share < last ? mine + share : last, column, part);
#pragma unroll
    for (int v = 0; v < kVec; ++v) shares[group][lane * kVec + v] = part[v];
    __syncthreads();
    if (group == other) {
      end = last;
      for (int each = 0; each < kGroups; ++each) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) sum[v] += shares[each][lane * kVec + v];
      }
    }
    __syncthreads();
  }
  __syncthreads();  // the next set writes `rest`
  if (row >= p.row_count) return;
  if (p.lengths != nullptr && lane == 0 && blockIdx.y == 0) {
    p.lengths[row] = static_cast<int>(end - begin);
  }
  if (column >= p.n) return;
  const Acc scale = p.mean && end > begin ? Acc(1) / Acc(end - begin) : Acc(1);
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    sum[v] *= scale;
    if (p.bias != nullptr) sum[v] += p.bias[column + v];
    if (p.relu) sum[v] = sum[v] < Acc(0) ? Acc(0) : sum[v];
  }
  store_columns<E, kVec, false>(p.c + i64(row) * p.n + column, kVec, sum);
}

// Without a minimum of blocks the compiler aims at more of them and spills.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    spmm_block(const __grid_constant__ Params p) {
  if (p.targets != nullptr && blockIdx.y == 0) check_edges(p);
  const bool walks = p.n > 0 || p.lengths != nullptr;
  const int sets = walks ? (p.row_count + kGroups - 1) / kGroups : 0;
  for (int set = blockIdx.x; set < sets; set += gridDim.x) multiply_set(p, set * kGroups);
}
