// terms[t, h] = {of_target, highest, 1 / total, mean slope}: the softmax of each row and head.
//
// A group of kLanes lanes works on one item (a row or a piece of one; the groups of a warp share a
// wide one, see segment.cuh) and kHeadLanes heads: lane l has head l % kHeadLanes, and
// kLanes / kHeadLanes entries are read side by side, kUnroll of them one after the other:
//
//   kLanes = 8, kHeadLanes = 4:   lane    0   1   2   3   4   5   6   7
//                                 head    0   1   2   3   0   1   2   3
//                                 entry   e   e   e   e  e+1 e+1 e+1 e+1
//
// A lane keeps the highest score so far and sums relative to it. Parts of a row are joined by
// rescaling both to the higher of their two, in a fixed order: across lanes by shuffles, across the
// pieces of a cut row by the tree of tree.cuh. Per entry this reads a column id and one number per
// head, a small part of what the weighted sum reads.
//
// torch's path adds 1e-16 to the total. The highest score itself adds 1 to it, so this changes
// nothing in float32.
//
// kEdges: scores have a term of the entry, of_edge[entry, h]; of_source may be null then.
//
// Threads: kThreads per block; grid.x = item blocks, grid.y = groups of kHeadLanes heads. Shared
// memory: none.
//
// Assumes: of_source [sources, heads] and of_target [targets, heads] contiguous; fewer than 2^31
// entries; arrivals all zero.
#include "attention/gat.cuh"
#include "rows/tree.cuh"

// Declared in kernels/gat.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kGroups = 32 / kLanes;
constexpr int kSide = kLanes / kHeadLanes;  // entries that a group reads side by side

static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");
static_assert(kLanes % kHeadLanes == 0, "every entry has lanes for all heads");

struct Softmax {
  float highest, total, bent;  // bent: the same sum, each term times its slope

  __device__ __forceinline__ void raise(float highest_now) {
    // Also equal if both are infinite; NaN propagates to the sums.
    const float factor = highest_now == highest ? 1.0f : __expf(highest - highest_now);
    highest = highest_now, total *= factor, bent *= factor;
  }
  __device__ __forceinline__ void join(Softmax other) {
    const float both = ptx::max_nan(highest, other.highest);
    raise(both);
    other.raise(both);
    total += other.total, bent += other.bent;
  }
};

// The lane's share of an item.
__device__ __forceinline__ Softmax softmax_of(const Params& p, const GroupWork& work, int4 item,
                                              int side, int head, float of_target) {
  const float slope = static_cast<float>(p.slope);
  const int step = kSide * kUnroll;
  const int stride = step * (work.wide ? kGroups : 1);
  Softmax sum = {-ptx::infinity<float>(), 0.0f, 0.0f};
#pragma unroll 1
  for (int at = item.y + work.first / kLanes * step; at < item.z; at += stride) {
    float raw[kUnroll], count[kUnroll];
    float highest = sum.highest;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Past the last entry the last is read again and not used.
      const int entry = min(at + u * kSide + side, item.z - 1);
      const u64 column = static_cast<u32>(__ldg(p.columns + entry));
      raw[u] = of_target;
      if (!kEdges || p.of_source != nullptr) raw[u] += __ldg(p.of_source + column * p.heads + head);
      if constexpr (kEdges) raw[u] += __ldg(p.of_edge + i64(entry) * p.heads + head);
      count[u] = p.counts == nullptr ? 1.0f : __ldg(p.counts + entry);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kSide + side < item.z) {
        highest = ptx::max_nan(highest, gat::leaky(raw[u], slope));
      }
    }
    sum.raise(highest);
    // If all scores so far are -inf they must not make the total NaN: a later one may be finite.
    const float base = highest == -ptx::infinity<float>() ? 0.0f : highest;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kSide + side < item.z) {
        const float term = count[u] * __expf(gat::leaky(raw[u], slope) - base);
        sum.total += term;
        sum.bent += term * gat::derivative(raw[u], slope);
      }
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gat_softmax(const __grid_constant__ Params p) {
  const GroupWork work = group_work<kLanes, kThreads>(blockIdx.x, p.item_end, p.block_end);
  const int lane = threadIdx.x % kLanes;
  const int own_head = blockIdx.y * kHeadLanes + lane % kHeadLanes;
  const int head = own_head < p.heads ? own_head : 0;
  const int4 item = work.index < work.end ? __ldg(p.items + work.index) : make_int4(-1, 0, 0, -1);
  const i64 place = i64(max(item.x, 0)) * p.heads + head;
  const float of_target = p.of_target == nullptr ? 0.0f : __ldg(p.of_target + place);
  Softmax sum = softmax_of(p, work, item, lane / kHeadLanes, head, of_target);
  // Lanes of one head, of the group or of the whole warp.
#pragma unroll
  for (int step = kHeadLanes; step < 32; step *= 2) {
    if (step >= kLanes && !work.wide) continue;
    sum.join({__shfl_xor_sync(kWarp, sum.highest, step), __shfl_xor_sync(kWarp, sum.total, step),
              __shfl_xor_sync(kWarp, sum.bent, step)});
  }
  if (item.x < 0 || (work.wide && work.first > 0)) return;
  if (item.w >= 0) {
    const Tree tree = tree_of(p, blockIdx.y, kLanes * sizeof(Softmax));
    const auto join = [](Softmax& mine, const Softmax& other) { mine.join(other); };
    if (!climb<kLanes>(tree, item.w, lane, sum, join)) return;
  }
  if (lane >= kHeadLanes || own_head >= p.heads) return;
  const bool empty = item.y == item.z;  // of a whole row: pieces are not empty
  const float inverse = empty ? 0.0f : 1.0f / sum.total;
  p.terms[place] = {of_target, empty ? 0.0f : sum.highest, inverse, sum.bent * inverse};
}
