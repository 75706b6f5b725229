// C = epilogue(A . B) for CSR A on CUDA cores through a copy of B in 16 bits: float32 operands and
// sums, B rounded to the precision of TF32, half the bytes to gather.
//
// half_rows.cu has made the copy: rows of B times powers of two, rounded to float16, and the
// inverse powers. row_items.cuh describes the work of a group of lanes, also for rows that the copy
// cannot hold. Threads, grid and order of the additions are those of spmm_csr.cu; grid.z is 1.
//
// Assumes: as spmm_csr.cu, with the copy in place of B; rows of B under 2^63 bytes apart.
#include "ptx/element.cuh"

using E = F16;
using V = F32;
using Out = F32;
using Acc = float;
constexpr bool kScaled = true;
constexpr bool kDirect = false;
constexpr int kParts = 1;
constexpr bool kExtremum = false, kArgs = false, kRepair = false, kShared = false, kHeads = false;

// Declared in kernels/half.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

#include "rows/row_items.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_half(const __grid_constant__ Params p) {
  ptx::wait_previous();
  if (p.early) ptx::let_next_start();
  int block = blockIdx.x, slab = blockIdx.y;
  if (p.slab_fast) {
    block = blockIdx.x / static_cast<u32>(p.slabs);
    slab = blockIdx.x - block * p.slabs;
  }
  rows::block_of_items(p, block, slab);
}
