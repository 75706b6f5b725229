// WgmmaRegisters of wgmma_regs.cuh: A (64 x kK) in registers, B (kK x kCols) in shared memory: TF32
// K-major in core matrices, types of 16 bits N-major in the 128-byte swizzle.
#include "mma/wgmma_regs.cuh"

using E = ELEMENT;
constexpr bool kIsF32 = sizeof(E::Storage) == 4;
constexpr int kK = kIsF32 ? 8 : 16;
constexpr int kSums = kCols / 2;

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void wgmma_registers(const __grid_constant__ Params p) {
  __shared__ __align__(1024) char s_b[kK * kCols * sizeof(E::Storage)];
  for (int at = threadIdx.x; at < kK * kCols; at += 128) {
    const int k = at / kCols, n = at % kCols;
    // TF32: four k of a column are 16 bytes; else rows of 64 columns, chunks of eight exchanged.
    const int place = kIsF32 ? k / 4 * (kCols * 16) + n * 16 + k % 4 * 4
                             : n / 64 * (kK * 128) + k * 128 + (n / 8 % 8 ^ k % 8) * 16 + n % 8 * 2;
    *reinterpret_cast<E::Storage*>(s_b + place) = p.b[at];
  }
  wg::fence_shared();
  __syncthreads();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = threadIdx.x / 32 * 16 + g;
  u32 a[4];
  for (int i = 0; i < 4; ++i) {
    const int r = row + i % 2 * 8;
    if constexpr (kIsF32) {
      a[i] = __float_as_uint(p.a[r * kK + t + i / 2 * 4]);
    } else {
      a[i] = *reinterpret_cast<const u32*>(p.a + r * kK + 2 * t + i / 2 * 8);
    }
  }
  float sum[kSums];
  for (int i = 0; i < kSums; ++i) sum[i] = 1.0f;  // added to
  wg::fence();
  WgmmaRegisters<E, kCols>::multiply(
      sum, a,
      kIsF32 ? wg::plain_descriptor(s_b, kCols * 16, 128) : wg::descriptor(s_b, kK * 128, 1024));
  wg::commit();
  wg::wait<0>();
  wg::settle(sum);
  for (int i = 0; i < kSums; ++i) {
    p.c[(row + i / 2 % 2 * 8) * kCols + i / 4 * 8 + t * 2 + i % 2] = sum[i];
  }
}
