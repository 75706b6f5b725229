// Bitmap tiles (formats/bittcf.py) decoded to MMA registers. Shared by Acc-SpMM and RSH-SpMM.
//
// A tile is kStack times eight rows of eight columns, stacked: each eight rows have their own
// bitmap, bit 8r + c, and share the rows of B behind the columns. Values are in bit order, bitmap
// after bitmap. lane = 4g + t holds row g and columns 2t, 2t + 1 of each eight rows.
#pragma once

#include "mma/mma.cuh"

template <int kStack>
struct TileBits {
  uint2 half[kStack];  // rows 0 to 3 and 4 to 7
};

// The lane's weights of a tile.
template <typename E, bool kWeighted, int kStack>
struct TileWeights {
  u32 word[kStack][Mma<E>::kWeights];

  // read(n): bits of the tile's n-th value. Returns how many it has.
  template <typename Read>
  __device__ __forceinline__ int decode(const TileBits<kStack>& bits, int g, int t,
                                        const Read& read) {
    const int shift = (g & 3) * 8 + t * 2;  // of the first of two bits in its half
    int before = 0;
#pragma unroll
    for (int s = 0; s < kStack; ++s) {
      const uint2 both = bits.half[s];
      const u32 half = g < 4 ? both.x : both.y;
      const u32 pair = half >> shift;
      u32 first = 0, second = 0;
      if constexpr (kWeighted) {
        const int upper = __popc(both.x);
        const int below = before + (g < 4 ? 0 : upper) + __popc(half & ~(0xffffffffu << shift));
        if (pair & 1) first = read(below);
        if (pair & 2) second = read(below + (pair & 1));
        before += upper + __popc(both.y);
      } else {
        first = pair & 1 ? Mma<E>::kOne : 0;
        second = pair & 2 ? Mma<E>::kOne : 0;
      }
      if constexpr (Mma<E>::kWeights == 2) {
        word[s][0] = first;
        word[s][1] = second;
      } else {
        word[s][0] = first | second << 16;
      }
    }
    return before;
  }
};

// A tile of A in shared memory, written by asynchronous copies: bitmaps, then values in words of
// four bytes. Not in registers: a loop's loads for its next iteration go to registers that the
// compiler may copy at the end of this one, and the copy waits for the load.
template <typename E, bool kWeighted, int kStack>
struct TileStore {
  using Bits = TileBits<kStack>;
  static constexpr int kSize = sizeof(typename E::Storage);
  // Values of 16 bits may begin in the middle of a word.
  static constexpr int kWords = 64 * kStack * kSize / 4 + (kSize < 4);
  static constexpr int kValues = 16;  // where they begin
  static constexpr int kBytes = kValues + (kWeighted ? (kWords * 4 + 15) / 16 * 16 : 0);

  // Start copying tile `tile`, whose values are begin to end.
  __device__ __forceinline__ static void copy(const u64* bitmaps, const typename E::Storage* values,
                                              int tile, int begin, int end, char* to, int lane) {
    if (lane == 0) ptx::copy_async_small<8 * kStack>(to, bitmaps + i64(tile) * kStack);
    if constexpr (kWeighted) {
      constexpr int kEach = 4 / kSize;  // values a word
      const int words = (end + kEach - 1) / kEach - begin / kEach;
      const u32* from = reinterpret_cast<const u32*>(values) + begin / kEach + lane;
#pragma unroll
      for (int w = 0; w < kWords; w += 32) {
        if (w + lane < words) ptx::copy_async_small<4>(to + kValues + (w + lane) * 4, from + w);
      }
    }
  }

  __device__ __forceinline__ static Bits bits(const char* from) {
    Bits bits;
    using Word = typename WordOf<8 * kStack>::Type;
    *reinterpret_cast<Word*>(bits.half) = *reinterpret_cast<const Word*>(from);
    return bits;
  }

  // Decode the tile whose values begin at number `begin`; returns how many it has.
  __device__ __forceinline__ static int read(const char* from, int begin, int g, int t,
                                             TileWeights<E, kWeighted, kStack>& weights) {
    using Value = typename WordOf<kSize>::Type;
    const Value* values = reinterpret_cast<const Value*>(from + kValues);
    if constexpr (kSize < 4) values += begin & 1;
    return weights.decode(bits(from), g, t, [&](int n) { return u32(values[n]); });
  }
};
