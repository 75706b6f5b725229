// Graph attention: shared by its kernels.
//
// An entry (t, s) of A[target, source] has one score per head, raw = of_source[s] + of_target[t],
// and the attention exp(leaky(raw) - highest) / total, with highest and total over the entries of
// row t. Nothing of it is stored per entry: each kernel recomputes it from numbers
// per node and head,
//
//   terms[t, h] = {of_target, highest, 1 / total, fourth}
//
// The fourth number is the mean slope of the row (attention-weighted, what the gradient of
// of_target needs) after the softmax, and D = dot(grad, out) in the backward pass.
//
// An entry may stand for several parallel edges, `counts` of them. With dropout `scales`
// [entries, heads] is the sum of their factors; it replaces the count in the weights of messages,
// not in the softmax.
#pragma once

#include "ptx/element.cuh"

namespace gat {

// As in torch: NaN stays NaN.
__device__ __forceinline__ float leaky(float raw, float slope) {
  return raw > 0.0f ? raw : slope * raw;
}
__device__ __forceinline__ float derivative(float raw, float slope) {
  return raw > 0.0f ? 1.0f : slope;
}

// Number of edges of an entry, and the factor of its message for one head.
struct Multiples {
  float count, scale;
};

template <typename Params>
__device__ __forceinline__ Multiples multiples(const Params& p, i64 entry, int head) {
  const float count = p.counts == nullptr ? 1.0f : __ldg(p.counts + entry);
  return {count, p.scales == nullptr ? count : __ldg(p.scales + entry * p.heads + head)};
}

}  // namespace gat
