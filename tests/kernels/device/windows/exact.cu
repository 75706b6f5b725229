// exact_strips.cuh: sixteen rows of a window of `tiles` tiles, at most kPieces times 128 bytes of
// columns, and whether the sums are finite.
#include "windows/exact_strips.cuh"

using E = ELEMENT;

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

struct Tiles {
  const Params& p;

  static constexpr bool kGaps = true;
  struct Bits {
    int first;  // cell
  };
  __device__ Bits bits(int tile) const { return {tile * 128}; }
  __device__ bool entry(const Bits& bits, int r, int k) const {
    return p.cells[bits.first + r * 8 + k] != 0;
  }
  __device__ void elements(int, const Bits& bits, int lane, u32 (&of)[4]) const {
    for (int w = 0; w < 4; ++w) {
      of[w] = p.raw[bits.first + (lane / 4 + w % 2 * 8) * 8 + lane % 4 + w / 2 * 4];
    }
  }
  __device__ int2 columns(int tile, int t) const {
    return make_int2(column(tile, t), column(tile, t + 4));
  }
  __device__ int column(int tile, int k) const { return p.columns[tile * 8 + k]; }
};

extern "C" __global__ void exact(const __grid_constant__ Params p) {
  ExactStrip<E, kPieces> strip(p.b, p.b_row_bytes, p.n);
  strip.template add<kBatch>(Tiles{p}, 0, p.tiles);
  FiniteCheck<kChains> check;
  constexpr int kSpan = ExactStrip<E, kPieces>::kSpan;
  for (int i = 0; i < kPieces * kSpan * 4; ++i) {
    const int j = i / 4 % kSpan, place = i % 4, row = strip.g + place / 2 * 8;
    const int piece = i / 4 / kSpan, chunk = piece * 8 + place % 2 * 4 + strip.t;
    const float sum = strip.sum[piece][j][place];
    check.add(sum, i);
    if (chunk * kSpan + j < p.n) p.out[row * p.n + chunk * kSpan + j] = sum;
  }
  p.failed[threadIdx.x] = check.failed();
}
