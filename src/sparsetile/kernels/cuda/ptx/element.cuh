// Element types as traits: storage types of B, C and A's values, and the type of sums.
//
// A kernel is written once against `Element<kind>`: Storage is the type in memory, Acc the type of
// sums (float32 for every type of at most 32 bits, float64 for float64). load_vector moves kVec
// consecutive elements with one access of kVec * sizeof bytes (and store_columns of epilogue.cuh
// stores them); the host chooses kVec so that every address is aligned to that size.
#pragma once

#include "ptx/ptx.cuh"

struct F32 {
  using Storage = float;
  using Acc = float;
  __device__ static float widen(float value) { return value; }
  __device__ static float narrow(float value) { return value; }
};

struct F64 {
  using Storage = double;
  using Acc = double;
  __device__ static double widen(double value) { return value; }
  __device__ static double narrow(double value) { return value; }
};

struct F16 {
  using Storage = u16;
  using Acc = float;
  __device__ static float widen(u16 bits) { return ptx::f16_to_f32(bits); }
  __device__ static u16 narrow(float value) { return ptx::f32_to_f16(value); }
};

struct BF16 {
  using Storage = u16;
  using Acc = float;
  __device__ static float widen(u16 bits) { return ptx::bf16_to_f32(bits); }
  __device__ static u16 narrow(float value) { return ptx::f32_to_bf16(value); }
};

// The unsigned word of kBytes bytes that one access moves.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = u16;
};
template <>
struct WordOf<4> {
  using Type = u32;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

// kVec raw elements as one register word; reinterpreted, never converted.
template <typename E, int kVec>
union Packed {
  static constexpr int kBytes = kVec * sizeof(typename E::Storage);
  using Word = typename WordOf<kBytes>::Type;
  Word word;
  typename E::Storage element[kVec];
  u32 pair[kBytes < 4 ? 1 : kBytes / 4];
  __device__ Packed() {}
};

// Two bfloat16 of a word become float32 with one instruction each; extracted first, the upper one
// would cost two.
template <int kVec>
__device__ __forceinline__ float widen(const Packed<BF16, kVec>& packed, int v) {
  if constexpr (kVec % 2 != 0) {
    return BF16::widen(packed.element[v]);
  } else {
    const u32 word = packed.pair[v / 2];
    return __uint_as_float(v % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
}
template <typename E, int kVec>
__device__ __forceinline__ typename E::Acc widen(const Packed<E, kVec>& packed, int v) {
  return E::widen(packed.element[v]);
}

// kVec elements at `address`.
template <typename E, int kVec>
__device__ __forceinline__ Packed<E, kVec> load_vector(const void* address) {
  Packed<E, kVec> packed;
  packed.word = ptx::load_nc(static_cast<const typename Packed<E, kVec>::Word*>(address));
  return packed;
}

// R values, raw, in words of up to 16 bytes.
template <typename E, int R>
struct RawValues {
  static constexpr int kMost = 16 / sizeof(typename E::Storage);
  static constexpr int kPart = R < kMost ? R : kMost;
  Packed<E, kPart> part[R / kPart];
  __device__ __forceinline__ void load(const typename E::Storage* address) {
#pragma unroll
    for (int i = 0; i < R / kPart; ++i) part[i] = load_vector<E, kPart>(address + i * kPart);
  }
  __device__ __forceinline__ typename E::Acc operator[](int r) const {
    return widen(part[r / kPart], r % kPart);
  }
};
