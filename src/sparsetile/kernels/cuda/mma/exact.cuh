// Exactness of tiles. Stored zeros of a tile are multiplied too, so an Inf or NaN of B spoils rows
// of the window that do not refer to it. Kernels therefore check their sums, at one FMA each, and
// recompute non-finite ones only from A's entries: Tensor Cores multiply finite numbers, entries
// with other operands are added one by one (exact_tiles.cuh, exact_strips.cuh, fragment_items.cuh).
#pragma once

#include "mma/mma.cuh"

// Whether any of the given sums is Inf or NaN. kChains: independent chains of FMAs.
template <int kChains = 1>
struct FiniteCheck {
  float chain[kChains] = {};

  __device__ __forceinline__ void add(float sum, int i = 0) {
    chain[i % kChains] = fmaf(sum, 0.0f, chain[i % kChains]);
  }
  __device__ __forceinline__ bool failed() const {
    float all = chain[0];
    if constexpr (kChains == 4) all = chain[0] + chain[1] + (chain[2] + chain[3]);
    static_assert(kChains == 1 || kChains == 4, "chains that are added up here");
    return all != 0.0f;  // NaN is not 0 either
  }
};

// A value of B as the Tensor Cores see it.
template <typename E>
__device__ __forceinline__ float operand(typename E::Storage value) {
  if constexpr (sizeof(typename E::Storage) == 4) {
    return __uint_as_float(round_tf32(__float_as_uint(value)));
  } else {
    return E::widen(value);
  }
}

// Replaces non-finite numbers in a word of B or A by zero, and returns their place: bit 0 for the
// lower half or all of it, bit 1 for the upper half.
template <typename E>
__device__ __forceinline__ u32 take_finite(u32& word) {
  if constexpr (sizeof(typename E::Storage) == 2) {
    constexpr u32 kInf = Mma<E>::kBfloat ? 0x7f80u : 0x7c00u;
    const bool low = (word & kInf) == kInf, high = (word >> 16 & kInf) == kInf;
    word &= (low ? 0u : 0xffffu) | (high ? 0u : 0xffff0000u);
    return u32(low) | u32(high) << 1;
  } else {
    const bool bad = (round_tf32(word) & 0x7f800000u) == 0x7f800000u;
    if (bad) word = 0;
    return bad;
  }
}

// Whether one of the given words of A and B, rounded, has a non-finite number: at one or three
// instructions per word. Only those need take_finite().
template <typename E>
struct OperandCheck {
  static constexpr bool kHalves = sizeof(typename E::Storage) == 2;
  FiniteCheck<4> rounded;
  u32 marks = 0;

  __device__ __forceinline__ void add(u32 word, int i) {
    if constexpr (kHalves) {  // an exponent of ones plus one sets the sign bit
      constexpr u32 kOnes = Mma<E>::kBfloat ? 0x7f807f80u : 0x7c007c00u;
      constexpr u32 kOne = Mma<E>::kBfloat ? 0x00800080u : 0x04000400u;
      marks |= (word & kOnes) + kOne;
    } else {
      rounded.add(__uint_as_float(word), i);
    }
  }
  __device__ __forceinline__ bool failed() const {
    return kHalves ? (marks & 0x80008000u) != 0 : rounded.failed();
  }
};
