// Windows of sixteen rows on Tensor Cores and rows on CUDA cores, in one launch: shared by
// RSH-SpMM's and BRP-SpMM's kernels. Both kinds of work own their rows of C; with kAtomic, windows
// do not. Included after element types, constants, parameters, and Weights, A's part of a step.
//
// fragment_items.cuh describes the work on windows, row_items.cuh the work on rows. Blocks of
// kThreads threads come in two kinds; grid.x counts those of windows first, because their items are
// longer. grid.y = groups of 2^slab_shift slabs of kCols columns, the slow dimension, so that a
// group of B stays in L2; grid.z = batch.
//
//   shared item        the first blocks: item block >> slab_shift for all warps, slab the low bits
//   block of windows   warp w: item (block * warps + w) >> slab_shift, slab the low bits: slabs of
//                      one item are neighbours, and share A's part of it in L1
//   block of rows      row_slabs neighbouring blocks cover the group's columns
//
// Shared memory: kStages steps of a window for each warp (fragment_items.cuh); blocks of rows use
// none. The schedules fix the order of all additions; no atomics on data without kAtomic.
//
// Assumes: B and C row-major with unit column stride; rows of B aligned to 16 bytes, n a multiple
// of 16 bytes of B, rows of C aligned to as many elements (engines/tiles/hybrid_runner.py); rows
// of B under 2^32 bytes and of C under 2^32 elements apart; fewer than 2^31 entries; weights of
// float32 rounded to TF32 by the host; arrivals all zero.
#pragma once

#include "windows/fragment_items.cuh"

namespace rows {

constexpr int kVec = kRowVec;
constexpr int kLanes = kRowLanes;
constexpr int kTimes = kRowTimes;
constexpr int kUnroll = kRowUnroll;
constexpr int kPartial = kUnroll < 4 ? kUnroll : 4;
constexpr int kRows = 1;
constexpr bool kExtremum = false, kArgs = false, kRepair = false;
constexpr int kParts = 1;
constexpr bool kShared = false, kHeads = false, kScaled = false, kDirect = false;
using V = E;

}  // namespace rows

#include "rows/row_items.cuh"

// Not inlined: both kinds of work would share one register allocation, at the windows' expense.
__device__ __noinline__ void block_of_rows(const Params& p, int block, int slab) {
  rows::block_of_items(p, block, slab);
}

__device__ __forceinline__ void hybrid_block(const Params& p) {
  const int block = blockIdx.x;
  const int shared_blocks = p.shared_item_count << p.slab_shift;
  if (block < p.window_blocks) {
    const bool shared = block < shared_blocks;
    const int unit = shared ? block : (block - shared_blocks) * (kThreads / 32) + threadIdx.x / 32;
    const int item = unit >> p.slab_shift;
    const int slab = (blockIdx.y << p.slab_shift) + (unit - (item << p.slab_shift));
    if constexpr (kAtomic) {
      fragments::piece_of_window(p, item, slab);
    } else if (shared) {
      fragments::item_of_windows<true>(p, item, slab);
    } else {
      fragments::item_of_windows<false>(p, p.shared_item_count + item, slab);
    }
  } else {
    const int number = block - p.window_blocks;
    const int row_block = number / static_cast<u32>(p.row_slabs);
    const int slab = blockIdx.y * p.row_slabs + (number - row_block * p.row_slabs);
    block_of_rows(p, row_block, slab);
  }
}
