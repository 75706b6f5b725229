// of_source[n, h] = dot(messages[n, h, :], first[h, :]), and of_target with `second`: the terms of
// graph attention's scores, from one read of the messages, summed in float32.
//
// A group of kLanes lanes works on one (node, head), each with vectors of kVec elements kLanes
// apart; the sums are added by shuffles in a fixed order. Threads: kThreads per block. Shared
// memory: none.
//
// Assumes: all arrays contiguous, rows of heads * width elements; width a multiple of kVec,
// addresses aligned to kVec elements.
#include "attention/gat.cuh"

using E = ELEMENT;

// Declared in kernels/gat.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");
static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");

// Vectors of float32, in accesses of up to 16 bytes.
using Wide = RawValues<F32, kVec>;

extern "C" __global__ void __launch_bounds__(kThreads)
    gat_scores(const __grid_constant__ Params p) {
  const i64 wanted = i64(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const i64 index = wanted < p.count ? wanted : 0;
  const int lane = threadIdx.x % kLanes;
  const i64 head = index % p.heads * p.width;
  float first = 0.0f, second = 0.0f;
  for (int at = lane * kVec; at < p.width; at += kLanes * kVec) {
    const Packed<E, kVec> message = load_vector<E, kVec>(p.messages + index * p.width + at);
    Wide x, y;
    x.load(p.first + head + at);
    y.load((kTwo ? p.second : p.first) + head + at);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      first += widen(message, v) * x[v];
      if constexpr (kTwo) second += widen(message, v) * y[v];
    }
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    first += __shfl_xor_sync(kWarp, first, step);
    if constexpr (kTwo) second += __shfl_xor_sync(kWarp, second, step);
  }
  if (lane > 0 || wanted >= p.count) return;
  p.of_source[index] = first;
  if constexpr (kTwo) p.of_target[index] = second;
}
