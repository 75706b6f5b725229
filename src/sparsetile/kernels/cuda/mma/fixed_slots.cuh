// A's part of a step in BRP's form (formats/brp.py): each column of a tile has exactly kFixed
// entries, each with one byte for its place and its value, none for a pattern. A lane finds the
// entries of its own two columns, or four of 16-bit types, and keeps those of its rows.
#pragma once

#include "mma/step.cuh"

struct FixedSlots {
  static constexpr int kSlots = kStepRows * kFixed;
  static constexpr int kIdBytes = kSlots;
  static constexpr int kValueBytes = kWeighted ? kSlots * kSize : 0;
  static constexpr int kBytes = kValueBytes + kIdBytes;
  static_assert(kSlots % 8 == 0 && kSlots / 8 <= 32 && kValueBytes / 16 <= 32, "a copy a lane");

  template <typename Params>
  __device__ __forceinline__ static void copy(const Params& p, int tile, int lane, char* to) {
    const i64 first = i64(tile) * (8 * kFixed);
    if constexpr (kWeighted) {
      if (lane < kValueBytes / 16) {
        const char* from = reinterpret_cast<const char*>(p.slot_values + first);
        ptx::copy_async<true>(to + lane * 16, from + lane * 16, true);
      }
    }
    if (lane < kSlots / 8) {
      ptx::copy_async_small<8>(to + kValueBytes + lane * 8, p.slot_ids + first + lane * 8);
    }
  }

  // The value of row r in column k of the step; zero, and false, if no slot has it.
  __device__ __forceinline__ static bool find(const char* from, int r, int k, u32& bits) {
    const auto* ids = reinterpret_cast<const unsigned char*>(from + kValueBytes) + k * kFixed;
    const auto* values = reinterpret_cast<const E::Storage*>(from) + k * kFixed;
    bool found = false;
    bits = 0;
#pragma unroll
    for (int s = 0; s < kFixed; ++s) {
      if (ids[s] >> 3 != r) continue;
      found = true;
      if constexpr (!kWeighted) {
        bits = Mma<E>::kOne;
      } else if constexpr (kHalf) {
        bits = values[s];
      } else {
        bits = __float_as_uint(values[s]);
      }
    }
    return found;
  }

  __device__ __forceinline__ static uint4 load(const char* from, int g, int t) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = g + i % 2 * 8;
      if constexpr (kHalf) {
        u32 low, high;
        find(from, r, i / 2 * 8 + 2 * t, low);
        find(from, r, i / 2 * 8 + 2 * t + 1, high);
        word[i] = low | high << 16;
      } else {
        find(from, r, i / 2 * 4 + t, word[i]);
      }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }

  template <typename Params>
  __device__ __forceinline__ static bool entry(const Params&, const char* from, int, int r, int k,
                                               float& weight) {
    u32 bits;
    const bool found = find(from, r, k, bits);
    if constexpr (kHalf) {
      weight = E::widen(static_cast<E::Storage>(bits));
    } else {
      weight = __uint_as_float(bits);
    }
    return found;
  }
};
