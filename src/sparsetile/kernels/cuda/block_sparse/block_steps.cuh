// The first steps of spmm_bcsr, without TMA and without Tensor Cores.
//
// A box is 64 x 64 elements of 16 bits in the 128-byte swizzle (wgmma.cuh).
#pragma once

#include "mma/wgmma.cuh"

// A box copied by all threads, to the place that TMA would use. Without TMA a map is an address,
// rows, columns, and bytes per row.
template <int kThreads>
__device__ __forceinline__ void copy_by_threads(char* shared, const TensorMap& map, int column,
                                                int row) {
  for (int at = threadIdx.x; at < 64 * 8; at += kThreads) {
    const int r = at / 8, chunk = at % 8, here = int(map.opaque[2]) - column - chunk * 8;
    const u16* source = reinterpret_cast<const u16*>(map.opaque[0] + (row + r) * map.opaque[3]) +
                        column + chunk * 8;
    uint4 word = make_uint4(0, 0, 0, 0);
    if (row + r < int(map.opaque[1]) && here >= 8) {
      word = ptx::load_nc(reinterpret_cast<const uint4*>(source));
    } else if (row + r < int(map.opaque[1]) && here > 0) {  // memory behind may be unmapped
      u32 pair[4] = {0, 0, 0, 0};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e < here) pair[e / 2] |= u32(source[e]) << (e % 2 * 16);
      }
      word = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
    *reinterpret_cast<uint4*>(shared + r * 128 + (chunk ^ (r % 8)) * 16) = word;
  }
}

// 64 x 128 sums += A (64 x 64, one box) . B (two boxes) by CUDA cores: each thread computes those
// that WGMMA would give it.
template <typename E>
__device__ __forceinline__ void multiply_by_cores(const char* stage, const char* b,
                                                  float (&sum)[64]) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  const char* rows = stage + (threadIdx.x % 128 / 32 * 16 + lane / 4) * 128;
  for (int k = 0; k < 64; ++k) {
    const int at = ((k / 8) ^ (lane / 4)) * 16 + k % 8 * 2;  // of rows 8 apart
    const float a[2] = {E::widen(*reinterpret_cast<const u16*>(rows + at)),
                        E::widen(*reinterpret_cast<const u16*>(rows + 8 * 128 + at))};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int chunk = (j % 8) ^ (k % 8);
      const u32 pair =
          *reinterpret_cast<const u32*>(b + j / 8 * 8192 + k * 128 + chunk * 16 + q * 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = E::widen(u16(pair >> (16 * e)));
        sum[j * 4 + e] = fmaf(a[0], x, sum[j * 4 + e]);
        sum[j * 4 + 2 + e] = fmaf(a[1], x, sum[j * 4 + 2 + e]);
      }
    }
  }
}
