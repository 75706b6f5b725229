// mma.sync for tiles of A. Acc-SpMM swaps the operands: sixteen columns of B are the M side of the
// instruction, eight rows of A its N side. A tile of A is then 8x8, and holds more entries per cell
// than one of 16x8.
//
// lane = 4g + t. Operands of a lane in one instruction; m counts columns of B, n rows of the tile:
//
//   m16n8k8 TF32     a: (m=g, k=t) (g+8, t) (g, t+4) (g+8, t+4)     b: (k=t, n=g) (t+4, g)
//   m16n8k8 16 bit   a: (g, 2t 2t+1) (g+8, 2t 2t+1)                 b: (2t 2t+1, g)
//   both             c: (g, n=2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
//
// Any numbering of k that both operands share is valid. For TF32, k = t stands for the tile's
// column 2t and k = t + 4 for its column 2t + 1. So with every type a lane has the neighbouring
// tile columns 2t and 2t + 1, whose bits and values are adjacent.
//
// Any numbering of B's columns is valid, too. A lane holds kSpan neighbouring columns of B;
// instruction q takes its column 2q as m = g and column 2q + 1 as m = g + 8. So the lane's sums are
// of the same kSpan columns, for rows 2t and 2t + 1 of the tile: 16-byte loads and stores, and
// nothing moves between lanes.
//
// Windows of sixteen rows do not swap operands: rows of A are the M side, eight columns of B the N
// side, and 16-bit types take k = 16.
//
//   m16n8k8 TF32     a: (m=g, k=t) (g+8, t) (g, t+4) (g+8, t+4)
//                    b: (k=t, n=g) (t+4, g)
//   m16n8k16 16 bit  a: (g, 2t 2t+1) (g+8, 2t 2t+1) (g, 2t+8 2t+9) (g+8, 2t+8 2t+9)
//                    b: (2t 2t+1, g) (2t+8 2t+9, g)
//   both             c: (m=g, n=2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
#pragma once

#include "ptx/element.cuh"

// kWords words of one row of B: kWords columns of 32 bits, or twice as many of 16.
template <int kWords>
struct BRow {
  u32 word[kWords];
};

// Bits of a float32 rounded to the nearest TF32: the MMA itself would truncate. From sm_90 on this
// is one instruction (ties to even); before, rounding ties away from zero takes three.
__device__ __forceinline__ u32 round_tf32(u32 bits) {
  u32 rounded;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
#endif
  return rounded;
}

// c += 16 x 8 of the first operand times 8 x 8 of the second, in TF32.
__device__ __forceinline__ void mma_tf32(const uint4& a, u32 b0, u32 b1, float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// The same in 16 bits.
template <bool kBrain>
__device__ __forceinline__ void mma_16_bit(const uint2& a, u32 b, float (&c)[4]) {
  if constexpr (kBrain) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(b));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(b));
  }
}

// Mma<E>::multiply adds columns 2q and 2q + 1 of the lane's rows of B, row[0 or 1] for tile columns
// 2t and 2t + 1, times the lane's weights to c, for each of kStack tiles that share the columns.
template <typename E>
struct Mma;

template <>
struct Mma<F32> {
  static constexpr bool kBfloat = false;
  static constexpr int kWeights = 2;  // words of the weights of tile columns 2t, 2t + 1
  static constexpr u32 kOne = 0x3f800000u;

  template <int kWords, int kStack>
  __device__ __forceinline__ static void multiply(const BRow<kWords> (&row)[2], int q,
                                                  const u32 (&weight)[kStack][2],
                                                  float (&c)[kStack][4]) {
    const uint4 a = make_uint4(round_tf32(row[0].word[2 * q]), round_tf32(row[0].word[2 * q + 1]),
                               round_tf32(row[1].word[2 * q]), round_tf32(row[1].word[2 * q + 1]));
#pragma unroll
    for (int s = 0; s < kStack; ++s) mma_tf32(a, weight[s][0], weight[s][1], c[s]);
  }
};

// Two rows of B come as words of neighbouring columns; the instruction wants words of neighbouring
// rows. Low halves are column 2q, high halves column 2q + 1.
template <int kWords>
__device__ __forceinline__ uint2 pair_rows(const BRow<kWords> (&row)[2], int q) {
  return make_uint2(__byte_perm(row[0].word[q], row[1].word[q], 0x5410),
                    __byte_perm(row[0].word[q], row[1].word[q], 0x7632));
}

template <bool kBrain>
struct Mma16Bit {
  static constexpr bool kBfloat = kBrain;
  static constexpr int kWeights = 1;  // both weights in one word
  static constexpr u32 kOne = kBrain ? 0x3f80u : 0x3c00u;

  template <int kWords, int kStack>
  __device__ __forceinline__ static void multiply(const BRow<kWords> (&row)[2], int q,
                                                  const u32 (&weight)[kStack][1],
                                                  float (&c)[kStack][4]) {
    const uint2 a = pair_rows(row, q);
#pragma unroll
    for (int s = 0; s < kStack; ++s) mma_16_bit<kBrain>(a, weight[s][0], c[s]);
  }
};

// c += sixteen rows of A by sixteen columns, the lane's part `a`, times eight columns of B.
template <bool kBrain>
__device__ __forceinline__ void multiply_16(const uint4& a, u32 b0, u32 b1, float (&c)[4]) {
  if constexpr (kBrain) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  }
}

// The same for eight columns of A in TF32; B is rounded here.
__device__ __forceinline__ void multiply_tf32(const uint4& a, u32 b0, u32 b1, float (&c)[4]) {
  mma_tf32(a, round_tf32(b0), round_tf32(b1), c);
}

template <>
struct Mma<F16> : Mma16Bit<false> {};
template <>
struct Mma<BF16> : Mma16Bit<true> {};
