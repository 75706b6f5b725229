// The gradient of a max or min for its operand: row j of Aᵀ collects the elements of C that it won.
//
//   out[j, f] = sum over the entries t of row j of  weight[t] * grad[i, f]  if entry t won (i, f)
//
// with i = columns[t]. Entry t of Aᵀ is entry order[t] of A, and it won (i, f) if places[i, f], the
// winner's place in row i of A, is order[t] - indptr[i]. A row of places has 2 or 4 bytes an
// element, and an element of grad is read only by the vector that won it: of a row i with d entries
// about kVec / d of its vectors, so the gather costs half of a product's bytes in float32.
//
// A group of kLanes lanes works on an item of Aᵀ's schedule and a slab of kLanes * kVec columns
// (segment.cuh). Entries come in chunks of kLanes, one a lane, the next chunk's in flight; kUnroll
// rows of places are in flight at once, then what was won of their rows of grad. Cut rows meet in
// the tree, so the order of the additions depends on the schedule alone.
//
// Threads: kThreads per block; grid.x = item blocks, grid.y = slabs, grid.z = batch. No shared
// memory.
//
// Assumes: grad, places and out contiguous, n a multiple of kVec; fewer than 2^31 entries;
// arrivals all zero, as they are left.
#include "ptx/element.cuh"
#include "rows/tree.cuh"

using E = ELEMENT;
using Acc = E::Acc;
using Place = PLACE;

// Declared in kernels/won.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

constexpr int kGroups = 32 / kLanes;
constexpr int kSlab = kLanes * kVec;
// A number that no winner has: they are -1 or not negative.
constexpr int kNoEntry = -2;

static_assert(kVec * sizeof(Place) <= 16, "places of a vector come with one access");
static_assert(kLanes % kUnroll == 0, "a chunk is a whole number of batches");

struct Places {
  using Storage = Place;
};

struct Sum {
  Acc of[kVec];
  __device__ __forceinline__ void add(const Sum& other) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) of[v] += other.of[v];
  }
};

// A chunk's operands: lane l has those of entry l.
struct Entry {
  int row = 0;            // of C
  int number = kNoEntry;  // its place in that row of A
  Acc weight = Acc(1);
};

__device__ __forceinline__ Entry load_entry(const Params& p, int at, bool here) {
  Entry entry;
  if (!here) return entry;
  entry.row = __ldg(p.columns + at);
  entry.number = static_cast<int>(__ldg(p.order + at) - __ldg(p.indptr + entry.row));
  if (p.values != nullptr) entry.weight = E::widen(__ldg(p.values + at));
  return entry;
}

// kUnroll entries of the chunk, from `first` on.
__device__ __forceinline__ void add_entries(const Params& p, const Entry& own, int first,
                                            const Place* places, const E::Storage* grad, Sum& sum) {
  Packed<Places, kVec> winner[kUnroll];
  Packed<E, kVec> x[kUnroll];
  int number[kUnroll];
  i64 row[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    row[u] = __shfl_sync(kWarp, own.row, first + u, kLanes);
    number[u] = __shfl_sync(kWarp, own.number, first + u, kLanes);
    winner[u] = load_vector<Places, kVec>(places + row[u] * p.n);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    bool any = false;
#pragma unroll
    for (int v = 0; v < kVec; ++v) any = any || winner[u].element[v] == number[u];
    x[u].word = {};
    if (any) x[u] = load_vector<E, kVec>(grad + row[u] * p.n);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Acc weight = __shfl_sync(kWarp, own.weight, first + u, kLanes);
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      // Not multiplied by zero: what was not won is skipped, whatever its weight.
      if (winner[u].element[v] == number[u]) sum.of[v] += weight * widen(x[u], v);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    spmm_won(const __grid_constant__ Params p) {
  const GroupWork work = group_work<kLanes, kThreads>(blockIdx.x, p.item_end, p.block_end);
  const int lane = threadIdx.x % kLanes;
  const int4 item = work.index < work.end ? __ldg(p.items + work.index) : make_int4(-1, 0, 0, -1);
  const int column = blockIdx.y * kSlab + lane * kVec;
  const i64 from = i64(blockIdx.z) * p.grad_batch_stride + (column < p.n ? column : 0);
  const Place* places = static_cast<const Place*>(p.places) + from;
  const E::Storage* grad = p.grad + from;

  Sum sum = {};
  const auto entry_of = [&](int begin) {
    const int at = item.y + begin + lane;
    return load_entry(p, at, at < item.z);
  };
  Entry next = entry_of(work.first);
  for (int begin = work.first;; begin += work.stride) {
    const int left = item.z - item.y - begin;  // may exceed kLanes or be <= 0
    const int most = kGroups == 1 ? left : __reduce_max_sync(kWarp, left);
    if (most <= 0) break;
    const Entry own = next;
    next = entry_of(begin + work.stride);
#pragma unroll 1
    for (int j = 0; j < kLanes && j < most; j += kUnroll) {
      add_entries(p, own, j, places, grad, sum);
    }
  }
  if (kGroups > 1 && work.wide) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
      Sum other;
#pragma unroll
      for (int v = 0; v < kVec; ++v) other.of[v] = __shfl_xor_sync(kWarp, sum.of[v], step);
      sum.add(other);
    }
  }
  if (item.x < 0 || (work.wide && work.first > 0)) return;
  if (item.w >= 0) {
    const i64 layer = i64(blockIdx.z) * gridDim.y + blockIdx.y;
    const Tree tree = tree_of(p, layer, kLanes * sizeof(Sum));
    const auto join = [](Sum& mine, const Sum& other) { mine.add(other); };
    if (!climb<kLanes>(tree, item.w, lane, sum, join)) return;
  }
  if (column >= p.n) return;
  Packed<E, kVec> packed;
#pragma unroll
  for (int v = 0; v < kVec; ++v) packed.element[v] = E::narrow(sum.of[v]);
  E::Storage* out = p.out + blockIdx.z * p.out_batch_stride + i64(item.x) * p.n + column;
  *reinterpret_cast<decltype(packed.word)*>(out) = packed.word;
}
