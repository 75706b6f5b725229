// Tiles of A (bittcf.cuh) times rows of B, one of which is not finite, on Tensor Cores. Stored
// zeros of a tile take no part:
//
//   multiply   finite numbers, with zeros in place of the rest
//   add        entries of the tile's columns with other numbers, in A or in B; bitmaps tell entries
//              from zeros
//
// A tile without such a number costs little more than in a product of finite ones. Sums of rows of
// A without one have the bits of that product.
#pragma once

#include "mma/bittcf.cuh"
#include "mma/exact.cuh"

// The lane's part of one tile, as in mma.cuh. All lanes of a warp call its functions.
template <typename E, bool kWeighted, int kStack>
struct ExactTile {
  using Weights = TileWeights<E, kWeighted, kStack>;
  TileBits<kStack> bits;
  Weights all, finite;
  int lane;
  u32 own;  // bits 0 and 1: columns 2t and 2t + 1 have a number that is not finite, of the lane's

  __device__ __forceinline__ ExactTile(const TileBits<kStack>& bits, const Weights& weights,
                                       int lane)
      : bits(bits), all(weights), finite(weights), lane(lane), own(0) {
#pragma unroll
    for (int s = 0; s < kStack; ++s) {
#pragma unroll
      for (int w = 0; w < Mma<E>::kWeights; ++w) own |= take_finite<E>(finite.word[s][w]) << w;
    }
  }

  // sum[q] += columns 2q and 2q + 1 of the lane's rows of B times the tile, finite numbers only.
  template <int kWords>
  __device__ __forceinline__ void multiply(BRow<kWords> (&row)[2], float (*sum)[kStack][4]) {
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) {
      if (take_finite<E>(row[i / kWords].word[i % kWords]) != 0) own |= 1 << i / kWords;
    }
#pragma unroll
    for (int q = 0; q < kWords / Mma<E>::kWeights; ++q) {
      Mma<E>::multiply(row, q, finite.word, sum[q]);
    }
  }

  // Columns of the tile, a bit each, of which multiply() has omitted something; the same for all
  // lanes.
  __device__ __forceinline__ u32 rest() const {
    return __reduce_or_sync(kWarp, own << 2 * (lane & 3));
  }

  // The part that multiply() has omitted of column k; `row` is that column's row of B, at the
  // lane's sums.
  template <int kWords>
  __device__ __forceinline__ void add(int k, const BRow<kWords>& row,
                                      float (*sum)[kStack][4]) const {
#pragma unroll
    for (int i = 0; i < 2 * kStack; ++i) {
      const int s = i / 2, r = 2 * (lane & 3) + i % 2;
      const float weight = weight_of(s, r, k);
      const u32 half = r < 4 ? bits.half[s].x : bits.half[s].y;
      const bool entry = half >> ((r & 3) * 8 + k) & 1;
#pragma unroll
      for (int v = 0; v < 4 * kWords / int(sizeof(typename E::Storage)); ++v) {
        const float x = number(row, v);
        float& to = sum[v / 2][s][v % 2 * 2 + i % 2];
        if (entry && !(isfinite(x) && isfinite(weight))) to = fmaf(weight, x, to);
      }
    }
  }

 private:
  // Lane 4r + k / 2 has it.
  __device__ __forceinline__ float weight_of(int s, int r, int k) const {
    if constexpr (Mma<E>::kWeights == 2) {
      const u32 mine = k & 1 ? all.word[s][1] : all.word[s][0];
      return __uint_as_float(__shfl_sync(kWarp, mine, 4 * r + k / 2));
    } else {
      const u32 both = __shfl_sync(kWarp, all.word[s][0], 4 * r + k / 2);
      return E::widen(static_cast<typename E::Storage>(both >> (k & 1) * 16));
    }
  }
  // Element v of a row of B as the Tensor Cores see it.
  template <int kWords>
  __device__ __forceinline__ static float number(const BRow<kWords>& row, int v) {
    if constexpr (Mma<E>::kWeights == 2) {
      return __uint_as_float(round_tf32(row.word[v]));
    } else {
      return E::widen(static_cast<typename E::Storage>(row.word[v / 2] >> v % 2 * 16));
    }
  }
};
