// CSR arrays as callers have them: row pointers and columns of 32 or 64 bits, values or none. Both
// indices are checked when they are read, and clamped: no other memory is ever read or written.
//
// A column that B does not have is replaced by 0 and its value by NaN. Row pointers must ascend
// from 0 to the number of entries; if they do not, C is undefined. The first thread that meets
// either claims `faults`, memory of the host, which reads it when the kernel has ended.
#pragma once

#include "ptx/element.cuh"

namespace direct {

// What is wrong: the first word of `faults`. The others: where, the number there, the limit.
constexpr u64 kBadColumn = 1, kBadPointer = 2;

template <typename P>
__device__ __forceinline__ i64 load_pointer(const P& p, i64 row) {
  return p.wide_indptr ? __ldg(static_cast<const i64*>(p.indptr) + row)
                       : i64(__ldg(static_cast<const int*>(p.indptr) + row));
}

template <typename P>
__device__ __forceinline__ i64 raw_column(const P& p, i64 entry) {
  return p.wide_columns ? __ldg(static_cast<const i64*>(p.columns) + entry)
                        : i64(__ldg(static_cast<const int*>(p.columns) + entry));
}

// In 32 bits; negative if it has more.
template <typename P>
__device__ __forceinline__ int load_column(const P& p, int entry) {
  const i64 column = raw_column(p, entry);
  return column == static_cast<int>(column) ? static_cast<int>(column) : -1;
}

// 1 without values.
template <typename V, typename P>
__device__ __forceinline__ typename V::Storage load_value(const P& p, int entry) {
  return p.values == nullptr ? V::narrow(typename V::Acc(1)) : __ldg(p.values + entry);
}

template <typename P>
__device__ __noinline__ void report(const P& p, u64 what, i64 where, i64 number, i64 limit) {
  u64* faults = p.faults;
  if (faults == nullptr || atomicCAS(faults, u64(0), what) != 0) return;
  faults[1] = where;
  faults[2] = number;
  faults[3] = limit;
}

// Replace a column that B does not have. `here`: whether it is that of an entry.
template <typename V, typename P>
__device__ __forceinline__ void check_column(const P& p, int entry, bool here, int& column,
                                             typename V::Storage& value) {
  if (static_cast<u32>(column) < static_cast<u32>(p.cols)) return;
  if (here) report(p, kBadColumn, entry, raw_column(p, entry), p.cols);
  column = 0;
  value = V::narrow(ptx::infinity<typename V::Acc>() - ptx::infinity<typename V::Acc>());
}

// A row's entries within A's; none if the pointers descend.
template <typename P>
__device__ __forceinline__ int2 entries_of(const P& p, int row) {
  const i64 begin = load_pointer(p, row), end = load_pointer(p, i64(row) + 1);
  const i64 most = p.entries;
  const i64 first = begin < 0 ? 0 : begin > most ? most : begin;
  const i64 last = end < first ? first : end > most ? most : end;
  return make_int2(static_cast<int>(first), static_cast<int>(last));
}

// Alpha, divided by the row's entries for a mean.
template <typename Acc, typename P>
__device__ __forceinline__ Acc row_scale(const P& p, int row) {
  const Acc scale = Acc(p.alpha);
  if (!p.mean) return scale;
  const int2 entries = entries_of(p, row);
  return entries.y > entries.x ? scale / Acc(entries.y - entries.x) : scale;
}

}  // namespace direct
