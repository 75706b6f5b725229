// ring.cuh: one warp fills stages of 128 words, `steps` of them, two others read them. Stages are
// filled by threads or by bulk copies (kBulk).
#include "mma/wgmma_regs.cuh"
#include "pipeline/ring.cuh"

constexpr int kWords = 128;

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void barrier_ring(const __grid_constant__ Params p) {
  __shared__ __align__(16) u32 s_stages[kStages][kWords];
  __shared__ __align__(8) char s_barriers[RingBarriers<kStages>::kBytes];
  const RingBarriers<kStages> ring(s_barriers);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ring.init(1, 2);
    wg::barrier_init_done();
  }
  __syncthreads();
  Turn<kStages> turn;
  for (int step = 0; step < p.steps; ++step, turn.next()) {
    u32* stage = s_stages[turn.stage];
    if (warp == 0) {
      ring.wait_empty(turn);
      if constexpr (kBulk) {
        if (lane == 0) {
          wg::fence_shared();
          wg::barrier_expect(ring.full + turn.stage, kWords * 4);
          wg::copy_bytes(stage, p.given + step * kWords, kWords * 4, ring.full + turn.stage);
        }
      } else {
        for (int i = lane; i < kWords; i += 32) stage[i] = p.given[step * kWords + i];
        __syncwarp();
        if (lane == 0) wg::barrier_arrive(ring.full + turn.stage);
      }
    } else {
      ring.wait_full(turn);
      // One of the readers is late, so that the writer has to wait for it.
      if (warp == 2) __nanosleep(2000);
      for (int i = lane; i < kWords; i += 32) {
        p.out[((warp - 1) * p.steps + step) * kWords + i] = stage[i];
      }
      __syncwarp();
      if (lane == 0) wg::barrier_arrive(ring.empty + turn.stage);
    }
  }
}
