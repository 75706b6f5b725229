// C = epilogue(sum of pieces) for the windows that spmm_wcsr.cu was given in pieces (sm_90a).
//
// A second launch, so that all SMs add up: a single long window leaves a piece on each of them, and
// the last block to end would read them all. Pieces are added in an order that depends only on
// their number, so the bits are the same every time.
//
// A warp has the sixteen rows of a strip and 32 columns; up to kAtOnce slots are in flight. If
// windows have many pieces, kParts warps take a run of them each, and the first adds up the runs in
// order.
//
// redo_wcsr.cu recomputes non-finite sums.
//
// Grid: x = cut windows times groups of 32 columns, and strips if kParts > 1; y = slabs of kCols
// columns, z = batch. Threads: kThreads, a warp for each strip or run. Shared memory: the runs'
// sums.
#include "windows/wcsr.cuh"

constexpr int kGroups = kCols / 32;
constexpr int kAtOnce = 4;
constexpr int kStrips = kParts == 1 ? kWarps : 1;  // of a block
static_assert(kThreads == kStrips * kParts * 32, "a warp a strip, or a run of its slots");

__device__ __forceinline__ void add_word(float4 word, int j, float (&sum)[kGroupSums]) {
  sum[4 * j] += word.x;
  sum[4 * j + 1] += word.y;
  sum[4 * j + 2] += word.z;
  sum[4 * j + 3] += word.w;
}

// Add kCount slots, one after the other; their loads are in flight together.
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
    for (int j = 0; j < 4; ++j) add_word(word[a][j], j, sum);
  }
}

// Slots `slot` to `end`.
__device__ __forceinline__ void add_run(const Params& p, const Lane& me, int slot, int end,
                                        int group, float (&sum)[kGroupSums]) {
#pragma unroll 1
  for (; slot + kAtOnce <= end; slot += kAtOnce) add_slots<kAtOnce>(p, me, slot, group, sum);
#pragma unroll 1
  for (; slot < end; ++slot) add_slots<1>(p, me, slot, group, sum);
}

// A warp's work: run `part` of the slots of a cut window, sixteen rows (me.warp) of 32 columns.
struct Work {
  Lane me;
  int part, group;
  int4 cut;  // window, first slot, slots

  __device__ __forceinline__ explicit Work(const Params& p) {
    constexpr int kBlocks = kWarps / kStrips;  // of a group of columns
    const int unit = blockIdx.x / kBlocks;
    group = unit % kGroups;
    cut = __ldg(p.cuts + unit / kGroups);
    part = me.warp / kStrips;
    me.warp = blockIdx.x % kBlocks * kStrips + me.warp % kStrips;
  }
};

// Request the recomputation of the warp's part of C. Looks up all its inputs, to keep registers
// free.
__device__ __noinline__ void ask_for(const Params& p) {
  constexpr int kGroupsOfUnit = kUnitCols / 32;
  const Work work(p);
  int* const flags = unit_flags(p);
  const int unit = unit_of(work.cut.x, work.me.warp, work.group / kGroupsOfUnit);
  if (work.me.lane == 0) atomicOr(flags + unit, 1 << work.group % kGroupsOfUnit);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    join_wcsr(const __grid_constant__ Params p) {
  ptx::wait_previous();
  ptx::let_next_start();  // the redo, which waits for this one's end
  const Work work(p);
  const Lane& me = work.me;
  const int4& cut = work.cut;
  const int part = work.part, group = work.group;
  float sum[kGroupSums] = {};
  add_run(p, me, cut.y + cut.z * part / kParts, cut.y + cut.z * (part + 1) / kParts, group, sum);
  if constexpr (kParts > 1) {
    __shared__ float4 s_sums[kParts][4][32];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s_sums[part][j][me.lane] =
          make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
    }
    __syncthreads();
    if (part > 0) return;
#pragma unroll 1
    for (int other = 1; other < kParts; ++other) {
#pragma unroll
      for (int j = 0; j < 4; ++j) add_word(s_sums[other][j][me.lane], j, sum);
    }
  }
  if (!all_finite(sum)) return ask_for(p);
  store_groups(p, me, cut.x, blockIdx.y * kCols + group * 32, sum);
}
