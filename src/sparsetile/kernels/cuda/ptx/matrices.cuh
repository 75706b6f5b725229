// Loads of 8x8 matrices from shared memory, for kernels that multiply operands as they lie there.
#pragma once

#include "ptx/ptx.cuh"

namespace ptx {

// Four 8x8 matrices of 16-bit elements from shared memory: lanes 8i to 8i + 7 point at the rows of
// matrix i, 16 bytes each; lane 4g + t gets elements (g, 2t) and (g, 2t + 1) of each.
__device__ __forceinline__ void load_matrix(const void* row, u32 (&word)[4]) {
  const u32 from = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from)
               : "memory");
}

}  // namespace ptx
