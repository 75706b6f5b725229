// Entries grouped by key, on the GPU alone: edges as rows of A, and A's entries as rows of A^T,
// with the schedules that kernels over rows read (segment.cuh). The host knows how many entries and
// keys there are, and nothing else.
//
//     entry i    key[i], the row that it goes to, and other[i], its column, or, with `pointers`,
//                the row whose pointers are around i; entries of `edges` on are self-loops, one for
//                each key in turn
//     sorted[j]  the key of the j-th entry by key; equal keys keep their order
//     columns[j], order[j]     its column, and its i
//     indptr[k]  the first entry of key k; indptr[keys] = the number of entries
//
// An entry whose key or column is outside is dropped: it gets the key `keys`, behind all rows. So
// does a given self-loop if self-loops were added. The first wrong one is reported (direct.cuh).
//
// A radix sort, lowest digit first. Entries are cut into tiles, which thread blocks stride over.
// For each digit, with a barrier of the whole grid behind each step:
//
//     count      counts[digit][tile]
//     scan       entries of each digit in earlier tiles, and in all
//     scatter    a tile's places: smaller digits, its digit in tiles before, then in warps before,
//                then in earlier lanes. An entry's place depends on the entries only
//
// Then row pointers, by binary search, and the schedule, of {row, begin, end, slot}: `wide_items`
// pieces of rows of more than `segment` entries, then `row_items` rows; a row of -1 stands for
// nothing. A row's pieces begin at the first multiple of segment / 2 that it reaches, in a list of
// all multiples: a row of more than `segment` entries has room for its pieces there, and no two
// rows meet. So places need no atomics.
//
// Then, if they are wanted, values of the entries from the numbers of entries of A's rows. With
// `kValues` nothing else: rows were grouped before.
//
// Threads: kThreads; no more thread blocks than fit the GPU at once (a cooperative launch). Shared
// memory: counters of 16 bits for each digit and warp, bases of digits.
// Assumes: fewer than 2^31 entries and 2^16 in a tile; `arrivals` zero, as it is left. What blocks
// write for each other is read from L2.
#include "rows/direct_items.cuh"

// Declared in kernels/grouping.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

// Of kValues: over the square roots of the entries of both rows, or over those of the column's row.
enum Rule { kSymmetric, kMean };

constexpr int kWarps = kThreads / 32, kDigits = 1 << kDigitBits;
// Digits of a thread in the running sum.
constexpr int kOwn = kDigits / kThreads;
constexpr u64 kBadEdge = 3;

static_assert(kDigits % kThreads == 0, "threads share the digits evenly");

// What is sorted, and where it goes.
struct Job {
  bool given;  // what the caller gave, or A's entries
  int key_count, other_count;
  int* sorted;
  int* columns;
  i64* order;
  i64* indptr;
  int4* items;
  int* parent_of_slot;
  int4* nodes;
  int segment, wide_items, row_items;
};

__device__ __forceinline__ Job forward_job(const Params& p) {
  return {true,    p.key_count,      p.other_count, p.sorted,  p.columns,    p.order,    p.indptr,
          p.items, p.parent_of_slot, p.nodes,       p.segment, p.wide_items, p.row_items};
}

__device__ __forceinline__ Job transposed_job(const Params& p) {
  return {false,     p.other_count, p.key_count,  p.t_sorted,         p.t_columns,
          p.t_order, p.t_indptr,    p.t_items,    p.t_parent_of_slot, p.t_nodes,
          p.segment, p.wide_items,  p.t_row_items};
}

// One pass: digits of `width` bits.
struct Pass {
  int shift, width;
  bool first, last;
  const int* keys_before;  // as the next two, of the pass before
  const int* others_before;
  const int* numbers_before;
  int* keys_after;
  int* others_after;
  int* numbers_after;
};

struct Entry {
  int key, other;
};

// All blocks of the grid have come this far; `round` counts them from 1 on.
__device__ __forceinline__ void grid_barrier(const Params& p, int& round) {
  __syncthreads();
  if (threadIdx.x == 0 && gridDim.x > 1) {
    __threadfence();
    atomicAdd(p.arrivals, 1);
    const int all = ++round * static_cast<int>(gridDim.x);
    const volatile int* const arrived = p.arrivals;
    while (*arrived < all) {
    }
    __threadfence();
  }
  __syncthreads();
}

// The last block to end leaves the counter as it was.
__device__ __forceinline__ void end_barriers(const Params& p, int round) {
  if (threadIdx.x > 0 || gridDim.x == 1) return;
  const int all = (round + 1) * static_cast<int>(gridDim.x);
  if (atomicAdd(p.arrivals, 1) == all - 1) *p.arrivals = 0;
}

__device__ __forceinline__ i64 given(const void* numbers, bool wide, i64 i) {
  return wide ? __ldg(static_cast<const i64*>(numbers) + i)
              : i64(__ldg(static_cast<const int*>(numbers) + i));
}

// The last row that begins at an entry or before.
__device__ __forceinline__ int row_around(const Params& p, int entry) {
  int low = 0, high = p.other_count - 1;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (given(p.pointers, p.wide_pointers, middle) <= entry) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Entry i, as it was given or in A. kCounting: only its key is needed, and what is wrong is
// reported.
template <bool kCounting>
__device__ __forceinline__ Entry load_entry(const Params& p, const Job& job, int i) {
  i64 key, other = 0;
  if (!job.given) {
    key = __ldcg(p.columns + i), other = __ldcg(p.sorted + i);
  } else if (i >= p.edges) {
    return {i - p.edges, i - p.edges};
  } else {
    key = given(p.keys, p.wide, i);
    if (p.pointers == nullptr) {
      other = given(p.others, p.wide, i);
    } else if (!kCounting) {
      other = row_around(p, i);
    }
  }
  const bool key_in = key >= 0 && key < job.key_count;
  if (!key_in || other < 0 || other >= job.other_count) {
    if (kCounting && job.given) {
      direct::report(p, kBadEdge, i, key_in ? other : key,
                     key_in ? job.other_count : job.key_count);
    }
    return {job.key_count, 0};
  }
  if (job.given && p.entries > p.edges && key == other) return {job.key_count, 0};
  return {static_cast<int>(key), static_cast<int>(other)};
}

__device__ __forceinline__ int load_digit(const Params& p, const Job& job, const Pass& pass,
                                          int i) {
  const int key = pass.first ? load_entry<true>(p, job, i).key : __ldcg(pass.keys_before + i);
  return key >> pass.shift & ((1 << pass.width) - 1);
}

// The lanes that are `here` and have this lane's digit.
__device__ __forceinline__ u32 lanes_alike(int width, int digit, bool here) {
  u32 alike = __ballot_sync(kWarp, here);
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit) {
    if (bit >= width) break;
    const bool set = digit >> bit & 1;
    const u32 votes = __ballot_sync(kWarp, set);
    alike &= set ? votes : ~votes;
  }
  return alike;
}

// Sum of `value` over the lanes up to this one.
__device__ __forceinline__ int sum_up_to(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_sync(kWarp, value, lane - step);
    if (lane >= step) value += below;
  }
  return value;
}

__device__ __forceinline__ void count_tiles(const Params& p, const Job& job, const Pass& pass,
                                            int* s_counts) {
  const int digits = 1 << pass.width, thread = threadIdx.x;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    __syncthreads();
    for (int d = thread; d < digits; d += kThreads) s_counts[d] = 0;
    __syncthreads();
    const int begin = tile * p.tile, end = min(begin + p.tile, p.entries);
    for (int i = begin + thread; i < end; i += kThreads) {
      atomicAdd(s_counts + load_digit(p, job, pass, i), 1);
    }
    __syncthreads();
    for (int d = thread; d < digits; d += kThreads) p.counts[d * p.tiles + tile] = s_counts[d];
  }
  if (!pass.first || job.items == nullptr) return;
  // Items that no row writes.
  const int step = gridDim.x * kThreads, own = blockIdx.x * kThreads + thread;
  for (int i = own; i < job.wide_items; i += step) job.items[i] = make_int4(-1, 0, 0, -1);
  for (int i = job.key_count + own; i < job.row_items; i += step) {
    job.items[job.wide_items + i] = make_int4(-1, 0, 0, -1);
  }
}

// A warp for each digit: entries in the tiles before each, and in all.
__device__ __forceinline__ void scan_tiles(const Params& p, const Pass& pass) {
  const int lane = threadIdx.x % 32, digits = 1 << pass.width;
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32, warps = gridDim.x * kWarps;
  for (int d = warp; d < digits; d += warps) {
    int* const counts = p.counts + d * p.tiles;
    int before = 0;
    for (int first = 0; first < p.tiles; first += 32) {
      const int tile = first + lane;
      const int mine = tile < p.tiles ? __ldcg(counts + tile) : 0;
      const int up_to = sum_up_to(mine);
      if (tile < p.tiles) counts[tile] = before + up_to - mine;
      before += __shfl_sync(kWarp, up_to, 31);
    }
    if (lane == 0) p.counts[digits * p.tiles + d] = before;
  }
}

// Entries of smaller digits than each, in s_base.
__device__ __forceinline__ void find_bases(const Params& p, const Pass& pass, int* s_base) {
  __shared__ int of_warp[kWarps];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int digits = 1 << pass.width;
  int total[kOwn], all = 0;
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    const int d = thread * kOwn + o;
    total[o] = d < digits ? __ldcg(p.counts + digits * p.tiles + d) : 0;
    all += total[o];
  }
  const int up_to = sum_up_to(all);
  if (lane == 31) of_warp[warp] = up_to;
  __syncthreads();
  int before = up_to - all;
  for (int other = 0; other < warp; ++other) before += of_warp[other];
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    s_base[thread * kOwn + o] = before;
    before += total[o];
  }
}

__device__ __forceinline__ void scatter_tiles(const Params& p, const Job& job, const Pass& pass,
                                              u16 (*s_counts)[kDigits], int* s_first) {
  __shared__ int s_base[kDigits];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int digits = 1 << pass.width, share = (p.tile + kThreads - 1) / kThreads * 32;
  u16* const own = s_counts[warp];
  find_bases(p, pass, s_base);
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    __syncthreads();
    for (int i = thread; i < kWarps * kDigits; i += kThreads) s_counts[0][i] = 0;
    __syncthreads();
    const int begin = tile * p.tile + warp * share;
    const int end = min(min(begin + share, (tile + 1) * p.tile), p.entries);
    for (int first = begin; first < end; first += 32) {
      const bool here = first + lane < end;
      int digit = 0;
      if (here) {
        const int key = pass.first ? load_entry<false>(p, job, first + lane).key
                                   : __ldcg(pass.keys_before + first + lane);
        digit = key >> pass.shift & (digits - 1);
      }
      const u32 alike = lanes_alike(pass.width, digit, here);
      if (here && (alike & ptx::lanes_below()) == 0) own[digit] += __popc(alike);
      __syncwarp();
    }
    __syncthreads();
    for (int d = thread; d < digits; d += kThreads) {
      s_first[d] = s_base[d] + __ldcg(p.counts + d * p.tiles + tile);
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
        if (pass.first) {
          entry = load_entry<false>(p, job, i);
        } else {
          entry = {__ldcg(pass.keys_before + i), __ldcg(pass.others_before + i)};
          if (job.order != nullptr) number = __ldcg(pass.numbers_before + i);
        }
      }
      const int digit = entry.key >> pass.shift & (digits - 1);
      const u32 alike = lanes_alike(pass.width, digit, here);
      const u32 below = alike & ptx::lanes_below();
      const int earlier = own[digit];
      __syncwarp();
      if (here && below == 0) own[digit] = static_cast<u16>(earlier + __popc(alike));
      __syncwarp();
      if (!here) continue;
      const int place = s_first[digit] + earlier + __popc(below);
      if (pass.last) {
        job.sorted[place] = entry.key;
        job.columns[place] = entry.other;
        if (job.order != nullptr) job.order[place] = number;
      } else {
        pass.keys_after[place] = entry.key;
        pass.others_after[place] = entry.other;
        if (job.order != nullptr) pass.numbers_after[place] = number;
      }
    }
  }
}

// First entry whose key is not less.
__device__ __forceinline__ int first_of(const int* sorted, int entries, int key) {
  int low = 0, high = entries;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (__ldcg(sorted + middle) < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The lanes of a warp: list a row of more than `segment` entries.
__device__ __forceinline__ void list_pieces(const Job& job, int lane, int row, int begin,
                                            int length) {
  const int half = job.segment / 2, pieces = (length + job.segment - 1) / job.segment;
  const int place = (begin + half - 1) / half, slot = 2 * place;
  for (int i = lane; i < pieces; i += 32) {
    const int first = begin + static_cast<int>(i64(length) * i / pieces);
    const int last = begin + static_cast<int>(i64(length) * (i + 1) / pieces);
    job.items[place + i] = make_int4(row, first, last, slot + i);
  }
  direct::write_tree<32>(job, lane, slot, place, pieces);
}

__device__ __forceinline__ void make_rows(const Params& p, const Job& job) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * kWarps;
  // The last lane of a warp finds the end of the row of the lane before it.
  const int sets = job.key_count / 31 + 1;
  for (int set = blockIdx.x * kWarps + threadIdx.x / 32; set < sets; set += warps) {
    const int row = set * 31 + lane;
    const int begin = first_of(job.sorted, p.entries, min(row, job.key_count));
    const int end = __shfl_sync(kWarp, begin, lane + 1);
    if (lane < 31 && row <= job.key_count) job.indptr[row] = begin;
    const bool mine = lane < 31 && row < job.key_count && job.items != nullptr;
    const bool is_long = mine && end - begin > job.segment;
    if (mine) {
      job.items[job.wide_items + row] =
          is_long ? make_int4(-1, 0, 0, -1) : make_int4(row, begin, end, -1);
    }
    for (u32 left = __ballot_sync(kWarp, is_long); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const int first = __shfl_sync(kWarp, begin, from), last = __shfl_sync(kWarp, end, from);
      list_pieces(job, lane, row - lane + from, first, last - first);
    }
  }
}

__device__ __forceinline__ void sort_entries(const Params& p, const Job& job, int& round) {
  __shared__ u16 s_counts[kWarps][kDigits];
  __shared__ int s_first[kDigits];
  int bits = 1;
  while (job.key_count >> bits) ++bits;
  const int passes = (bits + kDigitBits - 1) / kDigitBits;
  const int width = (bits + passes - 1) / passes;
  Pass pass;
  pass.shift = 0, pass.width = width;
  pass.keys_before = pass.others_before = pass.numbers_before = nullptr;
  for (int number = 0; number < passes; ++number) {
    pass.first = number == 0, pass.last = number == passes - 1;
    int* const after = p.between + (number % 2 ? i64(3) * p.entries : 0);
    pass.keys_after = after, pass.others_after = after + p.entries;
    pass.numbers_after = after + i64(2) * p.entries;
    count_tiles(p, job, pass, s_first);
    grid_barrier(p, round);
    scan_tiles(p, pass);
    grid_barrier(p, round);
    scatter_tiles(p, job, pass, s_counts, s_first);
    grid_barrier(p, round);
    pass.keys_before = pass.keys_after, pass.others_before = pass.others_after;
    pass.numbers_before = pass.numbers_after;
    pass.shift += width;
  }
  make_rows(p, job);
}

__device__ __forceinline__ float entries_of(const Params& p, int row) {
  return static_cast<float>(__ldcg(p.indptr + row + 1) - __ldcg(p.indptr + row));
}

__device__ __forceinline__ void store_value(const Params& p, void* values, int i, float value) {
  if (p.value_type == 0) {
    static_cast<float*>(values)[i] = value;
  } else {
    static_cast<u16*>(values)[i] =
        p.value_type == 1 ? ptx::f32_to_f16(value) : ptx::f32_to_bf16(value);
  }
}

// Values of a matrix whose rows or columns are counted by A's row pointers.
__device__ __forceinline__ void make_values(const Params& p, const Job& job, void* values) {
  const int count = static_cast<int>(__ldcg(job.indptr + job.key_count));
  const int step = gridDim.x * kThreads;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += step) {
    const float column = entries_of(p, __ldcg(job.columns + i));
    float value = 0.0f;
    if (p.rule == kMean) {
      value = column > 0.0f ? 1.0f / column : 0.0f;
    } else {
      const float row = entries_of(p, __ldcg(job.sorted + i));
      // A node without entering edges counts 0.
      if (column > 0.0f && row > 0.0f) value = (1.0f / sqrt(row)) * (1.0f / sqrt(column));
    }
    store_value(p, values, i, value);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    group_entries(const __grid_constant__ Params p) {
  int round = 0;
  const bool valued = p.values != nullptr || p.t_values != nullptr;
  if constexpr (!kValues) {
    if (p.sorts) sort_entries(p, forward_job(p), round);
    if (p.transposes) sort_entries(p, transposed_job(p), round);
    if (valued) grid_barrier(p, round);
  }
  if (p.values != nullptr) make_values(p, forward_job(p), p.values);
  if (p.t_values != nullptr) make_values(p, transposed_job(p), p.t_values);
  if constexpr (!kValues) end_barriers(p, round);
}
