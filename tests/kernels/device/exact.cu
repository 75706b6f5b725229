// exact.cuh: row threadIdx.x / 4 of a window of `tiles` tiles, columns threadIdx.x % 4 * 2 on, and
// whether the sums are finite.
#include "exact.cuh"

using E = ELEMENT;

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void exact(const __grid_constant__ Params p) {
  const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
  const auto tile_at = [&](int tile) {
    return TileEntries<E, kWeighted>{p.bitmaps[tile],
                                     kWeighted ? p.values + p.first_value[tile] : nullptr};
  };
  const auto column_at = [&](int tile, int k) { return p.columns[tile * 8 + k]; };
  float sum[2] = {};
  add_entries<E>(row, 0, p.tiles, tile_at, column_at, reinterpret_cast<const char*>(p.b + column),
                 p.b_row_bytes, p.n - column, sum);
  FiniteCheck<kChains> check;
  for (int v = 0; v < 2; ++v) {
    check.add(sum[v], v);
    if (column + v < p.n) p.out[row * p.n + column + v] = sum[v];
  }
  p.failed[threadIdx.x] = check.failed();
}
