// An exchange among lanes for stores of C.
#pragma once

#include "ptx/element.cuh"

// Rows to columns among four neighbouring lanes: lane q then has word q of each, in lane order.
__device__ __forceinline__ void transpose(u32 (&word)[4], int q) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = q & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 sent = upper ? word[i] : word[i | step];
      const u32 got = __shfl_xor_sync(0xffffffffu, sent, step);
      if (upper) {
        word[i] = got;
      } else {
        word[i | step] = got;
      }
    }
  }
}
