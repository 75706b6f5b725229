// Windows of four neighbouring rows, which may become bundles (formats/bundles.py): which of them
// share enough columns.
#pragma once

#include "ptx/ptx.cuh"

constexpr int kWindow = 4;

// Whether a window has enough entries per distinct column; compared in float32, like the tensor
// operations (formats/bundles.py).
__device__ __forceinline__ bool shares_columns(i64 entries, i64 columns, double min_sharing) {
  const float least = static_cast<float>(columns) * static_cast<float>(min_sharing);
  return columns > 0 && static_cast<float>(entries) >= least;
}
