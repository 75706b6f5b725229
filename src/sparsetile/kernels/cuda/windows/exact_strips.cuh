// The exact recomputation of a strip: sixteen rows of a window by kPieces times 128 bytes of
// columns of C, whose sums were not finite. Tensor Cores multiply finite numbers; only columns of A
// with other operands are added entry by entry. Adding all entries one by one took 18 to 236 times
// as long as a product of finite numbers (voltrix, N = 128 and 512, one row of B in a hundred with
// NaN).
//
// One MMA is a tile of eight columns of A. Lane 4g + t holds A's elements as in bmat.cuh, and 16
// bytes (a chunk) of the rows of B behind columns t and t + 4: chunk (g % 2) * 4 + g / 2 of eight,
// whose column j is n = g of instruction j. Its sums are then neighbouring columns of chunks t and
// t + 4, for rows g and g + 8. Any numbering of A's columns is valid: in 16 bits, k = 2t and 2t + 1
// of m16n8k8 are columns t and t + 4.
//
// A warp has kBatch tiles in flight: rows of B and values of these, ids and bits of the next ones,
// so it waits for memory once per batch. Tiles of finite numbers are only checked. Decoding a tile
// takes as many instructions as three pieces of 128 bytes: a warp with enough registers takes
// kPieces of them.
//
// A source of tiles has
//
//   kGaps                                whether columns of A may have no row of B (ids below 0)
//   Bits bits(tile)                      entries of a tile's sixteen rows, and the place of values
//   bool entry(bits, r, k)               whether row r has one in column k
//   void elements(tile, bits, lane, of)  the lane's elements of A, raw
//   int2 columns(tile, t)                rows of B behind columns t and t + 4
//   int column(tile, k)                  row of B behind column k
#pragma once

#include "mma/exact.cuh"

template <typename E, int kPieces = 1>
struct ExactStrip {
  using Storage = typename E::Storage;
  static constexpr int kSpan = 16 / sizeof(Storage);  // columns of a chunk
  static constexpr int kPieceCols = 8 * kSpan;
  static constexpr int kCols = kPieces * kPieceCols;
  static constexpr bool kIsF32 = sizeof(Storage) == 4;

  const char* b;  // the lane's chunk of row 0, or the first one if that begins past `columns`
  u32 row_bytes;
  int columns;  // at most kCols
  int lane, g, t;
  // Piece, column, then (row g: chunk t, t + 4), (row g + 8: chunk t, t + 4).
  float sum[kPieces][kSpan][4];

  ExactStrip() = default;
  // b: the first of `columns` columns, in row 0.
  __device__ __forceinline__ ExactStrip(const Storage* b, u32 row_bytes, int columns)
      : b(reinterpret_cast<const char*>(b)),
        row_bytes(row_bytes),
        columns(min(columns, kCols)),
        lane(threadIdx.x % 32),
        g(lane / 4),
        t(lane % 4),
        sum{} {
    this->b += own_chunk();
  }

  // Adds tiles `begin` to `end`.
  template <int kBatch, typename Source>
  __device__ __forceinline__ void add(const Source& source, int begin, int end) {
    if (begin >= end) return;
    const int last = end - 1;
    Heads<kBatch, Source> heads;
    heads.load(source, begin, last, t);
#pragma unroll 1
    for (int first = begin; first < end; first += kBatch) {
      BRow<4> row[kBatch][kPieces][2];
      u32 of[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        load_rows<Source>(heads.id[i], row[i]);
        source.elements(min(first + i, last), heads.bits[i], lane, of[i]);
      }
      heads.load(source, first + kBatch, last, t);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i > 0 && first + i >= end) break;
        const bool special = !all_finite(of[i], row[i]);
        u32 rest = 0;
        if (special) rest = take_special(of[i], row[i]);
#pragma unroll
        for (int j = 0; j < kPieces; ++j) multiply(of[i], row[i][j], sum[j]);
        if (special) {
          add_rest(source, first + i, rest);
          heads.load(source, first + kBatch, last, t);  // again: rare, and registers are scarce
        }
      }
    }
  }

  // ---- parts, for warps that have more than one strip

  // Rows of B behind columns t and t + 4.
  template <typename Source>
  __device__ __forceinline__ void load_rows(int2 id, BRow<4> (&row)[kPieces][2]) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const char* from = b + piece_at(j);
      *reinterpret_cast<uint4*>(row[j][0].word) = load<Source>(from, id.x);
      *reinterpret_cast<uint4*>(row[j][1].word) = load<Source>(from, id.y);
    }
  }
  // Rounds them, and passes them to the check.
  __device__ __forceinline__ static void round_rows(BRow<4> (&row)[kPieces][2],
                                                    OperandCheck<E>& check) {
#pragma unroll
    for (int i = 0; i < 8 * kPieces; ++i) {
      u32& word = row[i / 8][i / 4 % 2].word[i % 4];
      if constexpr (kIsF32) word = round_tf32(word);
      check.add(word, i);
    }
  }
  // Replaces non-finite numbers by zeros. Returns the tile's columns that had any, a bit each.
  __device__ __forceinline__ u32 take_special(u32 (&of)[4], BRow<4> (&row)[kPieces][2]) const {
    u32 bad[2] = {take_finite<E>(of[0]) | take_finite<E>(of[1]),
                  take_finite<E>(of[2]) | take_finite<E>(of[3])};
#pragma unroll
    for (int i = 0; i < 8 * kPieces; ++i) {
      bad[i / 4 % 2] |= take_finite<E>(row[i / 8][i / 4 % 2].word[i % 4]);
    }
    return __reduce_or_sync(kWarp, u32(bad[0] != 0) << t | u32(bad[1] != 0) << (t + 4));
  }
  __device__ __forceinline__ static void multiply(const u32 (&a)[4], const BRow<4> (&row)[2],
                                                  float (&sum)[kSpan][4]) {
    if constexpr (kIsF32) {
      const uint4 tile = make_uint4(a[0], a[1], a[2], a[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_tf32(tile, row[0].word[j], row[1].word[j], sum[j]);
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
  // The part that take_special() removed of a column: entries of rows g and g + 8 times row `id` of
  // B.
  template <typename Source>
  __device__ __forceinline__ void add_column(const u32 (&raw)[2], const bool (&entry)[2], int id) {
    const char* first = b - own_chunk();
#pragma unroll
    for (int place = 0; place < 2 * kPieces; ++place) {
      const uint4 x = load<Source>(first + chunk_at(t + 4 * place), id);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float weight = E::widen(storage(raw[half]));
        add_special(weight, entry[half], x, sum[place / 2], half * 2 + place % 2);
      }
    }
  }

 private:
  // Data of a batch that is loaded before its rows of B. Past the last tile it is the last one's.
  template <int kBatch, typename Source>
  struct Heads {
    int2 id[kBatch];
    typename Source::Bits bits[kBatch];

    __device__ __forceinline__ void load(const Source& source, int first, int last, int t) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int tile = min(first + i, last);
        id[i] = source.columns(tile, t);
        bits[i] = source.bits(tile);
      }
    }
  };

  // Bytes from the first chunk of a piece to one of its eight. Past the columns it is the first
  // one: its sums are not used, and an unconditional load is one instruction.
  __device__ __forceinline__ u32 chunk_at(int chunk) const {
    return chunk * kSpan < columns ? chunk * 16 : 0;
  }
  __device__ __forceinline__ u32 own_chunk() const { return chunk_at(g % 2 * 4 + g / 2); }
  // Bytes from the lane's chunk to that of piece j, or 0 if that begins past the columns.
  __device__ __forceinline__ u32 piece_at(int j) const {
    return j * kPieceCols + (g % 2 * 4 + g / 2) * kSpan < columns ? j * 128 : 0;
  }
  template <typename Source>
  __device__ __forceinline__ uint4 load(const char* from, int id) const {
    if (Source::kGaps && id < 0) return make_uint4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<const uint4*>(from + u64(u32(id)) * row_bytes));
  }
  // Whether a tile and its rows of B are finite, the same for all lanes. Rounds B.
  __device__ __forceinline__ static bool all_finite(const u32 (&of)[4],
                                                    BRow<4> (&row)[kPieces][2]) {
    OperandCheck<E> check;
    round_rows(row, check);
#pragma unroll
    for (int i = 0; i < 4; ++i) check.add(of[i], i);
    return !__any_sync(kWarp, check.failed());
  }
  // The part that take_special() removed of columns `rest`: entries of A there.
  template <typename Source>
  __device__ __forceinline__ void add_rest(const Source& source, int tile, u32 rest) {
    const typename Source::Bits bits = source.bits(tile);
    u32 of[4];
    source.elements(tile, bits, lane, of);
#pragma unroll 1
    for (; rest != 0; rest &= rest - 1) {
      const int k = __ffs(rest) - 1, id = source.column(tile, k);
      u32 raw[2];
      bool entry[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        raw[half] = __shfl_sync(kWarp, k < 4 ? of[half] : of[2 + half], g * 4 + k % 4);
        entry[half] = source.entry(bits, g + 8 * half, k);
      }
      add_column<Source>(raw, entry, id);
    }
  }
  __device__ __forceinline__ static Storage storage(u32 raw) {
    if constexpr (kIsF32) {
      return __uint_as_float(raw);
    } else {
      return static_cast<Storage>(raw);
    }
  }
  // An entry times a chunk, if either is not finite: multiply() has omitted that.
  __device__ __forceinline__ static void add_special(float weight, bool entry, const uint4& chunk,
                                                     float (&sum)[kSpan][4], int place) {
    union {
      uint4 word;
      Storage element[kSpan];
    } x;
    x.word = chunk;
#pragma unroll
    for (int j = 0; j < kSpan; ++j) {
      const float number = operand<E>(x.element[j]);
      if (entry && !(isfinite(number) && isfinite(weight))) {
        sum[j][place] = fmaf(weight, number, sum[j][place]);
      }
    }
  }
};
