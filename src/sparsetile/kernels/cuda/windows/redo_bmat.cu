// Recomputes non-finite sums of spmm_bmat.cu from A's entries (sm_90a). See redo.cuh.
//
// Grid: x = blocks that stride over the units of a slab, as many as run at once; y = slabs, z =
// batch. Threads: kThreads, warps that share a unit. Shared memory: their sums.
#include "windows/bmat_windows.cuh"
#include "windows/redo.cuh"

constexpr int kTeam = kThreads / 32;
constexpr int kBatch = kIsF32 ? 2 : 1;  // tiles in flight, as registers allow

// One unit, whose flag has `pieces`.
struct Compute {
  const Params& p;

  __device__ __forceinline__ void operator()(int unit, int pieces) const {
    const int of_part = unit / part_units(p), part = of_part % kStack, window = of_part / kStack;
    const int first_piece = unit % part_units(p) * kUnitPieces;
    const int first = slab_column(p) + first_piece * kPieceCols;
    if (first >= p.n) return;
    const int begin = __ldg(p.window_tile_ptr + window);
    const int end = __ldg(p.window_tile_ptr + window + 1), warp = threadIdx.x / 32;
    ExactStrip<E, kUnitPieces> strip(p.b + blockIdx.z * p.b_batch_stride + first, p.b_row_bytes,
                                     p.n - first);
    strip.template add<kBatch>(PartTiles{p, part}, redo::share<kTeam>(begin, end, warp),
                               redo::share<kTeam>(begin, end, warp + 1));
    __shared__ float4 s_sums[redo::kSumWords<kTeam, 1, ExactStrip<E, kUnitPieces>>];
    redo::add_up<kTeam>(strip, s_sums);
    if (warp != 0) return;
    const int position = window * kWindowRows + part * 16 + strip.g;
    const int rows[2] = {row_of(p, position), row_of(p, position + 8)};
#pragma unroll
    for (int j = 0; j < kUnitPieces; ++j) {
      if (!(pieces >> j & 1)) continue;
      store_sums(p, strip.t, rows, first + j * kPieceCols, strip.sum[j]);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    redo_bmat(const __grid_constant__ Params p) {
  ptx::wait_previous();
  redo::each_asked<kTeam>(unit_flags(p), unit_count(p), Compute{p});
}
