// C = epilogue(A . B) for A in BitTCF tiles on Tensor Cores (mma.sync), Acc-SpMM's product.
//
// One warp works on one item and one slab of kCols columns of B. An item is a run of windows of 8 *
// kStack rows of A, or a piece of a long one; its tiles are contiguous in memory across windows, so
// a warp's stream of tiles never stops at the end of a window:
//
//   tiles      | w0 w0 w0 | w1 w1 | w3 w3 w3 w3 |        w2 has none
//   copies     in flight ->  ring of kStages tiles       eight rows of B each, 16-byte asynchronous
//                                                        copies, 128 bytes of a row by eight lanes;
//                                                        bitmaps and values of the tile beside them
//   products                 ring -> registers -> MMA    lane 4g + t takes rows 2t and 2t + 1
//   C                        stored at the end of a window
//
// copy_ring.cuh explains why rows of B go through shared memory. Non-finite sums are recomputed
// only from A's entries (exact_tiles.cuh, windows.cuh), those of a piece before it is joined. The
// kernel owns the rows of C in `order`, or positions 0 to `rows` without it.
//
// Threads: kThreads per block, warps independent; grid.x = blocks of items, grid.y = slabs, the
// slow dimension, so that a slab of B stays in L2; grid.z = batch. Shared memory: kStages tiles of
// eight rows of kCols columns and 16 bytes, and a tile of A, for each warp. A tree joins windows
// that were cut (tree.cuh): one launch, a fixed order of additions, no atomics on data.
//
// kStages 0: rows of B go straight to registers, one tile at a time; for odd widths and strides,
// whose rows are not aligned to the copies' 16 bytes.
//
// Assumes: B and C row-major with unit column stride; addresses, strides and n multiples of kVec
// elements, of 16 bytes with a ring (host check in kernels/bittcf.py); rows of B under 2^32 bytes
// and of C under 2^32 elements apart; fewer than 2^31 entries; float32 values rounded to TF32 by
// the host; arrivals all zero.
#include "epilogue/epilogue.cuh"
#include "mma/bittcf.cuh"
#include "pipeline/copy_ring.cuh"
#include "rows/tree.cuh"
#include "windows/exact_tiles.cuh"
#include "windows/windows.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;
using M = Mma<E>;

constexpr int kSize = sizeof(E::Storage);
constexpr int kPieceCols = 8 * kSpan;
constexpr int kCols = kPieces * kPieceCols;
constexpr int kPairs = kSpan / 2;          // MMAs of a piece
constexpr int kWords = kSpan * kSize / 4;  // of a lane's row of a piece

using Store = TileStore<E, kWeighted, kStack>;
using Weights = TileWeights<E, kWeighted, kStack>;
using Stage = RowStage<E, kCols, Store::kBytes>;
using Exact = ExactTile<E, kWeighted, kStack>;

// Declared in kernels/bittcf.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");
static_assert(!kAheadA || kStages == 1, "B is not ahead where A alone is");
static_assert(kThreads % 32 == 0, "a warp an item");
static_assert(kStack == 1 || kStack == 2, "windows of eight or sixteen rows");
static_assert(kSpan % kVec == 0 && kSpan * kSize <= 16, "whole accesses a lane");
static_assert(kSpan % 2 == 0 && kWords > 0, "an MMA takes two of a lane's columns");

// A lane's sums in the layout of MMAs: columns of its pieces for rows 2t and 2t + 1 of each eight
// rows of the window.
struct Tally {
  float sum[kPieces * kPairs][kStack][4];

  __device__ __forceinline__ float at(int piece, int stack, int row, int column) const {
    return sum[piece * kPairs + column / 2][stack][(column & 1) * 2 + row];
  }
  template <typename Use>
  __device__ __forceinline__ void each(const Use& use) {
#pragma unroll
    for (int i = 0; i < kPieces * kPairs * kStack * 4; ++i) {
      use(i / 4 / kStack, i / 4 % kStack, i % 4);
    }
  }
};

// A lane's position: its group of eight lanes' columns, its pair of rows and tile columns.
struct Lane {
  int lane, g, t;
  int column;  // first of its columns
  int left;    // columns of B from there on; may be <= 0

  __device__ __forceinline__ explicit Lane(const Params& p)
      : lane(threadIdx.x & 31), g(lane >> 2), t(lane & 3) {
    column = blockIdx.y * kCols + g * kSpan;
    left = p.n - column;
  }
  // Whether the vector that begins `offset` columns on is inside B. n is a multiple of kVec.
  __device__ __forceinline__ bool inside(int offset) const { return offset < left; }
};

__device__ __forceinline__ void multiply(const BRow<kWords> (&row)[2], const Weights& weights,
                                         int j, Tally& tally) {
#pragma unroll
  for (int q = 0; q < kPairs; ++q) M::multiply(row, q, weights.word, tally.sum[j * kPairs + q]);
}

// Row of C at place r of the window; -1 past the last row.
__device__ __forceinline__ int window_row(const Params& p, int window, int r) {
  return row_of(p, window * (8 * kStack) + r);
}

// Epilogue and store of a lane's columns of one piece and row of C.
__device__ __forceinline__ void store_row(const Params& p, const Lane& me, int row, int offset,
                                          float (&sum)[kSpan]) {
  const int column = me.column + offset, inside = me.left - offset;
  Out::Storage* c = c_row(p, row) + column;
  // Always scaled, even by one: sums then need not be in the registers of the stores, which would
  // cost the loop over tiles a hundred moves (half of its instructions).
  const RowTerms<Acc> terms = row_terms<Acc>(p, row);
  scale_sums(terms, sum);
  if (p.epilogue) add_terms<Out>(p, terms, column, inside, c, 1, sum);
  store_columns<Out, kVec, kStreamC>(c, inside, sum);
}

// Whether all sums of the warp are finite.
__device__ __forceinline__ bool all_finite(Tally& tally) {
  FiniteCheck<> check;
  tally.each([&](int i, int s, int e) { check.add(tally.sum[i][s][e]); });
  return !__any_sync(kWarp, check.failed());
}

__device__ __forceinline__ void store_sums(const Params& p, const Lane& me, int window,
                                           const Tally& tally) {
#pragma unroll
  for (int place = 0; place < 2 * kStack; ++place) {
    const int stack = place / 2, r = place % 2;
    const int row = window_row(p, window, 8 * stack + 2 * me.t + r);
    if (row < 0) continue;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      float sum[kSpan];
#pragma unroll
      for (int v = 0; v < kSpan; ++v) sum[v] = tally.at(j, stack, r, v);
      store_row(p, me, row, j * kPieceCols, sum);
    }
  }
}

// Store a window's sums if all are finite; otherwise false, and C is unchanged. Clears them.
__device__ __forceinline__ bool store_window(const Params& p, const Lane& me, int window,
                                             Tally& tally) {
  const bool stored = all_finite(tally);
  if (stored) store_sums(p, me, window, tally);
  tally = {};
  return stored;
}

// ---- rows of B through the ring

__device__ __forceinline__ char* ring_memory() {
  constexpr int kBytes = kStages * Stage::kBytes + (kAheadA ? 2 * Store::kBytes : 0);
  __shared__ uint4 s_ring[kThreads / 32 * kBytes / 16 + 1];
  return reinterpret_cast<char*>(s_ring) + threadIdx.x / 32 * kBytes;
}

// Products of a stage of B and a decoded tile.
__device__ __forceinline__ void multiply_stage(const char* stage, const Lane& me,
                                               const Weights& weights, Tally& tally) {
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    BRow<kWords> row[2];
    Stage::read(stage, me.t, me.g * kSpan + j * kPieceCols, row);
    multiply(row, weights, j, tally);
  }
}

// Add the item's tiles times the slab of B, and store its windows.
template <bool kWhole>
__device__ __forceinline__ void stream(const Params& p, const Lane& me, int4 item, Windows& windows,
                                       Tally& tally) {
  const E::Storage* slab = p.b + blockIdx.z * p.b_batch_stride + blockIdx.y * kCols;
  const char* b = reinterpret_cast<const char*>(slab);
  const int end = item.z;
  const auto store = [&](int window) { return store_window(p, me, window, tally); };
  const int last = max(end - 1, 0);  // replaces tiles past the end, whose data is not used
  char* ring = ring_memory();
  Stage::Rows rows = {};
  RingPlace<kStages, Stage::kBytes> fill, read;
  int next = item.y;                 // tile to copy
  int next_begin = 0, next_end = 0;  // its values
  const auto offset = [&](int tile) { return __ldg(p.tc_offset + i64(tile) * kStack); };
  const auto load_rows = [&](int tile) {
    return Stage::load_rows(p.sparse_a_to_b + i64(tile) * 8, me.lane);
  };
  const auto copy_next = [&] {
    if (next < end) {
      char* stage = ring + fill.at;
      Stage::copy<kWhole, kCacheB>(b, static_cast<u32>(p.b_row_bytes), rows,
                                   p.n - int(blockIdx.y) * kCols, stage, me.lane);
      Store::copy(p.tc_local_bit, p.values, next, next_begin, next_end, stage + Stage::kTileAt,
                  me.lane);
      fill.next();
      ++next;
      next_begin = next_end;
      rows = load_rows(min(next, last));
      if constexpr (kWeighted) next_end = offset(min(next, last) + 1);
    }
    ptx::copy_commit();
  };
  int begin = 0;  // first value of the current tile
  if (next < end) {
    rows = load_rows(next);
    if constexpr (kWeighted) {
      begin = next_begin = offset(next);
      next_end = offset(next + 1);
    }
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) copy_next();
  }
#pragma unroll 1
  for (int tile = item.y;; ++tile) {
    if (tile == windows.stop) windows.close(p.row_window_offset, tile, store);
    if (tile >= end) break;
    __syncwarp();  // all lanes have read the stage that is filled now
    copy_next();
    ptx::copy_wait<kStages - 1>();
    __syncwarp();  // this tile's copies of all lanes are there
    const char* stage = ring + read.at;
    Weights weights;
    begin += Store::read(stage + Stage::kTileAt, begin, me.g, me.t, weights);
    multiply_stage(stage, me, weights, tally);
    read.next();
  }
}

// DTC-SpMM's pipeline, the base of the paper's ablation: the next tile of A is in flight while this
// one is multiplied, its rows of B are not.
template <bool kWhole>
__device__ __forceinline__ void stream_ahead_a(const Params& p, const Lane& me, int4 item,
                                               Windows& windows, Tally& tally) {
  const E::Storage* slab = p.b + blockIdx.z * p.b_batch_stride + blockIdx.y * kCols;
  const char* b = reinterpret_cast<const char*>(slab);
  char* stage = ring_memory();
  char* tiles = stage + Stage::kBytes;  // two of them
  Stage::Rows rows = {};
  int begin = 0, next_begin = 0;
  const auto copy_tile = [&](int tile) {
    if (tile < item.z) {
      int next_end = 0;
      if constexpr (kWeighted) next_end = __ldg(p.tc_offset + i64(tile + 1) * kStack);
      Store::copy(p.tc_local_bit, p.values, tile, next_begin, next_end,
                  tiles + (tile & 1) * Store::kBytes, me.lane);
      next_begin = next_end;
      rows = Stage::load_rows(p.sparse_a_to_b + i64(tile) * 8, me.lane);
    }
    ptx::copy_commit();
  };
  if (kWeighted && item.y < item.z) begin = next_begin = __ldg(p.tc_offset + i64(item.y) * kStack);
  copy_tile(item.y);
#pragma unroll 1
  for (int tile = item.y;; ++tile) {
    if (tile == windows.stop) {
      windows.close(p.row_window_offset, tile,
                    [&](int window) { return store_window(p, me, window, tally); });
    }
    if (tile >= item.z) break;
    __syncwarp();  // all lanes have read the stage
    Stage::copy<kWhole, kCacheB>(b, static_cast<u32>(p.b_row_bytes), rows,
                                 p.n - int(blockIdx.y) * kCols, stage, me.lane);
    ptx::copy_commit();
    copy_tile(tile + 1);
    ptx::copy_wait<1>();  // this tile's copies, not the next one's
    __syncwarp();
    Weights weights;
    begin += Store::read(tiles + (tile & 1) * Store::kBytes, begin, me.g, me.t, weights);
    multiply_stage(stage, me, weights, tally);
  }
}

// ---- rows of B straight to registers, for odd widths

// The lane's kSpan columns of one row of B at `address`; zeros past the last column.
__device__ __forceinline__ BRow<kWords> load_row(const Lane& me, const E::Storage* address,
                                                 int offset) {
  union {
    BRow<kWords> row;
    E::Storage element[kSpan];
  } loaded;
#pragma unroll
  for (int v = 0; v < kSpan; v += kVec) {
    Packed<E, kVec> packed;
    packed.word = {};
    if (me.inside(offset + v)) packed = load_vector<E, kVec>(address + offset + v);
#pragma unroll
    for (int e = 0; e < kVec; ++e) loaded.element[v + e] = packed.element[e];
  }
  return loaded.row;
}

__device__ __forceinline__ TileBits<kStack> load_weights(const Params& p, const Lane& me, int tile,
                                                         Weights& weights) {
  TileBits<kStack> bits;
#pragma unroll
  for (int s = 0; s < kStack; ++s) {
    bits.half[s] = __ldg(reinterpret_cast<const uint2*>(p.tc_local_bit) + i64(tile) * kStack + s);
  }
  const int first = kWeighted ? __ldg(p.tc_offset + i64(tile) * kStack) : 0;
  using Value = typename WordOf<kSize>::Type;
  const Value* values = reinterpret_cast<const Value*>(p.values) + first;
  weights.decode(bits, me.g, me.t, [&](int n) { return u32(__ldg(values + n)); });
  return bits;
}

__device__ __forceinline__ void walk(const Params& p, const Lane& me, int4 item, Windows& windows,
                                     Tally& tally) {
  const E::Storage* b = p.b + blockIdx.z * p.b_batch_stride + me.column;
  const i64 b_row_stride = p.b_row_bytes / kSize;
  const auto store = [&](int window) { return store_window(p, me, window, tally); };
#pragma unroll 1
  for (int tile = item.y;; ++tile) {
    if (tile == windows.stop) windows.close(p.row_window_offset, tile, store);
    if (tile >= item.z) break;
    Weights weights;
    load_weights(p, me, tile, weights);
    const int2 id = __ldg(reinterpret_cast<const int2*>(p.sparse_a_to_b) + i64(tile) * 4 + me.t);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const BRow<kWords> row[2] = {load_row(me, b + id.x * b_row_stride, j * kPieceCols),
                                   load_row(me, b + id.y * b_row_stride, j * kPieceCols)};
      multiply(row, weights, j, tally);
    }
  }
}

// ---- non-finite sums

// A lane's sums of one piece.
struct PieceTally {
  float sum[kPairs][kStack][4];
};

// Piece j of the sums of tiles `begin` to `end`, without the stored zeros of tiles. Piece by piece,
// and straight to registers: with all sums at once, or a ring, this took fewer clocks, but the loop
// over tiles above lost a third of its speed in 16 bits (bcsstk32, N = 512: 82 -> 115 us).
__device__ __forceinline__ void exact_piece(const Params& p, const Lane& me, int begin, int end,
                                            int j, PieceTally& tally) {
  tally = {};
  const E::Storage* b = p.b + blockIdx.z * p.b_batch_stride + me.column;
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    Weights weights;
    const TileBits<kStack> bits = load_weights(p, me, tile, weights);
    Exact exact(bits, weights, me.lane);
    const auto read = [&](int k) {
      const u64 id = __ldg(p.sparse_a_to_b + i64(tile) * 8 + k);
      return load_row(me, b + id * (p.b_row_bytes / kSize), j * kPieceCols);
    };
    BRow<kWords> row[2] = {read(2 * me.t), read(2 * me.t + 1)};
    exact.multiply(row, tally.sum);
#pragma unroll 1
    for (u32 rest = exact.rest(); rest != 0; rest &= rest - 1) {
      const int k = __ffs(rest) - 1;
      exact.add(k, read(k), tally.sum);
    }
  }
}

// A window whose sums were not all finite. Neither this nor piece_again() is inlined, to leave
// registers to the loop over tiles.
__device__ __noinline__ void store_again(const Params& p, int window) {
  const Lane me(p);
  const int begin = __ldg(p.row_window_offset + window);
  const int end = __ldg(p.row_window_offset + window + 1);
#pragma unroll 1
  for (int j = 0; j < kPieces; ++j) {
    PieceTally tally;
    exact_piece(p, me, begin, end, j, tally);
#pragma unroll
    for (int place = 0; place < 2 * kStack; ++place) {
      const int stack = place / 2, r = place % 2;
      const int row = window_row(p, window, 8 * stack + 2 * me.t + r);
      if (row < 0) continue;
      float sum[kSpan];
#pragma unroll
      for (int v = 0; v < kSpan; ++v) sum[v] = tally.sum[v / 2][stack][v % 2 * 2 + r];
      store_row(p, me, row, j * kPieceCols, sum);
    }
  }
}

__device__ __forceinline__ int item_index() {
  return blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
}

// Piece j of the sums of the warp's part of a window, which were not all finite.
__device__ __noinline__ void piece_again(const Params& p, int j, PieceTally& sums) {
  const int4 item = __ldg(p.items + item_index());
  PieceTally tally;
  exact_piece(p, Lane(p), item.y, item.z, j, tally);
  sums = tally;
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_bittcf(const __grid_constant__ Params p) {
  ptx::wait_previous();
  const int index = item_index();
  if (index >= p.item_count) return;
  const int4 item = __ldg(p.items + index);
  const Lane me(p);
  Tally tally = {};
  Windows windows(p.row_window_offset, item);
  if constexpr (kStages == 0) {
    walk(p, me, item, windows, tally);
  } else if constexpr (kAheadA) {
    if ((blockIdx.y + 1) * kCols <= p.n) {
      stream_ahead_a<true>(p, me, item, windows, tally);
    } else {
      stream_ahead_a<false>(p, me, item, windows, tally);
    }
  } else if ((blockIdx.y + 1) * kCols <= p.n) {
    stream<true>(p, me, item, windows, tally);  // most slabs are inside B: no checks
  } else {
    stream<false>(p, me, item, windows, tally);
  }
  if (item.w >= 0) {
    if (!all_finite(tally)) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        PieceTally again;
        piece_again(p, j, again);
#pragma unroll
        for (int i = 0; i < kPairs * kStack * 4; ++i) {
          const int q = i / 4 / kStack, s = i / 4 % kStack;
          tally.sum[j * kPairs + q][s][i % 4] = again.sum[q][s][i % 4];
        }
      }
    }
    const auto add = [](Tally& mine, const Tally& other) {
      mine.each([&](int i, int s, int e) { mine.sum[i][s][e] += other.sum[i][s][e]; });
    };
    const i64 layer = i64(blockIdx.z) * gridDim.y + blockIdx.y;
    const Tree tree = tree_of(p, layer, 32 * sizeof(Tally));
    if (!climb<32>(tree, item.w, me.lane, tally, add)) return;
    store_sums(p, me, windows.window, tally);
    return;
  }
  windows.repair([&](int window) { store_again(p, window); });
}
