// The windows of an item that are still to be stored. A warp goes through an item's tiles without
// stopping at the end of a window; C is stored at the end of each window, and non-finite sums are
// recomputed after the last tile.
//
//   items[i] = {first window, first tile, end, slot of a piece or -windows}; at most 32 windows,
//              as balance/windows.py ensures
//   offsets  = first tile of each window, and the end of the last one
#pragma once

#include "ptx/ptx.cuh"

struct Windows {
  int window;
  int left;        // windows still to be stored; none for a piece of a split window
  int stop;        // tile after the window's last
  int later;       // the same of the next window
  u32 non_finite;  // windows of the last 32 whose sums were not finite, the latest in bit 0

  __device__ __forceinline__ Windows(const int* offsets, int4 item)
      : window(item.x), left(item.w < 0 ? -item.w : 0), non_finite(0) {
    stop = left > 0 ? __ldg(offsets + window + 1) : -1;
    later = left > 1 ? __ldg(offsets + window + 2) : -1;
  }
  // All tiles before `tile` are in the sums: store the windows that end there. store(window) clears
  // the sums, and is false if they are not finite and C is unchanged.
  template <typename Store>
  __device__ __forceinline__ void close(const int* offsets, int tile, const Store& store) {
    while (left > 0 && stop == tile) {
      non_finite = non_finite << 1 | !store(window);
      ++window;
      --left;
      stop = later;
      if (left > 1) later = __ldg(offsets + window + 2);
    }
  }
  // Recompute the rest; after the last tile, because `redo` takes many registers.
  template <typename Redo>
  __device__ __forceinline__ void repair(const Redo& redo) const {
    for (u32 rest = non_finite; rest != 0; rest &= rest - 1) redo(window - __ffs(rest));
  }
};
