// A's part of a step in the register layout of the instruction, zeros included
// (formats/fragments.py): 16 bytes per lane, nothing to decode. Bitmaps tell entries from zeros for
// the exact recomputation.
#pragma once

#include "mma/step.cuh"

struct StoredFragments {
  static constexpr int kBytes = 512;

  // Start copying the part of the step that begins with `tile`.
  template <typename Params>
  __device__ __forceinline__ static void copy(const Params& p, int tile, int lane, char* to) {
    const char* from = reinterpret_cast<const char*>(p.fragments) + lane * 16;
    ptx::copy_async<true>(to + lane * 16, from + i64(tile) * (kBytes / kDepth), true);
  }
  // The operand of lane 4g + t.
  __device__ __forceinline__ static uint4 load(const char* from, int g, int t) {
    return *reinterpret_cast<const uint4*>(from + (4 * g + t) * 16);
  }
  // Whether row r of the window has an entry in column k of the step, and its value.
  template <typename Params>
  __device__ __forceinline__ static bool entry(const Params& p, const char* from, int tile, int r,
                                               int k, float& weight) {
    const int lane = r % 8 * 4 + (kHalf ? k % 8 / 2 : k % 4);
    const int word = r / 8 + k / (kHalf ? 8 : 4) * 2;
    const u32 bits = reinterpret_cast<const u32*>(from + lane * 16)[word];
    if constexpr (kHalf) {
      weight = E::widen(static_cast<E::Storage>(bits >> k % 2 * 16));
    } else {
      weight = __uint_as_float(bits);
    }
    return __ldg(p.bitmaps + i64(tile + k / 8) * 2 + r / 8) >> (8 * (r % 8) + k % 8) & 1;
  }
};
