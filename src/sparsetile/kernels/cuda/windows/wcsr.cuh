// Shared by the kernels of WCSR windows: parameters, rows of C, and their stores.
//
// Included after the constants ELEMENT, OUTPUT, kCols, kWeighted. A warp has sixteen rows (a strip)
// of a window and kCols columns; lane = 4g + t. Its sums are D of WGMMA (wgmma_regs.cuh): of 32
// columns, words 4j to 4j + 3 of a lane are n = 8j + 2t and 8j + 2t + 1, for rows g and g + 8.
// spmm_wcsr.cu maps n to columns.
#pragma once

#include "epilogue/epilogue.cuh"
#include "ptx/transpose.cuh"
#include "windows/exact_strips.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;

constexpr int kSize = sizeof(E::Storage);
constexpr bool kIsF32 = kSize == 4;
constexpr int kHeight = 64;
constexpr int kWarps = kHeight / 16;               // strips of a window
constexpr int kSums = kCols / 2;                   // of a lane
constexpr int kGroupSums = 16;                     // of them for 32 columns
constexpr int kStore = 16 / sizeof(Out::Storage);  // columns of C per store

// Declared in kernels/wcsr.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

// A thread's position; `warp` is its strip.
struct Lane {
  int warp, lane, g, t;
  __device__ __forceinline__ Lane()
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4) {}
};

// Place of a tile's column among its staged column ids.
__device__ __forceinline__ int staged(int column) { return column % 2 * 4 + column / 2; }

// Partial sums of a strip in a slot, word after word, lanes side by side.
__device__ __forceinline__ float4* partial_sums(const Params& p, int slot, int warp) {
  const i64 layer = i64(blockIdx.z) * gridDim.y + blockIdx.y;
  const i64 strip = (layer * p.slot_count + slot) * kWarps + warp;
  return reinterpret_cast<float4*>(p.partials) + strip * (kSums / 4) * 32;
}

// Row of C at place r of the window; -1 past the last row.
__device__ __forceinline__ int window_row(const Params& p, int window, int r) {
  return row_of(p, window * kHeight + r);
}

// Epilogue and store of kCount neighbouring columns of a row of C, which begins at `c`. kPlain: no
// epilogue, and the slab is inside C.
template <bool kPlain, int kCount>
__device__ __forceinline__ void store_row(const Params& p, const RowTerms<Acc>& terms,
                                          Out::Storage* c, int column, float (&x)[kCount]) {
  if constexpr (!kPlain) {
    if (column >= p.n) return;
    scale_sums(terms, x);
    if (p.epilogue) add_terms<Out>(p, terms, column, kCount, c + column, 1, x);
  }
  store_columns<Out, kCount>(c + column, kCount, x);
}

// Sixteen rows of a window's tiles, for the redo.
struct StripTiles {
  const Params& p;
  int strip;  // of the window

  static constexpr bool kGaps = false;
  struct Bits {
    uint4 rows;  // a byte a row
    int value;   // the first one
  };
  __device__ __forceinline__ Bits bits(int tile) const {
    const i64 at = i64(tile) * kWarps + strip;
    return {__ldg(reinterpret_cast<const uint4*>(p.bitmaps) + at),
            kWeighted ? __ldg(p.strip_value_ptr + at) : 0};
  }
  __device__ __forceinline__ bool entry(const Bits& bits, int r, int k) const {
    const u32 left = r < 8 ? bits.rows.x : bits.rows.z, right = r < 8 ? bits.rows.y : bits.rows.w;
    return (r % 8 < 4 ? left : right) >> (r % 4 * 8 + k) & 1;
  }
  __device__ __forceinline__ void elements(int, const Bits& bits, int lane, u32 (&of)[4]) const {
    using Value = typename WordOf<kSize>::Type;
    const Value* values = reinterpret_cast<const Value*>(p.values);
    const u32 bit = 1u << (lane / 4 % 4 * 8 + lane % 4);  // of column t
    const bool upper = lane >= 16;
    int before = bits.value;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 left = half == 0 ? bits.rows.x : bits.rows.z;
      const u32 right = half == 0 ? bits.rows.y : bits.rows.w;
      const u32 mine = upper ? right : left;
      const int first = upper ? before + __popc(left) : before;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const u32 own = bit << side * 4;
        u32& element = of[half + side * 2];
        if constexpr (kWeighted) {
          element = 0;
          if (mine & own) element = u32(__ldg(values + u32(first + __popc(mine & (own - 1)))));
        } else {
          element = mine & own ? Mma<E>::kOne : 0;
        }
      }
      if (half == 0) before += __popc(left) + __popc(right);
    }
  }
  __device__ __forceinline__ int2 columns(int tile, int t) const {
    const int* ids = p.columns + i64(tile) * 8 + staged(t);  // staged(t + 4) is staged(t) + 2
    return make_int2(__ldg(ids), __ldg(ids + 2));
  }
  __device__ __forceinline__ int column(int tile, int k) const {
    return __ldg(p.columns + i64(tile) * 8 + staged(k));
  }
};

// Epilogue and store of a recomputed strip of the window, from column `first` on: groups of 32
// columns whose bit is set.
template <int kPieces>
__device__ __forceinline__ void store_strip(const Params& p, const ExactStrip<E, kPieces>& strip,
                                            int window, int strip_of_window, int first,
                                            int groups) {
  constexpr int kSpan = ExactStrip<E>::kSpan;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = window_row(p, window, strip_of_window * 16 + half * 8 + strip.g);
    if (row < 0) continue;
    const RowTerms<Acc> terms = row_terms<Acc>(p, row);
    Out::Storage* c = p.c + blockIdx.z * p.c_batch_stride + i64(row) * p.c_row_stride;
#pragma unroll
    for (int place = 0; place < 2 * kPieces; ++place) {
      const int from = (place * 4 + strip.t) * kSpan;
      if (from >= strip.columns || !(groups >> from / 32 & 1)) continue;
      float x[kSpan];
#pragma unroll
      for (int j = 0; j < kSpan; ++j) x[j] = strip.sum[place / 2][j][half * 2 + place % 2];
      store_row<false>(p, terms, c, first + from, x);
    }
  }
}

// ---- recomputation by a later launch (redo.cuh)

// A unit is a strip of a window by kUnitCols columns; its flag has a bit for each 32 of them.
constexpr int kUnitCols = 256 / kSize, kUnits = kCols / kUnitCols;

__device__ __forceinline__ int unit_count(const Params& p) {
  return (p.rows + kHeight - 1) / kHeight * (kWarps * kUnits);
}
__device__ __forceinline__ int* unit_flags(const Params& p) {
  return p.redo + (i64(blockIdx.z) * gridDim.y + blockIdx.y) * unit_count(p);
}
__device__ __forceinline__ int unit_of(int window, int strip, int unit) {
  return (window * kWarps + strip) * kUnits + unit;
}

// Store sixteen rows of 32 columns, `first_column` on.
template <bool kPlain>
__device__ __forceinline__ void store_group(const Params& p, const Lane& me, int window,
                                            int first_column, const float (&sum)[kGroupSums]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = window_row(p, window, me.warp * 16 + half * 8 + me.g);
    const RowTerms<Acc> terms = kPlain || row < 0 ? RowTerms<Acc>{} : row_terms<Acc>(p, row);
    Out::Storage* c = p.c + blockIdx.z * p.c_batch_stride + i64(row) * p.c_row_stride;
    const float* mine = sum + half * 2;
    if constexpr (kIsF32) {
      // n = 8j + 2t + e is column 16e + 4t + j.
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x[4] = {mine[e], mine[4 + e], mine[8 + e], mine[12 + e]};
        if (row >= 0) store_row<kPlain>(p, terms, c, first_column + e * 16 + me.t * 4, x);
      }
    } else {
      // Columns 2t and 2t + 1 of four times eight; after the exchange eight of one.
      u32 first[4], second[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        first[i] = __float_as_uint(mine[4 * i]);
        second[i] = __float_as_uint(mine[4 * i + 1]);
      }
      transpose(first, me.t);
      transpose(second, me.t);
#pragma unroll
      for (int part = 0; part < 8; part += kStore) {
        float x[kStore];
#pragma unroll
        for (int v = 0; v < kStore; ++v) {
          const int at = part + v;
          x[v] = __uint_as_float(at % 2 == 0 ? first[at / 2] : second[at / 2]);
        }
        if (row >= 0) store_row<kPlain>(p, terms, c, first_column + me.t * 8 + part, x);
      }
    }
  }
}

// Whether all sums of the warp are finite.
template <int kCount>
__device__ __forceinline__ bool all_finite(const float (&sum)[kCount]) {
  FiniteCheck<4> check;
#pragma unroll
  for (int i = 0; i < kCount; ++i) check.add(sum[i], i);
  return !__any_sync(kWarp, check.failed());
}

// Store 32 columns for each sixteen sums.
template <int kCount>
__device__ __forceinline__ void store_groups(const Params& p, const Lane& me, int window,
                                             int first_column, const float (&sum)[kCount]) {
  constexpr int kColumns = kCount / kGroupSums * 32;
  const bool plain = !p.epilogue && first_column + kColumns <= p.n;
#pragma unroll
  for (int group = 0; group < kCount / kGroupSums; ++group) {
    float mine[kGroupSums];
#pragma unroll
    for (int i = 0; i < kGroupSums; ++i) mine[i] = sum[group * kGroupSums + i];
    if (plain) {
      store_group<true>(p, me, window, first_column + group * 32, mine);
    } else {
      store_group<false>(p, me, window, first_column + group * 32, mine);
    }
  }
}
