// out[e] = dot(G[row(e), :], B[column(e), :]) for each entry e of CSR A, on CUDA cores.
//
// The gradient of C = A.B with respect to A's values. A group of kLanes lanes works on one item (a
// row or a piece of a row; the groups of a warp share a wide one, see segment.cuh). Lane l holds
// kTimes vectors of kVec columns of G's row, kLanes * kVec apart, and multiplies them with the
// same columns of kUnroll rows of B at a time. The lanes' sums are added in a butterfly that halves
// the number of values at each step while it can, so that kUnroll sums cost few shuffles:
//
//   kUnroll = 4, 8 lanes:   lane       0      1      2      3      4 ...
//   before                           d0-d3  d0-d3  d0-d3  d0-d3  d0-d3     4 partial sums each
//   step 1, keep two                 d0 d2  d1 d3  d0 d2  d1 d3  d0 d2     2 shuffles
//   step 2, keep one                 d0     d1     d2     d3     d0        1 shuffle
//   step 4, add                      d0     d1     d2     d3     d0        1 shuffle
//
// Each lane of a chunk of kLanes entries ends up with one entry's result: one coalesced store.
// The order of additions is fixed: deterministic, one write per entry, no workspace. Widths over
// one slab (kTimes * kLanes * kVec) walk the slabs for each batch, with G from L1.
//
// Threads: kThreads per block; grid.x = item blocks, grid.z = batch (the caller adds the batches).
// Shared memory: none.
//
// The work of a group is in sampled_items.cuh.
//
// Assumes: as spmm_csr.cu; both G and B have unit column stride, addresses aligned to kVec.
#include "rows/segment.cuh"

using E = ELEMENT;
using Acc = E::Acc;
constexpr bool kDirect = false;

// Declared in kernels/csr.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

#include "rows/sampled_items.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    sddmm_csr(const __grid_constant__ Params p) {
  const GroupWork work = group_work<kLanes, kThreads>(blockIdx.x, p.item_end, p.block_end);
  const int lane = threadIdx.x % kLanes;
  const int4 item = work.index < work.end ? __ldg(p.items + work.index) : make_int4(0, 0, 0, -1);
  sampled_item(p, work, item, lane);
}
