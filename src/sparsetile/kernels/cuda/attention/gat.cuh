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
//
// Scores that are not a sum of both nodes' terms, and terms of edges, are numbers per entry and
// head (`of_edge`): edge_scores.cu computes them, and spmm_gat.cu adds them to raw.
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

// Add an edge's mapped features to kVec columns: features[number] * weights.
template <int kVec, typename Params>
__device__ __forceinline__ void add_edge(const Params& p, i64 number, int column,
                                         float (&sum)[kVec]) {
  const float* const features = p.features + number * p.dims;
#pragma unroll 1
  for (int d = 0; d < p.dims; ++d) {
    const float feature = __ldg(features + d);
    RawValues<F32, kVec> weights;
    weights.load(p.weights + i64(d) * p.n + column);
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum[v] += feature * weights[v];
  }
}

}  // namespace gat

// What edge_scores.cu and edge_rows.cu compute (kernels/edge_attention.py).
constexpr int kDot = 0, kBent = 1, kGradient = 2, kFeatures = 3, kRelu = 4, kReluGradient = 5;
