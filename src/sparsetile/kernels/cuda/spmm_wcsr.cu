// C = epilogue(A . B) for A in WCSR windows on WGMMA, AsyncSparse's product for irregular patterns
// (sm_90a).
//
// A block of threads makes kHeight rows (a window of A, or a piece of a long one) times kCols
// columns of C. It goes through the window's tiles, kStepTiles a step: eight columns of A each, and
// the eight rows of B behind them.
//
//   step s      16-byte loads of the rows of B of step s + 1, into registers
//               copies of A's tiles of step s + 1 and of column ids of step s + 2, asynchronous
//               A's tiles of step s: bits and values -> operand registers -> WGMMA, asynchronous
//               rows of B of step s + 1 -> shared memory, the stage that step s does not read
//
// B goes through registers because TF32 is rounded there (the Tensor Cores would truncate), and
// because WGMMA reads a float32 operand from shared memory K-major only: a lane loads four
// neighbouring columns of four rows and stores them as four times four rows of a column, which is a
// transposition that costs nothing. Which column of B is which n is free: columns 4l + j of 32 are
// n = 8j + l, so that eight lanes store 128 neighbouring bytes, and so that a lane's sums are eight
// neighbouring columns of C. Types of 16 bits lie N-major, as they come, in the 128-byte swizzle.
// A's tiles are operands in registers: a warp decodes the bits of its own sixteen rows
// (bittcf.cuh), no tile is ever expanded in memory.
//
// For TF32, k = t stands for a tile's column 2t and k = t + 4 for 2t + 1, as in mma.cuh; column ids
// are stored in that order.
//
// Exactness: zero bits multiply too. A warp whose sums are not all finite computes its part of C
// again from A's entries (`exact`). Windows that were cut are joined by a tree (tree.cuh), warp by
// warp: one launch, a fixed order of additions, no atomics on data.
//
// Grid: x = items, y = slabs of kCols columns, the slow dimension; z = batch. Shared memory:
// dynamic, two stages of B, two of A's tiles, four of column ids.
//
// Assumes: B and C row-major; addresses and row strides multiples of 16 bytes, n of 16 bytes of
// either (the host copies otherwise); rows of B under 2^32 bytes, fewer than 2^31 entries; float32
// values rounded to TF32 by the host; arrivals all zero.
#include "bittcf.cuh"
#include "tree.cuh"
#include "wgmma_regs.cuh"

using E = ELEMENT;
using Out = OUTPUT;

constexpr u32 kWarp = 0xffffffffu;
constexpr int kSize = sizeof(E::Storage);
constexpr bool kIsF32 = kSize == 4;
constexpr int kWarps = kHeight / 16;  // a strip of sixteen rows each
constexpr int kSums = kCols / 2;
constexpr int kStore = 16 / sizeof(Out::Storage);  // columns of C a store
constexpr int kOctets = kThreads / 8;  // eight lanes read 128 bytes of a row of B

using Store = TileStore<E, kWeighted, 2>;
using Weights = TileWeights<E, kWeighted, 2>;

constexpr int kStepRows = 8 * kStepTiles;
constexpr int kStageBytes = kStepRows * kCols * kSize;
constexpr int kLoads = kStageBytes / 16 / kThreads;
constexpr int kStripBytes = kStepTiles * Store::kBytes;  // of a warp
constexpr int kTilesAt = 2 * kStageBytes;
constexpr int kHeadsAt = kTilesAt + 2 * kWarps * kStripBytes;
constexpr int kOffsets = kStepTiles * kWarps + 1;  // of values: each warp's part of each tile
constexpr int kHeadInts = (kStepRows + kOffsets + 3) / 4 * 4;
constexpr int kHeads = 4;

struct Params {
  const int4* items;  // window, first tile, end, slot of a piece or -1
  const int* parent_of_slot;
  const int4* nodes;
  int* arrivals;
  const E::Storage* b;
  Out::Storage* c;
  const int* window_row_ptr;
  const int* strip_value_ptr;  // first value of sixteen rows of a tile [tiles * kWarps + 1]
  const int* columns;          // of a tile, in the order 0 2 4 6 1 3 5 7
  const u64* bitmaps;
  const E::Storage* values;  // packed; null for a pattern
  const int* order;          // row of A at each position; null: the position itself
  const i64* indptr;         // row pointers, for the mean
  const float* bias;         // null: none; [n]
  char* partials;            // [batch][slab][warp][slot][sums of 32 lanes]
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
static_assert(kThreads == 2 * kHeight && kHeight % 64 == 0, "a warpgroup for each 64 rows");
static_assert(kSharedBytes == kHeadsAt + kHeads * kHeadInts * 4 + 1024, "host and device disagree");
static_assert(kIsF32 || kStepTiles % 2 == 0, "two tiles an instruction");

// Where a thread stands.
struct Lane {
  int warp, lane, g, t;
  __device__ __forceinline__ Lane()
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4) {}
};

struct Memory {
  char* stages;
  char* tiles;
  int* heads;

  __device__ __forceinline__ Memory() {
    extern __shared__ char s_dynamic[];
    const u32 address = wg::shared_address(s_dynamic);
    stages = s_dynamic + ((1024 - address % 1024) % 1024);
    tiles = stages + kTilesAt;
    heads = reinterpret_cast<int*>(stages + kHeadsAt);
  }
  __device__ __forceinline__ char* stage(int step) const {
    return stages + step % 2 * kStageBytes;
  }
  __device__ __forceinline__ int* head(int step) const {
    return heads + step % kHeads * kHeadInts;
  }
  __device__ __forceinline__ char* tile(int step, int warp, int i) const {
    return tiles + (step % 2 * kWarps + warp) * kStripBytes + i * Store::kBytes;
  }
};

// Place of a tile's column among its staged column ids.
__device__ __forceinline__ int staged(int column) { return column % 2 * 4 + column / 2; }

// ---- rows of B

// What a thread moves of a step: kLoads times 16 bytes.
struct Rows {
  uint4 word[kLoads];
};

// Column of the slab and row of the step of a thread's i-th load. Eight lanes read side by side.
// float32: blocks of four rows, those of a staged chunk of ids.
constexpr int kChunks = 2 * kStepTiles;
__device__ __forceinline__ int load_column(int i) {
  const int octet = threadIdx.x / 8, l = threadIdx.x % 8;
  if constexpr (kIsF32) {
    return (octet / kChunks + i / 4 * (kOctets / kChunks)) * 32 + l * 4;
  } else {
    return (octet + i * kOctets) / kStepRows * 64 + l * 8;
  }
}

__device__ __forceinline__ Rows load_rows(const Params& p, const char* b, const int* head) {
  Rows rows;
  const int octet = threadIdx.x / 8;
  int id[kIsF32 ? 4 : kLoads];
  if constexpr (kIsF32) {
    *reinterpret_cast<int4*>(id) = *reinterpret_cast<const int4*>(head + octet % kChunks * 4);
  } else {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = (octet + i * kOctets) % kStepRows;
      id[i] = head[row / 8 * 8 + staged(row % 8)];
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = load_column(i);
    const char* from = b + static_cast<u64>(static_cast<u32>(id[kIsF32 ? i % 4 : i])) *
                               static_cast<u32>(p.b_row_bytes);
    rows.word[i] = make_uint4(0, 0, 0, 0);
    if (int(blockIdx.y * kCols) + column < p.n) {
      rows.word[i] = ptx::load_nc(reinterpret_cast<const uint4*>(from + column * kSize));
    }
  }
  return rows;
}

__device__ __forceinline__ void store_rows(const Rows& rows, char* stage) {
  const int octet = threadIdx.x / 8, l = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if constexpr (kIsF32) {
      // Of block i / 4: column j = i % 4 of each lane, its four rows side by side.
      const int chunk = octet % kChunks, block = i / 4, j = i % 4;
      const int group = octet / kChunks + block * (kOctets / kChunks);
      char* to = stage + chunk * (kCols * 16) + (group * 4 + j) * 128 + l * 16;
      uint4 column;
      const auto element = [&](int r) {
        const uint4& word = rows.word[block * 4 + r];
        return round_tf32(j == 0 ? word.x : j == 1 ? word.y : j == 2 ? word.z : word.w);
      };
      column = make_uint4(element(0), element(1), element(2), element(3));
      *reinterpret_cast<uint4*>(to) = column;
    } else {
      const int unit = octet + i * kOctets, row = unit % kStepRows, box = unit / kStepRows;
      char* to = stage + (box * kStepRows + row) * 128 + (l ^ row % 8) * 16;
      *reinterpret_cast<uint4*>(to) = rows.word[i];
    }
  }
}

// ---- tiles of A

// Start copying column ids and value offsets of the step's tiles, from `first` on. Past the item's
// last tile the last is taken again: its rows of B are multiplied by zeros.
__device__ __forceinline__ void copy_head(const Params& p, int first, int end, int* head) {
  const int thread = threadIdx.x;
  if (thread < 2 * kStepTiles) {
    const int tile = min(first + thread / 2, end - 1);
    ptx::copy_async_small<16>(head + thread * 4, p.columns + i64(tile) * 8 + thread % 2 * 4);
  }
  if constexpr (kWeighted) {
    const int i = thread - 32;
    if (i >= 0 && i < kOffsets) {
      const i64 place = min(i64(first) * kWarps + i, i64(end) * kWarps);
      ptx::copy_async_small<4>(head + kStepRows + i, p.strip_value_ptr + place);
    }
  }
}

__device__ __forceinline__ void copy_tiles(const Params& p, const Lane& me, const Memory& memory,
                                           int step, int first, int end) {
  const int* offsets = memory.head(step) + kStepRows + me.warp;
#pragma unroll
  for (int i = 0; i < kStepTiles; ++i) {
    if (first + i < end) {
      const int begin = kWeighted ? offsets[i * kWarps] : 0;
      const int stop = kWeighted ? offsets[i * kWarps + 1] : 0;
      Store::copy(p.bitmaps, p.values, (first + i) * kWarps + me.warp, begin, stop,
                  memory.tile(step, me.warp, i), me.lane);
    }
  }
}

__device__ __forceinline__ void multiply(const Lane& me, const Memory& memory, int step, int first,
                                         int end, float (&sum)[kSums]) {
  Weights weights[kStepTiles];
  const int* offsets = memory.head(step) + kStepRows + me.warp;
#pragma unroll
  for (int i = 0; i < kStepTiles; ++i) {
    weights[i] = {};
    if (first + i < end) {
      const int begin = kWeighted && !kIsF32 ? offsets[i * kWarps] : 0;
      Store::read(memory.tile(step, me.warp, i), begin, me.g, me.t, weights[i]);
    }
  }
  const char* stage = memory.stage(step);
  wg::fence();
  if constexpr (kIsF32) {
#pragma unroll
    for (int i = 0; i < kStepTiles; ++i) {
      const u32 a[4] = {weights[i].word[0][0], weights[i].word[1][0], weights[i].word[0][1],
                        weights[i].word[1][1]};
      WgmmaRegisters<E, kCols>::multiply(
          sum, a, wg::plain_descriptor(stage + i * kCols * 32, kCols * 16, 128));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kStepTiles; i += 2) {
      const u32 a[4] = {weights[i].word[0][0], weights[i].word[1][0], weights[i + 1].word[0][0],
                        weights[i + 1].word[1][0]};
      WgmmaRegisters<E, kCols>::multiply(
          sum, a, wg::descriptor(stage + i * 1024, kStepRows * 128, 1024));
    }
  }
  wg::commit();
}

__device__ __forceinline__ void stream(const Params& p, const Lane& me, const Memory& memory,
                                       int begin, int end, float (&sum)[kSums]) {
  const E::Storage* slab = p.b + blockIdx.z * p.b_batch_stride + i64(blockIdx.y) * kCols;
  const char* b = reinterpret_cast<const char*>(slab);
  const auto everyone = [] {
    ptx::copy_wait<0>();
    wg::fence_shared();
    __syncthreads();
  };
  copy_head(p, begin, end, memory.head(0));
  copy_head(p, begin + kStepTiles, end, memory.head(1));
  ptx::copy_commit();
  everyone();
  copy_tiles(p, me, memory, 0, begin, end);
  ptx::copy_commit();
  store_rows(load_rows(p, b, memory.head(0)), memory.stage(0));
  everyone();
#pragma unroll 1
  for (int step = 0, first = begin; first < end; ++step, first += kStepTiles) {
    const int next = first + kStepTiles;
    Rows rows;
    if (next < end) {
      rows = load_rows(p, b, memory.head(step + 1));
      copy_tiles(p, me, memory, step + 1, next, end);
      copy_head(p, next + kStepTiles, end, memory.head(step + 2));
    }
    ptx::copy_commit();
    multiply(me, memory, step, first, end, sum);
    if (next < end) store_rows(rows, memory.stage(step + 1));
    wg::wait<0>();
    everyone();
  }
  wg::settle(sum);
}

// ---- C

// Row of C at place r of the window; -1 past the last row.
__device__ __forceinline__ int row_of(const Params& p, int window, int r) {
  const int position = window * kHeight + r;
  if (position >= p.rows) return -1;
  return p.order == nullptr ? position : __ldg(p.order + position);
}

__device__ __forceinline__ float scale_of(const Params& p, int row) {
  float scale = float(p.alpha);
  if (p.mean) {
    const i64 entries = __ldg(p.indptr + row + 1) - __ldg(p.indptr + row);
    if (entries > 0) scale /= float(entries);
  }
  return scale;
}

// Scale, add what the caller wants added, and store kCount neighbouring columns of a row of C.
template <int kCount>
__device__ __forceinline__ void finish(const Params& p, Out::Storage* c, int column, float scale,
                                       float (&x)[kCount]) {
  if (column >= p.n) return;
#pragma unroll
  for (int v = 0; v < kCount; ++v) x[v] *= scale;
  if (p.epilogue) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (p.beta != 0.0) x[v] += float(p.beta) * Out::widen(c[column + v]);
      if (p.bias != nullptr) x[v] += p.bias[column + v];
      if (p.relu && x[v] < 0.0f) x[v] = 0.0f;
    }
  }
  Packed<Out, kCount> packed;
#pragma unroll
  for (int v = 0; v < kCount; ++v) packed.element[v] = Out::narrow(x[v]);
  ptx::store_cs(reinterpret_cast<typename Packed<Out, kCount>::Word*>(c + column), packed.word);
}

// A value of B as the Tensor Cores see it.
__device__ __forceinline__ float operand(E::Storage value) {
  if constexpr (kIsF32) {
    return __uint_as_float(round_tf32(__float_as_uint(value)));
  } else {
    return E::widen(value);
  }
}

// A warp's sixteen rows of the window from A's entries alone, slowly.
__device__ __noinline__ void exact(const Params& p, int window) {
  const Lane me;
  const int begin = __ldg(p.window_row_ptr + window), end = __ldg(p.window_row_ptr + window + 1);
  const char* b = reinterpret_cast<const char*>(p.b + blockIdx.z * p.b_batch_stride);
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    const int row = row_of(p, window, me.warp * 16 + r);
    if (row < 0) continue;
    Out::Storage* c = p.c + blockIdx.z * p.c_batch_stride + i64(row) * p.c_row_stride;
#pragma unroll 1
    for (int column = blockIdx.y * kCols + me.lane; column < min(p.n, int(blockIdx.y + 1) * kCols);
         column += 32) {
      float sum[1] = {0.0f};
#pragma unroll 1
      for (int tile = begin; tile < end; ++tile) {
        const i64 strip = i64(tile) * kWarps + me.warp;
        const u64 low = __ldg(p.bitmaps + strip * 2), high = __ldg(p.bitmaps + strip * 2 + 1);
        const u64 bits = r < 8 ? low : high;
        const E::Storage* value = p.values;
        if (kWeighted) value += __ldg(p.strip_value_ptr + strip) + (r < 8 ? 0 : __popcll(low));
#pragma unroll 1
        for (int k = 0; k < 8; ++k) {
          const int bit = r % 8 * 8 + k;
          if (!(bits >> bit & 1)) continue;
          const u32 id = __ldg(p.columns + i64(tile) * 8 + staged(k));
          float weight = 1.0f;
          if constexpr (kWeighted) weight = E::widen(value[__popcll(bits & ~(~0ull << bit))]);
          const char* from = b + u64(id) * u32(p.b_row_bytes) + i64(column) * kSize;
          sum[0] = fmaf(weight, operand(*reinterpret_cast<const E::Storage*>(from)), sum[0]);
        }
      }
      finish(p, c, column, scale_of(p, row), sum);
    }
  }
}

// The four words of four neighbouring lanes, rows to columns: lane t then has word t of each.
__device__ __forceinline__ void exchange(u32 (&word)[4], int t) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = t & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 got = __shfl_xor_sync(kWarp, upper ? word[i] : word[i | step], step);
      if (upper) {
        word[i] = got;
      } else {
        word[i | step] = got;
      }
    }
  }
}

// Store the warp's rows if all sums are finite; else false, and C is as it was.
__device__ __forceinline__ bool store_window(const Params& p, const Lane& me, int window,
                                             float (&sum)[kSums]) {
  float check = 0.0f;
#pragma unroll
  for (int i = 0; i < kSums; ++i) check = fmaf(sum[i], 0.0f, check);
  if (__any_sync(kWarp, check != 0.0f)) return false;  // NaN is not 0 either
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(p, window, me.warp * 16 + half * 8 + me.g);
    const float scale = row < 0 ? 0.0f : scale_of(p, row);
    Out::Storage* c = p.c + blockIdx.z * p.c_batch_stride + i64(row) * p.c_row_stride;
#pragma unroll
    for (int group = 0; group < kCols / 32; ++group) {
      const float* mine = sum + group * 16 + half * 2;
      if constexpr (kIsF32) {
        // n = 8j + l of 32 is column 4l + j; the lane has l = 2t and 2t + 1.
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float x[4] = {mine[e], mine[4 + e], mine[8 + e], mine[12 + e]};
          const int column = blockIdx.y * kCols + group * 32 + me.t * 8 + e * 4;
          if (row >= 0) finish(p, c, column, scale, x);
        }
      } else {
        // Columns 2t and 2t + 1 of four times eight; after the exchange eight of one.
        u32 first[4], second[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          first[i] = __float_as_uint(mine[4 * i]);
          second[i] = __float_as_uint(mine[4 * i + 1]);
        }
        exchange(first, me.t);
        exchange(second, me.t);
        const int column = blockIdx.y * kCols + group * 32 + me.t * 8;
#pragma unroll
        for (int part = 0; part < 8; part += kStore) {
          float x[kStore];
#pragma unroll
          for (int v = 0; v < kStore; ++v) {
            const int at = part + v;
            x[v] = __uint_as_float(at % 2 == 0 ? first[at / 2] : second[at / 2]);
          }
          if (row >= 0) finish(p, c, column + part, scale, x);
        }
      }
    }
  }
  return true;
}

__device__ __forceinline__ Tree tree_of(const Params& p, const Lane& me) {
  const i64 slab = i64(blockIdx.z) * gridDim.y + blockIdx.y, layer = slab * kWarps + me.warp;
  return {p.parent_of_slot, p.nodes, p.arrivals + layer * p.node_count,
          p.partials + layer * p.slot_count * 32 * i64(kSums) * 4};
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_wcsr(const __grid_constant__ Params p) {
  ptx::wait_previous();
  const int4 item = __ldg(p.items + blockIdx.x);
  const Lane me;
  float sum[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum[i] = 0.0f;
  if (item.y < item.z) stream(p, me, Memory(), item.y, item.z, sum);
  if (item.w >= 0 && !climb_sums<32>(tree_of(p, me), item.w, me.lane, sum)) return;
  if (!store_window(p, me, item.x, sum)) exact(p, item.x);
}
