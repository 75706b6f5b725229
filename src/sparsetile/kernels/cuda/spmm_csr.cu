// C = epilogue(A . B) for CSR A on CUDA cores: sum, mean, max or min over each row's entries.
//
// One group of kLanes lanes owns one item (a row or a piece of a row, see segment.cuh) and one
// slab of kLanes * kVec columns of B:
//
//              slab 0      slab 1                      lane l of the group holds columns
//   item 0   [ group ]   [ group ]      B row k:       [l * kVec, (l + 1) * kVec) of its slab
//   item 1   [ group ]   [ group ]      |l0|l1|l2|..|  and reads them with one access of
//                                                      kVec * sizeof(element) = up to 16 bytes
//
// Threads: kThreads per block, kThreads / kLanes items per block; grid.x = item blocks x slabs,
// slab slow (slab_fast = 0: all items of one slab before the next, so that the slab's slice of B
// stays in L2) or fast (neighbouring blocks read the same rows of A and of B); grid.z = batch.
// Shared memory: none. kUnroll entries are in flight per group: their column ids first, then
// their rows of B, then the multiply-adds, in entry order, so the sum's order is fixed.
//
// kRepair: C already holds a product made with tiles or a dense A, in which an invented zero may
// have met an Inf or NaN of B. Groups whose part of C is finite leave at once; the others compute
// it anew from A's entries alone. All pieces of a cut row look before its root writes.
//
// Assumes: B and C row-major with unit column stride and the row strides given; addresses aligned
// to kVec elements and n a multiple of kVec (host checks in kernels/csr.py); fewer than 2^31
// entries; arrivals all zero.
#include "segment.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = E::Acc;

constexpr int kSum = 0;
constexpr int kMax = 1;
constexpr int kMin = 2;
constexpr bool kExtremum = kReduce != kSum;

struct Params {
  const int4* items;
  const int* parent_of_slot;
  const int4* nodes;
  int* arrivals;
  const int* columns;
  const E::Storage* values;  // null: every entry of A is 1
  const E::Storage* b;
  Out::Storage* c;
  const Acc* bias;  // null: none; [n]
  Acc* partials;    // [batch][slot][columns padded to whole slabs]
  int* partial_args;
  i64* args;  // winning entry of each element of C, -1 where the row is empty
  i64 b_row_stride;
  i64 c_row_stride;
  i64 b_batch_stride;
  i64 c_batch_stride;
  double alpha;
  double beta;
  int n;
  int item_count;
  int slabs;
  int slot_count;
  int node_count;
  int slab_fast;
  int mean;
  int relu;
};

static_assert(sizeof(Params) == kParamsBytes, "host and device disagree on the parameter struct");
static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");

struct Accumulator {
  Acc sum[kVec];
  int arg[kExtremum ? kVec : 1];

  __device__ void clear() {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      sum[v] = Acc(0);
      if constexpr (kExtremum) arg[v] = -1;
    }
  }

  // Sums add; an extremum keeps the first of equals, and the first NaN for good.
  __device__ void take(int v, Acc candidate, int entry) {
    if constexpr (!kExtremum) {
      sum[v] += candidate;
    } else {
      const bool better = kReduce == kMax ? candidate > sum[v] : candidate < sum[v];
      const bool nan_wins = candidate != candidate && sum[v] == sum[v];
      if (entry >= 0 && (arg[v] < 0 || better || nan_wins)) {
        sum[v] = candidate;
        arg[v] = entry;
      }
    }
  }
};

__device__ __forceinline__ void gather(const Params& p, const E::Storage* b, int begin, int end,
                                       bool active, Accumulator& acc) {
  for (int entry = begin; entry < end; entry += kUnroll) {
    int column[kUnroll];
    Acc weight[kUnroll];
    Packed<E, kVec> row[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (entry + u < end) column[u] = __ldg(p.columns + entry + u);
    }
    if constexpr (kWeighted) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (entry + u < end) weight[u] = E::widen(__ldg(p.values + entry + u));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (entry + u < end && active) {
        row[u] = load_vector<E, kVec>(b + column[u] * p.b_row_stride);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (entry + u < end && active) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          const Acc x = E::widen(row[u].element[v]);
          if constexpr (kExtremum) {
            acc.take(v, kWeighted ? weight[u] * x : x, entry + u);
          } else if constexpr (kWeighted) {
            acc.sum[v] += weight[u] * x;
          } else {
            acc.sum[v] += x;
          }
        }
      }
    }
  }
}

// Climb the tree of a cut row; true in the one group that holds the whole row's result.
__device__ __forceinline__ bool combine(const Params& p, int slot, int slab, int lane,
                                        int& row_entries, Accumulator& acc) {
  const i64 width = i64(p.slabs) * kLanes * kVec;
  const i64 offset = i64(blockIdx.z) * p.slot_count * width + i64(slab * kLanes + lane) * kVec;
  Acc* partials = p.partials + offset;
  int* partial_args = p.partial_args + offset;
  int* arrivals = p.arrivals + (i64(blockIdx.z) * p.slabs + slab) * p.node_count;
  while (true) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      __stcg(partials + slot * width + v, acc.sum[v]);
      if constexpr (kExtremum) __stcg(partial_args + slot * width + v, acc.arg[v]);
    }
    const int node = __ldg(p.parent_of_slot + slot);
    const int4 info = __ldg(p.nodes + node);
    if (!arrive_last<kLanes>(arrivals + node, info.y, lane)) return false;
    acc.clear();
    for (int child = 0; child < info.y; ++child) {
      const i64 at = (info.x + child) * width;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const int arg = kExtremum ? __ldcg(partial_args + at + v) : 0;
        acc.take(v, __ldcg(partials + at + v), arg);
      }
    }
    row_entries = info.w;
    if (info.z < 0) return true;
    slot = info.z;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) spmm_csr(const __grid_constant__ Params p) {
  constexpr int kItems = kThreads / kLanes;
  const int item_blocks = (p.item_count + kItems - 1) / kItems;
  const int slab = p.slab_fast ? blockIdx.x % p.slabs : blockIdx.x / item_blocks;
  const int item_block = p.slab_fast ? blockIdx.x / p.slabs : blockIdx.x % item_blocks;
  const int lane = threadIdx.x % kLanes;
  const int index = item_block * kItems + threadIdx.x / kLanes;
  if (index >= p.item_count) return;  // whole groups leave together

  const int4 item = __ldg(p.items + index);
  const int column = (slab * kLanes + lane) * kVec;
  const bool active = column < p.n;
  const i64 at = blockIdx.z * p.c_batch_stride + item.x * p.c_row_stride + column;
  if constexpr (kRepair) {
    bool finite = true;
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const Acc x = active ? Acc(Out::widen(p.c[at + v])) : Acc(0);
      finite = finite && (x - x == Acc(0));
    }
    if (__all_sync(group_mask<kLanes>(), finite)) return;
  }

  Accumulator acc;
  acc.clear();
  gather(p, p.b + blockIdx.z * p.b_batch_stride + column, item.y, item.z, active, acc);

  int row_entries = item.z - item.y;
  if (item.w >= 0 && !combine(p, item.w, slab, lane, row_entries, acc)) return;
  if (!active) return;

  Acc scale = Acc(p.alpha);
  if (p.mean && row_entries > 0) scale /= Acc(row_entries);
  Acc result[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    result[v] = scale * acc.sum[v];
    if (p.beta != 0.0) result[v] += Acc(p.beta) * Out::widen(p.c[at + v]);
    if (p.bias != nullptr) result[v] += p.bias[column + v];
    if (p.relu && result[v] < Acc(0)) result[v] = Acc(0);
    if constexpr (kExtremum) p.args[at + v] = acc.arg[v];
  }
  store_vector<Out, kVec>(p.c + at, result);
}
