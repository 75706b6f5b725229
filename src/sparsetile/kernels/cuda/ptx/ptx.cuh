// Thin names over PTX. The only file with inline assembly of general use; no CUDA header is
// included, so a kernel compiles with only the NVRTC library installed.
#pragma once

using i32 = int;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// All lanes of a warp, for the *_sync functions.
constexpr u32 kWarp = 0xffffffffu;

namespace ptx {

// 16-bit floats are raw bits in registers; arithmetic is always in float32.
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

// Programmatic dependent launch (sm_90 on; nothing elsewhere). A kernel may start while the
// previous one on the stream is ending: wait_previous() returns when that one has ended and all its
// writes are visible, and must come before any read. let_next_start() comes after it, so that a
// kernel two launches back is never still running.
__device__ __forceinline__ void wait_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The lane's number in its warp; the read is not moved from here.
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Bits of the lanes below this one.
__device__ __forceinline__ u32 lanes_below() {
  u32 mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

template <typename T>
__device__ __forceinline__ T infinity() {
  return sizeof(T) == 8 ? T(__longlong_as_double(0x7ff0000000000000))
                        : T(__int_as_float(0x7f800000));
}

// The greater of two; NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
__device__ __forceinline__ double max_nan(double a, double b) { return b > a || b != b ? b : a; }

// sum[v] += weight * x[v] if `here`, as predicated instructions: a branch would make groups of a
// warp wait for each other, and a select would cost a second instruction each.
template <int kCount>
__device__ __forceinline__ void fma_if(bool here, float weight, const float (&x)[kCount],
                                       float (&sum)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int v = 0; v < kCount; v += 4) {
      asm("{.reg .pred q; setp.ne.s32 q, %9, 0; @q fma.rn.f32 %0, %4, %5, %0;"
          "@q fma.rn.f32 %1, %4, %6, %1; @q fma.rn.f32 %2, %4, %7, %2;"
          "@q fma.rn.f32 %3, %4, %8, %3;}"
          : "+f"(sum[v]), "+f"(sum[v + 1]), "+f"(sum[v + 2]), "+f"(sum[v + 3])
          : "f"(weight), "f"(x[v]), "f"(x[v + 1]), "f"(x[v + 2]), "f"(x[v + 3]), "r"(int(here)));
    }
  } else {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      asm("{.reg .pred q; setp.ne.s32 q, %3, 0; @q fma.rn.f32 %0, %1, %2, %0;}"
          : "+f"(sum[v])
          : "f"(weight), "f"(x[v]), "r"(int(here)));
    }
  }
}
template <int kCount>
__device__ __forceinline__ void add_if(bool here, const float (&x)[kCount], float (&sum)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int v = 0; v < kCount; v += 4) {
      asm("{.reg .pred q; setp.ne.s32 q, %8, 0; @q add.rn.f32 %0, %4, %0; @q add.rn.f32 %1, %5, %1;"
          "@q add.rn.f32 %2, %6, %2; @q add.rn.f32 %3, %7, %3;}"
          : "+f"(sum[v]), "+f"(sum[v + 1]), "+f"(sum[v + 2]), "+f"(sum[v + 3])
          : "f"(x[v]), "f"(x[v + 1]), "f"(x[v + 2]), "f"(x[v + 3]), "r"(int(here)));
    }
  } else {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      asm("{.reg .pred q; setp.ne.s32 q, %2, 0; @q add.rn.f32 %0, %1, %0;}"
          : "+f"(sum[v])
          : "f"(x[v]), "r"(int(here)));
    }
  }
}
template <int kCount>
__device__ __forceinline__ void fma_if(bool here, double weight, const double (&x)[kCount],
                                       double (&sum)[kCount]) {
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    if (here) sum[v] += weight * x[v];
  }
}
template <int kCount>
__device__ __forceinline__ void add_if(bool here, const double (&x)[kCount],
                                       double (&sum)[kCount]) {
#pragma unroll
  for (int v = 0; v < kCount; ++v) {
    if (here) sum[v] += x[v];
  }
}

// Read-only loads: the data is not written while the kernel runs.
__device__ __forceinline__ uint4 load_nc(const uint4* address) { return __ldg(address); }
__device__ __forceinline__ uint2 load_nc(const uint2* address) { return __ldg(address); }
__device__ __forceinline__ u32 load_nc(const u32* address) { return __ldg(address); }
__device__ __forceinline__ u16 load_nc(const u16* address) { return __ldg(address); }

// 16 bytes that are not read again: they must not evict others from L1.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}

// Loads that stay in their place and do not wait there; the second fills the upper half with zeros.
__device__ __forceinline__ void load_unwaited(const u32* from, u32& to) {
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to) : "l"(from));
}
__device__ __forceinline__ void load_unwaited(const u16* from, u32& to) {
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(to) : "l"(from));
}

// Two 16-bit numbers times two others, exact down to the smallest ones.
template <bool kBrain>
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 product;
  if constexpr (kBrain) {  // sm_80 has no other product; adding -0 keeps signs of zeros
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  }
  return product;
}

// 16 bytes from global to shared memory, asynchronously; zeros if not `inside`. kCached: through
// L1, in which other warps may find them; otherwise L2 only.
template <bool kCached>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  const int bytes = inside ? 16 : 0;
  if constexpr (kCached) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
  }
}

// The same for 4, 8 or 16 bytes, all inside.
template <int kBytes>
__device__ __forceinline__ void copy_async_small(void* shared, const void* global) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes)
               : "memory");
}

// All copies since the last commit are a group; wait until at most kPending groups are in flight.
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Wait for `threads` threads of the block, whole warps; `barrier` is a number from 1 to 15.
__device__ __forceinline__ void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Four 8x8 matrices of 16-bit elements from shared memory: lanes 8i to 8i + 7 point at the rows of
// matrix i, 16 bytes each; lane 4g + t gets elements (g, 2t) and (g, 2t + 1) of each.
__device__ __forceinline__ void load_matrix(const void* row, u32 (&word)[4]) {
  const u32 from = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements from shared memory, transposed: lanes 8i to 8i + 7 point at
// the rows of matrix i, 16 bytes each; lane 4g + t gets elements (2t, g) and (2t + 1, g) of each.
__device__ __forceinline__ void load_matrix_transposed(const void* row, u32 (&word)[4]) {
  const u32 from = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from)
               : "memory");
}

// Add two or four neighbouring numbers in global memory, aligned to as many, in any order with
// other threads' sums, without waiting. One instruction from sm_90 on.
template <int kCount>
__device__ __forceinline__ void add_global(float* address, const float (&sum)[kCount]) {
  static_assert(kCount == 2 || kCount == 4, "as many as an instruction takes");
#if __CUDA_ARCH__ >= 900
  if constexpr (kCount == 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(sum[0]),
                 "f"(sum[1]), "f"(sum[2]), "f"(sum[3])
                 : "memory");
  } else {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(sum[0]), "f"(sum[1])
                 : "memory");
  }
#else
#pragma unroll
  for (int v = 0; v < kCount; ++v) atomicAdd(address + v, sum[v]);
#endif
}

// Streaming stores: C is not read again here, so it should be evicted from L2 before B.
__device__ __forceinline__ void store_cs(uint4* address, uint4 value) { __stcs(address, value); }
__device__ __forceinline__ void store_cs(uint2* address, uint2 value) { __stcs(address, value); }
__device__ __forceinline__ void store_cs(u32* address, u32 value) { __stcs(address, value); }
__device__ __forceinline__ void store_cs(u16* address, u16 value) { __stcs(address, value); }

}  // namespace ptx
