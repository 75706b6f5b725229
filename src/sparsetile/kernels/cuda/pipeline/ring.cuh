// Rings of stages in shared memory with a pair of mbarriers each (sm_90).
//
//   producer   wait_empty(turn) -> fill turn.stage -> arrive at full[stage]
//   consumer   wait_full(turn)  -> use turn.stage  -> arrive at empty[stage]
//
// The parity of a barrier's phase flips after each pass through the ring. A producer waits for the
// opposite parity: in the first pass every stage counts as empty.
#pragma once

#include "mma/wgmma.cuh"

// The position of a producer or a consumer: its stage, and the parity of the barriers' phase.
template <int kStages>
struct Turn {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The barriers of a ring: data has arrived (full), data has been used (empty).
template <int kStages>
struct RingBarriers {
  static constexpr int kBytes = 2 * kStages * 8;
  u64* full;
  u64* empty;

  __device__ __forceinline__ explicit RingBarriers(char* memory)
      : full(reinterpret_cast<u64*>(memory)), empty(full + kStages) {}
  // By one thread; wg::barrier_init_done() and a sync of all threads must follow.
  __device__ __forceinline__ void init(u32 full_arrivals, u32 empty_arrivals) const {
    for (int s = 0; s < kStages; ++s) {
      wg::barrier_init(full + s, full_arrivals);
      wg::barrier_init(empty + s, empty_arrivals);
    }
  }
  __device__ __forceinline__ void wait_full(const Turn<kStages>& turn) const {
    wg::barrier_wait(full + turn.stage, turn.parity);
  }
  __device__ __forceinline__ void wait_empty(const Turn<kStages>& turn) const {
    wg::barrier_wait(empty + turn.stage, turn.parity ^ 1);
  }
};
