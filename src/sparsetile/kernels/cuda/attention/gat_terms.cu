// Terms of the backward pass of graph attention per target and head, from row-wise products:
//
//   D        = dot(grad, plain)            plain = sum of attention * message (the output)
//   d_target = dot(grad, bent) - D * mean  bent  = the same sum, each term times its slope
//   new terms = {of_target, highest, 1 / total, D}
//
// The gradient of of_target is the sum over the row of attention * slope * (dot(grad, message) -
// D). The dot product may be taken after the sum: with `bent` kept by the forward pass, no message
// is gathered again.
//
// A group of kLanes lanes works on one (target, head), each with vectors of kVec elements kLanes
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

extern "C" __global__ void __launch_bounds__(kThreads) gat_terms(const __grid_constant__ Params p) {
  const i64 index = i64(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const i64 first = (index < p.count ? index : 0) * p.width;
  float plain = 0.0f, bent = 0.0f;
  for (int at = lane * kVec; at < p.width; at += kLanes * kVec) {
    const Packed<E, kVec> grad = load_vector<E, kVec>(p.grad + first + at);
    Wide x, y;
    x.load(p.plain + first + at);
    y.load(p.bent + first + at);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      plain += widen(grad, v) * x[v];
      bent += widen(grad, v) * y[v];
    }
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    plain += __shfl_xor_sync(kWarp, plain, step);
    bent += __shfl_xor_sync(kWarp, bent, step);
  }
  if (lane > 0 || index >= p.count) return;
  const float4 terms = __ldg(p.terms + index);
  p.d_target[index] = bent - plain * terms.w;
  p.new_terms[index] = {terms.x, terms.y, terms.z, plain};
}
