// C = epilogue(A . B) for A in RS-Tile, RSH-SpMM's product: windows of sixteen rows on Tensor Cores
// and residual rows on CUDA cores, in one launch (hybrid.cuh).
#include "ptx/element.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;

// All entries of a window are in its tiles.
constexpr bool kRest = false;
// A window has one owner, who stores it.
constexpr bool kAtomic = false;
constexpr bool kDirect = false;

// Declared in kernels/rstile.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

#include "mma/stored_fragments.cuh"

using Weights = StoredFragments;

#include "windows/hybrid.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_rstile(const __grid_constant__ Params p) {
  ptx::wait_previous();
  hybrid_block(p);
}
