// Shared by both kernels of BMat windows: parameters, pieces of C and their stores, tiles for the
// redo.
//
// Included after the constants ELEMENT, OUTPUT, kStack, kDense, kWeighted.
#pragma once

#include "epilogue/epilogue.cuh"
#include "mma/bmat.cuh"
#include "windows/exact_strips.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;

constexpr int kSize = sizeof(E::Storage);
constexpr bool kIsF32 = kSize == 4;
constexpr int kPieceBytes = 128;
constexpr int kPieceCols = kPieceBytes / kSize;
constexpr int kSpan = 16 / kSize;  // columns of a lane's chunk, and instructions of a piece
constexpr int kWindowRows = 16 * kStack;

// Declared in kernels/bmat.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

__device__ __forceinline__ int slab_column(const Params& p) {
  return int(blockIdx.y) * p.slab_pieces * kPieceCols;
}
// Epilogue and store of kCount neighbouring columns of a row of C.
template <int kVec, int kCount>
__device__ __forceinline__ void store_row(const Params& p, int row, int column,
                                          float (&sum)[kCount]) {
  if (column >= p.n) return;
  Out::Storage* c = c_row(p, row) + column;
  const RowTerms<Acc> terms = row_terms<Acc>(p, row);
  scale_sums(terms, sum);
  if (p.epilogue) add_terms<Out>(p, terms, column, kCount, c, 1, sum);
  store_columns<Out, kVec>(c, kCount, sum);
}

// The lane's sums of a piece of a window's part to C.
__device__ __forceinline__ void store_sums(const Params& p, int t, const int (&rows)[2],
                                           int first_column, const float (&sums)[kSpan][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows[half] < 0) continue;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float x[kSpan];
#pragma unroll
      for (int j = 0; j < kSpan; ++j) x[j] = sums[j][half * 2 + side];
      store_row<kSpan>(p, rows[half], first_column + (side * 4 + t) * kSpan, x);
    }
  }
}

// A part of a window's tiles, for the redo.
struct PartTiles {
  const Params& p;
  int part;

  static constexpr bool kGaps = true;
  struct Bits {
    u32 word[4];
    int value;  // the part's first packed one
  };
  __device__ __forceinline__ Bits bits(int tile) const {
    const auto words = [&](int at, int s) { return __ldg(p.bitmaps + i64(at) * kStack + s); };
    const uint4 mine = words(tile, part);
    Bits bits = {{mine.x, mine.y, mine.z, mine.w}, 0};
    if constexpr (kWeighted && !kDense) {
      bits.value = __ldg(p.pair_values + tile / 2);
#pragma unroll
      for (int s = 0; s < kStack; ++s) {
        if (tile % 2 == 1) bits.value += bit_count(words(tile - 1, s));
        if (s < part) bits.value += bit_count(words(tile, s));
      }
    }
    return bits;
  }
  __device__ __forceinline__ bool entry(const Bits& bits, int r, int k) const {
    const u32 left = r < 8 ? bits.word[0] : bits.word[1];
    const u32 right = r < 8 ? bits.word[2] : bits.word[3];
    return (k < 4 ? left : right) >> (r % 8 * 4 + k % 4) & 1;
  }
  __device__ __forceinline__ void elements(int tile, const Bits& bits, int lane,
                                           u32 (&of)[4]) const {
    if constexpr (kDense && kIsF32) {
      const i64 at = (i64(tile) * kStack + part) * 32 + lane;
      const uint4 word = __ldg(reinterpret_cast<const uint4*>(p.values) + at);
      of[0] = word.x, of[1] = word.y, of[2] = word.z, of[3] = word.w;
    } else if constexpr (kDense) {  // operands are of two tiles
      const i64 at = ((i64(tile / 2) * kStack + part) * 32 + lane) * 2 + tile % 2;
      const uint2 word = __ldg(reinterpret_cast<const uint2*>(p.values) + at);
      of[0] = word.x & 0xffff, of[2] = word.x >> 16, of[1] = word.y & 0xffff, of[3] = word.y >> 16;
    } else {
      using Value = typename WordOf<kSize>::Type;
      const Value* values = reinterpret_cast<const Value*>(p.values) + bits.value;
      BMatElements<E, kWeighted> found;
      const uint4 words = make_uint4(bits.word[0], bits.word[1], bits.word[2], bits.word[3]);
      found.decode(words, lane, [&](int n) { return u32(__ldg(values + n)); });
#pragma unroll
      for (int w = 0; w < 4; ++w) of[w] = found.of[w];
    }
  }
  __device__ __forceinline__ int2 columns(int tile, int t) const {
    return make_int2(column(tile, t), column(tile, t + 4));
  }
  __device__ __forceinline__ int column(int tile, int k) const {
    return __ldg(p.columns + i64(tile) * 8 + k);
  }
};

// ---- recomputation by a later launch (redo.cuh)

// A unit is a part of a window by kUnitPieces pieces of the slab; its flag has a bit for each.
constexpr int kUnitPieces = 2;

__device__ __forceinline__ int part_units(const Params& p) {
  return (p.slab_pieces + kUnitPieces - 1) / kUnitPieces;
}
__device__ __forceinline__ int unit_count(const Params& p) {
  return (p.rows + kWindowRows - 1) / kWindowRows * kStack * part_units(p);
}
__device__ __forceinline__ int* unit_flags(const Params& p) {
  return p.redo + (i64(blockIdx.z) * gridDim.y + blockIdx.y) * unit_count(p);
}
__device__ __forceinline__ int unit_of(const Params& p, int window, int part, int piece) {
  return (window * kStack + part) * part_units(p) + piece / kUnitPieces;
}
