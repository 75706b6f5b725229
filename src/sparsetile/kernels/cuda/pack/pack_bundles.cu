// Bundles of four rows packed without a sort (formats/device_rows.py).
//
// An entry is fresh if no earlier row of its window has its column, so fresh entries are the
// window's distinct columns. Columns ascend in a row: the distinct columns before some column are
// the fresh entries before it in each of the four rows, found by a search and a difference of
// running sums. Stages, one launch each; between them the host adds up counts:
//
//     positions  place of each row in `rows`, if an order is given
//     fresh      whether each entry is fresh, and distinct columns of each window: decides whether
//                bundles pay                                                 -> running sums
//     windows    which windows are bundled, their padded lists, and the entries of each row in a
//                bundle: three lists in `plan`, one after the other              -> running sums
//     rows       rows in bundles and others, ranges of lists, and their padding
//     entries    list elements, and the place of each entry's value
//
// Rows may have any length: an entry is a thread's work. Atomics add whole numbers: the same result
// in every run. One kernel with the stage as a parameter, so that only one is compiled and loaded.
//
// Assumes: at least one entry; entries and rows are together fewer than 2^29; columns of a row
// ascend; `distinct` is zero before `fresh`. Threads: kThreads, whole warps; any grid; a thread has
// an element.
#include "pack/row_windows.cuh"
#include "pack/search.cuh"

// Declared in kernels/bundles.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kPositions, kFresh, kWindows, kRows, kEntries };

constexpr int kNoWindow = 0x7fffffff, kListStep = 4, kColumnBits = 28;

__device__ __forceinline__ i64 row_at(const Params& p, i64 place) {
  return p.rows ? p.rows[place] : place;
}
__device__ __forceinline__ int place_of(const Params& p, int row) {
  return p.positions ? p.positions[row] : row;
}

// All lanes of a warp; those without an entry are not inside.
__device__ __forceinline__ void find_fresh(const Params& p, i64 i, bool inside) {
  int window = kNoWindow;
  if (inside) {
    const int place = place_of(p, row_of(p.indptr, p.row_count, i)), column = p.columns[i];
    bool fresh = true;
    for (int other = place - place % kWindow; fresh && other < place; ++other) {
      const i64 row = row_at(p, other), end = p.indptr[row + 1];
      const i64 at = lower_bound(p.columns, p.indptr[row], end, column);
      fresh = at == end || p.columns[at] != column;
    }
    if (p.fresh) p.fresh[i] = fresh;
    if (fresh) window = place / kWindow;
  }
  // Neighbouring entries are mostly of one window, which is then added to once.
  for (int at = __reduce_min_sync(kWarp, window); at != kNoWindow;
       at = __reduce_min_sync(kWarp, window)) {
    const bool same = window == at;
    const int sum = __popc(__ballot_sync(kWarp, same));
    if (threadIdx.x % 32 == 0) atomicAdd(p.distinct + at, sum);
    if (same) window = kNoWindow;
  }
}

__device__ __forceinline__ void plan_window(const Params& p, int window) {
  const int first = window * kWindow, end = min(first + kWindow, p.row_count);
  i64 entries = 0;
  for (int place = first; place < end; ++place) {
    const i64 row = row_at(p, place);
    entries += p.indptr[row + 1] - p.indptr[row];
  }
  const int columns = p.distinct[window];
  const bool chosen = shares_columns(entries, columns, p.min_sharing);
  p.plan[window] = chosen;
  p.plan[p.windows + window] = chosen ? (columns + kListStep - 1) / kListStep * kListStep : 0;
  for (int place = first; place < end; ++place) {
    const i64 row = row_at(p, place);
    p.plan[2 * p.windows + row] = chosen ? static_cast<int>(p.indptr[row + 1] - p.indptr[row]) : 0;
  }
}

// Sum of a list of the plan, which begins at `begin`, before one of its elements.
__device__ __forceinline__ int sum_before(const Params& p, int begin, int element) {
  const int at = begin + element;
  return (at ? p.sums[at - 1] : 0) - (begin ? p.sums[begin - 1] : 0);
}

__device__ __forceinline__ bool is_chosen(const Params& p, int window) {
  return sum_before(p, 0, window + 1) != sum_before(p, 0, window);
}

__device__ __forceinline__ void write_row(const Params& p, int place) {
  const int window = place / kWindow, member = place % kWindow;
  const int bundle = sum_before(p, 0, window);
  if (!is_chosen(p, window)) {
    if (place < p.row_count) p.loose[place - i64(bundle) * kWindow] = row_at(p, place);
    return;
  }
  p.bundle_rows[i64(bundle) * kWindow + member] =
      place < p.row_count ? static_cast<int>(row_at(p, place)) : -1;
  if (member) return;
  const int begin = sum_before(p, p.windows, window), end = sum_before(p, p.windows, window + 1);
  if (bundle == 0) p.bundle_ptr[0] = 0;
  p.bundle_ptr[bundle + 1] = end;
  // Padding repeats the window's last column.
  int last = 0;
  for (int other = place; other < min(place + kWindow, p.row_count); ++other) {
    const i64 row = row_at(p, other), stop = p.indptr[row + 1];
    if (stop > p.indptr[row]) last = max(last, p.columns[stop - 1]);
  }
  for (int element = begin + p.distinct[window]; element < end; ++element) {
    p.tagged[element] = last;
  }
}

// Fresh entries before an entry, of all of A.
__device__ __forceinline__ int fresh_before(const Params& p, i64 entry) {
  return entry ? p.fresh_sums[entry - 1] : 0;
}

__device__ __forceinline__ void write_entry(const Params& p, i64 i) {
  const int row = row_of(p.indptr, p.row_count, i), place = place_of(p, row);
  const int window = place / kWindow, member = place % kWindow, column = p.columns[i];
  if (!is_chosen(p, window)) return;
  int element = sum_before(p, p.windows, window);
  u32 bits = 0;
  for (int other = 0; other < kWindow && place - member + other < p.row_count; ++other) {
    const i64 theirs = row_at(p, place - member + other);
    const i64 begin = p.indptr[theirs], end = p.indptr[theirs + 1];
    const i64 at = other == member ? i : lower_bound(p.columns, begin, end, column);
    element += fresh_before(p, at) - fresh_before(p, begin);
    bits |= u32(at < end && p.columns[at] == column) << other;
  }
  // The first of the rows that have the column writes the element.
  if (!(bits & ((1u << member) - 1))) {
    p.tagged[element] = static_cast<int>(bits << kColumnBits | u32(column));
  }
  const i64 to = sum_before(p, 2 * p.windows, row) + (i - p.indptr[row]);
  p.entries[to] = i;
  p.slots[to] = i64(element) * kWindow + member;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    pack_bundles(const __grid_constant__ Params p) {
  const i64 step = i64(gridDim.x) * kThreads;
  // All lanes of a warp iterate equally often: they meet in `fresh`.
  for (i64 base = i64(blockIdx.x) * kThreads; base < p.work; base += step) {
    const i64 i = base + threadIdx.x;
    if (p.stage == kFresh) {
      find_fresh(p, i, i < p.work);
      continue;
    }
    if (i >= p.work) continue;
    switch (p.stage) {
      case kPositions:
        p.positions[p.rows[i]] = static_cast<int>(i);
        break;
      case kWindows:
        plan_window(p, static_cast<int>(i));
        break;
      case kRows:
        write_row(p, static_cast<int>(i));
        break;
      case kEntries:
        write_entry(p, i);
        break;
    }
  }
}
