// copy_ring.cuh: a warp copies `tiles` tiles of eight rows of B, kStages - 1 ahead, and writes what
// it reads back.
#include "pipeline/copy_ring.cuh"

using E = ELEMENT;
using Stage = RowStage<E, kCols, 16>;
constexpr int kSpan = 16 / sizeof(E::Storage);
static_assert(kCols % (8 * kSpan) == 0, "whole pieces");

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void copy_ring(const __grid_constant__ Params p) {
  __shared__ uint4 s_ring[kStages * Stage::kBytes / 16];
  char* ring = reinterpret_cast<char*>(s_ring);
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  RingPlace<kStages, Stage::kBytes> fill, read;
  int next = 0;
  const auto copy_next = [&] {
    if (next < p.tiles) {
      const Stage::Rows rows = Stage::load_rows(p.ids + next * 8, lane);
      Stage::copy<kWhole, true>(reinterpret_cast<const char*>(p.b), p.b_row_bytes, rows, p.n,
                                ring + fill.at, lane);
      fill.next();
      ++next;
    }
    ptx::copy_commit();
  };
  for (int s = 0; s < kStages - 1; ++s) copy_next();
  for (int tile = 0; tile < p.tiles; ++tile) {
    __syncwarp();
    copy_next();
    ptx::copy_wait<kStages - 1>();
    __syncwarp();
    for (int first = 0; first < kCols; first += 8 * kSpan) {
      BRow<4> row[2];
      Stage::read(ring + read.at, t, first + g * kSpan, row);
      for (int r = 0; r < 2; ++r) {
        E::Storage* to = p.out + (tile * 8 + 2 * t + r) * kCols + first + g * kSpan;
        for (int w = 0; w < 4; ++w) reinterpret_cast<u32*>(to)[w] = row[r].word[w];
      }
    }
    read.next();
  }
}
