// Entries of a short-lived graph, by column: a stable sort in one launch of one thread block. The
// same kernel sorts unordered edges by row.
//
//     order[j]   the j-th entry by column; equal columns keep their order
//     sorted[j]  its column
//     ends[c]    end of column c among them
//
// A radix sort of one or two digits of up to 8 bits, lowest first. Each warp has a contiguous chunk
// of the entries, 32 a step. Ballots over the bits of a digit find the lanes with the same digit;
// a counter for each digit and warp gives the entries of earlier steps, a running sum over the
// counters, by digit and then by warp, those of smaller digits and earlier warps. So an entry's
// place depends only on the entries, and the time only on their number.
//
// By instruction counts, 16,384 entries of 65,536 columns take about 30,000 cycles (17 us at 1.75
// GHz), whatever the columns are. Comparing the entries of each column with each other would take
// 16 x 16,384 dependent steps if all had one column: milliseconds.
//
// Threads: kThreads, one block. Shared memory: kDigits * (kWarps + 1) * 4 bytes, first counters,
// then 16-bit halves of the entries' keys while they are exchanged; running sums of the warps. Only
// results go through global memory.
// Assumes: at most kMaxEdges entries; columns below column_count, which is at most 2^16.
#include "ptx/ptx.cuh"

// Declared in kernels/blocks.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kWarps = kThreads / 32;
constexpr int kSteps = kMaxEdges / kThreads;  // entries of a thread
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
// Of a digit's counters. One more than warps: lanes with different digits meet different banks.
constexpr int kPitch = kWarps + 1;
constexpr int kScanned = kDigits * kWarps / kThreads;  // counters of a thread in the running sum

static_assert(kMaxEdges % (2 * kThreads) == 0 && kMaxEdges <= 1 << 16,
              "an entry's number has 16 bits");
static_assert(kDigits * kPitch * 4 >= kMaxEdges * 2, "halves of the keys replace the counters");
static_assert(kWarps % kScanned == 0, "a thread's counters have one digit");

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

// The lanes that are `here` and have this lane's digit of `bits` bits.
__device__ __forceinline__ u32 lanes_alike(u32 digit, int bits, bool here) {
  u32 alike = __ballot_sync(kWarp, here);
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit) {
    if (bit >= bits) break;
    const bool set = digit >> bit & 1;
    const u32 votes = __ballot_sync(kWarp, set);
    alike &= set ? votes : ~votes;
  }
  return alike;
}

// Columns without entries end at the end of the column before. Their ends are 0 first; those of
// other columns ascend, so the nearest one that is not 0 is the greatest so far.
__device__ __forceinline__ void fill_ends(const Params& p) {
  __shared__ int last[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int steps = (p.column_count + kThreads - 1) / kThreads;
  const int first = warp * steps * 32 + lane;
  int greatest = 0;
  for (int s = 0; s < steps; ++s) {
    const int c = first + s * 32;
    if (c < p.column_count) greatest = max(greatest, p.ends[c]);
  }
  greatest = __reduce_max_sync(kWarp, greatest);
  if (lane == 0) last[warp] = greatest;
  __syncthreads();
  int before = 0;
  for (int other = 0; other < warp; ++other) before = max(before, last[other]);
  for (int s = 0; s < steps; ++s) {
    const int c = first + s * 32;
    const int end = c < p.column_count ? p.ends[c] : 0;
    const u32 known = __ballot_sync(kWarp, end != 0) & (ptx::lanes_below() << 1 | 1u);
    const int nearest = __shfl_sync(kWarp, end, known == 0 ? lane : 31 - __clz(known));
    const int filled = known == 0 ? before : nearest;
    if (c < p.column_count) p.ends[c] = filled;
    before = __shfl_sync(kWarp, filled, 31);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    transpose_block(const __grid_constant__ Params p) {
  __shared__ int s_counts[kDigits * kPitch];
  u16* const s_halves = reinterpret_cast<u16*>(s_counts);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int steps = (p.edges + kThreads - 1) / kThreads;
  const int first = warp * steps * 32 + lane;
  const int room = min((warp + 1) * steps * 32, p.edges) - first;  // the chunk's, from `first` on
  int bits = 0;
  while (1 << bits < p.column_count) ++bits;
  const int digits = bits > kDigitBits ? 2 : 1, width = (bits + digits - 1) / digits;

  for (int c = thread; c < p.column_count; c += kThreads) p.ends[c] = 0;
  u32 key[kSteps];         // column and number of an entry, 16 bits each
  u32 places[kSteps / 2];  // of two entries: one register each would be too many
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int i = first + s * 32;
    key[s] = s * 32 < room ? u32(p.columns[i]) << 16 | u32(i) : 0u;
  }

#pragma unroll 1
  for (int digit = 0; digit < digits; ++digit) {
    const int shift = 16 + digit * width;
    const u32 mask = (1u << width) - 1u;
    for (int i = thread; i < kDigits * kPitch; i += kThreads) s_counts[i] = 0;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s >= steps) break;
      const bool here = s * 32 < room;
      const u32 mine = key[s] >> shift & mask;
      const u32 alike = lanes_alike(mine, width, here);
      const u32 below = alike & ptx::lanes_below();
      int* const count = s_counts + mine * kPitch + warp;
      const int earlier = *count;
      const u32 place = earlier + __popc(below);
      places[s / 2] = s % 2 == 0 ? place : places[s / 2] | place << 16;
      __syncwarp();
      if (here && below == 0) *count = earlier + __popc(alike);
      __syncwarp();
    }
    __syncthreads();
    // Counters become places of their first entries.
    int* const scanned =
        s_counts + thread * kScanned / kWarps * kPitch + thread * kScanned % kWarps;
    int all = 0;
#pragma unroll
    for (int i = 0; i < kScanned; ++i) all += scanned[i];
    int before = sum_before(all);
#pragma unroll
    for (int i = 0; i < kScanned; ++i) {
      const int here = scanned[i];
      scanned[i] = before;
      before += here;
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s * 32 >= room) continue;
      const u32 before_warp = s_counts[(key[s] >> shift & mask) * kPitch + warp];
      places[s / 2] += before_warp << s % 2 * 16;
    }
    // Keys are exchanged by halves, which fit the counters' memory: numbers, then columns.
#pragma unroll
    for (int half = 0; half < 32; half += 16) {
      __syncthreads();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s * 32 < room) {
          s_halves[places[s / 2] >> s % 2 * 16 & 0xffffu] = static_cast<u16>(key[s] >> half);
        }
      }
      __syncthreads();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s * 32 < room) {
          key[s] = (key[s] & 0xffff0000u >> half) | u32(s_halves[first + s * 32]) << half;
        }
      }
    }
    if (digit + 1 < digits) __syncthreads();  // halves become counters
  }

#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int i = first + s * 32;
    if (s * 32 >= room) continue;
    const int column = key[s] >> 16;
    p.sorted[i] = column;
    p.order[i] = key[s] & 0xffffu;
    // The columns are still in shared memory.
    if (i + 1 == p.edges || s_halves[i + 1] != column) p.ends[column] = i + 1;
  }
  __syncthreads();
  fill_ends(p);
}
