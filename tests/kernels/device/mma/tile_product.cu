// bittcf.cuh and mma.cuh: a warp decodes one tile, from memory or through TileStore, and multiplies
// it with eight rows of B.
#include "mma/bittcf.cuh"

using E = ELEMENT;
using Store = TileStore<E, kWeighted, kStack>;
using Weights = TileWeights<E, kWeighted, kStack>;
constexpr int kSpan = 16 / sizeof(E::Storage);
constexpr int kWords = 4;

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void tile_product(const __grid_constant__ Params p) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  Weights weights;
  int count;
  if constexpr (kStored) {
    __shared__ uint4 s_tile[Store::kBytes / 16];
    char* stage = reinterpret_cast<char*>(s_tile);
    Store::copy(p.bitmaps, p.values, p.tile, p.begin, p.end, stage, lane);
    ptx::copy_commit();
    ptx::copy_wait<0>();
    __syncwarp();
    count = Store::read(stage, p.begin, g, t, weights);
  } else {
    TileBits<kStack> bits;
    for (int s = 0; s < kStack; ++s) {
      bits.half[s] = reinterpret_cast<const uint2*>(p.bitmaps)[p.tile * kStack + s];
    }
    using Value = WordOf<sizeof(E::Storage)>::Type;
    const Value* values = reinterpret_cast<const Value*>(p.values) + p.begin;
    count = weights.decode(bits, g, t, [&](int n) { return u32(values[n]); });
  }
  if (lane == 0) p.count[0] = count;
  for (int s = 0; s < kStack; ++s) {
    for (int w = 0; w < Mma<E>::kWeights; ++w) {
      p.weights[(lane * kStack + s) * Mma<E>::kWeights + w] = weights.word[s][w];
    }
  }
  // Columns g * kSpan on of rows 2t and 2t + 1; sums of the same columns for rows 2t and 2t + 1.
  BRow<kWords> row[2];
  for (int r = 0; r < 2; ++r) {
    const E::Storage* from = p.b + (2 * t + r) * 8 * kSpan + g * kSpan;
    for (int w = 0; w < kWords; ++w) row[r].word[w] = reinterpret_cast<const u32*>(from)[w];
  }
  float sum[kSpan / 2][kStack][4] = {};
  for (int q = 0; q < kSpan / 2; ++q) Mma<E>::multiply(row, q, weights.word, sum[q]);
  for (int s = 0; s < kStack; ++s) {
    for (int q = 0; q < kSpan / 2; ++q) {
      for (int e = 0; e < 4; ++e) {
        p.c[(8 * s + 2 * t + e % 2) * 8 * kSpan + g * kSpan + 2 * q + e / 2] = sum[q][s][e];
      }
    }
  }
}
