// Thin names over PTX. The only file with inline assembly of general use; no CUDA header is
// included, so that a kernel compiles with nothing but the NVRTC library installed.
#pragma once

using i32 = int;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

namespace ptx {

// 16-bit floats live in registers as raw bits; arithmetic is always in float32.
__device__ __forceinline__ float f16_to_f32(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u16 f32_to_f16(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// A bfloat16 is the upper half of a float32, so widening is a shift.
__device__ __forceinline__ float bf16_to_f32(u16 bits) {
  return __uint_as_float(static_cast<u32>(bits) << 16);
}

__device__ __forceinline__ u16 f32_to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Read-only loads: the data is not written while the kernel runs.
__device__ __forceinline__ uint4 load_nc(const uint4* address) { return __ldg(address); }
__device__ __forceinline__ uint2 load_nc(const uint2* address) { return __ldg(address); }
__device__ __forceinline__ u32 load_nc(const u32* address) { return __ldg(address); }
__device__ __forceinline__ u16 load_nc(const u16* address) { return __ldg(address); }

// Streaming stores: C is not read again here, so it should leave L2 before B does.
__device__ __forceinline__ void store_cs(uint4* address, uint4 value) { __stcs(address, value); }
__device__ __forceinline__ void store_cs(uint2* address, uint2 value) { __stcs(address, value); }
__device__ __forceinline__ void store_cs(u32* address, u32 value) { __stcs(address, value); }
__device__ __forceinline__ void store_cs(u16* address, u16 value) { __stcs(address, value); }

}  // namespace ptx
