// One number per entry (t, s) of A[target, source] and head, from a row of the target (`left`) and
// one of the source (`right`):
//
//   kDot       out = slope * dot(left, right); with `shared` all heads use the same row of right
//   kBent      out = dot(vector, leaky(left + right + edge))
//   kGradient  out = gradient of the entry's score (gat.cuh), with left = grad, right = messages:
//              derivative * attention * (scale * dot(left, right) - count * D)
//   kFeatures  out[entry, d] = sum over heads of weight * dot(vector * derivative, weights[d]) for
//              kSums neighbouring d: the gradient of the entry's features
//
//   edge[c] = sum over d of features[entry, d] * weights[d, c]     kEdges, else 0
//
// A group of kLanes lanes works on one entry. It goes over the heads step by step, a vector of kVec
// columns per lane; kUnroll steps are in flight at once. Sums of the lanes are added by shuffles in
// a fixed order. Nothing is added across entries.
//
//   kLanes * kVec = 32, width = 40:   step       0        1        2        3
//                                     head       0        0        1        1
//                                     columns  0..31   32..39    0..31   32..39
//
// Threads: kThreads per block; grid.x = groups of entries. Shared memory: none.
//
// Assumes: rows of heads * width elements, contiguous; width and addresses multiples of kVec
// elements, vector and weights aligned to kVec floats; fewer than 2^31 entries.
#include "attention/gat.cuh"

using E = ELEMENT;

// Declared in kernels/edge_attention.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");
static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");
static_assert(kMode == kFeatures || kSums == 1, "other numbers are one per head");

constexpr bool kNonlinear = kMode == kBent || kMode == kFeatures;

// Vectors of float32, in accesses of up to 16 bytes.
using Wide = RawValues<F32, kVec>;

// The place of a step in the rows, the same for all lanes but the column.
struct Step {
  int head, column;
  bool inside;
};

__device__ __forceinline__ float of_head(const Params& p, i64 entry, i64 target, i64 source,
                                         int head, float dot) {
  if constexpr (kMode == kDot) return static_cast<float>(p.slope) * dot;
  if constexpr (kMode != kGradient) return dot;
  const float4 terms = __ldg(p.terms + target * p.heads + head);
  const float slope = static_cast<float>(p.slope);
  float raw = terms.x + __ldg(p.of_edge + entry * p.heads + head);
  if (p.of_source != nullptr) raw += __ldg(p.of_source + source * p.heads + head);
  const float one = __expf(gat::leaky(raw, slope) - terms.y) * terms.z;  // of one edge
  const gat::Multiples times = gat::multiples(p, entry, head);
  return gat::derivative(raw, slope) * one * (times.scale * dot - times.count * terms.w);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    edge_scores(const __grid_constant__ Params p) {
  const i64 wanted = i64(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const bool valid = wanted < p.count;
  const i64 entry = valid ? wanted : 0;
  const int lane = threadIdx.x % kLanes;
  const float slope = static_cast<float>(p.slope);
  const i64 target = __ldg(p.rows + entry), source = static_cast<u32>(__ldg(p.columns + entry));
  const E::Storage* const left = p.left + target * p.n;
  const bool shared = kMode == kDot && p.shared;  // right has one head's columns, for all heads
  const E::Storage* const right = p.right + source * (shared ? p.width : p.n);
  const int per_head = (p.width + kLanes * kVec - 1) / (kLanes * kVec);
  float sum[kSums] = {};
  int head = 0, part = 0;
#pragma unroll 1
  while (head < p.heads) {
    Step step[kUnroll];
    Packed<E, kVec> x[kUnroll], y[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = (part * kLanes + lane) * kVec;
      // Past the last column the first one is read and not used.
      step[u] = {head, head * p.width + at, head < p.heads && at < p.width};
      if (!step[u].inside) step[u].column = 0;
      x[u] = load_vector<E, kVec>(left + step[u].column);
      y[u] = load_vector<E, kVec>(right + (shared && step[u].inside ? at : step[u].column));
      if (++part == per_head) part = 0, ++head;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (step[u].head >= p.heads) continue;
      Wide vector;
      float edge[kVec] = {};
      if constexpr (kNonlinear) vector.load(p.vector + step[u].column);
      if constexpr (kNonlinear && kEdges) {
        gat::add_edge<kVec>(p, entry, step[u].column, edge);
      }
      if (step[u].inside) {
        float weight = 0.0f;
        if constexpr (kMode == kFeatures) {
          weight = __ldg(p.of_edge + entry * p.heads + step[u].head);
        }
        if constexpr (kMode == kFeatures) {
          float pull[kVec];
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            const float z = widen(x[u], v) + widen(y[u], v) + edge[v];
            pull[v] = weight * vector[v] * gat::derivative(z, slope);
          }
#pragma unroll
          for (int s = 0; s < kSums; ++s) {
            Wide row;
            row.load(p.chunk + i64(s) * p.n + step[u].column);
#pragma unroll
            for (int v = 0; v < kVec; ++v) sum[s] += pull[v] * row[v];
          }
        } else {
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            if constexpr (kMode == kBent) {
              const float z = widen(x[u], v) + widen(y[u], v) + edge[v];
              sum[0] += vector[v] * gat::leaky(z, slope);
            } else {
              sum[0] += widen(x[u], v) * widen(y[u], v);
            }
          }
        }
      }
      // The last step of a head, or of all.
      const bool last = u + 1 < kUnroll ? step[u + 1].head != step[u].head : part == 0;
      if (kMode == kFeatures || !last) continue;
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        sum[0] += __shfl_xor_sync(kWarp, sum[0], lanes);
      }
      if (lane == 0 && valid) {
        p.out[entry * p.heads + step[u].head] =
            of_head(p, entry, target, source, step[u].head, sum[0]);
      }
      sum[0] = 0.0f;
    }
  }
  if constexpr (kMode == kFeatures) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        sum[s] += __shfl_xor_sync(kWarp, sum[s], lanes);
      }
      if (lane == 0 && valid) p.out[entry * p.dims + s] = sum[s];
    }
  }
}
