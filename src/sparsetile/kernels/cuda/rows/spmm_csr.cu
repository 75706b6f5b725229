// C = epilogue(A . B) for CSR A on CUDA cores: sum, mean, max or min over each row's entries.
//
// row_items.cuh describes the work of a group of lanes. Threads: kThreads per block; grid.x = item
// blocks, grid.y = slabs, the slow dimension, so that all items of a slab run before the next and
// the slab's slice of B stays in L2; if rows of A use neighbouring rows of B, slabs are the fast
// dimension instead (grid.x counts both), so that rows of B are read whole. grid.z = batch. Shared
// memory: warps' sums of a row that they share. Only the schedule fixes the order of the additions.
//
// kRepair: `args` is a flag, if not null: 0 means that all of C was finite.
//
// Assumes: B and C row-major with unit column stride and the row strides given; addresses aligned
// to kVec elements and n a multiple of kVec, and of a slab if kTimes > 1 (host checks in
// kernels/csr.py); fewer than 2^31 entries; rows of B under 2^32 bytes and of C under 2^32
// elements apart; arrivals all zero; kRows is 1 without bundles.
#include "ptx/element.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using V = E;
using Acc = E::Acc;
constexpr bool kScaled = false;
constexpr bool kDirect = false;

// Declared in kernels/csr.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

#include "rows/row_items.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_csr(const __grid_constant__ Params p) {
  ptx::wait_previous();
  if (p.early) ptx::let_next_start();
  if constexpr (kRepair) {
    if (p.args != nullptr && __ldcg(p.args) == 0) return;  // all sums were finite
  }
  int block = blockIdx.x, slab = blockIdx.y;
  if (p.slab_fast) {
    block = blockIdx.x / static_cast<u32>(p.slabs);
    slab = blockIdx.x - block * p.slabs;
  }
  rows::block_of_items(p, block, slab);
}
