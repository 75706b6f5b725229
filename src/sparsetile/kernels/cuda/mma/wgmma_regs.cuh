// Warpgroup MMA with its first operand in registers (sm_90a).
//
//   D[64, kN] += A[64, k] . B[k, kN]      k is 8 for TF32, 16 for types of 16 bits
//
// Warp w of the warpgroup holds rows 16w to 16w + 15 of A and D. lane = 4g + t:
//
//   A, TF32     (g, k=t) (g+8, t) (g, t+4) (g+8, t+4)
//   A, 16 bit   (g, k=2t 2t+1) (g+8, same) (g, 2t+8 2t+9) (g+8, same)
//   D           sum[4i + e]: row g (e < 2) or g + 8, column 8i + 2t + e % 2
//
// B is in shared memory: TF32 K-major, without swizzle, in core matrices of eight columns times
// 16 bytes of k; 16-bit types N-major in the 128-byte swizzle (wgmma.cuh).
#pragma once

#include "mma/wgmma.cuh"

namespace wg {

// Descriptor of a K-major operand without swizzle: `along_k` bytes to the core matrix of the next
// 16 bytes of k, `along_n` to that of the next eight columns.
__device__ __forceinline__ u64 plain_descriptor(const void* shared, u32 along_k, u32 along_n) {
  const u64 address = shared_address(shared);
  return (address & 0x3ffff) >> 4 | u64(along_k >> 4) << 16 | u64(along_n >> 4) << 32;
}

}  // namespace wg

// kN columns, their sums, the instruction, the operands after its scales, numbers of the operands
// after the sums: A's four words and B's descriptor.
#define WGMMA_REGISTERS(E, kN, kSums, OP, TAIL, A0, A1, A2, A3, B)                                 \
  template <>                                                                                      \
  struct WgmmaRegisters<E, kN> {                                                                   \
    __device__ __forceinline__ static void multiply(float (&d)[kSums], const u32 (&a)[4], u64 b) { \
      asm volatile("wgmma.mma_async.sync.aligned." OP " {" WGMMA_NAMES_##kSums                     \
                   "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", 1, 1, 1" TAIL ";"                  \
                   : WGMMA_SUMS_##kSums                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
    }                                                                                              \
  };

template <typename E, int kN>
struct WgmmaRegisters;
WGMMA_REGISTERS(F32, 128, 64, "m64n128k8.f32.tf32.tf32", "", "%64", "%65", "%66", "%67", "%68")
WGMMA_REGISTERS(F16, 128, 64, "m64n128k16.f32.f16.f16", ", 1", "%64", "%65", "%66", "%67", "%68")
WGMMA_REGISTERS(BF16, 128, 64, "m64n128k16.f32.bf16.bf16", ", 1", "%64", "%65", "%66", "%67", "%68")
WGMMA_REGISTERS(F32, 256, 128, "m64n256k8.f32.tf32.tf32", "", "%128", "%129", "%130", "%131",
                "%132")
WGMMA_REGISTERS(F16, 256, 128, "m64n256k16.f32.f16.f16", ", 1", "%128", "%129", "%130", "%131",
                "%132")
WGMMA_REGISTERS(BF16, 256, 128, "m64n256k16.f32.bf16.bf16", ", 1", "%128", "%129", "%130", "%131",
                "%132")
