// Items of windows on Tensor Cores: the work of a warp of the hybrid kernels. Included after
// element types, constants, parameters and Weights.
//
// One warp works on one item and kCols columns of B. An item is a run of windows of sixteen rows of
// A. All warps of a block share an item that is a long window, or a piece of a very long one: each
// takes a part of its steps (step.cuh). Weights defines A's part of a step: RS-Tile stores it in
// the register layout of the instruction, zeros included (stored_fragments.cuh), BRP as slots that
// lanes search (fixed_slots.cuh). With kDirect, BRP's groups of one entry a column take no ring
// (direct_groups.cuh), except to recompute non-finite sums.
//
//   steps      | w0 w0 w0 | w1 w1 | w3 w3 w3 w3 |        w2 has none
//   copies     in flight ->  ring of kStages steps       kStepRows rows of B, kCols columns each,
//                                                        and A's part, in asynchronous copies
//   products                 ring -> registers -> MMA
//   C                        stored at the end of a window
//
// Lane 4g + t. 16-bit types: ldmatrix transposes rows of B as it loads them; the lane's sums are
// columns 2t and 2t + 1 of each eight, of rows g and g + 8. float32: the lane reads columns 4g to
// 4g + 3 of each 32 in rows t and t + 4 of B, and takes them as n = g of four instructions, so its
// sums are columns 8t to 8t + 7 of each 32.
//
// A step of 128 columns of 16 bits takes about 130 instructions with stored fragments. With bitmaps
// and packed values it took 250, and the product 1.6 times as long (docs/explanation/notes/rsh.md).
//
// Zeros of a step are multiplied too. Non-finite sums are recomputed: Tensor Cores multiply finite
// numbers, and entries of A with other operands, which Weights tells from zeros, are added. Entries
// outside tiles (window_rest.cuh) are added before a window is stored, or a part joined. A tree
// joins windows that were cut (tree.cuh), shared memory joins parts of a shared item. With kAtomic
// an item is one piece of one window, and is added to C (window_adds.cuh). C's rows are those in
// `order`, or positions 0 to `rows` without it.
#pragma once

#include "mma/exact.cuh"
#include "pipeline/copy_ring.cuh"
#include "rows/tree.cuh"
#include "windows/direct_groups.cuh"
#include "windows/window_adds.cuh"
#include "windows/window_rest.cuh"
#include "windows/window_sums.cuh"
#include "windows/windows.cuh"

namespace fragments {

constexpr int kRowBytes = kCols * kSize;
// ldmatrix reads eight rows at once, 16 bytes each; vector loads read four, 32 bytes of each.
constexpr int kRowStride = kRowBytes + (kHalf ? 16 : 32);
constexpr int kMostSide = kHalf ? 8 : 16;
constexpr int kSide = kRowBytes / 16 < kMostSide ? kRowBytes / 16 : kMostSide;  // lanes along a row
constexpr int kSegments = kRowBytes / (16 * kSide);  // copies of a lane along a row
constexpr int kHeights = kStepRows * kSide / 32;     // rows of B that a lane copies its part of
constexpr int kWeightsAt = kStepRows * kRowStride;   // A's part of a stage, behind B's
constexpr int kStageBytes = kWeightsAt + (Weights::kBytes + 15) / 16 * 16;

static_assert(kRowBytes % 64 == 0 && kSide <= 32 && kHeights >= 1, "whole rows of lanes");
static_assert(kHalf || kRowStride % 128 == 32, "rows t of four lanes lie in different banks");
static_assert(kThreads % 32 == 0, "a warp an item");

// The rows of B that a lane copies of one step.
struct Ids {
  u32 id[kHeights];
};

__device__ __forceinline__ Ids load_ids(const int* columns, int tile, int lane) {
  union {
    typename WordOf<4 * kHeights>::Type word;
    Ids ids;
  } loaded;
  const int* from = columns + i64(tile) * 8 + lane / kSide * kHeights;
  loaded.word = ptx::load_nc(reinterpret_cast<const decltype(loaded.word)*>(from));
  return loaded.ids;
}

// The lane's address for ldmatrix, for a step's sixteen rows and the first sixteen columns.
__device__ __forceinline__ const char* matrix_row(const char* stage, const Place& at) {
  return stage + (at.lane & 15) * kRowStride + (at.lane >> 4) * 16;
}

// A stage's rows of B times its part of A.
__device__ __forceinline__ void multiply(const char* stage, const Place& at, Tally& tally) {
  const uint4 a = Weights::load(stage + kWeightsAt, at.g, at.t);
  if constexpr (kHalf) {
    const char* row = matrix_row(stage, at);
    u32 b[kGroups / 2][4];
#pragma unroll
    for (int j = 0; j < kGroups / 2; ++j) ptx::load_matrix_transposed(row + j * 32, b[j]);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      multiply_16<Mma<E>::kBfloat>(a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], tally.sum[j]);
    }
  } else {
    const char* row = stage + at.t * kRowStride + at.g * 16;
#pragma unroll
    for (int j = 0; j < kGroups / 4; ++j) {
      const uint4 low = *reinterpret_cast<const uint4*>(row + j * 128);
      const uint4 high = *reinterpret_cast<const uint4*>(row + j * 128 + 4 * kRowStride);
      multiply_tf32(a, low.x, high.x, tally.sum[4 * j]);
      multiply_tf32(a, low.y, high.y, tally.sum[4 * j + 1]);
      multiply_tf32(a, low.z, high.z, tally.sum[4 * j + 2]);
      multiply_tf32(a, low.w, high.w, tally.sum[4 * j + 3]);
    }
  }
}

// Whether all sums of the warp are finite.
__device__ __forceinline__ bool all_finite(Tally& tally) {
  FiniteCheck<4> check;
  int i = 0;
  tally.each([&](float sum) { check.add(sum, i++); });
  return !__any_sync(kWarp, check.failed());
}

__device__ __forceinline__ void store(const Params& p, int slab, int window, Tally& tally) {
  if (p.beta != 0.0) {
    const Tally sums = tally;
    store_with_terms(p, slab, window, sums);
  } else {
    const Place at(p, slab);
    if (p.epilogue) apply_terms(p, at, window, tally);
    store_sums<false>(p, at, window, tally);
  }
}

// Store a window's sums if all are finite; otherwise false, and C is unchanged. Clears them.
__device__ __forceinline__ bool store_window(const Params& p, int slab, int window, Tally& tally) {
  const bool stored = all_finite(tally);
  if (stored) {
    if constexpr (kRest) add_rest(p, slab, window, tally);
    store(p, slab, window, tally);
  }
  tally = {};
  return stored;
}

__device__ __forceinline__ char* ring_memory(int warp = threadIdx.x / 32) {
  __shared__ uint4 s_ring[kThreads / 32 * kStages * kStageBytes / 16];
  return reinterpret_cast<char*>(s_ring) + warp * (kStages * kStageBytes);
}

// Brings the steps of tiles `next` to `end` into the warp's ring, one after the other.
struct Feed {
  static constexpr int kTiles = kDepth;

  char* ring;
  const char* b;  // the lane's first column in row 0
  int along;      // bytes from the slab's first column to it
  int height;     // the lane's first row of a step
  int left;       // columns of B from it on; may be <= 0
  int next, end;
  Ids ids;
  RingPlace<kStages, kStageBytes> fill, read;

  __device__ __forceinline__ Feed(const Params& p, const Place& at, int begin, int end_)
      : ring(ring_memory()),
        along(at.lane % kSide * 16),
        height(at.lane / kSide * kHeights),
        left(at.left - along / kSize),
        next(begin),
        end(end_),
        ids{} {
    b = reinterpret_cast<const char*>(p.b + blockIdx.z * p.b_batch_stride + at.column) +
        (left > 0 ? along : 0);
    if (next < end) ids = load_ids(p.tile_columns, next, at.lane);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) copy_next(p, at);
  }

  __device__ __forceinline__ void copy_next(const Params& p, const Place& at) {
    if (next < end) {
      char* stage = ring + fill.at;
#pragma unroll
      for (int h = 0; h < kHeights; ++h) {
        const char* from = b + static_cast<u64>(ids.id[h]) * static_cast<u32>(p.b_row_bytes);
#pragma unroll
        for (int i = 0; i < kSegments; ++i) {
          constexpr int kStep = 16 * kSide;
          const bool inside = i * kStep / kSize < left;
          ptx::copy_async<true>(stage + (height + h) * kRowStride + along + i * kStep,
                                inside ? from + i * kStep : from, inside);
        }
      }
      Weights::copy(p, next, at.lane, stage + kWeightsAt);
      fill.next();
      next += kDepth;
      if (next < end) ids = load_ids(p.tile_columns, next, at.lane);
    }
    ptx::copy_commit();
  }

  // The next step, once all lanes' copies of it are there.
  __device__ __forceinline__ const char* step(const Params& p, const Place& at) {
    __syncwarp();  // all lanes have read the stage that is filled now
    copy_next(p, at);
    ptx::copy_wait<kStages - 1>();
    __syncwarp();
    return ring + read.at;
  }

  __device__ __forceinline__ void multiply_next(const Params& p, const Place& at, Tally& tally) {
    multiply(step(p, at), at, tally);
    read.next();
  }
};

// What brings and multiplies the steps of finite sums.
template <bool kStraight>
struct StepsOf {
  using Type = Feed;
};
template <>
struct StepsOf<true> {
  using Type = DirectGroups;
};
using Steps = StepsOf<kDirect>::Type;

// multiply() of only the finite numbers. Returns the step's columns of A, a bit each, that have
// others, in A or in the slab's part of B; the same for all lanes.
__device__ __forceinline__ u32 multiply_finite(const char* stage, const Place& at, Tally& tally) {
  uint4 a = Weights::load(stage + kWeightsAt, at.g, at.t);
  u32 low = take_finite<E>(a.x) | take_finite<E>(a.y),
      high = take_finite<E>(a.z) | take_finite<E>(a.w);
  if constexpr (kHalf) {
    const char* row = matrix_row(stage, at);
#pragma unroll
    for (int j = 0; j < kGroups; j += 2) {
      u32 b[4];
      ptx::load_matrix_transposed(row + j * 16, b);
      low |= take_finite<E>(b[0]) | take_finite<E>(b[2]);
      high |= take_finite<E>(b[1]) | take_finite<E>(b[3]);
      multiply_16<Mma<E>::kBfloat>(a, b[0], b[1], tally.sum[j]);
      multiply_16<Mma<E>::kBfloat>(a, b[2], b[3], tally.sum[j + 1]);
    }
    return __reduce_or_sync(kWarp, low << 2 * at.t | high << (2 * at.t + 8));
  } else {
    const char* row = stage + at.t * kRowStride + at.g * 16;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const char* place = row + j / 4 * 128 + j % 4 * 4;
      u32 b0 = *reinterpret_cast<const u32*>(place);
      u32 b1 = *reinterpret_cast<const u32*>(place + 4 * kRowStride);
      low |= take_finite<E>(b0);
      high |= take_finite<E>(b1);
      multiply_tf32(a, b0, b1, tally.sum[j]);
    }
    return __reduce_or_sync(kWarp, low << at.t | high << (at.t + 4));
  }
}

// The part that multiply_finite omitted of column k of a step: entries of A there, which a format
// tells from zeros, if they or B are not finite.
__device__ __forceinline__ void multiply_rest(const Params& p, const char* stage, int tile, int k,
                                              const Place& at, Tally& tally) {
  float weight[2];
  bool entry[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = at.g + 8 * half;
    entry[half] = Weights::entry(p, stage + kWeightsAt, tile, r, k, weight[half]);
  }
  const auto* b = reinterpret_cast<const E::Storage*>(stage + k * kRowStride);
#pragma unroll
  for (int i = 0; i < kGroups * 2; ++i) {
    const float x = operand<E>(b[column_of(at, i / 2, i % 2)]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = tally.sum[i / 2][2 * half + i % 2];
      if (entry[half] && !(isfinite(x) && isfinite(weight[half]))) {
        sum = fmaf(weight[half], x, sum);
      }
    }
  }
}

// Recompute the sums of tiles `begin` to `end`, without the stored zeros of a step: Tensor Cores
// multiply finite numbers, and only columns of A with other operands are added entry by entry.
// Adding all entries one by one took 19 to 54 times as long as a product of finite numbers
// (pkustk04 and gupta2, TF32 and float16, N = 128, one row in a hundred of B with NaN).
__device__ __noinline__ void exact_sums(const Params& p, int slab, int begin, int end,
                                        Tally& sums) {
  const Place at(p, slab);
  Tally tally = {};
  __syncwarp();  // all lanes have read the ring's last step
  Feed feed(p, at, begin, end);
#pragma unroll 1
  for (int tile = begin; tile < end; tile += kDepth) {
    const char* stage = feed.step(p, at);
    u32 rest = multiply_finite(stage, at, tally);
#pragma unroll 1
    for (; rest != 0; rest &= rest - 1) {
      multiply_rest(p, stage, tile, __ffs(rest) - 1, at, tally);
    }
    feed.read.next();
  }
  sums = tally;
}

// A window whose sums were not all finite.
__device__ __noinline__ void store_again(const Params& p, int slab, int window) {
  Tally tally;
  exact_sums(p, slab, __ldg(p.row_window_offset + window), __ldg(p.row_window_offset + window + 1),
             tally);
  if constexpr (kRest) add_rest(p, slab, window, tally);
  store(p, slab, window, tally);
}

__device__ __forceinline__ void add_sums(Tally& mine, const Tally& other) {
#pragma unroll
  for (int i = 0; i < kGroups * 4; ++i) mine.sum[i / 4][i % 4] += other.sum[i / 4][i % 4];
}

// A piece of a cut window is done: the last to arrive adds all pieces up and stores the window.
__device__ __noinline__ void join_piece(const Params& p, int slab, int window, int slot,
                                        Tally& tally) {
  const Place at(p, slab);
  const i64 layer = i64(blockIdx.z) * p.window_slabs + slab;
  const Tree tree = {p.window_parent_of_slot, p.window_nodes,
                     p.window_arrivals + layer * p.window_node_count,
                     p.window_partials + layer * p.window_slot_count * 32 * sizeof(Tally)};
  if (climb<32>(tree, slot, at.lane, tally, add_sums)) store(p, slab, window, tally);
}

// The warp's part of an item that all warps of the block share, as an item.
__device__ __forceinline__ int4 part_of(int4 item) {
  constexpr int kWarps = kThreads / 32;
  const int steps = (item.z - item.y) / Steps::kTiles, warp = threadIdx.x / 32;
  item.z = item.y + (warp + 1) * steps / kWarps * Steps::kTiles;
  item.y += warp * steps / kWarps * Steps::kTiles;
  item.w = 0;  // nothing to store before all parts are added
  return item;
}

// The warps of the block have each done a part of one window, or of a piece of it: the first adds
// their sums in the warps' order, through the ring, which is free now, and delivers them. Each
// makes its own sums exact first.
__device__ __noinline__ void join_warps(const Params& p, int slab, int index, Tally& tally) {
  using Words = TreeWords<Tally>;
  static_assert(sizeof(Tally) * 32 <= kStages * kStageBytes, "sums fit into a warp's ring");
  const int lane = ptx::lane_now(), warp = threadIdx.x / 32;
  const int4 item = __ldg(p.window_items + index);
  const int4 part = part_of(item);
  if (!all_finite(tally)) exact_sums(p, slab, part.y, part.z, tally);
  if constexpr (kRest) add_rest(p, slab, item.x, part.y, part.z, tally);
  __syncwarp();  // all lanes have read the last step
  if (warp > 0) {
    Words mine;
    mine.partial = tally;
    auto* place = reinterpret_cast<typename Words::Word*>(ring_memory()) + lane;
#pragma unroll
    for (int w = 0; w < Words::kWords; ++w) place[w * 32] = mine.word[w];
  }
  __syncthreads();
  if (warp > 0) return;
#pragma unroll 1
  for (int other = 1; other < kThreads / 32; ++other) {
    Words theirs;
    const auto* place = reinterpret_cast<const typename Words::Word*>(ring_memory(other)) + lane;
#pragma unroll
    for (int w = 0; w < Words::kWords; ++w) theirs.word[w] = place[w * 32];
    add_sums(tally, theirs.partial);
  }
  if (item.w >= 0) {
    join_piece(p, slab, item.x, item.w, tally);
  } else {
    store(p, slab, item.x, tally);
  }
}

// All of item `index` in one slab, or the warp's part of an item that the block's warps share; the
// same for all lanes of a warp.
template <bool kShared>
__device__ __forceinline__ void item_of_windows(const Params& p, int index, int slab) {
  const Place at(p, slab);
  if (index >= p.window_item_count || at.left <= 0) return;
  int4 item = __ldg(p.window_items + index);
  if constexpr (kShared) item = part_of(item);
  const int end = item.z;
  Tally tally = {};
  Windows windows(p.row_window_offset, item);
  Steps steps(p, at, item.y, end);
#pragma unroll 1
  for (int tile = item.y;; tile += Steps::kTiles) {
    if (tile == windows.stop) {
      windows.close(p.row_window_offset, tile,
                    [&](int window) { return store_window(p, slab, window, tally); });
    }
    if (tile >= end) break;
    steps.multiply_next(p, at, tally);
  }
  if constexpr (kShared) {
    Tally sums = tally;
    join_warps(p, slab, index, sums);
  } else {
    windows.repair([&](int window) { store_again(p, slab, window); });
  }
}

// All of item `index` in one slab: tiles of one window, made exact and added to C with their share
// of the entries outside tiles; the same for all lanes of a warp.
__device__ __forceinline__ void piece_of_window(const Params& p, int index, int slab) {
  const Place at(p, slab);
  if (index >= p.window_item_count || at.left <= 0) return;
  const int4 item = __ldg(p.window_items + index);
  Tally tally = {};
  Steps steps(p, at, item.y, item.z);
#pragma unroll 1
  for (int tile = item.y; tile < item.z; tile += Steps::kTiles) steps.multiply_next(p, at, tally);
  if (!all_finite(tally)) {
    Tally sums;  // through local memory, only here
    exact_sums(p, slab, item.y, item.z, sums);
    tally = sums;
  }
  if constexpr (kRest) add_rest(p, slab, item.x, item.y, item.z, tally);
  add_sums_to_c(p, slab, item.x, tally);
}

}  // namespace fragments
