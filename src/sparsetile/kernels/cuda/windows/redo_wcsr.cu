// Recomputes non-finite sums of spmm_wcsr.cu and join_wcsr.cu from A's entries (sm_90a). See
// redo.cuh.
//
// Grid: x = blocks that stride over the units of a slab, as many as run at once; y = slabs of kCols
// columns, z = batch. Threads: kThreads, warps that share a unit. Shared memory: their sums.
#include "windows/redo.cuh"
#include "windows/wcsr.cuh"

constexpr int kTeam = kThreads / 32;
constexpr int kPieces = kUnitCols * kSize / 128;
constexpr int kBatch = kIsF32 ? 2 : 1;  // as registers allow
static_assert(ExactStrip<E, kPieces>::kCols == kUnitCols, "a strip is a unit");

// One unit, whose flag has `groups`.
struct Compute {
  const Params& p;

  __device__ __forceinline__ void operator()(int unit, int groups) const {
    const int strip_of_window = unit / kUnits % kWarps, window = unit / (kUnits * kWarps);
    const int first = blockIdx.y * kCols + unit % kUnits * kUnitCols;
    if (first >= p.n) return;
    const int begin = __ldg(p.window_row_ptr + window), end = __ldg(p.window_row_ptr + window + 1);
    const int warp = threadIdx.x / 32;
    ExactStrip<E, kPieces> strip(p.b + blockIdx.z * p.b_batch_stride + first, p.b_row_bytes,
                                 p.n - first);
    strip.template add<kBatch>(StripTiles{p, strip_of_window}, redo::share<kTeam>(begin, end, warp),
                               redo::share<kTeam>(begin, end, warp + 1));
    __shared__ float4 s_sums[redo::kSumWords<kTeam, 1, ExactStrip<E, kPieces>>];
    redo::add_up<kTeam>(strip, s_sums);
    if (warp == 0) store_strip(p, strip, window, strip_of_window, first, groups);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    redo_wcsr(const __grid_constant__ Params p) {
  ptx::wait_previous();
  redo::each_asked<kTeam>(unit_flags(p), unit_count(p), Compute{p});
}
