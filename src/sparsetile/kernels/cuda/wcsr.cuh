// What both kernels of WCSR windows share: parameters, rows of C, and how they are stored.
//
// Included after the constants ELEMENT, OUTPUT, kCols, kWeighted. A warp has sixteen rows (a strip)
// of a window and kCols columns; lane = 4g + t. Its sums are D of WGMMA (wgmma_regs.cuh): of 32
// columns, words 4j to 4j + 3 of a lane are n = 8j + 2t and 8j + 2t + 1, for rows g and g + 8.
// Which column is which n: spmm_wcsr.cu.
#pragma once

#include "mma.cuh"
#include "wgmma.cuh"

using E = ELEMENT;
using Out = OUTPUT;

constexpr u32 kWarp = 0xffffffffu;
constexpr int kSize = sizeof(E::Storage);
constexpr bool kIsF32 = kSize == 4;
constexpr int kHeight = 64;
constexpr int kWarps = kHeight / 16;               // strips of a window
constexpr int kSums = kCols / 2;                   // of a lane
constexpr int kGroupSums = 16;                     // of them for 32 columns
constexpr int kStore = 16 / sizeof(Out::Storage);  // columns of C a store

struct Params {
  const int4* items;  // window, first tile, end, slot of a piece or -1; then first items of blocks
  const void* unused;
  const int4* cuts;  // windows in pieces: window, first slot, slots, 0
  int* unused_either;
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
  char* partials;            // [batch][slab][slot][strip][sums of 32 lanes]
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
  int cut_count;
  int epilogue;  // 0: alpha 1, beta 0, no mean, bias or relu
  int mean;
  int relu;
};

static_assert(sizeof(Params) == kParamsBytes, "host and device disagree on the parameter struct");

// Where a thread stands; `warp` is its strip.
struct Lane {
  int warp, lane, g, t;
  __device__ __forceinline__ Lane()
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4) {}
};

// Place of a tile's column among its staged column ids.
__device__ __forceinline__ int staged(int column) { return column % 2 * 4 + column / 2; }

// Partial sums of a strip in a slot, word after word, lanes side by side.
__device__ __forceinline__ float4* partial_sums(const Params& p, int slot, int warp) {
  const i64 layer = i64(blockIdx.z) * gridDim.y + blockIdx.y;
  const i64 strip = (layer * p.slot_count + slot) * kWarps + warp;
  return reinterpret_cast<float4*>(p.partials) + strip * (kSums / 4) * 32;
}

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
// kPlain: the product is all that is wanted, and the slab lies inside C.
template <bool kPlain, int kCount>
__device__ __forceinline__ void finish(const Params& p, Out::Storage* c, int column, float scale,
                                       float (&x)[kCount]) {
  if (!kPlain && column >= p.n) return;
  if constexpr (!kPlain) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) x[v] *= scale;
  }
  if (!kPlain && p.epilogue) {
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

// A warp's sixteen rows of the window, columns `first` to `end_column`, from A's entries alone,
// slowly.
__device__ __forceinline__ void exact(const Params& p, const Lane& me, int window, int first,
                                      int end_column) {
  const int begin = __ldg(p.window_row_ptr + window), end = __ldg(p.window_row_ptr + window + 1);
  const char* b = reinterpret_cast<const char*>(p.b + blockIdx.z * p.b_batch_stride);
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    const int row = row_of(p, window, me.warp * 16 + r);
    if (row < 0) continue;
    Out::Storage* c = p.c + blockIdx.z * p.c_batch_stride + i64(row) * p.c_row_stride;
#pragma unroll 1
    for (int column = first + me.lane; column < min(p.n, end_column); column += 32) {
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
      finish<false>(p, c, column, scale_of(p, row), sum);
    }
  }
}

// Store sixteen rows of 32 columns, `first_column` on.
template <bool kPlain>
__device__ __forceinline__ void store_group(const Params& p, const Lane& me, int window,
                                            int first_column, const float (&sum)[kGroupSums]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(p, window, me.warp * 16 + half * 8 + me.g);
    const float scale = kPlain || row < 0 ? 1.0f : scale_of(p, row);
    Out::Storage* c = p.c + blockIdx.z * p.c_batch_stride + i64(row) * p.c_row_stride;
    const float* mine = sum + half * 2;
    if constexpr (kIsF32) {
      // n = 8j + 2t + e is column 16e + 4t + j.
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x[4] = {mine[e], mine[4 + e], mine[8 + e], mine[12 + e]};
        if (row >= 0) finish<kPlain>(p, c, first_column + e * 16 + me.t * 4, scale, x);
      }
    } else {
      // Columns 2t and 2t + 1 of four times eight; after the exchange eight of one.
      u32 first[4], second[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        first[i] = __float_as_uint(mine[4 * i]);
        second[i] = __float_as_uint(mine[4 * i + 1]);
      }
      transpose(first, me.t);
      transpose(second, me.t);
#pragma unroll
      for (int part = 0; part < 8; part += kStore) {
        float x[kStore];
#pragma unroll
        for (int v = 0; v < kStore; ++v) {
          const int at = part + v;
          x[v] = __uint_as_float(at % 2 == 0 ? first[at / 2] : second[at / 2]);
        }
        if (row >= 0) finish<kPlain>(p, c, first_column + me.t * 8 + part, scale, x);
      }
    }
  }
}

// Store 32 columns for each sixteen sums if all sums are finite; else false, and C is as it was.
template <int kCount>
__device__ __forceinline__ bool store_groups(const Params& p, const Lane& me, int window,
                                             int first_column, const float (&sum)[kCount]) {
  float check[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) check[i % 4] = fmaf(sum[i], 0.0f, check[i % 4]);
  const float all = check[0] + check[1] + (check[2] + check[3]);
  if (__any_sync(kWarp, all != 0.0f)) return false;  // NaN is not 0 either
  constexpr int kColumns = kCount / kGroupSums * 32;
  const bool plain = !p.epilogue && first_column + kColumns <= p.n;
#pragma unroll
  for (int group = 0; group < kCount / kGroupSums; ++group) {
    float mine[kGroupSums];
#pragma unroll
    for (int i = 0; i < kGroupSums; ++i) mine[i] = sum[group * kGroupSums + i];
    if (plain) {
      store_group<true>(p, me, window, first_column + group * 32, mine);
    } else {
      store_group<false>(p, me, window, first_column + group * 32, mine);
    }
  }
  return true;
}
