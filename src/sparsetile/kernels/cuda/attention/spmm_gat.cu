// Sums of messages weighed by graph attention, all heads at once, and the gradients for sources.
//
//   forward, rows of A[target, source]:   out[t]  = sum over s of attention[t, s] * messages[s]
//   kKeep, also:                          plain[t] = out before bias and rounding, and
//                                         bent[t] = the same, each term times its score's slope
//   kBackward, rows of A^T:               d_messages[s] = sum over t of attention[t, s] * grad[t]
//          d_source[s] = sum over t of slope * attention * (dot(grad[t], messages[s]) - D[t])
//   with the vectors of the scores:
//          d_messages[s] += d_source[s] * first + d_target[s] * second
//
// Each row of messages (or of grad) is gathered once for all heads; gat.cuh defines attention.
// `bent` gives the gradient of of_target without a second gather (gat_terms.cu). The sum over
// entries and the dot product are exchanged: a lane adds its own part of every dot product, and
// lanes are added once per row. A head inside one slab then has its d_source in registers, so the
// scores' part of d_messages costs no extra pass; the `parts` of a head in several slabs are added
// later.
//
// A group of kLanes lanes works on one item (a row or a piece of one, see segment.cuh) and a slab
// of columns. Lane l holds kTimes vectors of kVec columns, kLanes * kVec apart; a vector lies in
// one head. kUnroll rows of B are in flight at once, and the column ids of the next ones. All lanes
// of a group read the same ids, which costs no more than shuffles. Groups of a warp diverge until
// they join: those that share a wide item add by shuffles, pieces of a cut row by the tree of
// tree.cuh. Only the schedule fixes the order of the additions.
//
// kEdges: scores have a term of the entry, of_edge[entry, h]. Then of_source may be null, and so
// may bent, which is not stored: without terms of targets nobody reads it.
//
// Absent entries are skipped, also if B is not finite.
//
// Threads: kThreads per block; grid.x = item blocks, grid.y = slabs. Shared memory: none.
//
// Assumes: all arrays contiguous; head width and addresses multiples of kVec elements, first and
// second aligned to 16 bytes and null unless parts is 1; fewer than 2^31 entries; arrivals all
// zero.
#include "attention/gat.cuh"
#include "epilogue/epilogue.cuh"
#include "rows/tree.cuh"

using E = ELEMENT;

// Declared in kernels/gat.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kGroups = 32 / kLanes;
constexpr int kStep = kLanes * kVec;  // columns from one of a lane's vectors to its next
constexpr int kSlab = kTimes * kStep;
// Beside the sums of a vector: bent sums, or the lane's part of the dot products.
constexpr int kMore = kKeep ? kVec : 1;

static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");
static_assert(!kKeep || !kBackward, "the backward pass keeps nothing");

// A lane's part of its row's sums.
struct Sums {
  float sum[kTimes][kVec];
  float more[kTimes][kMore];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) sum[q][v] = 0.0f;
#pragma unroll
      for (int v = 0; v < kMore; ++v) more[q][v] = 0.0f;
    }
  }
  __device__ __forceinline__ void join(const Sums& other) {
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) sum[q][v] += other.sum[q][v];
#pragma unroll
      for (int v = 0; v < kMore; ++v) more[q][v] += other.more[q][v];
    }
  }
  // The sums of the lane `step` away.
  __device__ __forceinline__ Sums shuffled(int step) const {
    Sums other;
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) other.sum[q][v] = __shfl_xor_sync(kWarp, sum[q][v], step);
#pragma unroll
      for (int v = 0; v < kMore; ++v) other.more[q][v] = __shfl_xor_sync(kWarp, more[q][v], step);
    }
    return other;
  }
};

// A lane's vector of a slab, and its row's numbers there.
struct Side {
  int column;  // past the last column: 0, not stored
  int head;
  bool inside;
  float score;              // backward: of_source of this row; forward: of_target
  float highest, inverse;   // forward: of this row
  float first;              // backward: 1 in a head's first vector, which takes D's part
  Packed<E, kVec> message;  // backward: of this row

  __device__ __forceinline__ void load(const Params& p, int row, int wanted) {
    inside = wanted < p.n;
    column = inside ? wanted : 0;
    head = column / p.width;
    const i64 place = i64(row) * p.heads + head;
    if constexpr (kBackward) {
      score = !kEdges || p.of_source != nullptr ? __ldg(p.of_source + place) : 0.0f;
      first = column == head * p.width ? 1.0f : 0.0f;
      message = load_vector<E, kVec>(p.messages + i64(row) * p.n + column);
    } else {
      const float4 terms = __ldg(p.terms + place);
      score = terms.x, highest = terms.y, inverse = terms.z;
    }
  }
};

// The gathered node's numbers of one entry for one vector.
struct Gathered {
  Packed<E, kVec> part;
  float4 terms;  // backward
  float score;   // forward: of_source; kEdges: also of_edge

  // `entry`: one of this row.
  __device__ __forceinline__ void load(const Params& p, const Side& side, u64 column, int entry) {
    part = load_vector<E, kVec>(p.b + column * static_cast<u32>(p.n) + side.column);
    if constexpr (kBackward) {
      terms = __ldg(p.terms + column * p.heads + side.head);
    } else {
      score = !kEdges || p.of_source != nullptr ? __ldg(p.of_source + column * p.heads + side.head)
                                                : 0.0f;
    }
    if constexpr (kEdges) {
      const i64 number = kBackward ? __ldg(p.order + entry) : entry;
      const float of_edge = __ldg(p.of_edge + number * p.heads + side.head);
      score = kBackward ? of_edge : score + of_edge;
    }
  }
};

__device__ __forceinline__ void add(const Params& p, float slope, const Side& side,
                                    const Gathered& from, int entry, float (&sum)[kVec],
                                    float (&more)[kMore]) {
  float raw = side.score + (kBackward ? from.terms.x : from.score);
  if constexpr (kBackward && kEdges) raw += from.score;
  const float highest = kBackward ? from.terms.y : side.highest;
  const float inverse = kBackward ? from.terms.z : side.inverse;
  const float one = __expf(gat::leaky(raw, slope) - highest) * inverse;  // of one edge
  gat::Multiples times = {1.0f, 1.0f};
  if constexpr (kScaled) {
    // The transpose's entries have other numbers.
    const i64 number = kBackward ? __ldg(p.order + entry) : entry;
    times = gat::multiples(p, number, side.head);
  }
  const float weight = one * times.scale;
  const float bend = gat::derivative(raw, slope);
  float dot = 0.0f;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    const float x = widen(from.part, v);
    sum[v] += weight * x;
    if constexpr (kKeep) more[v] += weight * bend * x;
    if constexpr (kBackward) dot += x * widen(side.message, v);
  }
  if constexpr (kBackward) {
    more[0] += bend * (weight * dot - one * times.count * side.first * from.terms.w);
  }
}

// kUnroll entries: all their gathers are in flight before the first is used.
template <bool kMasked>
__device__ __forceinline__ void batch(const Params& p, float slope, const Side (&side)[kTimes],
                                      const int (&column)[kUnroll], int entry, int left,
                                      Sums& sums) {
  Gathered from[kUnroll][kTimes];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
      const int place = entry + (kMasked ? min(u, left - 1) : u);
      from[u][q].load(p, side[q], static_cast<u32>(column[u]), place);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (kMasked && u >= left) continue;
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
      add(p, slope, side[q], from[u][q], entry + u, sums.sum[q], sums.more[q]);
    }
  }
}

// The group's share of an item.
__device__ __forceinline__ void gather(const Params& p, const GroupWork& work, int4 item,
                                       const Side (&side)[kTimes], Sums& sums) {
  const float slope = static_cast<float>(p.slope);
  const int stride = kUnroll * (work.wide ? kGroups : 1);
  int at = item.y + work.first / kLanes * kUnroll;
  int next[kUnroll];
  // Past the last entry the last is read again and not used.
  const auto look_ahead = [&] {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) next[u] = __ldg(p.columns + min(at + u, item.z - 1));
  };
  if (at < item.z) look_ahead();
#pragma unroll 1
  while (at < item.z) {
    int column[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) column[u] = next[u];
    const int entry = at, left = item.z - at;
    at += stride;
    if (at < item.z) look_ahead();
    if (left >= kUnroll) {
      batch<false>(p, slope, side, column, entry, left, sums);
    } else {
      batch<true>(p, slope, side, column, entry, left, sums);
    }
  }
}

// Sum the lanes' parts of each head's dot products over the head's vectors in this slab; all of its
// lanes get the sum. Every lane of the group takes part.
__device__ __forceinline__ void add_lanes(const Params& p, int lane, const Side (&side)[kTimes],
                                          Sums& sums) {
  const u32 mask = group_mask<kLanes>();
  const int slab = blockIdx.y * kSlab;
#pragma unroll
  for (int q = 0; q < kTimes; ++q) {
    // Each lane adds the lanes before it down to its head's first one.
    const int start = max((side[q].head * p.width - slab - q * kStep) / kVec, 0);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float before = __shfl_sync(mask, sums.more[q][0], (lane - step) & (kLanes - 1), kLanes);
      if (lane - step >= start) sums.more[q][0] += before;
    }
  }
  float total[kTimes];
#pragma unroll
  for (int q = 0; q < kTimes; ++q) {
    const int begin = side[q].head * p.width - slab, end = begin + p.width;
    total[q] = 0.0f;
#pragma unroll
    for (int r = 0; r < kTimes; ++r) {
      const int last = min(max((end - r * kStep) / kVec - 1, 0), kLanes - 1);
      const float part = __shfl_sync(mask, sums.more[r][0], last, kLanes);
      if (begin < (r + 1) * kStep && end > r * kStep) total[q] += part;
    }
  }
#pragma unroll
  for (int q = 0; q < kTimes; ++q) sums.more[q][0] = total[q];
}

// The gradient of of_source, complete or the part of this slab; then the scores' part of the
// gradient of the messages.
__device__ __forceinline__ void finish(const Params& p, int row, const Side& side, float d_source,
                                       float (&sum)[kVec]) {
  const int begin = side.head * p.width, slab = blockIdx.y * kSlab;
  const i64 place = i64(row) * p.heads + side.head;
  if (side.column == max(begin, slab)) {
    const int part = blockIdx.y - begin / kSlab;
    p.d_source[place * p.parts + part] = d_source;
    if (begin + p.width <= slab + kSlab) {  // others lie in more slabs
      for (int i = part + 1; i < p.parts; ++i) p.d_source[place * p.parts + i] = 0.0f;
    }
  }
  if (p.first == nullptr) return;
  const float d_target = __ldg(p.d_target + place);
  RawValues<F32, kVec> first, second;
  first.load(p.first + side.column);
  second.load(p.second + side.column);
#pragma unroll
  for (int v = 0; v < kVec; ++v) sum[v] += d_source * first[v] + d_target * second[v];
}

// One vector of a whole row.
__device__ __forceinline__ void store(const Params& p, int row, const Side& side,
                                      float (&sum)[kVec], float (&more)[kMore]) {
  if (!side.inside) return;
  const i64 place = i64(row) * p.n + side.column;
  if constexpr (kBackward) finish(p, row, side, more[0], sum);
  if constexpr (kKeep) {
    if (!kEdges || p.bent != nullptr) store_columns<F32, kVec>(p.bent + place, kVec, more);
    store_columns<F32, kVec>(p.plain + place, kVec, sum);
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum[v] += __ldg(p.bias + side.column + v);
  }
  store_columns<E, kVec>(p.c + place, kVec, sum);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_gat(const __grid_constant__ Params p) {
  const GroupWork work = group_work<kLanes, kThreads>(blockIdx.x, p.item_end, p.block_end);
  const int lane = threadIdx.x % kLanes;
  const int4 item = work.index < work.end ? __ldg(p.items + work.index) : make_int4(-1, 0, 0, -1);
  Side side[kTimes];
#pragma unroll
  for (int q = 0; q < kTimes; ++q) {
    side[q].load(p, max(item.x, 0), blockIdx.y * kSlab + q * kStep + lane * kVec);
  }
  Sums sums;
  sums.clear();
  gather(p, work, item, side, sums);
  if (kGroups > 1 && work.wide) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) sums.join(sums.shuffled(step));
  }
  if (item.x < 0 || (work.wide && work.first > 0)) return;
  if (item.w >= 0) {
    const Tree tree = tree_of(p, blockIdx.y, kLanes * sizeof(Sums));
    const auto join = [](Sums& mine, const Sums& other) { mine.join(other); };
    if (!climb<kLanes>(tree, item.w, lane, sums, join)) return;
  }
  if constexpr (kBackward) add_lanes(p, lane, side, sums);
#pragma unroll
  for (int q = 0; q < kTimes; ++q) store(p, item.x, side[q], sums.sum[q], sums.more[q]);
}
