// C = epilogue(A . B) for CSR A on CUDA cores: sum, mean, max or min over each row's entries.
//
// A group of kLanes lanes works on one item (a row, a bundle of four rows that share columns, or
// a piece of either, see segment.cuh) and one slab of kLanes * kVec columns of B:
//
//              slab 0      slab 1                      lane l of the group holds columns
//   item 0   [ group ]   [ group ]      B row k:       [l * kVec, (l + 1) * kVec) of its slab
//   item 1   [ group ]   [ group ]      |l0|l1|l2|..|  and reads them with one access of
//                                                      kVec * sizeof(element) = up to 16 bytes
//
// Entries are taken in chunks of kLanes: lane l reads column id and value of the chunk's l-th
// entry (coalesced, one chunk ahead), and hands them to the group by shuffles; kUnroll rows of B
// are then in flight at once. All lanes of a warp run the same number of chunks, with predicates
// where an item is shorter, so groups of one warp never wait for each other in turn. In a bundle
// each row of B serves up to four rows of C; its four values come by one broadcast load, and bits
// say which of them count.
//
// Short rows run out of instructions and of loads in flight before they run out of bytes
// (docs/csr.md): whole chunks take a path without predicates, the rest of a row takes batches of
// 4, then exactly what is left. kPipelined: a group takes several short items in turn, reading the
// next one's column ids while it waits for the rows of B of the one before; this costs registers,
// so it is a kernel of its own.
//
// Threads: kThreads per block; grid.x = item blocks, grid.y = slabs, the slow dimension, so that
// all items of a slab run before the next and the slab's slice of B stays in L2; grid.z = batch.
// Shared memory: none. The order of the additions is fixed by the schedule alone.
//
// kRepair: C already holds a product made with tiles or a dense A, in which an invented zero may
// have met an Inf or NaN of B. Groups whose part of C is finite leave at once; the others compute
// it anew from A's entries alone. All pieces of a cut row look before its root writes.
//
// Assumes: B and C row-major with unit column stride and the row strides given; addresses aligned
// to kVec elements and n a multiple of kVec (host checks in kernels/csr.py); fewer than 2^31
// entries; rows of B under 2^32 bytes and of C under 2^32 elements apart; arrivals all zero;
// kRows is 1 without bundles.
#include "segment.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = E::Acc;

constexpr int kGroups = 32 / kLanes;
constexpr u32 kWarp = 0xffffffffu;
constexpr int kColumnBits = 28;

struct Params {
  const int4* items;
  const int* parent_of_slot;
  const int4* nodes;
  int* arrivals;
  const int* columns;
  const E::Storage* values;
  const E::Storage* b;
  Out::Storage* c;
  const int* tagged;         // bundles: bits and column of each list element
  const E::Storage* packed;  // bundles: four values of each list element
  const int4* bundle_rows;   // bundles: their rows of C, -1 where there is none
  const i64* indptr;         // row pointers, for the mean
  const Acc* bias;           // null: none; [n]
  Acc* partials;             // [batch][slot][kRows][columns padded to whole slabs]
  int* partial_args;
  i64* args;  // winning entry of each element of C, -1 where the row is empty
  i64 b_row_bytes;
  i64 c_row_stride;
  i64 b_batch_stride;
  i64 c_batch_stride;
  double alpha;
  double beta;
  Sections sections;
  int n;
  int slabs;
  int slot_count;
  int node_count;
  int epilogue;  // 0: alpha 1, beta 0, no mean, bias or relu
  int mean;
  int relu;
  int minimum;  // an extremum is the least, not the greatest
};

static_assert(sizeof(Params) == kParamsBytes, "host and device disagree on the parameter struct");
static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");
static_assert(!kRepair || kLanes == 32, "all pieces of a cut row must decide alike");
static_assert(kLanes % kUnroll == 0, "a chunk is a whole number of batches");
static_assert(kRows == 1 || (kRows == 4 && !kExtremum && !kRepair), "bundles have four rows");

template <int R>
struct Accumulator {
  Acc sum[R][kVec];
  int arg[kVec];  // used by max and min only, which know no bundles

  __device__ void clear() {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r][v] = Acc(0);
      if constexpr (kExtremum) arg[v] = -1;
    }
  }

  // An extremum keeps the first of equals, and the first NaN for good, also where partial
  // results meet out of order.
  __device__ void take(bool minimum, int v, Acc candidate, int entry) {
    const Acc held = sum[0][v];
    const bool better = minimum ? candidate < held : candidate > held;
    const bool nan = candidate != candidate, held_nan = held != held;
    const bool tie = (candidate == held || (nan && held_nan)) && entry < arg[v];
    if (entry >= 0 && (arg[v] < 0 || better || (nan && !held_nan) || tie)) {
      sum[0][v] = candidate;
      arg[v] = entry;
    }
  }

  __device__ void join(bool minimum, int r, int v, Acc other, int other_arg) {
    if constexpr (kExtremum) {
      take(minimum, v, other, other_arg);
    } else {
      sum[r][v] += other;
    }
  }
};

// One chunk's operands as a group holds them: lane l has column and value of entry l.
template <int R>
struct Chunk {
  int column;                 // tagged with bits in a bundle
  Acc value;                  // of a plain row
  const E::Storage* weights;  // of a bundle: four values for each entry of the chunk
  int entry;                  // number of the chunk's first entry in A
  int left;                   // its entries, may exceed kLanes or be <= 0

  // Drop the first M entries. Turning the operands round costs two shuffles, and lets a loop over
  // batches stay a loop: unrolled, the compiler would start all loads at once and run out of
  // registers.
  template <int M>
  __device__ __forceinline__ void drop(int lane) {
    column = __shfl_sync(kWarp, column, lane + M, kLanes);
    if constexpr (kWeighted && R == 1) value = __shfl_sync(kWarp, value, lane + M, kLanes);
    if constexpr (R > 1) weights += M * R;
    entry += M;
    left -= M;
  }
};

// The first M entries of a chunk: their rows of B are all in flight before the first is used.
// kMasked: groups of the warp have different numbers of entries. A group that has fewer loads
// along (some row of B, whose column it read before, or row 0) and uses nothing of it: predicates
// on every load would cost more than a load that hits in L1.
template <int R, int M, bool kMasked>
__device__ __forceinline__ void batch(const Params& p, const Chunk<R>& chunk, const char* b,
                                      Accumulator<R>& acc) {
  Packed<E, kVec> row[M];
  Packed<E, R> weights[M];
  u32 tagged[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    tagged[m] = __shfl_sync(kWarp, chunk.column, m, kLanes);
    const u32 k = R == 1 ? tagged[m] : tagged[m] & ((1u << kColumnBits) - 1u);
    const char* address = b + static_cast<u64>(k) * static_cast<u32>(p.b_row_bytes);
    row[m] = load_vector<E, kVec>(address);
    if constexpr (R > 1 && kWeighted) weights[m] = load_vector<E, R>(chunk.weights + m * R);
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const bool here = !kMasked || m < chunk.left;
    if constexpr (R > 1) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (tagged[m] & (1u << (kColumnBits + r))) {
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            const Acc x = E::widen(row[m].element[v]);
            acc.sum[r][v] += kWeighted ? E::widen(weights[m].element[r]) * x : x;
          }
        }
      }
    } else {
      Acc weight = Acc(1);
      if constexpr (kWeighted) weight = __shfl_sync(kWarp, chunk.value, m, kLanes);
      if (here) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          const Acc x = E::widen(row[m].element[v]);
          if constexpr (kExtremum) {
            acc.take(p.minimum, v, kWeighted ? weight * x : x, chunk.entry + m);
          } else {
            acc.sum[0][v] += kWeighted ? weight * x : x;
          }
        }
      }
    }
  }
}

// A chunk of fewer than kLanes entries in some group of the warp; `most` in the fullest.
template <int R>
__device__ __forceinline__ void partial_chunk(const Params& p, Chunk<R> chunk, const char* b,
                                              int lane, int most, Accumulator<R>& acc) {
  constexpr bool kMasked = kGroups > 1;
#pragma unroll 1
  for (; most >= 4; most -= 4) {
    batch<R, 4, kMasked>(p, chunk, b, acc);
    chunk.template drop<4>(lane);
  }
  if (most == 1) {
    batch<R, 1, kMasked>(p, chunk, b, acc);
  } else if (most == 2) {
    batch<R, 2, kMasked>(p, chunk, b, acc);
  } else if (most == 3) {
    batch<R, 3, kMasked>(p, chunk, b, acc);
  }
}

// An item and what this lane reads of its first chunk, loaded ahead of its turn.
struct Head {
  int4 item;
  int column;
  E::Storage value;
};

__device__ __forceinline__ int4 load_item(const Params& p, int index, int end) {
  return index < end ? __ldg(p.items + index) : make_int4(-1, 0, 0, -1);
}

template <int R>
__device__ __forceinline__ Head load_head(const Params& p, const GroupWork& work, int4 item,
                                          int lane) {
  Head head;
  head.item = item;
  head.column = 0;
  head.value = {};
  const int at = item.y + work.first + lane;
  if (at < item.z) {
    head.column = __ldg((R == 1 ? p.columns : p.tagged) + at);
    if constexpr (kWeighted && R == 1) head.value = __ldg(p.values + at);
  }
  return head;
}

template <int R>
__device__ __forceinline__ void gather(const Params& p, const GroupWork& work, const Head& head,
                                       int lane, const char* b, Accumulator<R>& acc) {
  constexpr bool kShuffledValue = kWeighted && R == 1;
  const int4 item = head.item;
  const int* columns = (R == 1 ? p.columns : p.tagged) + item.y;
  const E::Storage* values = R == 1 ? p.values + item.y : p.packed + i64(item.y) * R;
  const int length = item.z - item.y;
  int begin = work.first;  // of the group's chunk in the item
  int next_column = head.column;
  E::Storage next_value = head.value;
  while (true) {
    Chunk<R> chunk;
    chunk.left = length - begin;
    const int most = kGroups == 1 ? chunk.left : __reduce_max_sync(kWarp, chunk.left);
    if (most <= 0) break;
    // Past the end of a bundle no bits are set; past the end of a row the batch looks at `left`.
    chunk.column = R > 1 && kGroups > 1 && lane >= chunk.left ? 0 : next_column;
    chunk.value = E::widen(next_value);
    chunk.weights = kGroups > 1 && chunk.left <= 0 ? p.packed : values + begin * R;
    chunk.entry = item.y + begin;
    begin += work.stride;
    if (begin + lane < length) {
      next_column = __ldg(columns + begin + lane);
      if constexpr (kShuffledValue) next_value = __ldg(values + begin + lane);
    }
    const int least = kGroups == 1 ? chunk.left : __reduce_min_sync(kWarp, chunk.left);
    if (least >= kLanes) {
#pragma unroll 1
      for (int j = 0; j < kLanes; j += kUnroll) {
        batch<R, kUnroll, false>(p, chunk, b, acc);
        if (kLanes > kUnroll) chunk.template drop<kUnroll>(lane);
      }
    } else {
      partial_chunk<R>(p, chunk, b, lane, most < kLanes ? most : kLanes, acc);
    }
  }
  if (kGroups > 1 && work.wide) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const int arg = kExtremum ? __shfl_xor_sync(kWarp, acc.arg[v], step) : 0;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          acc.join(p.minimum, r, v, __shfl_xor_sync(kWarp, acc.sum[r][v], step), arg);
        }
      }
    }
  }
}

// Climb the tree of a cut unit; true in the one group that holds the whole unit's result.
template <int R>
__device__ __forceinline__ bool combine(const Params& p, int slot, int slab, int lane,
                                        Accumulator<R>& acc) {
  const i64 width = i64(p.slabs) * kLanes * kVec;
  const i64 slot_stride = width * kRows;
  const i64 offset =
      i64(blockIdx.z) * p.slot_count * slot_stride + i64(slab * kLanes + lane) * kVec;
  Acc* partials = p.partials + offset;
  int* partial_args = p.partial_args + offset;
  int* arrivals = p.arrivals + (i64(blockIdx.z) * p.slabs + slab) * p.node_count;
  while (true) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      store_shared_sums<Acc, kVec>(partials + slot * slot_stride + r * width, acc.sum[r]);
    }
    if constexpr (kExtremum) {
      store_shared_sums<int, kVec>(partial_args + slot * slot_stride, acc.arg);
    }
    const int node = __ldg(p.parent_of_slot + slot);
    const int4 info = __ldg(p.nodes + node);
    if (!arrive_last<kLanes>(arrivals + node, info.y, lane)) return false;
    acc.clear();
#pragma unroll(R == 1 ? 4 : 1)
    for (int child = 0; child < info.y; ++child) {
      const i64 at = (info.x + child) * slot_stride;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const Sums<Acc, kVec> other = load_shared_sums<Acc, kVec>(partials + at + r * width);
        Sums<int, kVec> arg;
        if constexpr (kExtremum) arg = load_shared_sums<int, kVec>(partial_args + at);
#pragma unroll
        for (int v = 0; v < kVec; ++v)
          acc.join(p.minimum, r, v, other.sum[v], kExtremum ? arg.sum[v] : 0);
      }
    }
    if (info.z < 0) return true;
    slot = info.z;
  }
}

// Scale, add what the caller wants added, and store kVec elements of one row of C.
__device__ __forceinline__ void finish(const Params& p, int row, int column, Acc (&sum)[kVec],
                                       const int (&arg)[kVec]) {
  Out::Storage* c = p.c + blockIdx.z * p.c_batch_stride + column;
  c += static_cast<u64>(static_cast<u32>(row)) * static_cast<u32>(p.c_row_stride);
  if (p.epilogue) {
    Acc scale = Acc(p.alpha);
    if (p.mean) {
      const i64 entries = __ldg(p.indptr + row + 1) - __ldg(p.indptr + row);
      if (entries > 0) scale /= Acc(entries);
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      sum[v] *= scale;
      if (p.beta != 0.0) sum[v] += Acc(p.beta) * Out::widen(c[v]);
      if (p.bias != nullptr) sum[v] += p.bias[column + v];
      if (p.relu && sum[v] < Acc(0)) sum[v] = Acc(0);
    }
  }
  if constexpr (kExtremum) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) p.args[c - p.c + v] = arg[v];
  }
  store_vector<Out, kVec>(c, sum);
}

// Store what a group holds for its item: add cut pieces first, then one row or four.
template <int R>
__device__ __forceinline__ void deliver(const Params& p, const GroupWork& work, int4 item,
                                        int column, int lane, Accumulator<R>& acc) {
  // A wide item's first group goes on alone.
  if (item.x < 0 || (work.wide && work.first > 0)) return;
  if (item.w >= 0 && !combine<R>(p, item.w, blockIdx.y, lane, acc)) return;
  if (column >= p.n) return;
  if constexpr (R == 1) {
    finish(p, item.x, column, acc.sum[0], acc.arg);
  } else {
    const int4 rows = __ldg(p.bundle_rows + item.x);
    finish(p, rows.x, column, acc.sum[0], acc.arg);
    if (rows.y >= 0) finish(p, rows.y, column, acc.sum[1], acc.arg);
    if (rows.z >= 0) finish(p, rows.z, column, acc.sum[2], acc.arg);
    if (rows.w >= 0) finish(p, rows.w, column, acc.sum[3], acc.arg);
  }
}

// True when this part of C is finite, so that there is nothing to repair.
__device__ __forceinline__ bool is_finite(const Params& p, int row, int column) {
  const i64 at = blockIdx.z * p.c_batch_stride + row * p.c_row_stride + column;
  bool finite = true;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    const Acc x = column < p.n && row >= 0 ? Acc(Out::widen(p.c[at + v])) : Acc(0);
    finite = finite && (x - x == Acc(0));
  }
  return __all_sync(kWarp, finite);
}

template <int R>
__device__ __forceinline__ void product(const Params& p, const GroupWork& work, int lane) {
  const int column = (blockIdx.y * kLanes + lane) * kVec;
  // Lanes past the last column read the first ones instead and store nothing.
  const E::Storage* b = p.b + blockIdx.z * p.b_batch_stride + (column < p.n ? column : 0);
  const auto one = [&](const Head& head) {
    if (kRepair && is_finite(p, head.item.x, column)) return;
    Accumulator<R> acc;
    acc.clear();
    gather<R>(p, work, head, lane, reinterpret_cast<const char*>(b), acc);
    deliver<R>(p, work, head.item, column, lane, acc);
  };
  Head head = load_head<R>(p, work, load_item(p, work.index, work.end), lane);
  if constexpr (!kPipelined) {
    one(head);
  } else {
    int index = work.index + work.step;
    int4 next_item = load_item(p, work.count > 1 ? index : work.end, work.end);
    for (int turn = 0; turn < work.count; ++turn) {
      // Two items ahead the item, one ahead its first column ids: short rows have no other way
      // to hide that each load needs the one before.
      index += work.step;
      const int4 later = load_item(p, turn + 2 < work.count ? index : work.end, work.end);
      const Head next = load_head<R>(p, work, next_item, lane);
      one(head);
      head = next;
      next_item = later;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_csr(const __grid_constant__ Params p) {
  const GroupWork work = group_work<kLanes, kThreads>(blockIdx.x, p.sections);
  const int lane = threadIdx.x % kLanes;
  if constexpr (kRows > 1) {
    if (work.bundled) return product<kRows>(p, work, lane);
  }
  product<1>(p, work, lane);
}
