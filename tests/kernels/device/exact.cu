// exact_strips.cuh: sixteen rows of a window of `tiles` tiles, at most 128 bytes of columns, and
// whether the sums are finite.
#include "exact_strips.cuh"

using E = ELEMENT;

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void exact(const __grid_constant__ Params p) {
  ExactStrip<E> strip;
  for (int tile = 0; tile < p.tiles; ++tile) {
    const auto entry = [&](int r, int k) { return p.cells[(tile * 16 + r) * 8 + k] != 0; };
    const auto column_at = [&](int k) { return p.columns[tile * 8 + k]; };
    u32 of[4];
    for (int w = 0; w < 4; ++w) {
      const int r = strip.g + w % 2 * 8, k = strip.t + w / 2 * 4;
      of[w] = p.raw[(tile * 16 + r) * 8 + k];
    }
    strip.add(of, entry, column_at, reinterpret_cast<const char*>(p.b), p.b_row_bytes, p.n);
  }
  FiniteCheck<kChains> check;
  for (int i = 0; i < strip.kSpan * 4; ++i) {
    const int j = i / 4, place = i % 4, row = strip.g + place / 2 * 8;
    const int column = (place % 2 * 4 + strip.t) * strip.kSpan + j;
    check.add(strip.sum[j][place], i);
    if (column < p.n) p.out[row * p.n + column] = strip.sum[j][place];
  }
  p.failed[threadIdx.x] = check.failed();
}
