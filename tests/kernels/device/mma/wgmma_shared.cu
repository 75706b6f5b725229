// Wgmma128 and descriptors of wgmma.cuh: one warpgroup multiplies a tile of A (64 rows of
// kRowBytes, K-major) with 128 columns of B, both in the swizzle that the copy engine writes.
#include "mma/wgmma.cuh"

using E = ELEMENT;
constexpr int kDepth = kRowBytes / sizeof(E::Storage);
constexpr int kBoxBytes = 64 * kRowBytes;
// 128-byte rows exchange chunks by row mod 8, 64-byte rows by row / 2 mod 4.
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return kRowBytes == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
}

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

// `rows` rows of kRowBytes to shared memory.
__device__ __forceinline__ void load(char* to, const char* from, int rows, int stride) {
  constexpr int kChunks = kRowBytes / 16;
  for (int at = threadIdx.x; at < rows * kChunks; at += 128) {
    const int row = at / kChunks, chunk = at % kChunks;
    const uint4 word = *reinterpret_cast<const uint4*>(from + row * stride + chunk * 16);
    *reinterpret_cast<uint4*>(to + row * kRowBytes + swizzled(row, chunk) * 16) = word;
  }
}

extern "C" __global__ void wgmma_shared(const __grid_constant__ Params p) {
  __shared__ __align__(1024) char s_a[kBoxBytes];
  __shared__ __align__(1024) char s_b[2 * kBoxBytes];
  const char* b = reinterpret_cast<const char*>(p.b);
  load(s_a, reinterpret_cast<const char*>(p.a), 64, kRowBytes);
  if constexpr (kKMajor) {
    load(s_b, b, 128, kRowBytes);  // [128 columns, k]
  } else {
    load(s_b, b, 64, 256);  // [k, 128 columns of 16 bits], two boxes of 64 columns
    load(s_b + kBoxBytes, b + 128, 64, 256);
  }
  wg::fence_shared();
  __syncthreads();
  float sum[64];
  for (int i = 0; i < 64; ++i) sum[i] = 1e30f;  // overwritten, not added to
  wg::fence();
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; ++k) {
    Wgmma128<E, kKMajor ? 0 : 1>::multiply(
        sum, wg::descriptor<kRowBytes>(s_a + k * 32, 16, 8 * kRowBytes),
        kKMajor ? wg::descriptor<kRowBytes>(s_b + k * 32, 16, 8 * kRowBytes)
                : wg::descriptor(s_b + k * 2048, kBoxBytes, 1024),
        k > 0);
  }
  wg::commit();
  wg::wait<0>();
  wg::settle(sum);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 64; ++i) {
    p.c[(row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i];
  }
}
