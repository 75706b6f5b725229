// out[e] = dot(G[row(e), :], B[column(e), :]) for each entry e of CSR arrays as callers have them.
//
// sddmm_csr.cu draws the work of a group (sampled_items.cuh), direct_items.cuh who works on what.
// Nothing is joined: each entry is written once. An entry whose column B does not have is NaN, and
// reported.
//
// Threads: kThreads per block; grid.z = batch. Shared memory: none.
//
// Assumes: as spmm_direct.cu; both G and B have unit column stride, addresses aligned to kVec.
#include "ptx/element.cuh"

using E = ELEMENT;
using Acc = E::Acc;
constexpr bool kDirect = true;

// Declared in kernels/direct.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

#include "rows/direct_items.cuh"
#include "rows/sampled_items.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    sddmm_direct(const __grid_constant__ Params p) {
  ptx::wait_previous();
  const int lane = threadIdx.x % kLanes;
  direct::for_each_item<kLanes, kThreads>(p, [&](const GroupWork& work, int4 item) {
    if (item.x < 0) item.x = 0;  // a row in the list: no entries here
    sampled_item(p, work, item, lane);
  });
}
