// C = epilogue(A . B) for A in BitTCF tiles on tensor cores (mma.sync), Acc-SpMM's product.
//
// One warp works on one item and one slab of kCols columns of B. An item is a run of windows of
// 8 * kStack rows of A, or a piece of a long one; its tiles follow each other in memory, whatever
// window they belong to, so that a warp's stream of tiles never stops at the end of a window:
//
//   tiles      | w0 w0 w0 | w1 w1 | w3 w3 w3 w3 |        w2 has none
//   copies     in flight ->  ring of kStages tiles       eight rows of B each, 16-byte asynchronous
//                                                        copies, 128 bytes of a row by eight lanes;
//                                                        bitmaps and values of the tile beside them
//   products                 ring -> registers -> MMA    lane 4g + t takes rows 2t and 2t + 1
//   C                        stored where a window ends
//
// Why through shared memory: a lane of the MMA wants rows 2t and 2t + 1 of B, so that a load
// straight into registers has eight neighbouring lanes read the same columns of four rows: the same
// banks of L1, four times the wavefronts (92 % of L1's peak, and the time was theirs). The copies
// read 128 neighbouring bytes; rows in the ring are 16 bytes apart modulo 64, so that reading them
// back has no conflicts either. Registers are then free for sums.
//
// Exactness: zero bits multiply too, so that an Inf or NaN of B spoils rows of the window that do
// not refer to it. A warp whose sums are not all finite computes its part of C again, entry by
// entry (`exact`); checking costs one FMA a sum.
//
// Threads: kThreads per block, warps independent; grid.x = blocks of items, grid.y = slabs, the
// slow dimension, so that a slab of B stays in L2; grid.z = batch. Shared memory: kStages tiles of
// eight rows of kCols columns and 16 bytes, and a tile of A, for each warp. Windows that were cut
// are joined by a tree (tree.cuh): one launch, a fixed order of additions, no atomics on data.
//
// kStages 0: rows of B go straight to registers, one tile at a time; for odd widths and strides,
// whose rows are not aligned to the copies' 16 bytes.
//
// Assumes: B and C row-major with unit column stride; addresses, strides and n multiples of kVec
// elements, of 16 bytes with a ring (host check in kernels/bittcf.py); rows of B under 2^32 bytes
// and of C under 2^32 elements apart; fewer than 2^31 entries; float32 values rounded to TF32 by
// the host; arrivals all zero.
#include "bittcf.cuh"
#include "tree.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using M = Mma<E>;

constexpr u32 kWarp = 0xffffffffu;
constexpr int kSize = sizeof(E::Storage);
constexpr bool kIsF32 = kSize == 4;
constexpr int kPieceCols = 8 * kSpan;
constexpr int kCols = kPieces * kPieceCols;
constexpr int kPairs = kSpan / 2;          // MMAs of a piece
constexpr int kWords = kSpan * kSize / 4;  // of a lane's row of a piece

// The ring. Eight lanes copy 128 bytes of a row (fewer lanes a narrower row); a lane has rows
// lane / kSide and kLoadRows further on.
constexpr int kRowBytes = kCols * kSize;
constexpr int kSide = kRowBytes < 128 ? kRowBytes / 16 : 8;
constexpr int kLoadRows = 32 / kSide;
constexpr int kHeights = 8 / kLoadRows;
constexpr int kSegments = kRowBytes / (16 * kSide);
constexpr int kRowStride = kRowBytes + 16;
constexpr int kTileAt = 8 * kRowStride;  // the tile of A behind its rows of B
constexpr int kStageBytes = kTileAt + TileStore<E, kWeighted, kStack>::kBytes;
constexpr int kRingBytes = kStages * kStageBytes;

struct Params {
  const int4* items;  // first window, first tile, end, slot of a piece or -windows
  const int* parent_of_slot;
  const int4* nodes;
  int* arrivals;
  const E::Storage* b;
  Out::Storage* c;
  const int* row_window_offset;
  const int* tc_offset;
  const int* sparse_a_to_b;
  const u64* tc_local_bit;
  const E::Storage* values;  // packed; null for a pattern
  const int* order;          // row of A at each position; null: the position itself
  const i64* indptr;         // row pointers, for the mean
  const float* bias;         // null: none; [n]
  char* partials;            // [batch][slab][slot][Tally of 32 lanes]
  i64 b_row_bytes;
  i64 c_row_stride;
  i64 b_batch_stride;
  i64 c_batch_stride;
  double alpha;
  double beta;
  int item_count;
  int rows;
  int n;
  int slot_count;
  int node_count;
  int epilogue;  // 0: alpha 1, beta 0, no mean, bias or relu
  int mean;
  int relu;
};

static_assert(sizeof(Params) == kParamsBytes, "host and device disagree on the parameter struct");
static_assert(kThreads % 32 == 0, "a warp an item");
static_assert(kStack == 1 || kStack == 2, "windows of eight or sixteen rows");
static_assert(kSpan % kVec == 0 && kSpan * kSize <= 16, "whole accesses a lane");
static_assert(kSpan % 2 == 0 && kWords > 0, "an MMA takes two of a lane's columns");
static_assert(kRowBytes % 64 == 0, "rows of the ring lie 16 bytes apart modulo 64");

// A lane's sums: columns of its pieces for rows 2t and 2t + 1 of each eight rows of the window, as
// MMAs hold them.
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

// Where a lane stands: its group of eight lanes' columns, its pair of rows and tile columns.
struct Lane {
  int lane, g, t;
  int column;  // first of its columns
  int left;    // columns of B from there on; may be <= 0

  __device__ __forceinline__ explicit Lane(const Params& p)
      : lane(threadIdx.x & 31), g(lane >> 2), t(lane & 3) {
    column = blockIdx.y * kCols + g * kSpan;
    left = p.n - column;
  }
  // Whether the vector that begins `offset` columns on lies inside B. n is a multiple of kVec.
  __device__ __forceinline__ bool inside(int offset) const { return offset < left; }
};

using Store = TileStore<E, kWeighted, kStack>;
using Weights = TileWeights<E, kWeighted, kStack>;

__device__ __forceinline__ void multiply(const BRow<kWords> (&row)[2], const Weights& weights,
                                         int j, Tally& tally) {
#pragma unroll
  for (int q = 0; q < kPairs; ++q) M::multiply(row, q, weights.word, tally.sum[j * kPairs + q]);
}

// Row of C at place r of the window; -1 past the last row.
__device__ __forceinline__ int row_of(const Params& p, int window, int r) {
  const int position = window * (8 * kStack) + r;
  if (position >= p.rows) return -1;
  return p.order == nullptr ? position : __ldg(p.order + position);
}

template <typename Word>
__device__ __forceinline__ void store_c(Word* address, Word value) {
  if constexpr (kStreamC) {
    ptx::store_cs(address, value);
  } else {
    *address = value;
  }
}

// Scale, add what the caller wants added, and store a lane's columns of one piece and row of C.
__device__ __forceinline__ void finish(const Params& p, const Lane& me, int row, int offset,
                                       float (&sum)[kSpan]) {
  const int column = me.column + offset;
  Out::Storage* c = p.c + blockIdx.z * p.c_batch_stride + column;
  c += static_cast<u64>(static_cast<u32>(row)) * static_cast<u32>(p.c_row_stride);
  // Scaled always, if only by one: sums then need not lie in registers as the stores want them,
  // which would cost the loop over tiles a hundred moves (half of its instructions).
  float scale = float(p.alpha);
  if (p.mean) {
    const i64 entries = __ldg(p.indptr + row + 1) - __ldg(p.indptr + row);
    if (entries > 0) scale /= float(entries);
  }
#pragma unroll
  for (int v = 0; v < kSpan; ++v) sum[v] *= scale;
  if (p.epilogue) {
#pragma unroll
    for (int v = 0; v < kSpan; ++v) {
      if (me.inside(offset + v)) {
        if (p.beta != 0.0) sum[v] += float(p.beta) * Out::widen(c[v]);
        if (p.bias != nullptr) sum[v] += p.bias[column + v];
      }
      if (p.relu && sum[v] < 0.0f) sum[v] = 0.0f;
    }
  }
  constexpr int kMost = 16 / sizeof(Out::Storage);
  constexpr int kPart = kVec < kMost ? kVec : kMost;
#pragma unroll
  for (int v = 0; v < kSpan; v += kPart) {
    if (!me.inside(offset + v)) continue;
    Packed<Out, kPart> packed;
#pragma unroll
    for (int e = 0; e < kPart; ++e) packed.element[e] = Out::narrow(sum[v + e]);
    store_c(reinterpret_cast<typename Packed<Out, kPart>::Word*>(c + v), packed.word);
  }
}

// A value of B or of A as the tensor cores see it.
__device__ __forceinline__ float operand(E::Storage value) {
  if constexpr (kIsF32) {
    return __uint_as_float(round_tf32(__float_as_uint(value)));
  } else {
    return E::widen(value);
  }
}

// The lane's part of a window of C from A's entries alone, slowly: zeros of the tiles take no part.
__device__ __noinline__ void exact(const Params& p, int window) {
  const Lane me(p);
  const E::Storage* b = p.b + blockIdx.z * p.b_batch_stride + me.column;
  const i64 b_row_stride = p.b_row_bytes / i64(sizeof(E::Storage));
  const int begin = __ldg(p.row_window_offset + window);
  const int end = __ldg(p.row_window_offset + window + 1);
#pragma unroll 1
  for (int place = 0; place < 2 * kStack; ++place) {
    const int stack = place / 2, place_row = 2 * me.t + place % 2;
    const int row = row_of(p, window, 8 * stack + place_row);
    if (row < 0) continue;
#pragma unroll 1
    for (int offset = 0; offset < kCols; offset += kPieceCols) {
      float sum[kSpan] = {};
#pragma unroll 1
      for (int tile = begin; tile < end; ++tile) {
        const u64 bits = __ldg(p.tc_local_bit + i64(tile) * kStack + stack);
        const E::Storage* value = p.values;
        if (kWeighted) value += __ldg(p.tc_offset + i64(tile) * kStack + stack);
#pragma unroll 1
        for (int column = 0; column < 8; ++column) {
          const int bit = place_row * 8 + column;
          if (!(bits >> bit & 1)) continue;
          const i64 k = __ldg(p.sparse_a_to_b + i64(tile) * 8 + column);
          float weight = 1.0f;
          if constexpr (kWeighted) weight = E::widen(value[__popcll(bits & ~(~0ull << bit))]);
#pragma unroll
          for (int v = 0; v < kSpan; ++v) {
            if (me.inside(offset + v)) {
              sum[v] = fmaf(weight, operand(b[k * b_row_stride + offset + v]), sum[v]);
            }
          }
        }
      }
      finish(p, me, row, offset, sum);
    }
  }
}

// Store a window's sums if all are finite; else false, and C is as it was.
__device__ __forceinline__ bool store_window(const Params& p, const Lane& me, int window,
                                             Tally& tally) {
  float check = 0.0f;
  tally.each([&](int i, int s, int e) { check = fmaf(tally.sum[i][s][e], 0.0f, check); });
  if (__any_sync(kWarp, check != 0.0f)) return false;  // NaN is not 0 either
#pragma unroll
  for (int place = 0; place < 2 * kStack; ++place) {
    const int stack = place / 2, r = place % 2;
    const int row = row_of(p, window, 8 * stack + 2 * me.t + r);
    if (row < 0) continue;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      float sum[kSpan];
#pragma unroll
      for (int v = 0; v < kSpan; ++v) sum[v] = tally.at(j, stack, r, v);
      finish(p, me, row, j * kPieceCols, sum);
    }
  }
  return true;
}

// The windows of an item that are still to be stored; none for a piece of a cut window.
struct Windows {
  int window;
  int left;
  int stop;    // tile after the window's last
  int later;   // the same of the next window
  u32 spoilt;  // windows of the last 32 whose sums were not finite, the latest in bit 0

  __device__ __forceinline__ Windows(const Params& p, int4 item)
      : window(item.x), left(item.w < 0 ? -item.w : 0), spoilt(0) {
    stop = left > 0 ? __ldg(p.row_window_offset + window + 1) : -1;
    later = left > 1 ? __ldg(p.row_window_offset + window + 2) : -1;
  }
  // All tiles before `tile` are in `tally`: store the windows that end there.
  __device__ __forceinline__ void close(const Params& p, const Lane& me, int tile, Tally& tally) {
    while (left > 0 && stop == tile) {
      spoilt = spoilt << 1 | !store_window(p, me, window, tally);
      tally = {};
      ++window;
      --left;
      stop = later;
      if (left > 1) later = __ldg(p.row_window_offset + window + 2);
    }
  }
  // Compute what could not be stored; after the stream, because the call takes many registers.
  __device__ __forceinline__ void repair(const Params& p) const {
    for (u32 rest = spoilt; rest != 0; rest &= rest - 1) exact(p, window - __ffs(rest));
  }
};

// ---- rows of B through the ring

__device__ __forceinline__ char* ring_memory() {
  __shared__ uint4 s_ring[kThreads / 32 * kRingBytes / 16 + 1];
  return reinterpret_cast<char*>(s_ring) + threadIdx.x / 32 * kRingBytes;
}

// The rows of B that a lane copies of one tile.
struct Rows {
  u32 id[kHeights];
};

__device__ __forceinline__ Rows load_rows(const Params& p, const Lane& me, int tile) {
  Rows rows;
#pragma unroll
  for (int h = 0; h < kHeights; ++h) {
    rows.id[h] = __ldg(p.sparse_a_to_b + i64(tile) * 8 + h * kLoadRows + me.lane / kSide);
  }
  return rows;
}

// Start copying a tile's rows of the slab, b, to a stage of the ring; zeros past the last column.
template <bool kWhole>
__device__ __forceinline__ void copy_rows(const Params& p, const Lane& me, const char* b,
                                          const Rows& rows, char* stage) {
  const int place = me.lane % kSide * 16;
  char* to = stage + me.lane / kSide * kRowStride + place;
#pragma unroll
  for (int h = 0; h < kHeights; ++h) {
    const char* from = b + static_cast<u64>(rows.id[h]) * static_cast<u32>(p.b_row_bytes) + place;
#pragma unroll
    for (int j = 0; j < kSegments; ++j) {
      const int step = j * kSide * 16;
      const int column = blockIdx.y * kCols + (place + step) / kSize;
      const bool inside = kWhole || column < p.n;
      ptx::copy_async<kCacheB>(to + h * kLoadRows * kRowStride + step, inside ? from + step : b,
                               inside);
    }
  }
}

// Add the item's tiles times the slab of B, and store its windows.
template <bool kWhole>
__device__ __forceinline__ void stream(const Params& p, const Lane& me, int4 item, Windows& windows,
                                       Tally& tally) {
  const E::Storage* slab = p.b + blockIdx.z * p.b_batch_stride + blockIdx.y * kCols;
  const char* b = reinterpret_cast<const char*>(slab);
  const int end = item.z;
  const int last = max(end - 1, 0);  // stands in for tiles past the end, whose data is not used
  char* ring = ring_memory();
  Rows rows = {};
  int next = item.y, fill = 0;       // tile to copy, and where to
  int next_begin = 0, next_end = 0;  // its values
  const auto offset = [&](int tile) { return __ldg(p.tc_offset + i64(tile) * kStack); };
  const auto copy_next = [&] {
    if (next < end) {
      copy_rows<kWhole>(p, me, b, rows, ring + fill);
      Store::copy(p.tc_local_bit, p.values, next, next_begin, next_end, ring + fill + kTileAt,
                  me.lane);
      fill = fill + kStageBytes < kRingBytes ? fill + kStageBytes : 0;
      ++next;
      next_begin = next_end;
      rows = load_rows(p, me, min(next, last));
      if constexpr (kWeighted) next_end = offset(min(next, last) + 1);
    }
    ptx::copy_commit();
  };
  int begin = 0;  // where the values of the tile at work begin
  if (next < end) {
    rows = load_rows(p, me, next);
    if constexpr (kWeighted) {
      begin = next_begin = offset(next);
      next_end = offset(next + 1);
    }
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) copy_next();
  }
  int read = 0;  // in the ring
#pragma unroll 1
  for (int tile = item.y;; ++tile) {
    if (tile == windows.stop) windows.close(p, me, tile, tally);
    if (tile >= end) break;
    __syncwarp();  // all lanes have read the stage that is filled now
    copy_next();
    ptx::copy_wait<kStages - 1>();
    __syncwarp();  // this tile's copies of all lanes are there
    const char* stage = ring + read;
    Weights weights;
    begin += Store::read(stage + kTileAt, begin, me.g, me.t, weights);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      BRow<kWords> row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const char* at =
            stage + (2 * me.t + r) * kRowStride + (me.g * kSpan + j * kPieceCols) * kSize;
        using Word = typename WordOf<4 * kWords>::Type;
        *reinterpret_cast<Word*>(row[r].word) = *reinterpret_cast<const Word*>(at);
      }
      multiply(row, weights, j, tally);
    }
    read = read + kStageBytes < kRingBytes ? read + kStageBytes : 0;
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

__device__ __forceinline__ void walk(const Params& p, const Lane& me, int4 item, Windows& windows,
                                     Tally& tally) {
  const E::Storage* b = p.b + blockIdx.z * p.b_batch_stride + me.column;
  const i64 b_row_stride = p.b_row_bytes / kSize;
#pragma unroll 1
  for (int tile = item.y;; ++tile) {
    if (tile == windows.stop) windows.close(p, me, tile, tally);
    if (tile >= item.z) break;
    TileBits<kStack> bits;
#pragma unroll
    for (int s = 0; s < kStack; ++s) {
      bits.half[s] = __ldg(reinterpret_cast<const uint2*>(p.tc_local_bit) + i64(tile) * kStack + s);
    }
    const int first = kWeighted ? __ldg(p.tc_offset + i64(tile) * kStack) : 0;
    using Value = typename WordOf<kSize>::Type;
    const Value* values = reinterpret_cast<const Value*>(p.values) + first;
    Weights weights;
    weights.decode(bits, me.g, me.t, [&](int n) { return u32(__ldg(values + n)); });
    const int2 id = __ldg(reinterpret_cast<const int2*>(p.sparse_a_to_b) + i64(tile) * 4 + me.t);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const BRow<kWords> row[2] = {load_row(me, b + id.x * b_row_stride, j * kPieceCols),
                                   load_row(me, b + id.y * b_row_stride, j * kPieceCols)};
      multiply(row, weights, j, tally);
    }
  }
}

__device__ __forceinline__ Tree tree_of(const Params& p) {
  const i64 layer = i64(blockIdx.z) * gridDim.y + blockIdx.y;
  return {p.parent_of_slot, p.nodes, p.arrivals + layer * p.node_count,
          p.partials + layer * p.slot_count * 32 * i64(sizeof(Tally))};
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_bittcf(const __grid_constant__ Params p) {
  ptx::wait_previous();
  const int index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (index >= p.item_count) return;
  const int4 item = __ldg(p.items + index);
  const Lane me(p);
  Tally tally = {};
  Windows windows(p, item);
  if constexpr (kStages == 0) {
    walk(p, me, item, windows, tally);
  } else if ((blockIdx.y + 1) * kCols <= p.n) {
    stream<true>(p, me, item, windows, tally);  // most slabs lie inside B: no checks
  } else {
    stream<false>(p, me, item, windows, tally);
  }
  if (item.w >= 0) {
    const auto add = [](Tally& mine, const Tally& other) {
      mine.each([&](int i, int s, int e) { mine.sum[i][s][e] += other.sum[i][s][e]; });
    };
    if (!climb<32>(tree_of(p), item.w, me.lane, tally, add)) return;
    windows.spoilt = !store_window(p, me, windows.window++, tally);
  }
  windows.repair(p);
}
