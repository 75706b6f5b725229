// C = epilogue(A . B) for A in WCSR windows on WGMMA, AsyncSparse's product for irregular patterns
// (sm_90a).
//
// A thread block makes kHeight rows (a window of A, or a piece of a long one) times kCols columns
// of C. It goes through the window's tiles, kStepTiles per step: eight columns of A each, and the
// eight rows of B behind them. Two warpgroups load B, in turn, and one multiplies:
//
//   producers   some in turn: column ids, bits, value offsets, values of a step, each one bulk copy
//                                                                      -> ring of kTileStages
//               all: ids -> 16-byte loads of rows of B -> registers -> shared memory
//                                                                      -> ring of kStages
//   consumer    bits and values of sixteen rows per warp -> operand registers -> WGMMA; the next
//               step is decoded while the Tensor Cores work
//
// A block goes through its items without stopping: while C is stored, the rings fill for the next.
// The host distributes tiles evenly, and cuts the windows at the border of two blocks.
//
// B goes through registers because TF32 is rounded there (the Tensor Cores would truncate), and
// because WGMMA reads a float32 operand from shared memory only K-major: a lane loads four
// neighbouring columns of four rows and stores them as four times four rows of a column, so the
// transposition is free. Any numbering of B's columns is valid: of 32, column 4l + j is
// n = 8j + 2 (l % 4) + l / 4. Eight lanes then store 128 neighbouring bytes, and lanes t have sums
// of four neighbouring columns each, side by side. Types of 16 bits are N-major, as loaded, in the
// 128-byte swizzle. A's tiles are operands in registers (bittcf.cuh decodes them): no tile is
// expanded in memory.
//
// For TF32, k = t stands for a tile's column 2t and k = t + 4 for 2t + 1, as in mma.cuh; column ids
// are stored in that order.
//
// Pieces of windows that were split leave partial sums, which a second kernel adds up in order
// (join_wcsr.cu): no atomics. If sums are not all finite, that part of C is recomputed from A's
// entries (exact.cuh): by the warp that has them, or, if there is a second launch, by a third
// (redo_wcsr.cu).
//
// Grid: x = blocks, each with its own items, y = slabs of kCols columns, the slow dimension; z =
// batch. Shared memory: dynamic, both rings and their barriers.
//
// Assumes: B and C row-major; addresses and row strides multiples of 16 bytes, n of 16 bytes of
// either (the host copies otherwise); rows of B under 2^32 bytes, fewer than 2^31 entries; float32
// values rounded to TF32 by the host; columns, bits and value offsets readable for kStepTiles tiles
// past the last, values for 16 bytes.
#include "mma/bittcf.cuh"
#include "mma/wgmma_regs.cuh"
#include "pipeline/ring.cuh"
#include "windows/wcsr.cuh"

constexpr int kConsumers = kWarps * 32;
constexpr int kProducers = 128;          // of a step
constexpr int kGroups = 2;               // of producers
constexpr int kOctets = kProducers / 8;  // eight lanes read 128 bytes of a row of B
constexpr int kExactBatch = 4;           // tiles in flight in the recomputation of a window

using Weights = TileWeights<E, kWeighted, 2>;

constexpr int kStepRows = 8 * kStepTiles;
constexpr int kStageBytes = kStepRows * kCols * kSize;
constexpr int kLoads = kStageBytes / 32 / kProducers;  // of a thread in half a step

// A step's part of A in shared memory: ids, bits, value offsets of strips, values.
constexpr int kIdBytes = kStepRows * 4;
constexpr int kBitsAt = kIdBytes;
constexpr int kBitBytes = kStepTiles * kHeight;
constexpr int kOffsetsAt = kBitsAt + kBitBytes;
constexpr int kOffsetBytes = kStepTiles * kWarps * 4 + 16;  // one more strip, in 16-byte pieces
constexpr int kValuesAt = kOffsetsAt + kOffsetBytes;
constexpr int kTileBytes = kWeighted ? kValuesAt + kStepRows * kHeight * kSize + 16 : kOffsetsAt;
constexpr int kCopiers = kGroups * kProducers / 32;  // warps that copy A, each a step in turn
constexpr int kTilesAt = kStages * kStageBytes;
constexpr int kBarriersAt = kTilesAt + kTileStages * kTileBytes;

static_assert(kThreads == kConsumers + kGroups * kProducers, "three warpgroups");
static_assert(kSharedBytes == kBarriersAt + 16 * (kStages + kTileStages) + 1024,
              "host and device disagree on shared memory");
static_assert(kConsumerRegisters * kConsumers + kProducerRegisters * kGroups * kProducers <=
                  65536 / kThreads / 8 * 8 * kThreads,
              "warpgroups would wait for registers that the block does not have");
static_assert(kTileStages > kCopiers, "a copy waits for earlier steps alone");
static_assert(kIsF32 || kStepTiles % 2 == 0, "two tiles an instruction");

// The items of a block.
struct Share {
  int first, end;
  __device__ __forceinline__ explicit Share(const Params& p) {
    const int* firsts = p.first_items + blockIdx.x;
    first = __ldg(firsts);
    end = __ldg(firsts + 1);
  }
};

using StepTurn = Turn<kStages>;      // in the ring of B
using TileTurn = Turn<kTileStages>;  // in the ring of A's tiles

// Both rings and their barriers.
struct Rings {
  char* stages;
  char* tiles;
  RingBarriers<kStages> b;
  RingBarriers<kTileStages> a;

  __device__ __forceinline__ explicit Rings(char* memory)
      : stages(memory),
        tiles(memory + kTilesAt),
        b(memory + kBarriersAt),
        a(memory + kBarriersAt + RingBarriers<kStages>::kBytes) {}
  __device__ __forceinline__ void init() const {
    b.init(kProducers / 32, kWarps);
    a.init(1, kWarps + kProducers / 32);
    wg::barrier_init_done();
  }
};

// Dynamic shared memory, aligned to the swizzle's 1024 bytes.
__device__ __forceinline__ char* ring_memory() {
  extern __shared__ char s_dynamic[];
  return s_dynamic + ((1024 - wg::shared_address(s_dynamic) % 1024) % 1024);
}

// ---- rows of B

// A thread's part of half a step: kLoads times 16 bytes. Eight lanes read 128 contiguous bytes.
//
// float32: blocks of four columns of four rows. The rows are those of a chunk of four staged ids,
// the same for all of the thread's blocks; the halves of a step are halves of the slab. 16 bits:
// eight columns of one row at a time.
struct Rows {
  uint4 word[kLoads];
};

constexpr int kChunks = 2 * kStepTiles;  // of four ids, in a step
// Columns from one of a thread's blocks of float32 to the next.
constexpr int kBlockColumns = kOctets / kChunks * 32;

__device__ __forceinline__ int octet() { return threadIdx.x % kProducers / 8; }

// 16 bytes at `from` if the slab's column is inside B, otherwise zeros.
template <bool kWhole>
__device__ __forceinline__ uint4 load_inside(const Params& p, const char* from, int column) {
  const bool inside = kWhole || int(blockIdx.y * kCols) + column < p.n;
  return inside ? ptx::load_nc(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
}

// Rows of B of one half of a step. Without `wanted`, row 0 is read, and not used: a conditional
// load would cost register moves that wait for it.
template <bool kWhole, int kHalf>
__device__ __forceinline__ void load_rows(const Params& p, const char* b, const int* ids,
                                          bool wanted, Rows& rows) {
  const u32 row_bytes = p.b_row_bytes;
  if constexpr (kIsF32) {
    const int column =
        octet() / kChunks * 32 + threadIdx.x % 8 * 4 + kHalf * kLoads / 4 * kBlockColumns;
    const int4 id = *reinterpret_cast<const int4*>(ids + octet() % kChunks * 4);
    const int row_id[4] = {id.x, id.y, id.z, id.w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const char* row = b + column * 4 + u64(wanted ? u32(row_id[r]) : 0u) * row_bytes;
#pragma unroll
      for (int block = 0; block < kLoads / 4; ++block) {
        const int further = block * kBlockColumns;
        rows.word[block * 4 + r] = load_inside<kWhole>(p, row + further * 4, column + further);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int unit = octet() + (kHalf * kLoads + i) * kOctets, row = unit % kStepRows;
      const int column = unit / kStepRows * 64 + threadIdx.x % 8 * 8;
      const u32 id = wanted ? ids[row / 8 * 8 + staged(row % 8)] : 0;
      rows.word[i] = load_inside<kWhole>(p, b + column * 2 + u64(id) * row_bytes, column);
    }
  }
}

template <int kHalf>
__device__ __forceinline__ void store_rows(const Rows& rows, char* stage) {
  const int l = threadIdx.x % 8;
  if constexpr (kIsF32) {
    const int n = l % 4 * 2 + l / 4;
    char* to = stage + octet() % kChunks * (kCols * 16) + octet() / kChunks * 512 + n * 16;
#pragma unroll
    for (int block = 0; block < kLoads / 4; ++block) {
      const uint4* row = rows.word + block * 4;
      const auto column = [](u32 a, u32 b, u32 c, u32 d) {
        return make_uint4(round_tf32(a), round_tf32(b), round_tf32(c), round_tf32(d));
      };
      const int further = (kHalf * kLoads / 4 + block) * kBlockColumns;
      uint4* at = reinterpret_cast<uint4*>(to + further * 16);
      at[0] = column(row[0].x, row[1].x, row[2].x, row[3].x);
      at[8] = column(row[0].y, row[1].y, row[2].y, row[3].y);
      at[16] = column(row[0].z, row[1].z, row[2].z, row[3].z);
      at[24] = column(row[0].w, row[1].w, row[2].w, row[3].w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int unit = octet() + (kHalf * kLoads + i) * kOctets;
      const int row = unit % kStepRows, box = unit / kStepRows;
      char* to = stage + (box * kStepRows + row) * 128 + (l ^ row % 8) * 16;
      *reinterpret_cast<uint4*>(to) = rows.word[i];
    }
  }
}

// ---- tiles of A

// The position of a walk over the steps of a block's items.
struct Steps {
  const Params& p;
  int place;  // item
  int end;    // of the block's items
  int first;  // tile
  int stop;   // of the item's tiles
  StepTurn turn;
  TileTurn tiles;

  __device__ __forceinline__ Steps(const Params& p, const Share& share)
      : p(p), place(share.first), end(share.end), first(0), stop(0) {
    if (place < end) open();
    settle();
  }
  __device__ __forceinline__ void open() {
    const int4 item = __ldg(p.items + place);
    first = item.y;
    stop = item.z;
  }
  // On to the next item that has tiles.
  __device__ __forceinline__ void settle() {
    while (first >= stop && place < end) {
      if (++place < end) open();
    }
  }
  __device__ __forceinline__ bool more() const { return place < end; }
  __device__ __forceinline__ void skip(int steps) {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      first += kStepTiles;
      turn.next();
      tiles.next();
      settle();
    }
  }
};

// Copies every kCopiers-th step's part of A, by one warp. Copies cost a warp as much as half a step
// of rows of B, and the consumer waits for the slowest, so all warps share them.
struct TileCopies {
  const Rings& rings;
  Steps at;         // the next copy
  int value, last;  // its values, begin and end: loaded well before

  __device__ __forceinline__ TileCopies(const Params& p, const Rings& rings, const Share& share,
                                        int first)
      : rings(rings), at(p, share), value(0), last(0) {
    at.skip(first);
    look_up();
  }
  __device__ __forceinline__ void look_up() {
    if constexpr (kWeighted) {
      if (!at.more()) return;
      value = __ldg(at.p.strip_value_ptr + i64(at.first) * kWarps);
      last = __ldg(at.p.strip_value_ptr + i64(min(at.first + kStepTiles, at.stop)) * kWarps);
    }
  }
  __device__ __forceinline__ void next() {
    if (!at.more()) return;
    if (threadIdx.x % 32 == 0) {
      const Params& p = at.p;
      rings.a.wait_empty(at.tiles);
      char* to = rings.tiles + at.tiles.stage * kTileBytes;
      u64* full = rings.a.full + at.tiles.stage;
      constexpr int kEach = 16 / kSize;
      const int aligned = value / kEach * kEach;
      const u32 bytes = (last - aligned + kEach - 1) / kEach * 16;
      u32 all = kIdBytes + kBitBytes;
      if constexpr (kWeighted) all += kOffsetBytes + bytes;
      // Threads have read the old data, and TMA writes: without a fence between the two it may
      // write first, despite the barrier. Observed: values of a later step, once in a million.
      wg::fence_shared();
      wg::barrier_expect(full, all);
      wg::copy_bytes(to, p.columns + i64(at.first) * 8, kIdBytes, full);
      wg::copy_bytes(to + kBitsAt, p.bitmaps + i64(at.first) * (kHeight / 8), kBitBytes, full);
      if constexpr (kWeighted) {
        wg::copy_bytes(to + kOffsetsAt, p.strip_value_ptr + i64(at.first) * kWarps, kOffsetBytes,
                       full);
        if (bytes != 0) wg::copy_bytes(to + kValuesAt, p.values + aligned, bytes, full);
      }
    }
    __syncwarp();
    at.skip(kCopiers);
    look_up();
  }
};

template <bool kWhole>
__device__ __forceinline__ void produce(const Params& p, const Rings& rings, const Share& share) {
  const E::Storage* slab = p.b + blockIdx.z * p.b_batch_stride + i64(blockIdx.y) * kCols;
  const char* b = reinterpret_cast<const char*>(slab);
  const int group = (threadIdx.x - kConsumers) / kProducers;
  const int warp = threadIdx.x % kProducers / 32;
  const bool first_lane = threadIdx.x % 32 == 0;
  // A group's warps copy in turn the steps that the group will take, kCopiers ahead.
  TileCopies tiles(p, rings, share, warp * kGroups + group);
  tiles.next();
  Steps at(p, share);
  at.skip(group);
  if (!at.more()) return;  // otherwise B has rows
  const auto ids = [&] {
    return reinterpret_cast<const int*>(rings.tiles + at.tiles.stage * kTileBytes);
  };
  const auto wait_for_ids = [&] {
    if (at.more()) rings.a.wait_full(at.tiles);
  };
  const auto ids_are_read = [&] {
    __syncwarp();
    if (first_lane && at.more()) wg::barrier_arrive(rings.a.empty + at.tiles.stage);
  };
  // Half of the next step's rows are in flight while half of this one's are stored.
  Rows low, high;
  wait_for_ids();
  load_rows<kWhole, 0>(p, b, ids(), at.more(), low);
  load_rows<kWhole, 1>(p, b, ids(), at.more(), high);
  ids_are_read();
#pragma unroll 1
  for (int turn = 0; at.more(); turn = turn + 1 < kCopiers / kGroups ? turn + 1 : 0) {
    char* stage = rings.stages + at.turn.stage * kStageBytes;
    u64* full = rings.b.full + at.turn.stage;
    rings.b.wait_empty(at.turn);
    store_rows<0>(low, stage);
    at.skip(kGroups);
    wait_for_ids();
    load_rows<kWhole, 0>(p, b, ids(), at.more(), low);
    store_rows<1>(high, stage);
    wg::fence_shared();
    __syncwarp();
    if (first_lane) wg::barrier_arrive(full);
    load_rows<kWhole, 1>(p, b, ids(), at.more(), high);
    ids_are_read();
    if (turn == warp) tiles.next();  // while the loads are in flight
  }
}

// The lane's operands of a step from its tiles in shared memory; zeros past the item's last tile.
__device__ __forceinline__ void decode(const Lane& me, const char* from, int tiles,
                                       Weights (&weights)[kStepTiles]) {
  const int* offsets = reinterpret_cast<const int*>(from + kOffsetsAt);
  using Value = typename WordOf<kSize>::Type;
  const Value* values = reinterpret_cast<const Value*>(from + kValuesAt);
  if constexpr (kWeighted) values -= offsets[0] & ~(16 / kSize - 1);
#pragma unroll
  for (int i = 0; i < kStepTiles; ++i) {
    const int strip = i * kWarps + me.warp;
    TileBits<2> bits;
    *reinterpret_cast<uint4*>(bits.half) =
        i < tiles ? *reinterpret_cast<const uint4*>(from + kBitsAt + strip * 16)
                  : make_uint4(0, 0, 0, 0);
    const Value* mine = kWeighted ? values + offsets[strip] : values;
    weights[i].decode(bits, me.g, me.t, [&](int n) { return u32(mine[n]); });
  }
}

__device__ __forceinline__ void multiply(const char* stage, const Weights (&weights)[kStepTiles],
                                         float (&sum)[kSums]) {
  wg::fence();
  if constexpr (kIsF32) {
#pragma unroll
    for (int i = 0; i < kStepTiles; ++i) {
      const u32 a[4] = {weights[i].word[0][0], weights[i].word[1][0], weights[i].word[0][1],
                        weights[i].word[1][1]};
      WgmmaRegisters<E, kCols>::multiply(
          sum, a, wg::plain_descriptor(stage + i * kCols * 32, kCols * 16, 128));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kStepTiles; i += 2) {
      const u32 a[4] = {weights[i].word[0][0], weights[i].word[1][0], weights[i + 1].word[0][0],
                        weights[i + 1].word[1][0]};
      WgmmaRegisters<E, kCols>::multiply(sum, a,
                                         wg::descriptor(stage + i * 1024, kStepRows * 128, 1024));
    }
  }
  wg::commit();
}

// The consumer's position in both rings, over all items.
struct Progress {
  StepTurn turn;
  TileTurn tiles;
};

__device__ __forceinline__ void take_tiles(const Lane& me, const Rings& rings, TileTurn& turn,
                                           int tiles, Weights (&weights)[kStepTiles]) {
  rings.a.wait_full(turn);
  decode(me, rings.tiles + turn.stage * kTileBytes, tiles, weights);
  __syncwarp();
  if (me.lane == 0) wg::barrier_arrive(rings.a.empty + turn.stage);
  turn.next();
}

__device__ __forceinline__ void consume(const Lane& me, const Rings& rings, Progress& at, int begin,
                                        int end, float (&sum)[kSums]) {
  // Start the products of a step, decode the next one's operands meanwhile, then wait.
  const auto step = [&](int first, const Weights(&now)[kStepTiles], Weights(&next)[kStepTiles]) {
    rings.b.wait_full(at.turn);
    multiply(rings.stages + at.turn.stage * kStageBytes, now, sum);
    const int left = end - first - kStepTiles;
    if (left > 0) take_tiles(me, rings, at.tiles, left, next);
    wg::wait<0>();
    if (me.lane == 0) wg::barrier_arrive(rings.b.empty + at.turn.stage);
    at.turn.next();
  };
  Weights even[kStepTiles], odd[kStepTiles];
  take_tiles(me, rings, at.tiles, end - begin, even);
#pragma unroll 1
  for (int first = begin; first < end; first += 2 * kStepTiles) {
    step(first, even, odd);
    if (first + kStepTiles < end) step(first + kStepTiles, odd, even);
  }
  wg::settle(sum);
}

__device__ __forceinline__ void store_partial(const Params& p, const Lane& me, int slot,
                                              const float (&sum)[kSums]) {
  float4* to = partial_sums(p, slot, me.warp) + me.lane;
#pragma unroll
  for (int w = 0; w < kSums / 4; ++w) {
    to[w * 32] = make_float4(sum[4 * w], sum[4 * w + 1], sum[4 * w + 2], sum[4 * w + 3]);
  }
}

// Without a later launch: recompute the warp's part of the window at once.
__device__ __noinline__ void exact(const Params& p, int strip_of_window, int window) {
  const int begin = __ldg(p.window_row_ptr + window), end = __ldg(p.window_row_ptr + window + 1);
  const int first_column = blockIdx.y * kCols, end_column = min(p.n, first_column + kCols);
  using Strip = ExactStrip<E>;
#pragma unroll 1
  for (int first = first_column; first < end_column; first += Strip::kCols) {
    Strip strip(p.b + blockIdx.z * p.b_batch_stride + first, p.b_row_bytes, end_column - first);
    strip.add<kExactBatch>(StripTiles{p, strip_of_window}, begin, end);
    store_strip(p, strip, window, strip_of_window, first, ~0);
  }
}

// The warp's part of a window has sums that are not finite.
__device__ __forceinline__ void compute_again(const Params& p, const Lane& me, int window) {
  if (p.redo == nullptr) return exact(p, me.warp, window);
  constexpr int kAll = (1 << kUnitCols / 32) - 1;
  if (me.lane < kUnits) unit_flags(p)[unit_of(window, me.warp, me.lane)] = kAll;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    spmm_wcsr(const __grid_constant__ Params p) {
  const Rings rings(ring_memory());
  if (threadIdx.x == 0) rings.init();
  __syncthreads();
  ptx::wait_previous();
  const Share share(p);
  if (threadIdx.x >= kConsumers) {
    wg::fewer_registers<kProducerRegisters>();
    if (int(blockIdx.y + 1) * kCols <= p.n) {
      produce<true>(p, rings, share);  // most slabs are inside B: no checks
    } else {
      produce<false>(p, rings, share);
    }
  } else {
    wg::more_registers<kConsumerRegisters>();
    const Lane me;
    Progress at;
#pragma unroll 1
    for (int place = share.first; place < share.end; ++place) {
      const int4 item = __ldg(p.items + place);
      float sum[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[i] = 0.0f;
      if (item.y < item.z) consume(me, rings, at, item.y, item.z, sum);
      const int first_column = blockIdx.y * kCols;
      if (item.w >= 0) {
        store_partial(p, me, item.w, sum);
      } else if (!all_finite(sum)) {
        compute_again(p, me, item.x);
      } else {
        store_groups(p, me, item.x, first_column, sum);
      }
    }
  }
}
