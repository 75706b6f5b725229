// Sums over the entries of each row, which depend on both ends of an entry and on the entry:
//
//   kDot           c[row] = slope * sum of weight * b[column]
//   kBent          c[row] = vector * sum of weight * derivative(z)
//   kKeep          more[row] = sum of weight * leaky(z), in float32
//   kRelu          c[row] = sum of relu(z - own[row])
//   kReluGradient  c[row] = sum of b[column] where own[row] + edge > 0
//
// with z = b[column] + own[row] + edge. The weight is one number per entry and head. The edge's
// part is that of edge_scores.cu; with kRelu and kReluGradient it also has `vector`, and without
// kEdges it is a row of `direct`. kDot and kBent are the gradients of the rows from which
// edge_scores.cu computes scores, kRelu is a sum of messages.
//
// With kDot and `shared` a row of b has the columns of one head, and all heads use it: `columns`
// are then edges, whose features are summed.
//
// For rows of A the gathered nodes are sources; for rows of A^T they are targets, and `order` has
// A's number of each entry. The vector's gradient is the sum of `more` over all rows.
//
// A group of kLanes lanes works on one item (a row or a piece of one, see segment.cuh) and a slab
// of kLanes * kVec columns; a lane's vector lies in one head. kUnroll rows of B are in flight at
// once. Groups that share a wide item add by shuffles, pieces of a cut row by the tree of tree.cuh.
// Only the schedule fixes the order of the additions.
//
// Threads: kThreads per block; grid.x = item blocks, grid.y = slabs. Shared memory: none.
//
// Assumes: all arrays contiguous; head width and addresses multiples of kVec elements, vector and
// weights aligned to kVec floats; fewer than 2^31 entries; arrivals all zero.
#include "attention/gat.cuh"
#include "epilogue/epilogue.cuh"
#include "rows/tree.cuh"

using E = ELEMENT;

// Declared in kernels/edge_attention.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kGroups = 32 / kLanes;
constexpr int kSlab = kLanes * kVec;
constexpr int kMore = kKeep ? kVec : 0;

static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");
static_assert(!kKeep || kMode == kBent, "only bent sums have a gradient of the vector");

constexpr bool kRectified = kMode == kRelu || kMode == kReluGradient;

// A lane's part of its row's sums, then those that are kept.
struct Sums {
  float value[kVec + kMore];

  __device__ __forceinline__ void join(const Sums& other) {
#pragma unroll
    for (int v = 0; v < kVec + kMore; ++v) value[v] += other.value[v];
  }
};

// A lane's vector of a slab.
struct Side {
  int column, head;
  int gathered;  // the column in rows of B
  bool inside;
  Packed<E, kVec> own;  // kBent, kReluGradient: of this row
};

// What an entry adds to a vector: the gathered row, and its own numbers.
struct Gathered {
  Packed<E, kVec> row, direct;
  float weight;
  i64 number;

  __device__ __forceinline__ void load(const Params& p, const Side& side, int entry) {
    const u32 column = static_cast<u32>(__ldg(p.columns + entry));
    number = p.order == nullptr ? entry : __ldg(p.order + entry);
    const int length = kMode == kDot && p.shared ? p.width : p.n;
    row = load_vector<E, kVec>(p.b + column * static_cast<u64>(length) + side.gathered);
    if constexpr (!kRectified) weight = __ldg(p.weight + number * p.heads + side.head);
    if constexpr (kRectified && !kEdges) {
      direct = load_vector<E, kVec>(p.direct + number * p.n + side.column);
    }
  }
};

__device__ __forceinline__ void add(const Params& p, float slope, const Side& side,
                                    const Gathered& from, Sums& sums) {
  float edge[kVec] = {};
  if constexpr (kEdges) gat::add_edge<kVec>(p, from.number, side.column, edge);
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    const float x = widen(from.row, v);
    if constexpr (kMode == kBent) {
      const float z = x + widen(side.own, v) + edge[v];
      sums.value[v] += from.weight * gat::derivative(z, slope);
      if constexpr (kKeep) sums.value[kVec + v] += from.weight * gat::leaky(z, slope);
    } else if constexpr (kRectified) {
      if constexpr (!kEdges) edge[v] = widen(from.direct, v);
      if (kEdges && p.vector != nullptr) edge[v] += __ldg(p.vector + side.column + v);
      // As in torch: NaN stays NaN, and passes gradients.
      const float z = (kMode == kRelu ? x : widen(side.own, v)) + edge[v];
      sums.value[v] += z <= 0.0f ? 0.0f : kMode == kRelu ? z : x;
    } else {
      sums.value[v] += from.weight * x;
    }
  }
}

// The group's share of an item.
__device__ __forceinline__ void gather(const Params& p, const GroupWork& work, int4 item,
                                       const Side& side, Sums& sums) {
  const float slope = static_cast<float>(p.slope);
  const int stride = kUnroll * (work.wide ? kGroups : 1);
#pragma unroll 1
  for (int at = item.y + work.first / kLanes * kUnroll; at < item.z; at += stride) {
    Gathered from[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Past the last entry the last is read again and not used.
      from[u].load(p, side, min(at + u, item.z - 1));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u < item.z) add(p, slope, side, from[u], sums);
    }
  }
}

__device__ __forceinline__ void store(const Params& p, int row, const Side& side, Sums& sums) {
  if (!side.inside) return;
  const i64 place = i64(row) * p.n + side.column;
  float out[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    float factor = 1.0f;
    if constexpr (kMode == kBent) factor = __ldg(p.vector + side.column + v);
    if constexpr (kMode == kDot) factor = static_cast<float>(p.slope);
    out[v] = factor * sums.value[v];
  }
  store_columns<E, kVec>(p.c + place, kVec, out);
  if constexpr (kKeep) {
    float more[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) more[v] = sums.value[kVec + v];
    store_columns<F32, kVec>(p.more + place, kVec, more);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    edge_rows(const __grid_constant__ Params p) {
  const GroupWork work = group_work<kLanes, kThreads>(blockIdx.x, p.item_end, p.block_end);
  const int lane = threadIdx.x % kLanes;
  const int4 item = work.index < work.end ? __ldg(p.items + work.index) : make_int4(-1, 0, 0, -1);
  Side side;
  const int wanted = blockIdx.y * kSlab + lane * kVec;
  side.inside = wanted < p.n;
  side.column = side.inside ? wanted : 0;
  side.head = side.column / p.width;
  side.gathered = side.column - (kMode == kDot && p.shared ? side.head * p.width : 0);
  if constexpr (kMode == kBent || kMode == kReluGradient) {
    side.own = load_vector<E, kVec>(p.own + i64(max(item.x, 0)) * p.n + side.column);
  }
  Sums sums = {};
  gather(p, work, item, side, sums);
  if (kGroups > 1 && work.wide) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
      Sums other;
#pragma unroll
      for (int v = 0; v < kVec + kMore; ++v) {
        other.value[v] = __shfl_xor_sync(kWarp, sums.value[v], step);
      }
      sums.join(other);
    }
  }
  if (item.x < 0 || (work.wide && work.first > 0)) return;
  if (item.w >= 0) {
    const Tree tree = tree_of(p, blockIdx.y, kLanes * sizeof(Sums));
    const auto join = [](Sums& mine, const Sums& other) { mine.join(other); };
    if (!climb<kLanes>(tree, item.w, lane, sums, join)) return;
  }
  store(p, item.x, side, sums);
}
