// C = epilogue(sum of pieces) for the windows that spmm_wcsr.cu was given in pieces (sm_90a).
//
// A second launch, because adding up is work for all SMs: a single long window leaves a piece on
// each of them, and whichever came last would read them all. Pieces are added in the order of their
// slots, so that the same bits come out every time.
//
// A warp has the sixteen rows of a strip and 32 columns; kAtOnce slots are under way. Grid:
// x = cut windows times groups of 32 columns, y = slabs of kCols columns, z = batch. Threads:
// kThreads, a warp for each strip. No shared memory.
#include "wcsr.cuh"

constexpr int kGroups = kCols / 32;
constexpr int kAtOnce = 4;
static_assert(kThreads == kWarps * 32, "a warp a strip");

// Add kCount slots, one after the other; their loads are under way together.
template <int kCount>
__device__ __forceinline__ void add_slots(const Params& p, const Lane& me, int slot, int group,
                                          float (&sum)[kGroupSums]) {
  float4 word[kCount][4];
#pragma unroll
  for (int a = 0; a < kCount; ++a) {
    const float4* from = partial_sums(p, slot + a, me.warp) + group * 4 * 32 + me.lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) word[a][j] = __ldcg(from + j * 32);
  }
#pragma unroll
  for (int a = 0; a < kCount; ++a) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[4 * j] += word[a][j].x;
      sum[4 * j + 1] += word[a][j].y;
      sum[4 * j + 2] += word[a][j].z;
      sum[4 * j + 3] += word[a][j].w;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) join_wcsr(const __grid_constant__ Params p) {
  ptx::wait_previous();
  const Lane me;
  const int4 cut = __ldg(p.cuts + blockIdx.x / kGroups);  // window, first slot, slots
  const int group = blockIdx.x % kGroups;
  float sum[kGroupSums] = {};
  int slot = cut.y;
  const int end = cut.y + cut.z;
#pragma unroll 1
  for (; slot + kAtOnce <= end; slot += kAtOnce) add_slots<kAtOnce>(p, me, slot, group, sum);
#pragma unroll 1
  for (; slot < end; ++slot) add_slots<1>(p, me, slot, group, sum);
  const int column = blockIdx.y * kCols + group * 32;
  if (!store_groups(p, me, cut.x, column, sum)) exact(p, cut.x, column, column + 32);
}
