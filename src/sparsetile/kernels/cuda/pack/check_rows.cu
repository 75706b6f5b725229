// A matrix of the caller checked and copied as a plan keeps it (formats/device_intake.py): 64-bit
// row pointers, 32-bit columns.
//
//     compressed  from row pointers and columns
//     edges       from the rows and columns of entries, whose row pointers are searched for; their
//                 keys, row * columns + column, are listed
//     sorted      from keys that have been sorted, and the entry that each is of
//
// `facts` says what was found: whether a number is out of range or row pointers descend, and
// whether entries are out of order or twice at one place. What is copied then is not to be read.
// The host looks up what is wrong.
//
// Assumes: fewer than 2^31 rows, columns and entries; `facts` is zero before. Reads nothing out of
// bounds, whatever the numbers are. All threads that find something write the same. Threads:
// kThreads; any grid; a thread has a row pointer and an entry.
#include "ptx/ptx.cuh"

// Declared in kernels/row_checks.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kCompressed, kEdges, kSorted };
enum Fact { kBad, kUnsorted };

__device__ __forceinline__ i64 number_at(const void* numbers, bool wide, i64 i) {
  return wide ? static_cast<const i64*>(numbers)[i] : static_cast<const int*>(numbers)[i];
}

// Numbers of an ascending array of `count` that are less.
__device__ __forceinline__ i64 count_less(const void* numbers, bool wide, i64 count, i64 than) {
  i64 low = 0, high = count;
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    if (number_at(numbers, wide, middle) < than) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ __forceinline__ void take_pointer(const Params& p, i64 i) {
  const i64 begin = number_at(p.rows, p.wide_rows, i);
  const i64 end = i < p.row_count ? number_at(p.rows, p.wide_rows, i + 1) : p.entries;
  const bool bad = (i == 0 && begin != 0) || begin > end || (i == p.row_count && begin != end);
  if (bad) p.facts[kBad] = 1;
  p.indptr[i] = begin;
}

__device__ __forceinline__ void take_column(const Params& p, i64 i) {
  const i64 column = number_at(p.columns, p.wide_columns, i);
  if (column < 0 || column >= p.column_count) p.facts[kBad] = 1;
  p.indices[i] = static_cast<int>(column);
  if (i == 0 || column > number_at(p.columns, p.wide_columns, i - 1)) return;
  // Only the first entry of a row may have no greater column than the entry before.
  const i64 at = count_less(p.rows, p.wide_rows, p.row_count + 1, i);
  if (at > p.row_count || number_at(p.rows, p.wide_rows, at) != i) p.facts[kUnsorted] = 1;
}

__device__ __forceinline__ void take_edge(const Params& p, i64 i) {
  const i64 row = number_at(p.rows, p.wide_rows, i);
  const i64 column = number_at(p.columns, p.wide_columns, i);
  const bool outside = row < 0 || row >= p.row_count || column < 0 || column >= p.column_count;
  if (outside) p.facts[kBad] = 1;
  p.indices[i] = static_cast<int>(column);
  p.keys[i] = row * p.column_count + column;
  if (i == 0) return;
  const i64 row_before = number_at(p.rows, p.wide_rows, i - 1);
  const bool ascends = row > row_before ||
                       (row == row_before && column > number_at(p.columns, p.wide_columns, i - 1));
  if (!ascends) p.facts[kUnsorted] = 1;
}

__device__ __forceinline__ void take_key(const Params& p, i64 i) {
  const i64 key = number_at(p.rows, true, i);
  p.indices[i] = static_cast<int>(key % p.column_count);
  p.entry_map[p.order[i]] = i;
  if (i && key == number_at(p.rows, true, i - 1)) p.facts[kUnsorted] = 1;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    check_rows(const __grid_constant__ Params p) {
  const i64 step = i64(gridDim.x) * kThreads;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < p.work; i += step) {
    if (p.stage == kCompressed) {
      if (i <= p.row_count) take_pointer(p, i);
      if (i < p.entries) take_column(p, i);
    } else {
      const i64 first = p.stage == kSorted ? i * p.column_count : i;
      if (i <= p.row_count) p.indptr[i] = count_less(p.rows, p.wide_rows, p.entries, first);
      if (i >= p.entries) continue;
      if (p.stage == kSorted) {
        take_key(p, i);
      } else {
        take_edge(p, i);
      }
    }
  }
}
