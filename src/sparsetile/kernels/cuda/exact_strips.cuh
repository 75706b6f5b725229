// Sixteen rows of a window and 128 bytes of columns of C again, where sums were not finite: Tensor
// Cores multiply what is finite, and only columns of A with anything else are gone through entry by
// entry. Going through all entries that way took 18 to 236 times as long as a product of finite
// numbers (voltrix, bcsstk32 and CoauthorPhysics, N = 128 and 512, one row in a hundred of B with
// NaN).
//
// One MMA is a tile of eight columns of A. Lane 4g + t holds A's elements as bmat.cuh says, and 16
// bytes (a chunk) of the rows of B behind columns t and t + 4: chunk (g % 2) * 4 + g / 2 of eight,
// whose column j is n = g of instruction j. Its sums are then neighbouring columns of chunks t and
// t + 4, for rows g and g + 8. Which k of m16n8k8 a column of A is, is free: in 16 bits k = 2t and
// 2t + 1 are columns t and t + 4.
//
// One warp goes through all tiles of a window, which may be hundreds, and waits for memory four
// times a tile. So kBatch tiles are loaded together: ids and bits, then rows of B and values.
//
// A source of tiles has
//
//   Bits bits(tile)                      entries of a tile's sixteen rows
//   bool entry(bits, r, k)               whether row r has one in column k
//   void elements(tile, bits, lane, of)  the lane's elements of A, raw
//   int column(tile, k)                  row of B behind column k, below 0 for none
#pragma once

#include "exact.cuh"

template <typename E>
struct ExactStrip {
  using Storage = typename E::Storage;
  static constexpr int kSpan = 16 / sizeof(Storage);  // columns of a chunk
  static constexpr bool kIsF32 = sizeof(Storage) == 4;

  const char* b;  // first of `columns` columns, in row 0; chunks that begin past them are not read
  u64 row_bytes;
  int columns;
  int lane, g, t;
  float sum[kSpan][4];  // column, then (row g: chunk t, t + 4), (row g + 8: chunk t, t + 4)

  __device__ __forceinline__ ExactStrip(const Storage* b, u64 row_bytes, int columns)
      : b(reinterpret_cast<const char*>(b)),
        row_bytes(row_bytes),
        columns(columns),
        lane(threadIdx.x % 32),
        g(lane / 4),
        t(lane % 4),
        sum{} {}

  template <int kBatch, typename Source>
  __device__ __forceinline__ void add(const Source& source, int begin, int end) {
    const int chunk = g % 2 * 4 + g / 2;
#pragma unroll 1
    for (int first = begin; first < end; first += kBatch) {
      const auto tile = [&](int i) { return min(first + i, end - 1); };
      int id[kBatch][2];
      decltype(source.bits(0)) bits[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        id[i][0] = source.column(tile(i), t);
        id[i][1] = source.column(tile(i), t + 4);
        bits[i] = source.bits(tile(i));
      }
      BRow<4> row[kBatch][2];
      u32 of[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        *reinterpret_cast<uint4*>(row[i][0].word) = load(id[i][0], chunk);
        *reinterpret_cast<uint4*>(row[i][1].word) = load(id[i][1], chunk);
        source.elements(tile(i), bits[i], lane, of[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < end) add_tile(source, first + i, bits[i], of[i], row[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ uint4 load(int id, int chunk) const {
    if (id < 0 || chunk * kSpan >= columns) return make_uint4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<const uint4*>(b + u64(u32(id)) * row_bytes) + chunk);
  }
  template <typename Source, typename Bits>
  __device__ __forceinline__ void add_tile(const Source& source, int tile, const Bits& bits,
                                           const u32 (&of)[4], BRow<4> (&row)[2]) {
    u32 a[4] = {of[0], of[1], of[2], of[3]};
    u32 bad[2] = {take_finite<E>(a[0]) | take_finite<E>(a[1]),
                  take_finite<E>(a[2]) | take_finite<E>(a[3])};
#pragma unroll
    for (int i = 0; i < 8; ++i) bad[i / 4] |= take_finite<E>(row[i / 4].word[i % 4]);
    multiply(a, row);
    const u32 own = u32(bad[0] != 0) << t | u32(bad[1] != 0) << (t + 4);
#pragma unroll 1
    for (u32 rest = __reduce_or_sync(kWarp, own); rest != 0; rest &= rest - 1) {
      const int k = __ffs(rest) - 1, id = source.column(tile, k);
      const uint4 x[2] = {load(id, t), load(id, t + 4)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 raw = __shfl_sync(kWarp, k < 4 ? of[half] : of[2 + half], g * 4 + k % 4);
        if (!source.entry(bits, g + 8 * half, k)) continue;
        const float weight = E::widen(storage(raw));
        add_special(weight, x[0], half * 2);
        add_special(weight, x[1], half * 2 + 1);
      }
    }
  }
  __device__ __forceinline__ static Storage storage(u32 raw) {
    if constexpr (kIsF32) {
      return __uint_as_float(raw);
    } else {
      return static_cast<Storage>(raw);
    }
  }
  __device__ __forceinline__ void multiply(const u32 (&a)[4], const BRow<4> (&row)[2]) {
    if constexpr (kIsF32) {
      const uint4 tile = make_uint4(a[0], a[1], a[2], a[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply_tf32(tile, row[0].word[j], row[1].word[j], sum[j]);
    } else {
      const uint2 tile = make_uint2(a[0] | a[2] << 16, a[1] | a[3] << 16);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint2 pair = pair_rows(row, q);
        mma_16_bit<Mma<E>::kBfloat>(tile, pair.x, sum[2 * q]);
        mma_16_bit<Mma<E>::kBfloat>(tile, pair.y, sum[2 * q + 1]);
      }
    }
  }
  // An entry times a chunk, where either is not finite: multiply() has left that out.
  __device__ __forceinline__ void add_special(float weight, const uint4& chunk, int place) {
    union {
      uint4 word;
      Storage element[kSpan];
    } x;
    x.word = chunk;
#pragma unroll
    for (int j = 0; j < kSpan; ++j) {
      const float number = operand<E>(x.element[j]);
      if (!(isfinite(number) && isfinite(weight))) {
        sum[j][place] = fmaf(weight, number, sum[j][place]);
      }
    }
  }
};
