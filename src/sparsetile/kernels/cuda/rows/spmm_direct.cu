// C = epilogue(A . B) straight from CSR arrays on CUDA cores: sum, mean, max or min over each row's
// entries. No format: direct.cuh reads the arrays, row_items.cuh describes the work of a group.
//
// Rows of up to `wide_length` entries have a group of lanes each, in their order. Longer ones are
// listed in pieces, and `wide_blocks` thread blocks stride over the list, a warp for each piece
// (direct_items.cuh). Pieces meet as in spmm_csr.cu.
//
// Threads: kThreads per block; grid.y = slabs, the slow dimension; grid.z = batch. Shared memory:
// none. The order of additions depends on row pointers, n and the lengths given only.
//
// Assumes: as spmm_csr.cu; entries under 2^31; row pointers and columns need not be right.
#include "ptx/element.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using V = E;
using Acc = E::Acc;
constexpr bool kScaled = false, kShared = false, kHeads = false, kRepair = false;
constexpr bool kDirect = true, kWeighted = true;
constexpr int kRows = 1;

// Declared in kernels/direct.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

#include "rows/direct_items.cuh"
#include "rows/row_items.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_direct(const __grid_constant__ Params p) {
  ptx::wait_previous();
  if (p.early) ptx::let_next_start();
  const int lane = threadIdx.x % kLanes, slab = blockIdx.y;
  direct::for_each_item<kLanes, kThreads>(
      p, [&](const GroupWork& work, int4 item) { rows::row_item(p, work, item, slab, lane, 0); });
}
