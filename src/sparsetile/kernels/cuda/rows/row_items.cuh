// Items of rows and of row bundles on CUDA cores: the work of a group of lanes of the row kernels.
// Included by spmm_csr.cu, spmm_half.cu and hybrid.cuh after element types, constants and
// parameters. One long file: rows, shared rows and bundles walk the same chunks with the same
// lanes, and the kernels include all three.
//
// A group of kLanes lanes works on one item (a row, a bundle of rows that share columns, or a
// piece of either, see segment.cuh) and one slab of kTimes * kLanes * kVec columns of B:
//
//              slab 0      slab 1                  lane l of the group holds kTimes vectors of kVec
//   item 0   [ group ]   [ group ]   B row k:      columns, kLanes * kVec apart, and reads each
//   item 1   [ group ]   [ group ]   |l0|l1|..|l0| with one access of up to 16 bytes
//
// Few lanes with several vectors each suit short rows: a warp then processes 32 / kLanes rows at
// once, which share the fixed cost of a row (about 140 instructions). Many lanes suit long rows.
//
// Rows: entries are taken in chunks of kLanes: lane l reads column id and value of the chunk's l-th
// entry (coalesced, one chunk ahead), and shuffles pass them to the group; kUnroll rows of B are
// then in flight at once. All lanes of a warp run the same number of chunks. Whole chunks take a
// path without predicates; the rest of a row takes whole batches, then the remaining entries, in a
// batch that is at most one entry too long.
//
// Shared rows: the groups of a thread block take chunks in turn; each warp adds its groups' sums,
// and the first warp adds the others' through shared memory. For long rows of products that do not
// fill the GPU: fewer chunks one after the other, and no tree.
//
// kHeads: the column ids of every group's first chunk come with its item, from an array with one id
// for each thread of the grid: the first gathers wait for one load instead of two.
//
// Bundles: each row of B serves up to kRows rows of C. The list comes in batches of 4 tagged
// columns, one load each for all lanes of the group, as are the kRows values of an element; bits
// mark the rows that have the entry.
//
// kScaled: B is a copy of 16 bits whose rows were multiplied by powers of two (half_rows.cu); the
// inverse factor is multiplied into A's value. Its load is issued with the gathers, and nothing
// waits for it before they are in flight. A factor of 0 marks a row that the copy cannot hold and
// has zeros for: its product is added from B itself, after the chunk, in the order of the entries.
// The same holds for entries whose value times the factor is not a normal float32; a bundle has no
// such test, `unfit` marks all rows for it. After a chunk of only such entries the next one checks
// its factors first, and gathers from the copy only if one fits, so B is gathered once and the copy
// is not. V is the type of A's values, E's if B is no copy.
//
// kDirect: A is CSR arrays as callers have them (direct.cuh): a short row's item is its row
// pointers.
//
// kParts > 1, for few columns of B: kLanes / kParts lanes cover a row of B, and the group reads
// kParts entries side by side. Shuffles only add the sums at the end:
//
//   lane     0 1   2 3   4 5   6 7     kLanes = 8, kParts = 4: two lanes cover a row of B
//   entry     0     1     2     3      then 4, 5, 6, 7 and so on: kUnroll of a lane in flight
//
// kRepair: C already holds a product made with tiles or a dense A, in which an explicit zero may
// have met an Inf or NaN of B. Groups whose part of C is finite exit at once; the others recompute
// it only from A's entries. All pieces of a cut row check before its root writes.
#pragma once

#include "epilogue/epilogue.cuh"
#include "rows/accumulator.cuh"
#include "rows/direct.cuh"
#include "rows/tree.cuh"

namespace rows {

constexpr int kGroups = 32 / kLanes;
constexpr int kColumnLanes = kLanes / kParts;
constexpr int kStep = kColumnLanes * kVec;  // columns from one of a lane's vectors to its next
constexpr int kSlab = kTimes * kStep;
constexpr int kColumnBits = 32 - kRows;  // of a tagged column
constexpr int kListStep = 4;             // elements of a bundle's list that come with one load

static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");
static_assert(!kRepair || kLanes == 32, "all pieces of a cut row must decide alike");
static_assert(kParts > 1 || kLanes % kUnroll == 0, "a chunk is a whole number of batches");
static_assert(kPartial <= kUnroll, "as many rows of B as registers were counted for");
static_assert(kRows == 1 || (!kExtremum && !kRepair), "bundles only sum");
static_assert(kRows == 1 || kRows == 4, "a bundle's rows come as one int4");
static_assert(!kArgs || kExtremum, "a sum has no winner");
static_assert(!kHeads || (kLanes == 8 && kRows == 1), "heads are laid out for groups of eight");
static_assert(!kScaled || (!kExtremum && !kRepair && !kHeads && !kShared), "scaled rows are sums");
static_assert(!kShared || (kRows == 1 && !kRepair), "shared rows are plain sums or extrema");
static_assert(kParts == 1 || (kRows == 1 && kTimes == 1 && !kExtremum && !kRepair && !kScaled &&
                              !kHeads && kLanes % kParts == 0),
              "entries side by side are plain sums");
static_assert(!kDirect || (kRows == 1 && kWeighted && !kScaled && !kShared && !kHeads && !kRepair),
              "arrays of callers have no other form");

// A chunk's values: with heads in their type in memory, because widening would wait for the load
// before the gathers are in flight.
template <bool>
struct Held {
  using Type = Acc;
  static __device__ __forceinline__ Acc of(V::Storage value) { return V::widen(value); }
  static __device__ __forceinline__ Acc widen(Acc value) { return value; }
};
template <>
struct Held<true> {
  using Type = V::Storage;
  static __device__ __forceinline__ V::Storage of(V::Storage value) { return value; }
  static __device__ __forceinline__ Acc widen(V::Storage value) { return V::widen(value); }
};
using Value = Held<kHeads && kWeighted>;

constexpr bool kWeights = kWeighted || kScaled;  // whether rows of B are multiplied

// The factor of a bundle's row of B; a row that the copy cannot hold is added elsewhere.
__device__ __forceinline__ Acc scaled(Acc value, float scale) {
  return scale == 0.0f ? Acc(0) : value * scale;
}
// A row's entry: whether it is added elsewhere. 0 fits as long as its row of B does.
__device__ __forceinline__ bool is_wide(Acc value, float scale) {
  const float size = fabsf(static_cast<float>(value) * scale);
  const bool normal = size >= 1.17549435e-38f && size <= 3.40282347e38f;
  return scale == 0.0f || (kWeighted && value != Acc(0) && !normal);
}

// The inverse factor of row k of B. Templates, because only spmm_half.cu has these fields.
template <typename P>
__device__ __forceinline__ float load_scale(const P& p, int k) {
  if constexpr (kScaled) return __ldg(p.scales + k);
  return 1.0f;
}
// Whether the copy holds no row, because of A's values.
template <typename P>
__device__ __forceinline__ bool load_unfit(const P& p) {
  if constexpr (kScaled) return p.unfit != nullptr && __ldg(p.unfit) != 0;
  return false;
}
// The matrix whose rows are gathered.
template <typename P>
__device__ __forceinline__ const E::Storage* gathered(const P& p) {
  if constexpr (kScaled) {
    return p.copy;
  } else {
    return p.b;
  }
}

// Column id and value of an entry of A.
template <typename P>
__device__ __forceinline__ int load_column(const P& p, int entry) {
  if constexpr (kDirect) {
    return direct::load_column(p, entry);
  } else {
    return __ldg(p.columns + entry);
  }
}
template <typename P>
__device__ __forceinline__ V::Storage load_value(const P& p, int entry) {
  if constexpr (kDirect) {
    return direct::load_value<V>(p, entry);
  } else {
    return __ldg(p.values + entry);
  }
}

// One chunk's operands in a group: lane l has column and value of entry l.
struct Chunk {
  int column;
  Value::Type value;
  float scale;  // if kScaled
  int entry;    // number of the chunk's first entry in A
  int left;     // its entries, may exceed kLanes or be <= 0

  __device__ __forceinline__ Acc weight() const {
    if constexpr (kScaled) return is_wide(value, scale) ? Acc(0) : value * scale;
    return Value::widen(value);
  }

  // Drop the first M entries. Rotating the operands costs two shuffles, and lets a loop over
  // batches stay a loop: unrolled, the compiler would start all loads at once and run out of
  // registers.
  template <int M>
  __device__ __forceinline__ void drop(int lane) {
    column = __shfl_sync(kWarp, column, lane + M, kLanes);
    if constexpr (kScaled) {
      value = __shfl_sync(kWarp, weight(), lane + M, kLanes);
      scale = 1.0f;
    } else if constexpr (kWeighted) {
      value = __shfl_sync(kWarp, value, lane + M, kLanes);
    }
    entry += M;
    left -= M;
  }
};

// A lane's part of row k of B.
__device__ __forceinline__ void load_row(const Params& p, const char* b, u32 k,
                                         Packed<E, kVec> (&row)[kTimes]) {
  const char* address = b + static_cast<u64>(k) * static_cast<u32>(p.b_row_bytes);
#pragma unroll
  for (int q = 0; q < kTimes; ++q) {
    row[q] = load_vector<E, kVec>(address + q * kStep * sizeof(E::Storage));
  }
}

// sum += weight * row if `here`; predicated, not multiplied by zero: absent entries are skipped,
// also if B is not finite.
template <bool kAlways>
__device__ __forceinline__ void add_row(bool here, Acc weight, const Packed<E, kVec> (&row)[kTimes],
                                        Acc (&sum)[kTimes][kVec]) {
#pragma unroll
  for (int q = 0; q < kTimes; ++q) {
    Acc x[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) x[v] = widen(row[q], v);
    if constexpr (kAlways) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) sum[q][v] += kWeights ? weight * x[v] : x[v];
    } else if constexpr (kWeights) {
      ptx::fma_if<kVec>(here, weight, x, sum[q]);
    } else {
      ptx::add_if<kVec>(here, x, sum[q]);
    }
  }
}

// kUnroll entries of a lane, from `at` on: their columns, then their rows of B are in flight at
// once.
template <bool kMasked>
__device__ __forceinline__ void side_by_side(const Params& p, int at, int step, int end,
                                             const char* b, Accumulator<1>& acc) {
  int column[kUnroll];
  V::Storage value[kUnroll];
  Packed<E, kVec> row[kUnroll][kTimes];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    column[u] = 0, value[u] = {};
    if (kMasked && at + u * step >= end) continue;
    column[u] = load_column(p, at + u * step);
    if constexpr (kWeighted) value[u] = load_value(p, at + u * step);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const bool here = !kMasked || at + u * step < end;
    if constexpr (kDirect) direct::check_column<V>(p, at + u * step, here, column[u], value[u]);
    row[u][0] = {};
    if (here) load_row(p, b, column[u], row[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Acc weight = kWeighted ? V::widen(value[u]) : Acc(1);
    add_row<!kMasked>(at + u * step < end, weight, row[u], acc.sum[0]);
  }
}

// Sum of a group's share of an item whose entries it reads side by side.
__device__ __forceinline__ void gather_side_by_side(const Params& p, const GroupWork& work,
                                                    int4 item, int lane, const char* b,
                                                    Accumulator<1>& acc) {
  const int step = work.stride / kColumnLanes;
  int at = item.y + (work.first + lane) / kColumnLanes;
#pragma unroll 1
  for (; at + (kUnroll - 1) * step < item.z; at += kUnroll * step) {
    side_by_side<false>(p, at, step, item.z, b, acc);
  }
  if (at < item.z) side_by_side<true>(p, at, step, item.z, b, acc);
}

// The first M entries of a chunk: their rows of B are all in flight before the first is used.
// kMasked: groups of the warp have different numbers of entries. A group that has fewer also loads
// (a row of B whose column it read before, or row 0) and does not use it: predicates on every load
// would cost more than a load that hits in L1.
template <int M, bool kMasked>
__device__ __forceinline__ void batch(const Params& p, const Chunk& chunk, const char* b,
                                      Accumulator<1>& acc) {
  Packed<E, kVec> row[M][kTimes];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    load_row(p, b, __shfl_sync(kWarp, chunk.column, m, kLanes), row[m]);
  }
  const Acc own = chunk.weight();
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const bool here = !kMasked || m < chunk.left;
    const Acc weight = kWeights ? __shfl_sync(kWarp, own, m, kLanes) : own;
    if constexpr (!kExtremum) {
      add_row<!kMasked>(here, weight, row[m], acc.sum[0]);
    } else if (here) {
#pragma unroll
      for (int q = 0; q < kTimes; ++q) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          acc.offer(q, v, weight * widen(row[m][q], v), chunk.entry + m);
        }
      }
    }
  }
}

// Exactly `most` entries, fewer than M.
template <int M>
__device__ __forceinline__ void rest(const Params& p, const Chunk& chunk, const char* b, int most,
                                     Accumulator<1>& acc) {
  if constexpr (M > 1) {
    if (most == M - 1) {
      batch<M - 1, (kGroups > 1)>(p, chunk, b, acc);
    } else {
      rest<M - 1>(p, chunk, b, most, acc);
    }
  }
}

// `most` entries, from 1 to M: exactly up to four, then in steps of two.
template <int M>
__device__ __forceinline__ void at_once(const Params& p, const Chunk& chunk, const char* b,
                                        int most, Accumulator<1>& acc) {
  constexpr int kLess = M > 4 ? M - 2 : M - 1;
  if constexpr (kLess > 0) {
    if (most <= kLess) return at_once<kLess>(p, chunk, b, most, acc);
  }
  batch<M, (kGroups > 1 || M > 4)>(p, chunk, b, acc);
}

// A chunk of fewer than kLanes entries in some group of the warp; `most` in the fullest.
__device__ __forceinline__ void partial_chunk(const Params& p, Chunk chunk, const char* b, int lane,
                                              int most, Accumulator<1>& acc) {
  if constexpr (kPartial == kLanes && kPartial > 4) {
    at_once<kPartial>(p, chunk, b, most, acc);
  } else {
#pragma unroll 1
    for (; most >= kPartial; most -= kPartial) {
      batch<kPartial, (kGroups > 1)>(p, chunk, b, acc);
      chunk.drop<kPartial>(lane);
    }
    rest<kPartial>(p, chunk, b, most, acc);
  }
}

// The first NaN among the group's own entries, in one column of B; rare, so it may be slow.
__device__ __forceinline__ int first_nan(const Params& p, const GroupWork& work, int4 item,
                                         const char* b, Acc sign) {
  for (int begin = item.y + work.first; begin < item.z; begin += work.stride) {
    const int end = begin + kLanes < item.z ? begin + kLanes : item.z;
    for (int at = begin; at < end; ++at) {
      const int found = load_column(p, at);
      const u64 k = kDirect && found < 0 ? 0 : static_cast<u32>(found);
      const char* address = b + k * static_cast<u32>(p.b_row_bytes);
      const Acc x = E::widen(*reinterpret_cast<const E::Storage*>(address));
      const Acc candidate = (kWeighted ? sign * V::widen(load_value(p, at)) : sign) * x;
      if (kDirect && found < 0) return at;
      if (candidate != candidate) return at;
    }
  }
  return -1;
}

// Column id of this thread's first entry; 0 for none. engines/rows/lengths.py writes them.
// A template, because only spmm_csr.cu has them among its parameters.
template <typename P>
__device__ __forceinline__ int load_head(const P& p, int block) {
  if constexpr (kHeads) return __ldg(p.heads + i64(block) * kThreads + threadIdx.x);
  return 0;
}

template <typename P>
__device__ __forceinline__ int4 load_item(const P& p, int index, int end) {
  return index < end ? __ldg(p.items + index) : make_int4(-1, 0, 0, -1);
}

// sum[r] += weight[r] * row k of B itself, which the copy cannot hold. By whole accesses if B's
// rows are aligned to them, which does not follow from the copy's alignment.
template <int R, typename P>
__device__ __forceinline__ void add_wide_row(const P& p, int k, int column, const Acc (&weight)[R],
                                             u32 here, Acc (&sum)[R][kTimes][kVec]) {
  constexpr int kPart = kVec < 4 ? kVec : 4;
  const char* row = reinterpret_cast<const char*>(p.b) +
                    static_cast<u64>(static_cast<u32>(k)) * static_cast<u64>(p.wide_row_bytes);
  const float* from = reinterpret_cast<const float*>(row) + column;
  const u64 places = reinterpret_cast<u64>(p.b) | static_cast<u64>(p.wide_row_bytes);
  const bool aligned = places % (kPart * sizeof(float)) == 0;
#pragma unroll
  for (int q = 0; q < kTimes; ++q) {
    Packed<F32, kPart> x[kVec / kPart];
#pragma unroll
    for (int i = 0; i < kVec / kPart; ++i) {
      const float* at = from + q * kStep + i * kPart;
      if (aligned) {
        x[i] = load_vector<F32, kPart>(at);
      } else {
#pragma unroll
        for (int v = 0; v < kPart; ++v) x[i].element[v] = __ldg(at + v);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if ((here >> r & 1) == 0) continue;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        sum[r][q][v] += weight[r] * x[v / kPart].element[v % kPart];
      }
    }
  }
}

// The entries of a chunk, from `first` on in A, whose rows the copy cannot hold: bits of `wide`.
template <typename P>
__device__ __forceinline__ void wide_entries(const P& p, int first, u32 wide, int column,
                                             Acc (&sum)[1][kTimes][kVec]) {
#pragma unroll 1
  for (; wide != 0; wide &= wide - 1) {
    const int at = first + __ffs(wide) - 1;
    const Acc weight[1] = {kWeighted ? V::widen(__ldg(p.values + at)) : Acc(1)};
    add_wide_row<1>(p, __ldg(p.columns + at), column, weight, 1u, sum);
  }
}

// Sum or extremum of the group's share of an item, starting at the lane's column of B.
__device__ __forceinline__ void gather_row(const Params& p, const GroupWork& work, int4 item,
                                           int lane, const char* b, int first_column, int head,
                                           Accumulator<1>& acc) {
  const Acc sign = kExtremum && p.minimum ? Acc(-1) : Acc(1);
  const int length = item.z - item.y;
  int begin = work.first;  // of the group's chunk in the item
  int next_column = head;
  V::Storage next_value = {};
  const auto look_ahead = [&](bool column_too) {
    if constexpr (kHeads) next_value = {};  // no copy of the one in flight
    if (begin + lane < length) {
      if (column_too) next_column = load_column(p, item.y + begin + lane);
      if constexpr (kWeighted) next_value = load_value(p, item.y + begin + lane);
    }
  };
  look_ahead(!kHeads);
  int column = 0;
  V::Storage value = {};
  const auto take = [&] {
    column = next_column;
    value = next_value;
  };
  // With heads the first value comes after its column, and nothing may wait for it before the first
  // gathers are in flight: it is used where it was loaded, later ones at the end of the loop, by a
  // shuffle, since the compiler would move a copy to the loop's start.
  if constexpr (kHeads) take();
  bool all_wide = load_unfit(p);  // whether nothing of the chunk before came from the copy
  while (true) {
    Chunk chunk;
    chunk.left = length - begin;
    const int most = kGroups == 1 ? chunk.left : __reduce_max_sync(kWarp, chunk.left);
    if (most <= 0) break;
    if constexpr (!kHeads) take();
    if constexpr (kDirect) {
      direct::check_column<V>(p, item.y + begin + lane, lane < chunk.left, column, value);
    }
    chunk.column = column;
    if constexpr (kWeighted) {
      chunk.value = Value::of(value);
    } else {
      chunk.value = Acc(1);
    }
    if constexpr (kExtremum) chunk.value *= sign;
    chunk.scale = load_scale(p, column);
    const bool here = lane < chunk.left;
    const auto own_value = chunk.value;
    const float own_scale = chunk.scale;
    const auto own_is_wide = [&] { return is_wide(Value::widen(own_value), own_scale); };
    chunk.entry = item.y + begin;
    const int first_entry = chunk.entry;
    begin += work.stride;
    look_ahead(true);
    const int least = kGroups == 1 ? chunk.left : __reduce_min_sync(kWarp, chunk.left);
    if (kScaled && all_wide && !__any_sync(kWarp, here && !own_is_wide())) {
      // The copy holds none of these rows.
    } else if (least >= kLanes) {
#pragma unroll 1
      for (int j = 0; j < kLanes; j += kUnroll) {
        batch<kUnroll, false>(p, chunk, b, acc);
        if (kLanes > kUnroll) chunk.drop<kUnroll>(lane);
      }
    } else {
      partial_chunk(p, chunk, b, lane, most < kLanes ? most : kLanes, acc);
    }
    if constexpr (kScaled) {
      const u32 wide = __ballot_sync(kWarp, here && own_is_wide());
      if (wide != 0) {
        const u32 mine = (wide & group_mask<kLanes>()) >> (threadIdx.x % 32 / kLanes * kLanes);
        wide_entries(p, first_entry, mine, first_column, acc.sum);
        all_wide = !__any_sync(kWarp, here && !own_is_wide());
      } else {
        all_wide = false;
      }
    }
    if constexpr (kHeads) {
      column = next_column;
      value = __shfl_sync(kWarp, next_value, lane, kLanes);
    }
  }
  if constexpr (kArgs) {
    // If the greatest is NaN, its entry is still to be found.
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        if (acc.sum[0][q][v] != acc.sum[0][q][v]) {
          const int column = q * kStep + v;
          const char* place = b + column * sizeof(E::Storage);
          acc.set_winner(q, v, first_nan(p, work, item, place, sign));
        }
      }
    }
  }
}

// Four elements of a bundle's list, from `first` on, whose rows the copy cannot hold. Tags and
// values are read again: they are in cache, and registers are scarce.
template <int R, typename P>
__device__ __forceinline__ void wide_elements(const P& p, int first, int column,
                                              Accumulator<R>& acc) {
  const u32* tagged = reinterpret_cast<const u32*>(p.tagged);
#pragma unroll 1
  for (int m = first; m < first + kListStep; ++m) {
    const u32 tag = __ldg(tagged + m);
    const int k = tag & ((1u << kColumnBits) - 1u);
    if (load_scale(p, k) != 0.0f) continue;
    Acc weight[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      weight[r] = kWeighted ? V::widen(__ldg(p.packed + i64(m) * R + r)) : Acc(1);
    }
    add_wide_row<R>(p, k, column, weight, tag >> kColumnBits, acc.sum);
  }
}

// The group's share of a bundle. Groups of a warp diverge: nothing is shuffled.
template <int R, typename P>
__device__ __forceinline__ void gather_bundle(const P& p, const GroupWork& work, int4 item,
                                              const char* b, int first_column,
                                              Accumulator<R>& acc) {
  const int step = work.wide ? kGroups : 1;
  const int end = item.z / kListStep;
  int at = item.y / kListStep + work.first / kLanes;
  uint4 next = {};
  if (at < end) next = ptx::load_nc(p.tagged + at);
  bool all_wide = load_unfit(p);  // whether nothing of the elements before came from the copy
#pragma unroll 1
  while (at < end) {
    const u32 tags[kListStep] = {next.x, next.y, next.z, next.w};
    const V::Storage* values = p.packed + static_cast<i64>(at) * (kListStep * R);
    at += step;
    if (at < end) next = ptx::load_nc(p.tagged + at);
    Packed<E, kVec> row[kListStep][kTimes];
    RawValues<V, R> weights[kListStep];
    float scale[kListStep];
    bool gathers = !kScaled || !all_wide;
#pragma unroll
    for (int m = 0; m < kListStep; ++m) {
      const int k = tags[m] & ((1u << kColumnBits) - 1u);
      if (gathers) load_row(p, b, k, row[m]);
      if constexpr (kWeighted) weights[m].load(values + m * R);
      scale[m] = load_scale(p, k);
    }
    bool fits = false;
#pragma unroll
    for (int m = 0; m < kListStep; ++m) fits = fits || scale[m] != 0.0f;
    if (kScaled && all_wide && fits) {
      gathers = true;
#pragma unroll
      for (int m = 0; m < kListStep; ++m) {
        load_row(p, b, tags[m] & ((1u << kColumnBits) - 1u), row[m]);
      }
    }
    if (gathers) {
#pragma unroll
      for (int m = 0; m < kListStep; ++m) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const Acc weight = kWeighted ? weights[m][r] : Acc(1);
          add_row<false>(tags[m] & (1u << (kColumnBits + r)),
                         kScaled ? scaled(weight, scale[m]) : weight, row[m], acc.sum[r]);
        }
      }
    }
    if constexpr (kScaled) {
      bool wide = false;
#pragma unroll
      for (int m = 0; m < kListStep; ++m) wide = wide || scale[m] == 0.0f;
      if (wide) wide_elements<R>(p, (at - step) * kListStep, first_column, acc);
      all_wide = !fits;
    }
  }
}

// Lanes from kFrom to kTo apart have sums of the same item: add them.
template <int R, int kFrom = kLanes, int kTo = 32>
__device__ __forceinline__ void join_lanes(Accumulator<R>& acc) {
#pragma unroll
  for (int step = kFrom; step < kTo; step *= 2) {
    acc.join([&](int r, int q, int v) { return __shfl_xor_sync(kWarp, acc.sum[r][q][v], step); },
             [&](int q, int v) { return __shfl_xor_sync(kWarp, acc.winner(q, v), step); });
  }
}

// The warps of a block shared a row: the first one adds their sums, in their order.
__device__ __forceinline__ void join_warps(int lane, Accumulator<1>& acc) {
  constexpr int kOthers = kThreads / 32 - 1;
  __shared__ Accumulator<1> held[kOthers][kLanes];
  const int warp = threadIdx.x / 32;
  if (warp > 0 && threadIdx.x % 32 < kLanes) held[warp - 1][lane] = acc;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int w = 0; w < kOthers; ++w) {
    acc.join([&](int r, int q, int v) { return held[w][lane].sum[r][q][v]; },
             [&](int q, int v) { return held[w][lane].winner(q, v); });
  }
}

// Climb the tree of a cut unit; true in the one group that has the whole unit's result.
template <int R>
__device__ __forceinline__ bool combine(const Params& p, int slot, int column, int lane,
                                        Accumulator<R>& acc) {
  constexpr int kSlotBytes = sizeof(Accumulator<kRows>);
  const i64 layer = i64(blockIdx.z) * p.slabs + column / kSlab;
  const Tree tree = tree_of(p, layer, kLanes * kSlotBytes);
  const auto join = [](Accumulator<R>& mine, const Accumulator<R>& other) {
    mine.join([&](int r, int q, int v) { return other.sum[r][q][v]; },
              [&](int q, int v) { return other.winner(q, v); });
  };
  return climb<kLanes, Accumulator<R>, decltype(join), kSlotBytes>(tree, slot, lane, acc, join);
}

template <typename P>
__device__ __forceinline__ RowTerms<Acc> terms_of_row(const P& p, int row) {
  if constexpr (kDirect) {
    return {direct::row_scale<Acc>(p, row), Acc(0)};
  } else {
    return row_terms<Acc>(p, row);
  }
}

// Store kVec elements of one row of C, after the epilogue or, for an extremum, unchanged.
__device__ __forceinline__ void store_row(const Params& p, int row, int column, Acc (&sum)[kVec],
                                          bool empty) {
  Out::Storage* c = c_row(p, row) + column;
  if constexpr (kExtremum) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum[v] = empty ? Acc(0) : p.minimum ? -sum[v] : sum[v];
  } else if (p.epilogue) {
    apply_epilogue<Out>(p, terms_of_row(p, row), column, kVec, c, 1, sum);
  }
  store_columns<Out, kVec>(c, kVec, sum);
}

// The winning entries' places in the row, -1 for none, of kArgs bytes; args has the layout of C.
template <int R>
__device__ __forceinline__ void store_args(const Params& p, int row, int column,
                                           const Accumulator<R>& acc, int q) {
  using Place = typename WordOf<kArgs>::Type;
  constexpr int kPart = kVec * kArgs < 16 ? kVec : 16 / kArgs;
  using Word = typename WordOf<kPart * kArgs>::Type;
  const i64 at = blockIdx.z * p.c_batch_stride + i64(row) * p.c_row_stride + column;
  const i64 first = __ldg(p.indptr + row);
#pragma unroll
  for (int i = 0; i < kVec; i += kPart) {
    union {
      Place place[kPart];
      Word word;
    };
#pragma unroll
    for (int v = 0; v < kPart; ++v) {
      const int winner = acc.winner(q, i + v);
      place[v] = static_cast<Place>(winner < 0 ? -1 : winner - static_cast<int>(first));
    }
    *reinterpret_cast<Word*>(reinterpret_cast<Place*>(p.args) + at + i) = word;
  }
}

// Store a group's result for its item: add cut pieces first, then one row or a bundle's.
template <int R, typename P>
__device__ __forceinline__ void deliver(const P& p, const GroupWork& work, int4 item, int column,
                                        int lane, Accumulator<R>& acc) {
  // Only the first group of a wide or shared item continues.
  if (item.x < 0 || (work.wide && work.first > 0)) return;
  if (item.w >= 0 && !combine<R>(p, item.w, column, lane, acc)) return;
  if (column >= p.n || lane >= kColumnLanes) return;
  int row[R];
  if constexpr (R == 1) {
    row[0] = item.x;
  } else {
    const int4 four = __ldg(p.bundle_rows + item.x);
    row[0] = four.x, row[1] = four.y, row[2] = four.z, row[3] = four.w;
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (row[r] < 0) continue;
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
      store_row(p, row[r], column + q * kStep, acc.sum[r][q], item.y == item.z);
      if constexpr (kArgs) store_args<R>(p, row[r], column + q * kStep, acc, q);
    }
  }
}

// True if this part of C is finite and needs no repair.
__device__ __forceinline__ bool is_finite(const Params& p, int row, int column) {
  const i64 at = blockIdx.z * p.c_batch_stride + row * p.c_row_stride + column;
  bool finite = true;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    const Acc x = column < p.n && row >= 0 ? Acc(Out::widen(p.c[at + v])) : Acc(0);
    finite = finite && (x - x == Acc(0));
  }
  return __all_sync(kWarp, finite);
}

// A lane's first column; lanes past the last one read the first ones instead and store nothing.
struct Place {
  int column;
  int read;
  const char* b;
};

__device__ __forceinline__ Place place(const Params& p, int slab, int lane) {
  const int column = slab * kSlab + lane % kColumnLanes * kVec;
  const int read = column < p.n ? column : 0;
  const E::Storage* b = gathered(p) + blockIdx.z * p.b_batch_stride + read;
  return {column, read, reinterpret_cast<const char*>(b)};
}

__device__ __forceinline__ void row_item(const Params& p, const GroupWork& work, int4 item,
                                         int slab, int lane, int head) {
  const Place at = place(p, slab, lane);
  if (kRepair && is_finite(p, item.x, at.column)) return;
  Accumulator<1> acc;
  const int first = item.y + work.first;
  acc.clear(first < item.z ? first : -1);
  if constexpr (kParts > 1) {
    gather_side_by_side(p, work, item, lane, at.b, acc);
    join_lanes<1, kColumnLanes, kLanes>(acc);
  } else {
    gather_row(p, work, item, lane, at.b, at.read, head, acc);
  }
  if (kGroups > 1 && work.wide) join_lanes<1>(acc);
  if constexpr (kShared) {
    if (work.shared) join_warps(lane, acc);
  }
  deliver<1>(p, work, item, at.column, lane, acc);
}

template <typename P>
__device__ __forceinline__ void bundle_item(const P& p, const GroupWork& work, int slab, int lane) {
  const Place at = place(p, slab, lane);
  const int4 item = load_item(p, work.index, work.end);
  Accumulator<kRows> acc;
  acc.clear(-1);
  gather_bundle<kRows>(p, work, item, at.b, at.read, acc);
  if (kGroups > 1 && work.wide) join_lanes<kRows>(acc);
  deliver<kRows>(p, work, item, at.column, lane, acc);
}

// The items of one thread block.
template <typename P>
__device__ __forceinline__ void block_of_items(const P& p, int block, int slab) {
  const int head = load_head(p, block);
  const GroupWork work = group_work<kLanes, kThreads, kShared>(block, p.item_end, p.block_end);
  const int lane = threadIdx.x % kLanes;
  if constexpr (kRows > 1) {
    if (work.bundled) return bundle_item(p, work, slab, lane);
  }
  row_item(p, work, load_item(p, work.index, work.end), slab, lane, head);
}

}  // namespace rows
