// Graph attention: what its kernels share.
//
// An entry (t, s) of A[target, source] has one score per head, raw = of_source[s] + of_target[t],
// and the attention exp(leaky(raw) - highest) / total, where highest and total are taken over the
// entries of row t. Nothing of it is stored per entry: each kernel computes it again from numbers
// per node and head,
//
//   terms[t, h] = {of_target, highest, 1 / total, fourth}
//
// The fourth number is the mean slope of the row (attention-weighted, what the gradient of
// of_target needs) after the softmax, and D = dot(grad, out) in the backward pass.
//
// An entry may stand for several parallel edges: `counts` says for how many. With dropout `scales`
// [entries, heads] is the sum of their factors; it takes the place of the count where messages are
// weighed, and not in the softmax.
#pragma once

#include "element.cuh"

namespace gat {

// As torch's: NaN stays NaN.
__device__ __forceinline__ float leaky(float raw, float slope) {
  return raw > 0.0f ? raw : slope * raw;
}
__device__ __forceinline__ float derivative(float raw, float slope) {
  return raw > 0.0f ? 1.0f : slope;
}

// How many edges an entry stands for, and by what its message is multiplied for one head.
struct Multiples {
  float count, scale;
};

template <typename Params>
__device__ __forceinline__ Multiples multiples(const Params& p, i64 entry, int head) {
  const float count = p.counts == nullptr ? 1.0f : __ldg(p.counts + entry);
  return {count, p.scales == nullptr ? count : __ldg(p.scales + entry * p.heads + head)};
}

}  // namespace gat
