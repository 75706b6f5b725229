// Binary searches in ascending arrays of A: first entries of rows, columns of a row.
#pragma once

#include "ptx/ptx.cuh"

// Row of an entry: the last of `rows` that begins at it or before.
__device__ __forceinline__ int row_of(const i64* starts, int rows, i64 entry) {
  int low = 0, high = rows;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (starts[middle] <= entry) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// First entry from `low` to `high` whose column is not less; `high` without one.
template <typename Entry>
__device__ __forceinline__ Entry lower_bound(const int* columns, Entry low, Entry high,
                                             int column) {
  while (low < high) {
    const Entry middle = low + (high - low) / 2;
    if (columns[middle] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
