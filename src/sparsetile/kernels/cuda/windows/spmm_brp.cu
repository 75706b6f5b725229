// C = epilogue(A . B) for A in BRP's form, BRP-SpMM's product (hybrid.cuh). Tensor Cores multiply
// groups of tiles whose columns all have kFixed entries. CUDA cores add the other entries of those
// windows, as one more partial sum of the window, and rows of windows without groups. With kAtomic
// a warp takes one group, as in the paper, and adds to C by atomics (window_adds.cuh); otherwise a
// window has one owner, and sums are added in a fixed order.
#include "ptx/element.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;

constexpr bool kRest = true;

// Declared in kernels/brp.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

#include "mma/fixed_slots.cuh"

using Weights = FixedSlots;

#include "windows/hybrid.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_brp(const __grid_constant__ Params p) {
  ptx::wait_previous();
  hybrid_block(p);
}
