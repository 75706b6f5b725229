// Warpgroup MMA and TMA (sm_90a): thin names over PTX.
//
// Shared operands are in the 128-byte swizzle that TMA writes: rows of 128 bytes, 8 rows per atom
// of 1024 bytes, the 16-byte chunks of row r permuted by XOR with r mod 8. A descriptor has the
// address of an operand and the strides between atoms:
//
//   K-major   (A: a row of 128 bytes is 64 k)    atoms follow along M or N: stride = 1024
//   MN-major  (B as it is: a row is 64 columns)  atoms follow along K: stride = 1024; the next 64
//                                                columns begin `leading` bytes on
//
// Rows of 64 bytes (64 k of FP8) are in the swizzle of that width: atoms of 512 bytes, chunks
// permuted by XOR with r / 2 mod 4.
#pragma once

#include "ptx/element.cuh"
#include "ptx/transpose.cuh"

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// Bytes that only Tensor Cores read.
struct E4M3 {
  using Storage = unsigned char;
};

namespace wg {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- barriers in shared memory

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The calling thread arrives; `bytes` are still expected.
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// The same on that barrier of block `rank` of the cluster, which the calling one may be.
__device__ __forceinline__ void barrier_arrive_at(u64* barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];}" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// Wait for all threads of the cluster; their earlier writes are then visible.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  const u32 address = shared_address(barrier);
  u32 done;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p;}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  } while (done == 0);
}

// ---- copies

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of a matrix, its first element at (row, column), to shared memory.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap* map, int column, int row,
                                         u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// The same to all blocks of a cluster whose bit is set in `blocks`: to that place in the shared
// memory of each, and to that barrier of each.
__device__ __forceinline__ void copy_box_to_all(void* shared, const TensorMap* map, int column,
                                                int row, u64* barrier, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}

// `bytes` bytes, a multiple of 16, to shared memory; both addresses multiples of 16.
__device__ __forceinline__ void copy_bytes(void* shared, const void* global, u32 bytes,
                                           u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// ---- copies back: written by threads, then read by TMA

// Orders threads and the asynchronous proxy (TMA, Tensor Cores): TMA and WGMMA can then read what
// the calling thread has written to shared memory, and TMA may overwrite what the thread has read.
__device__ __forceinline__ void fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Lines stored with this policy are evicted from L2 first.
__device__ __forceinline__ u64 leave_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// A box in shared memory to a matrix; elements outside of the matrix are not stored.
__device__ __forceinline__ void store_box(const TensorMap* map, int column, int row,
                                          const void* shared, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0, {%1, %2}], [%3], %4;" ::"l"(map),
      "r"(column), "r"(row), "r"(shared_address(shared)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Wait until the calling thread's stored boxes may be overwritten.
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Four 8 x 8 matrices of 16 bits, one word per lane each: row r of matrix i goes to the address of
// lane 8 i + r.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}
// The same for columns: column r of matrix i goes to the address of lane 8 i + r.
__device__ __forceinline__ void store_matrices_transposed(u32 address, const u32 (&word)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
      : "memory");
}
// Wait for all threads of the warpgroup; `barrier` is its own number from 1 to 15.
__device__ __forceinline__ void group_sync(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

// ---- products

template <int kRowBytes = 128>
__device__ __forceinline__ u64 descriptor(const void* shared, u32 leading, u32 stride) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "a swizzle that copies are made in");
  const u64 address = shared_address(shared), swizzle = kRowBytes == 128 ? 1 : 2;
  return (address & 0x3ffff) >> 4 | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 |
         swizzle << 62;
}

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Sums change until their products have been waited for, which the compiler cannot know: no read of
// them may move before this.
template <int kCount>
__device__ __forceinline__ void settle(float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace wg

// Two sums rounded to 16 bits in one instruction, the first in the lower half.
template <typename E>
__device__ __forceinline__ u32 narrow_pair(float low, float high);
template <>
__device__ __forceinline__ u32 narrow_pair<F16>(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ u32 narrow_pair<BF16>(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Products. The instruction names its sums one by one: 64 for 128 columns, 128 for 256.
#define WGMMA_NAMES_64                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_128                                                                        \
  WGMMA_NAMES_64                                                                               \
  ", "                                                                                         \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, "                                                                                     \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define WGMMA_SUMS_8(i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_SUMS_32(i) \
  WGMMA_SUMS_8(i), WGMMA_SUMS_8(i + 8), WGMMA_SUMS_8(i + 16), WGMMA_SUMS_8(i + 24)
#define WGMMA_SUMS_64 WGMMA_SUMS_32(0), WGMMA_SUMS_32(32)
#define WGMMA_SUMS_128 WGMMA_SUMS_64, WGMMA_SUMS_32(64), WGMMA_SUMS_32(96)

// One warpgroup: 64 x 128 sums += A (64 x 16, K-major; 64 x 32 of 8 bits, 64 x 8 of TF32) . B
// (N-major, or K-major if kNMajor is 0), both in shared memory. Types of 8 and 32 bits have no
// choice, nor an operand for it; of float32 the lower 13 bits are not read.
template <typename E, int kNMajor = 1>
struct Wgmma128;

#define WGMMA_SHARED(E, kNMajor, OP, TAIL)                                                   \
  template <>                                                                                \
  struct Wgmma128<E, kNMajor> {                                                              \
    __device__ __forceinline__ static void multiply(float (&d)[64], u64 a, u64 b, int add) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned." OP  \
                   " {" WGMMA_NAMES_64 "}, %64, %65, p, 1, 1" TAIL ";}"                      \
                   : WGMMA_SUMS_64                                                           \
                   : "l"(a), "l"(b), "r"(add));                                              \
    }                                                                                        \
  };

WGMMA_SHARED(F16, 1, "m64n128k16.f32.f16.f16", ", 0, 1")
WGMMA_SHARED(F16, 0, "m64n128k16.f32.f16.f16", ", 0, 0")
WGMMA_SHARED(BF16, 1, "m64n128k16.f32.bf16.bf16", ", 0, 1")
WGMMA_SHARED(BF16, 0, "m64n128k16.f32.bf16.bf16", ", 0, 0")
WGMMA_SHARED(E4M3, 0, "m64n128k32.f32.e4m3.e4m3", "")
WGMMA_SHARED(F32, 0, "m64n128k8.f32.tf32.tf32", "")
