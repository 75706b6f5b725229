// BRP-SpMM's own write-back: several warps add to a window's rows of C by atomics. Only kernels
// with kAtomic do. Included after element types, constants and parameters.
//
// One warp has one piece of a window, which is a group of tiles and its share of the entries
// outside groups. No piece is known to be the last one, so the epilogue cannot run here:
//
//   before the launch   C = beta * C + bias in rows of windows, zeros without both
//   each piece          C += scale * its sums, scale being alpha, divided for a mean: linear
//   after it            ReLU; then C in 16 bits is rounded from the float32 sums
//
// The host does the first and the last (systems/brp/runner.py), on the same stream, and thus in a
// captured graph. Non-finite sums are recomputed before they are added: a piece's Inf and NaN then
// come only from its entries, and their sum, in any order, is the right element of C. So no second
// pass reads C, and every epilogue, type and input has one path.
//
// The paper adds entries outside groups by a separate kernel: as many atomics again for rows that
// the groups add to anyway.
//
// Bits depend on the order of the pieces. Only plans that need not be reproducible use this.
#pragma once

#include "windows/window_sums.cuh"

namespace fragments {

static_assert(!kAtomic || sizeof(Out::Storage) == 4, "sums are added in float32");

// Neighbouring columns of one row that a lane has.
constexpr int kAddCount = kHalf ? 2 : 4;

__device__ __forceinline__ void add_sums_to_c(const Params& p, int slab, int window,
                                              const Tally& tally) {
  const Place at(p, slab);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = window_row(p, window, 8 * half + at.g);
    if (row < 0) continue;
    const RowTerms<float> terms = row_terms<float>(p, row);
    float* c = reinterpret_cast<float*>(c_row(p, row) + at.column);
#pragma unroll
    for (int j = 0; j < kGroups * 2; j += kAddCount) {
      // 16-bit types: sums j and j + 1 of one instruction; float32: one of four instructions each.
      float sum[kAddCount];
#pragma unroll
      for (int v = 0; v < kAddCount; ++v) {
        sum[v] =
            kHalf ? tally.sum[j / 2][2 * half + v] : tally.sum[j / 8 * 4 + v][2 * half + j % 8 / 4];
      }
      const int offset = kHalf ? column_of(at, j / 2, 0) : column_of(at, j / 8 * 4, j % 8 / 4);
      scale_sums(terms, sum);
      if (offset < at.left) ptx::add_global(c + offset, sum);
    }
  }
}

}  // namespace fragments
