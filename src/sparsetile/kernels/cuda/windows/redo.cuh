// A launch after a product that recomputes units with non-finite sums. A unit is sixteen rows of a
// window by some columns of C. The product sets bits in the unit's flag, which is zero between
// products, and does not store the requested part.
//
// In the product a warp would go through its window alone, while its thread block waits. Here a
// thread block has one unit and its kTeam warps share the tiles. Counts for ogbl-ddi (67 windows of
// 64 rows, 400 tiles each), N = 128 in float32, one row of B in a hundred with NaN:
//
//                  warps per SM   tiles per warp   KB in flight per SM   instructions
//   in the product 8              400              8                     86 million
//   here           16             50               64                    35 million
//
// Decoding a tile takes as many instructions as multiplying it by 128 bytes of B, so a warp takes
// two such pieces. Inside the product or the join, the recomputation took registers from them or
// spilled.
#pragma once

#include "windows/exact_strips.cuh"

namespace redo {

// The warp's share of tiles `begin` to `end`: from share(warp) to share(warp + 1).
template <int kTeam>
__device__ __forceinline__ int share(int begin, int end, int warp) {
  const int tiles = end - begin;
  return begin + tiles / kTeam * warp + min(tiles % kTeam, warp);
}

// Words of shared memory that add_up() takes.
template <int kTeam, int kMembers, typename Strip>
constexpr int kSumWords = kTeam / 2 * kMembers * sizeof(Strip::sum) / sizeof(float4) * 32;

// Adds up the warps' sums of one strip, each over other tiles; the first warp gets the result. The
// order depends only on kTeam: the same bits every time. Warps may be kTeam teams of kMembers,
// whose members have their own strips.
template <int kTeam, int kMembers = 1, typename E, int kPieces>
__device__ __forceinline__ void add_up(ExactStrip<E, kPieces>& strip, float4* s_sums) {
  constexpr int kSpan = ExactStrip<E, kPieces>::kSpan, kWords = kPieces * kSpan;
  static_assert((kTeam & (kTeam - 1)) == 0, "halves of halves");
  const int warp = threadIdx.x / 32 / kMembers, member = threadIdx.x / 32 % kMembers;
#pragma unroll 1
  for (int half = kTeam / 2; half > 0; half /= 2) {
    float4* const place = s_sums + (warp % half * kMembers + member) * (kWords * 32) + strip.lane;
    __syncthreads();  // the earlier content has been read
    if (warp >= half && warp < 2 * half) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const float* sum = strip.sum[w / kSpan][w % kSpan];
        place[w * 32] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
    }
    __syncthreads();
    if (warp < half) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const float4 other = place[w * 32];
        float* sum = strip.sum[w / kSpan][w % kSpan];
        sum[0] += other.x, sum[1] += other.y, sum[2] += other.z, sum[3] += other.w;
      }
    }
  }
}

// Flags of a unit that has kFlags of them, kBits bits each: one word.
template <int kFlags, int kBits>
__device__ __forceinline__ u32 asked_of(const int* flags, int unit) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < kFlags; ++i) bits |= u32(__ldcg(flags + unit * kFlags + i)) << i * kBits;
  return bits;
}

// compute(unit, bits of its flags) for each of the block's `units` that was requested, by all
// threads of the block together. Clears the flags. Each thread reads one unit's flags, so that a
// block without work waits once.
template <int kTeam, int kFlags = 1, int kBits = 0, typename Compute>
__device__ __forceinline__ void each_asked(int* flags, int units, const Compute& compute) {
  __shared__ u32 s_asked[kTeam];
  const int stride = gridDim.x;
#pragma unroll 1
  for (int first = blockIdx.x; first < units; first += kTeam * 32 * stride) {
    const int mine = first + int(threadIdx.x) * stride;
    const u32 asked = mine < units && asked_of<kFlags, kBits>(flags, mine) != 0;
    const u32 of_warp = __reduce_or_sync(kWarp, asked << threadIdx.x % 32);
    __syncthreads();  // the last round's requests have been read
    if (threadIdx.x % 32 == 0) s_asked[threadIdx.x / 32] = of_warp;
    __syncthreads();
#pragma unroll 1
    for (int warp = 0; warp < kTeam; ++warp) {
#pragma unroll 1
      for (u32 rest = s_asked[warp]; rest != 0; rest &= rest - 1) {
        const int unit = first + (warp * 32 + __ffs(rest) - 1) * stride;
        const u32 bits = asked_of<kFlags, kBits>(flags, unit);
        __syncthreads();  // all threads have read it
        if (threadIdx.x < kFlags) flags[unit * kFlags + threadIdx.x] = 0;
        compute(unit, bits);
      }
    }
  }
}

}  // namespace redo
