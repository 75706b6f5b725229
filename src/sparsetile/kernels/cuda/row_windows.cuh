// Windows of four neighbouring rows, which may become bundles (formats/bundles.py): searches in
// A's rows, whose columns ascend, and which windows share enough columns.
#pragma once

#include "ptx.cuh"

constexpr int kWindow = 4;

// Row of an entry: the last of `rows` that begins at it or before.
__device__ __forceinline__ int row_of(const i64* indptr, int rows, i64 entry) {
  int low = 0, high = rows;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (indptr[middle] <= entry) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// First entry from `low` to `high` whose column is not less; `high` without one.
__device__ __forceinline__ i64 lower_bound(const int* columns, i64 low, i64 high, int column) {
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    if (columns[middle] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Whether a window holds so many entries per distinct column; in float32, as tensor operations
// compare (formats/bundles.py).
__device__ __forceinline__ bool shares_columns(i64 entries, i64 columns, double min_sharing) {
  const float least = static_cast<float>(columns) * static_cast<float>(min_sharing);
  return columns > 0 && static_cast<float>(entries) >= least;
}
