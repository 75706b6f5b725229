// Rows of B through a warp's own ring in shared memory, by asynchronous copies (sm_80 on): eight
// rows of kCols columns per stage, followed by kTileBytes of A.
//
//   copies     lane l: 16 bytes of rows l / kSide, l / kSide + kLoadRows, ..; eight lanes have 128
//              neighbouring bytes of a row, fewer lanes a narrower row
//   products   lane 4g + t of an MMA: rows 2t and 2t + 1
//
// Why through shared memory: with loads straight into registers, eight neighbouring lanes read the
// same columns of four rows, which are in the same banks of L1: four times the wavefronts (L1 at
// 92 % of its peak was the bound). Rows in the ring are 16 bytes apart modulo 64, so reads have no
// bank conflicts. Registers are then free for sums.
#pragma once

#include "mma/mma.cuh"

template <typename E, int kCols, int kTileBytes>
struct RowStage {
  static constexpr int kSize = sizeof(typename E::Storage);
  static constexpr int kRowBytes = kCols * kSize;
  static constexpr int kSide = kRowBytes < 128 ? kRowBytes / 16 : 8;
  static constexpr int kLoadRows = 32 / kSide;
  static constexpr int kHeights = 8 / kLoadRows;
  static constexpr int kSegments = kRowBytes / (16 * kSide);
  static constexpr int kRowStride = kRowBytes + 16;
  static constexpr int kTileAt = 8 * kRowStride;  // the tile of A behind its rows of B
  static constexpr int kBytes = kTileAt + kTileBytes;
  static_assert(kRowBytes % 64 == 0, "rows of the ring lie 16 bytes apart modulo 64");

  // The rows of B that a lane copies of one tile.
  struct Rows {
    u32 id[kHeights];
  };

  // `ids` are the tile's eight rows of B.
  __device__ __forceinline__ static Rows load_rows(const int* ids, int lane) {
    Rows rows;
#pragma unroll
    for (int h = 0; h < kHeights; ++h) rows.id[h] = __ldg(ids + h * kLoadRows + lane / kSide);
    return rows;
  }

  // Start copying rows from `b`, the first of the columns in row 0, to a stage. kWhole: all columns
  // exist; otherwise `columns` do, and zeros are stored for the rest. kCached: through L1.
  template <bool kWhole, bool kCached>
  __device__ __forceinline__ static void copy(const char* b, u32 row_bytes, const Rows& rows,
                                              int columns, char* stage, int lane) {
    const int place = lane % kSide * 16;
    char* to = stage + lane / kSide * kRowStride + place;
#pragma unroll
    for (int h = 0; h < kHeights; ++h) {
      const char* from = b + static_cast<u64>(rows.id[h]) * row_bytes + place;
#pragma unroll
      for (int j = 0; j < kSegments; ++j) {
        const int step = j * kSide * 16;
        const bool inside = kWhole || (place + step) / kSize < columns;
        ptx::copy_async<kCached>(to + h * kLoadRows * kRowStride + step, inside ? from + step : b,
                                 inside);
      }
    }
  }

  // Row k of a stage, kWords words from `column` on.
  template <int kWords>
  __device__ __forceinline__ static BRow<kWords> row(const char* stage, int k, int column) {
    BRow<kWords> row;
    using Word = typename WordOf<4 * kWords>::Type;
    *reinterpret_cast<Word*>(row.word) =
        *reinterpret_cast<const Word*>(stage + k * kRowStride + column * kSize);
    return row;
  }
  // Rows 2t and 2t + 1.
  template <int kWords>
  __device__ __forceinline__ static void read(const char* stage, int t, int column,
                                              BRow<kWords> (&pair)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) pair[r] = row<kWords>(stage, 2 * t + r, column);
  }
};

// A warp's position in its ring for filling or reading, in bytes from the ring's start.
template <int kStages, int kStageBytes>
struct RingPlace {
  int at = 0;
  __device__ __forceinline__ void next() {
    at = at + kStageBytes < kStages * kStageBytes ? at + kStageBytes : 0;
  }
};
