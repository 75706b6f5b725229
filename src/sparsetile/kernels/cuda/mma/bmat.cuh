// BMat tiles (formats/bmat.py) decoded to MMA registers.
//
// A tile is sixteen rows by eight columns of A: four words of 32 bits, one for each operand
// register of m16n8k8, one bit for each lane. lane = 4g + t holds
//
//   word 0: (row g, column t)   1: (g + 8, t)   2: (g, t + 4)   3: (g + 8, t + 4)
//
// Values are in tile order, word by word and bit by bit: the bits before its own give the place of
// a lane's value. m16n8k16 takes two tiles: k = 2t, 2t + 1 are columns t, t + 4 of the first,
// k = 2t + 8, 2t + 9 those of the second.
#pragma once

#include "mma/exact.cuh"

// The lane's four elements of a tile, raw, one per register.
template <typename E, bool kWeighted>
struct BMatElements {
  static constexpr u32 kOne = Mma<E>::kOne;
  u32 of[4];

  // read(n): bits of the tile's n-th value. Returns how many it has.
  template <typename Read>
  __device__ __forceinline__ int decode(const uint4& bits, int lane, const Read& read) {
    const u32 word[4] = {bits.x, bits.y, bits.z, bits.w};
    const u32 below = ptx::lanes_below();
    int before = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool here = word[i] >> lane & 1;
      if constexpr (kWeighted) {
        of[i] = 0;
        if (here) of[i] = read(before + __popc(word[i] & below));
        before += __popc(word[i]);
      } else {
        of[i] = here ? kOne : 0;
      }
    }
    return before;
  }
};

// Operand A of one instruction: m16n8k8 of one tile in TF32, m16n8k16 of two in 16 bits.
template <typename Elements>
__device__ __forceinline__ uint4 tf32_operand(const Elements& tile) {
  return make_uint4(tile.of[0], tile.of[1], tile.of[2], tile.of[3]);
}
template <typename Elements>
__device__ __forceinline__ uint4 operand_16(const Elements& first, const Elements& second) {
  return make_uint4(first.of[0] | first.of[2] << 16, first.of[1] | first.of[3] << 16,
                    second.of[0] | second.of[2] << 16, second.of[1] | second.of[3] << 16);
}

// Entries of a tile.
__device__ __forceinline__ int bit_count(const uint4& words) {
  return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
}
