// out[e] = dot(G[row(e), :], B[column(e), :]) for each entry e of CSR A, on CUDA cores.
//
// The gradient of C = A.B with respect to A's values. One group of kLanes lanes owns one item (a
// row or a piece of a row, see segment.cuh); lane l multiplies columns l*kVec.. of every slab of
// kLanes * kVec columns, kUnroll entries at a time, then the lanes' sums are added in a fixed
// butterfly: deterministic, one write per entry, no workspace. grid.x = item blocks, grid.z =
// batch (the caller adds the batches). Shared memory: none.
//
// Assumes: as spmm_csr.cu; both G and B have unit column stride, addresses aligned to kVec.
#include "segment.cuh"

using E = ELEMENT;
using Acc = E::Acc;

struct Params {
  const int4* items;
  const int* columns;
  const E::Storage* g;
  const E::Storage* b;
  Acc* out;  // [batch][entries]
  i64 g_row_stride;
  i64 b_row_stride;
  i64 g_batch_stride;
  i64 b_batch_stride;
  i64 out_batch_stride;
  int n;
  int item_count;
};

static_assert(sizeof(Params) == kParamsBytes, "host and device disagree on the parameter struct");
static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");

extern "C" __global__ void __launch_bounds__(kThreads, 5)
    sddmm_csr(const __grid_constant__ Params p) {
  constexpr int kItems = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int index = blockIdx.x * kItems + threadIdx.x / kLanes;
  if (index >= p.item_count) return;
  const int4 item = __ldg(p.items + index);
  const E::Storage* g = p.g + blockIdx.z * p.g_batch_stride + item.x * p.g_row_stride;
  const E::Storage* b = p.b + blockIdx.z * p.b_batch_stride;
  Acc* out = p.out + blockIdx.z * p.out_batch_stride;

  for (int entry = item.y; entry < item.z; entry += kUnroll) {
    int column[kUnroll];
    Acc dot[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      dot[u] = Acc(0);
      column[u] = entry + u < item.z ? __ldg(p.columns + entry + u) : 0;
    }
    for (int at = lane * kVec; at < p.n; at += kLanes * kVec) {
      const Packed<E, kVec> left = load_vector<E, kVec>(g + at);
      Packed<E, kVec> right[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const E::Storage* address = b + i64(column[u]) * p.b_row_stride + at;
        right[u] = load_vector<E, kVec>(address);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (entry + u < item.z) {
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            dot[u] += E::widen(left.element[v]) * E::widen(right[u].element[v]);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) {
        dot[u] += __shfl_xor_sync(group_mask<kLanes>(), dot[u], step, kLanes);
      }
      if (lane == 0 && entry + u < item.z) out[entry + u] = dot[u];
    }
  }
}
