// A warp's sums of one window of sixteen rows by kCols columns of B: their layout among the lanes,
// and their stores to C. Included after element types, constants and parameters.
//
// Lane 4g + t has rows g and g + 8. 16-bit types: columns 2t and 2t + 1 of each eight. float32:
// columns 8t to 8t + 7 of each 32.
#pragma once

#include "epilogue/epilogue.cuh"
#include "mma/step.cuh"

namespace fragments {

constexpr int kGroups = kCols / 8;  // instructions side by side

static_assert(kCols % (kHalf ? 16 : 32) == 0, "whole groups of instructions");

struct Tally {
  float sum[kGroups][4];

  template <typename Use>
  __device__ __forceinline__ void each(const Use& use) {
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i) use(sum[i / 4][i % 4]);
  }
};

// A warp's position: its slab of columns of B, and its lane's place in it. Recomputed at each use,
// from a lane number that the compiler cannot keep: the loop over steps has no spare registers for
// data of its rare branches.
struct Place {
  int lane, g, t;
  int slab;
  int column;  // first of the slab
  int left;    // columns of B from there on

  __device__ __forceinline__ Place(const Params& p, int slab_)
      : lane(ptx::lane_now()),
        g(lane >> 2),
        t(lane & 3),
        slab(slab_),
        column(slab_ * kCols),
        left(p.n - slab_ * kCols) {}
};

// Row of C at place r of the window; -1 past the last row.
__device__ __forceinline__ int window_row(const Params& p, int window, int r) {
  return row_of(p, window * 16 + r);
}

// Epilogue and store of neighbouring columns of one row, the first of them `offset` on in the slab.
// Always scaled, even by one: sums then need not be in the registers of the stores, which would
// cost the loop over steps a move each.
template <bool kEpilogue, int kCount>
__device__ __forceinline__ void store_row(const Params& p, const Place& at, int row,
                                          const RowTerms<float>& terms, int offset,
                                          float (&sum)[kCount]) {
  Out::Storage* c = c_row(p, row) + at.column + offset;
  scale_sums(terms, sum);
  if constexpr (kEpilogue) {
    add_terms<Out>(p, terms, at.column + offset, at.left - offset, c, 1, sum);
  }
  store_columns<Out, 4>(c, at.left - offset, sum);
}

// Sums of 16-bit types are stored four at a time: columns 2t and 2t + 1 of one eight are exchanged
// with the neighbouring lane's of the next, so four lanes of a row fill 32 bytes of a 16-bit C and
// 64 of a float32 one.
template <bool kEpilogue>
__device__ __forceinline__ void store_fours(const Params& p, const Place& at, int row,
                                            const RowTerms<float>& terms, int half,
                                            const Tally& tally) {
  constexpr int kWords = sizeof(Out::Storage) / 2;  // of two sums
  const bool odd = at.t & 1;
  Out::Storage* c = row < 0 ? nullptr : c_row(p, row) + at.column;
#pragma unroll
  for (int j = 0; j < kGroups; j += 2) {
    Packed<Out, 2> pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum[2] = {tally.sum[j + i][2 * half], tally.sum[j + i][2 * half + 1]};
      const int offset = 8 * (j + i) + 2 * at.t;
      scale_sums(terms, sum);
      if (kEpilogue && row >= 0) {
        add_terms<Out>(p, terms, at.column + offset, at.left - offset, c + offset, 1, sum);
      }
      pair[i].element[0] = Out::narrow(sum[0]);
      pair[i].element[1] = Out::narrow(sum[1]);
    }
    Packed<Out, 4> four;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const u32 first = pair[0].pair[w], second = pair[1].pair[w];
      const u32 theirs = __shfl_xor_sync(kWarp, odd ? first : second, 1);
      four.pair[w] = odd ? theirs : first;
      four.pair[kWords + w] = odd ? second : theirs;
    }
    const int offset = 8 * (j + odd) + 2 * (at.t & 2);
    if (row >= 0 && offset < at.left) {
      ptx::store_cs(reinterpret_cast<typename Packed<Out, 4>::Word*>(c + offset), four.word);
    }
  }
}

template <bool kEpilogue>
__device__ __forceinline__ void store_sums(const Params& p, const Place& at, int window,
                                           const Tally& tally) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = window_row(p, window, 8 * half + at.g);
    // Sums scaled by apply_terms are not scaled again.
    RowTerms<float> terms = {p.epilogue ? 1.0f : float(p.alpha), 0.0f};
    if (kEpilogue && row >= 0) terms = row_terms<float>(p, row);
    if constexpr (kHalf) {
      store_fours<kEpilogue>(p, at, row, terms, half, tally);
    } else if (row >= 0) {
      constexpr int kCount = 8;
#pragma unroll
      for (int j = 0; j < kGroups; j += kCount / 2) {
        float sum[kCount];
#pragma unroll
        for (int v = 0; v < kCount; ++v) {
          sum[v] = tally.sum[j + v % (kCount / 2)][2 * half + v / (kCount / 2)];
        }
        store_row<kEpilogue>(p, at, row, terms, 8 * (j + at.t), sum);
      }
    }
  }
}

// Column in the slab of the lane's sum[j][e] and sum[j][2 + e].
__device__ __forceinline__ int column_of(const Place& at, int j, int e) {
  return kHalf ? 8 * j + 2 * at.t + e : 32 * (j / 4) + 8 * at.t + 4 * e + j % 4;
}

// Scale, mean, bias and ReLU, applied to the sums in place.
__device__ __forceinline__ void apply_terms(const Params& p, const Place& at, int window,
                                            Tally& tally) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = window_row(p, window, 8 * half + at.g);
    const float scale = row < 0 ? 1.0f : row_terms<float>(p, row).scale;
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i) tally.sum[i / 2][2 * half + i % 2] *= scale;
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i) {
      const int column = column_of(at, i / 2, i % 2);
      const float bias = column < at.left ? __ldg(p.bias + at.column + column) : 0.0f;
      tally.sum[i / 2][i % 2] += bias;
      tally.sum[i / 2][2 + i % 2] += bias;
    }
  }
  if (p.relu) tally.each([](float& sum) { sum = sum < 0.0f ? 0.0f : sum; });
}

// The same plus beta times the old C. Not inlined, nor is join_piece, to leave registers to the
// loop over steps. Sums go through local memory, once per window; with every epilogue there, a bias
// made pkustk04 take 87 instead of 43 us (float16, N = 128).
__device__ __noinline__ void store_with_terms(const Params& p, int slab, int window,
                                              const Tally& tally) {
  store_sums<true>(p, Place(p, slab), window, tally);
}

}  // namespace fragments
