// Symmetric normalisation of a square matrix's values, and its gradient, in two launches each:
//
//     v[e] = weights[sources[e]], `fill` if sources[e] < 0; d[r] = sum of v over row r
//     kScales    scales[r] = d[r]^-1/2, 0 if d[r] is 0
//     kValues    values[e] = scales[row] * v[e] * scales[column]
//
// With g the gradient of the values y, row r's scale is in g * y of its row and of its column:
//
//     kPulls     pulls[r] = -1/2 scales[r]^2 * (sum of g * y over row r + over column r)
//     kGradient  grad_weights[sources[e]] = g[e] * scales[row] * scales[column] + pulls[row]
//
// pulls is the gradient of d: the derivative of d^-1/2 is -1/2 of its cube, and the sums already
// have the scale once. A degree of 0 has none. A negative degree makes NaN, as in torch.
//
//     thread block: kGroups groups of kLanes lanes, one row each; group g of set s has row
//     g * sets + s, so that neighbouring long rows fall to different thread blocks
//     row:          |<-- up to kAlone entries: its group -->|<-- the rest: all threads -->|
//
// Lanes add every kLanes-th entry, groups and thread blocks add by a tree: the order of additions
// depends only on the row's length, so every run gives the same bits. A row of 100,000 entries
// takes a thread about 50 batches of kUnroll loads.
//
// Threads: kThreads; any grid. Shared memory: the rest of each row, and sums of warps.
// Assumes: a square matrix, fewer than 2^31 entries and weights; no source twice.
#include "ptx/element.cuh"

using E = ELEMENT;
using Acc = E::Acc;

// Declared in kernels/normalise.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kScales, kValues, kPulls, kGradient };

constexpr int kGroups = kThreads / kLanes, kWarps = kThreads / 32;
constexpr int kUnroll = 8;

static_assert(32 % kLanes == 0 && kThreads % 32 == 0, "groups must not straddle warps");

// Entries of one row, or of one column's list.
struct Range {
  i64 begin, end;
};

__device__ __forceinline__ Range range_of(const i64* ptr, i64 row, i64 rows) {
  if (row >= rows) return {0, 0};
  return {__ldg(ptr + row), __ldg(ptr + row + 1)};
}

// Entries that each group leaves to all threads. True if any group leaves some.
__shared__ Range s_rest[kGroups];
__device__ __forceinline__ bool leave(Range mine) {
  if (threadIdx.x % kLanes == 0) s_rest[threadIdx.x / kLanes] = {mine.begin + kAlone, mine.end};
  return __syncthreads_or(mine.begin + kAlone < mine.end);
}

__device__ __forceinline__ Acc add_lanes(Acc sum, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kWarp, sum, step);
  return sum;
}

// Sum of load(i) over each group's range, in all its lanes; all threads of the block take part.
template <typename Load>
__device__ __forceinline__ Acc sum_of(Range mine, const Load& load) {
  __shared__ Acc s_sums[kWarps];
  const int thread = threadIdx.x, group = thread / kLanes;
  const i64 alone = min(mine.begin + kAlone, mine.end);
  Acc sum = 0;
  for (i64 i = mine.begin + thread % kLanes; i < alone; i += kLanes) sum += load(i);
  sum = add_lanes(sum, kLanes);
  if (leave(mine)) {
    for (int other = 0; other < kGroups; ++other) {
      const Range rest = s_rest[other];
      if (rest.begin >= rest.end) continue;
      Acc part[kUnroll] = {};
      for (i64 first = rest.begin + thread; first < rest.end; first += kUnroll * kThreads) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const i64 i = first + u * kThreads;
          if (i < rest.end) part[u] += load(i);
        }
      }
#pragma unroll
      for (int u = 1; u < kUnroll; ++u) part[0] += part[u];
      const Acc of_warp = add_lanes(part[0], 32);
      if (thread % 32 == 0) s_sums[thread / 32] = of_warp;
      __syncthreads();
      if (group == other) {
        for (int warp = 0; warp < kWarps; ++warp) sum += s_sums[warp];
      }
      __syncthreads();
    }
  }
  __syncthreads();  // s_rest is written again
  return sum;
}

// Call body(i, row) for each entry of the groups' rows.
template <typename Body>
__device__ __forceinline__ void each_of(Range mine, i64 row, i64 sets, const Body& body) {
  const int thread = threadIdx.x, group = thread / kLanes;
  const i64 alone = min(mine.begin + kAlone, mine.end);
  for (i64 i = mine.begin + thread % kLanes; i < alone; i += kLanes) body(i, row);
  if (leave(mine)) {
    for (int other = 0; other < kGroups; ++other) {
      const Range rest = s_rest[other];
      for (i64 i = rest.begin + thread; i < rest.end; i += kThreads) {
        body(i, row + (other - group) * sets);
      }
    }
  }
  __syncthreads();  // s_rest is written again
}

__device__ __forceinline__ Acc weight_of(const Params& p, i64 entry) {
  if (p.sources == nullptr) return E::widen(__ldg(p.weights + entry));
  const int source = __ldg(p.sources + entry);
  return source < 0 ? Acc(p.fill) : E::widen(__ldg(p.weights + source));
}

// Without a minimum of blocks the compiler aims at more of them and spills.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    normalise(const __grid_constant__ Params p) {
  const i64 rows = p.rows, sets = (rows + kGroups - 1) / kGroups;
  const bool first_lane = threadIdx.x % kLanes == 0;
  for (i64 set = blockIdx.x; set < sets; set += gridDim.x) {
    const i64 row = threadIdx.x / kLanes * sets + set;
    const Range mine = range_of(p.indptr, row, rows);
    if constexpr (kStage == kScales) {
      const Acc degree = sum_of(mine, [&](i64 i) { return weight_of(p, i); });
      if (first_lane && row < rows) {
        p.scales[row] = degree == Acc(0) ? Acc(0) : Acc(1) / sqrt(degree);
      }
    } else if constexpr (kStage == kValues) {
      each_of(mine, row, sets, [&](i64 i, i64 of) {
        const Acc left = __ldg(p.scales + of), right = __ldg(p.scales + __ldg(p.columns + i));
        p.values[i] = left * weight_of(p, i) * right;
      });
    } else if constexpr (kStage == kPulls) {
      const auto pull = [&](i64 i) { return __ldg(p.grad + i) * __ldg(p.values + i); };
      const Acc of_row = sum_of(mine, pull);
      const Acc of_column = sum_of(range_of(p.column_ptr, row, rows),
                                   [&](i64 i) { return pull(__ldg(p.order + i)); });
      if (first_lane && row < rows) {
        const Acc scale = p.scales[row];
        // Not the square first: that of a tiny degree overflows float32.
        const Acc found = Acc(-0.5) * scale * (scale * (of_row + of_column));
        p.pulls[row] = scale == Acc(0) ? Acc(0) : found;
      }
    } else {
      each_of(mine, row, sets, [&](i64 i, i64 of) {
        const i64 to = p.sources == nullptr ? i : i64(__ldg(p.sources + i));
        if (to < 0) return;
        const Acc left = __ldg(p.scales + of), right = __ldg(p.scales + __ldg(p.columns + i));
        p.grad_weights[to] = E::narrow(__ldg(p.grad + i) * left * right + __ldg(p.pulls + of));
      });
    }
  }
}
