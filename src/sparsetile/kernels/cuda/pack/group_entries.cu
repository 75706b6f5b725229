// Entries grouped by key, on the GPU alone: edges as rows of A, or A's entries as rows of A^T, with
// the schedule that kernels over rows read (segment.cuh). The host knows how many entries and keys
// there are, and nothing else.
//
//     entry i    key[i], the row that it goes to, and other[i], its column; entries of `edges` on
//                are self-loops, one for each key in turn
//     sorted[j]  the key of the j-th entry by key; equal keys keep their order
//     columns[j], order[j]     its column, and its i
//     indptr[k]  the first entry of key k; indptr[keys] = the number of entries
//
// An entry whose key or column is outside is dropped: it gets the key `keys`, behind all rows. So
// does a given self-loop if self-loops were added. The first wrong one is reported (direct.cuh).
//
// A radix sort, lowest digit first. Stages, a launch each; a tile of entries has a thread block:
//
//     kCount     counts[tile][digit]
//     kScatter   a tile's places: smaller digits of all tiles, its digit in tiles before, then in
//                warps before, then in earlier lanes. An entry's place depends on the entries only
//     kRows      row pointers by binary search, and the schedule
//     kValues    a value for each entry, from numbers of entries of rows
//
// The schedule, of {row, begin, end, slot}: `wide_items` pieces of rows of more than `segment`
// entries, then `row_items` rows; a row of -1 stands for nothing. A row's pieces begin at the first
// multiple of segment / 2 that it reaches, in a list of all multiples: a row of more than `segment`
// entries has room for its pieces there, and no two rows meet. So places need no atomics.
//
// Threads: kThreads. Shared memory: counters of 16 bits for each digit and warp, bases of digits.
// Assumes: fewer than 2^31 entries and 2^16 in a warp's part of a tile; digits of at most
// kDigitBits bits.
#include "rows/direct_items.cuh"

// Declared in kernels/grouping.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kCount, kScatter, kRows, kValues };
// Of kValues: over the square roots of the entries of both rows, or over those of the column's row.
enum Rule { kSymmetric, kMean };

constexpr int kWarps = kThreads / 32, kDigits = 1 << kDigitBits;
// Digits of a thread in the running sum.
constexpr int kOwn = kDigits / kThreads;
constexpr u64 kBadEdge = 3;

static_assert(kDigits % kThreads == 0, "threads share the digits evenly");

struct Entry {
  int key, other;
};

__device__ __forceinline__ i64 given(const Params& p, const void* numbers, i64 i) {
  return p.wide ? __ldg(static_cast<const i64*>(numbers) + i)
                : i64(__ldg(static_cast<const int*>(numbers) + i));
}

// Entry i as it was given.
__device__ __forceinline__ Entry load_entry(const Params& p, int i) {
  if (i >= p.edges) return {i - p.edges, i - p.edges};
  const i64 key = given(p, p.keys, i), other = given(p, p.others, i);
  const bool key_in = key >= 0 && key < p.key_count;
  if (!key_in || other < 0 || other >= p.other_count) {
    if (kStage == kCount) {
      direct::report(p, kBadEdge, i, key_in ? other : key, key_in ? p.other_count : p.key_count);
    }
    return {p.key_count, 0};
  }
  if (p.entries > p.edges && key == other) return {p.key_count, 0};
  return {static_cast<int>(key), static_cast<int>(other)};
}

__device__ __forceinline__ int load_key(const Params& p, int i) {
  return p.first ? load_entry(p, i).key : p.keys_before[i];
}

__device__ __forceinline__ int digit_of(const Params& p, int key) {
  return key >> p.shift & ((1 << p.width) - 1);
}

// The lanes that are `here` and have this lane's digit.
__device__ __forceinline__ u32 lanes_alike(const Params& p, int digit, bool here) {
  u32 alike = __ballot_sync(kWarp, here);
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit) {
    if (bit >= p.width) break;
    const bool set = digit >> bit & 1;
    const u32 votes = __ballot_sync(kWarp, set);
    alike &= set ? votes : ~votes;
  }
  return alike;
}

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

__device__ __forceinline__ void count_tile(const Params& p) {
  __shared__ int s_counts[kDigits];
  const int digits = 1 << p.width, thread = threadIdx.x;
  for (int d = thread; d < digits; d += kThreads) s_counts[d] = 0;
  __syncthreads();
  const int begin = blockIdx.x * p.tile, end = min(begin + p.tile, p.entries);
  for (int i = begin + thread; i < end; i += kThreads) {
    atomicAdd(s_counts + digit_of(p, load_key(p, i)), 1);
  }
  __syncthreads();
  for (int d = thread; d < digits; d += kThreads) p.counts[blockIdx.x * digits + d] = s_counts[d];
  if (!p.first) return;
  // Items that no row writes.
  const int step = gridDim.x * kThreads, own = blockIdx.x * kThreads + thread;
  for (int i = own; i < p.wide_items; i += step) p.items[i] = make_int4(-1, 0, 0, -1);
  for (int i = p.key_count + own; i < p.row_items; i += step) {
    p.items[p.wide_items + i] = make_int4(-1, 0, 0, -1);
  }
}

// First place of each digit of this tile, in s_base.
__device__ __forceinline__ void find_bases(const Params& p, int* s_base) {
  const int digits = 1 << p.width, thread = threadIdx.x;
  int before[kOwn];
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    const int d = thread + o * kThreads;
    int total = 0;
    before[o] = 0;
    if (d < digits) {
#pragma unroll 8
      for (int tile = 0; tile < p.tiles; ++tile) {
        const int count = __ldg(p.counts + tile * digits + d);
        total += count;
        if (tile < blockIdx.x) before[o] += count;
      }
    }
    s_base[d] = total;
  }
  __syncthreads();
  int all = 0;
#pragma unroll
  for (int o = 0; o < kOwn; ++o) all += s_base[thread * kOwn + o];
  int sum = sum_before(all);
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    const int total = s_base[thread * kOwn + o];
    s_base[thread * kOwn + o] = sum;
    sum += total;
  }
  __syncthreads();
#pragma unroll
  for (int o = 0; o < kOwn; ++o) s_base[thread + o * kThreads] += before[o];
}

__device__ __forceinline__ void scatter_tile(const Params& p) {
  __shared__ u16 s_counts[kWarps][kDigits];
  __shared__ int s_base[kDigits];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, digits = 1 << p.width;
  const int share = (p.tile + kThreads - 1) / kThreads * 32;  // entries of a warp
  const int begin = blockIdx.x * p.tile + warp * share;
  const int end = min(min(begin + share, (static_cast<int>(blockIdx.x) + 1) * p.tile), p.entries);
  for (int i = thread; i < kWarps * kDigits; i += kThreads) (&s_counts[0][0])[i] = 0;
  __syncthreads();
  for (int first = begin; first < end; first += 32) {
    const bool here = first + lane < end;
    const int digit = here ? digit_of(p, load_key(p, first + lane)) : 0;
    const u32 alike = lanes_alike(p, digit, here);
    if (here && (alike & ptx::lanes_below()) == 0) s_counts[warp][digit] += __popc(alike);
    __syncwarp();
  }
  find_bases(p, s_base);  // its barriers let all warps count
  for (int d = thread; d < digits; d += kThreads) {
    int before = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int here = s_counts[w][d];
      s_counts[w][d] = static_cast<u16>(before);
      before += here;
    }
  }
  __syncthreads();
  for (int first = begin; first < end; first += 32) {
    const int i = first + lane;
    const bool here = i < end;
    Entry entry = {0, 0};
    int number = i;
    if (here) {
      if (p.first) {
        entry = load_entry(p, i);
      } else {
        entry = {p.keys_before[i], p.others_before[i]};
        if (p.order != nullptr) number = p.numbers_before[i];
      }
    }
    const int digit = digit_of(p, entry.key);
    const u32 alike = lanes_alike(p, digit, here);
    const u32 below = alike & ptx::lanes_below();
    const int earlier = s_counts[warp][digit];
    __syncwarp();
    if (here && below == 0) s_counts[warp][digit] = static_cast<u16>(earlier + __popc(alike));
    __syncwarp();
    if (!here) continue;
    const int place = s_base[digit] + earlier + __popc(below);
    if (p.last) {
      p.sorted[place] = entry.key;
      p.columns[place] = entry.other;
      if (p.order != nullptr) p.order[place] = number;
    } else {
      p.keys_after[place] = entry.key;
      p.others_after[place] = entry.other;
      if (p.order != nullptr) p.numbers_after[place] = number;
    }
  }
}

// First entry whose key is not less.
__device__ __forceinline__ int first_of(const Params& p, int key) {
  int low = 0, high = p.entries;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (__ldg(p.sorted + middle) < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The lanes of a warp: list a row of more than `segment` entries.
__device__ __forceinline__ void list_pieces(const Params& p, int lane, int row, int begin,
                                            int length) {
  const int half = p.segment / 2, pieces = (length + p.segment - 1) / p.segment;
  const int place = (begin + half - 1) / half, slot = 2 * place;
  for (int i = lane; i < pieces; i += 32) {
    const int first = begin + static_cast<int>(i64(length) * i / pieces);
    const int last = begin + static_cast<int>(i64(length) * (i + 1) / pieces);
    p.items[place + i] = make_int4(row, first, last, slot + i);
  }
  direct::write_tree<32>(p, lane, slot, place, pieces);
}

__device__ __forceinline__ void make_rows(const Params& p) {
  const int lane = threadIdx.x % 32;
  // The last lane finds the end of the row of the lane before it.
  const int row = (blockIdx.x * kWarps + threadIdx.x / 32) * 31 + lane;
  const int begin = first_of(p, min(row, p.key_count));
  const int end = __shfl_sync(kWarp, begin, lane + 1);
  if (lane < 31 && row <= p.key_count) p.indptr[row] = begin;
  const bool mine = lane < 31 && row < p.key_count;
  const bool is_long = mine && end - begin > p.segment;
  if (mine) {
    p.items[p.wide_items + row] =
        is_long ? make_int4(-1, 0, 0, -1) : make_int4(row, begin, end, -1);
  }
  for (u32 left = __ballot_sync(kWarp, is_long); left != 0; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int first = __shfl_sync(kWarp, begin, from), last = __shfl_sync(kWarp, end, from);
    list_pieces(p, lane, row - lane + from, first, last - first);
  }
}

__device__ __forceinline__ float entries_of(const Params& p, int row) {
  return static_cast<float>(__ldg(p.lengths + row + 1) - __ldg(p.lengths + row));
}

__device__ __forceinline__ void make_values(const Params& p) {
  const int count = static_cast<int>(__ldg(p.indptr + p.key_count)), step = gridDim.x * kThreads;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += step) {
    const float column = entries_of(p, __ldg(p.columns + i));
    float value;
    if (p.rule == kMean) {
      value = column > 0.0f ? 1.0f / column : 0.0f;
    } else {
      const float row = entries_of(p, __ldg(p.sorted + i));
      // A node without entering edges counts 0.
      value = column > 0.0f && row > 0.0f ? (1.0f / sqrt(row)) * (1.0f / sqrt(column)) : 0.0f;
    }
    if (p.value_type == 0) {
      static_cast<float*>(p.values)[i] = value;
    } else {
      static_cast<u16*>(p.values)[i] =
          p.value_type == 1 ? ptx::f32_to_f16(value) : ptx::f32_to_bf16(value);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    group_entries(const __grid_constant__ Params p) {
  ptx::wait_previous();
  if constexpr (kStage == kCount) {
    count_tile(p);
  } else if constexpr (kStage == kScatter) {
    scatter_tile(p);
  } else if constexpr (kStage == kRows) {
    make_rows(p);
  } else {
    make_values(p);
  }
}
