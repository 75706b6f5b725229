// C = epilogue(A . B) for A in BMat tiles on Tensor Cores (mma.sync), Voltrix-SpMM's product
// (sm_90a).
//
// One kernel, longer than a file should be: both kinds of warps walk the same items and share the
// layout of a stage.
//
// Persistent thread blocks go through their own lists of items: a window of kStack times sixteen
// rows (or some tiles of a long one) times a range of columns of C. Each row of B in the ring is
// multiplied by all kStack parts of a window. Warps are specialised:
//
//   producers   column ids -> one bulk copy for each row of B, of all the item's columns at once;
//               bits and values of the tiles, one bulk copy each     -> ring of kStages
//   consumers   bits, or whole tiles (kDense) -> operand registers, rows of B -> MMA; each has its
//               own columns
//
//   ring stage: | rows of B, kStepTiles * 8, 16 bytes apart modulo 128 | bits | values |
//
// A step is kStepTiles tiles. Each stage has a pair of mbarriers (ring.cuh): each lane that copies
// arrives at `full` with the bytes that it requests, each lane of a consumer at `empty` for what it
// has read. No lane arrives for another: that would need a warp barrier, which the compiler may
// drop and racecheck then reports. It is also 2 to 6 % faster at N = 128 (H200), because no lane
// waits for lane 0. Both sides walk the same items and steps, so neither waits for ever.
//
// A copy costs a producer about 70 clocks, whatever its size (measured on an H200): rows are copied
// in pieces as wide as the block's columns, and several producers share the rows of a step. Ids and
// items are loaded well ahead of the copies (Scout, Items): an id used in the step that loads it
// adds a load's latency to every step.
//
// Pieces. 128 bytes of a row are a piece: consumer w has pieces w, w + kConsumers, ... Lane 4g + t
// reads 16 bytes of rows t and t + 4 of a tile, chunk (g % 2) * 4 + g / 2 of the piece's eight.
// Eight lanes then read from eight different groups of banks. Column j of the chunk is n = g of
// instruction j, so the lane's sums n = 2t and 2t + 1 of all instructions are the neighbouring
// columns of chunks t and t + 4: C is written in 16-byte stores, 64 bytes of a row by four lanes.
//
// Slots of a window past its last column have no row of B (id -1): nothing is copied, and the old
// content of the ring is multiplied by zeros. It is always a row of B, or zero: the ring is cleared
// first. If B is not finite that may be NaN; non-finite sums are recomputed from A's entries
// (exact.cuh), here or by a second launch (redo_bmat.cu).
//
// A tree joins windows that were cut along their tiles (tree.cuh), piece by piece of their columns:
// one launch, a fixed order of additions, no atomics on data.
//
// kBulk false, the base of the paper's breakdown: producers copy with loads and stores. kDense: A's
// tiles as whole operands, zeros included, in place of bits and packed values. kHandOver false:
// neither side waits for the other; C is wrong, and the time is a bound (the paper's overlap rate).
//
// Grid: x = blocks, each with its own items, y = slabs of slab_pieces pieces, the slow dimension; z
// = batch. Shared memory: dynamic, the ring and its barriers.
//
// Assumes: B and C row-major; addresses and row strides multiples of 16 bytes, rows readable and
// writable up to the next multiple of 16 bytes of B's type behind column n (the host copies
// otherwise); rows of B under 2^32 bytes, fewer than 2^31 entries; an even number of tiles in each
// window and item; slab_pieces at most kConsumers * kPieces; float32 values rounded to TF32 by the
// host; values readable for 16 bytes past the last.
#include "pipeline/ring.cuh"
#include "rows/tree.cuh"
#include "windows/bmat_windows.cuh"

constexpr int kStepRows = 8 * kStepTiles;
constexpr int kProducerRows = (kStepRows + kProducers - 1) / kProducers;
constexpr int kBatchSteps = 32 / kProducerRows;  // steps whose column ids come with one load
constexpr int kBatchTiles = kBatchSteps * kStepTiles;
constexpr int kCells = 128;
// Arrivals that fill and empty a stage. Bulk: a lane for each row of a producer, and one for A.
constexpr int kFullArrivals = kBulk ? kProducers * kProducerRows + 1 : kProducers * 32;
constexpr int kEmptyArrivals = kConsumers * 32;

// A stage of the ring.
constexpr int kRowStride = kConsumers * kPieces * kPieceBytes + 16;
constexpr int kBitsAt = kStepRows * kRowStride;
constexpr int kValuesAt = kBitsAt + (kDense ? 0 : kStepTiles * kStack * 16);
constexpr int kDenseBytes = kStack * kCells * kSize;  // of a tile
constexpr int kValueBytes = kDense      ? kStepTiles * kDenseBytes
                            : kWeighted ? kStepTiles * kDenseBytes + 16
                                        : 0;
constexpr int kStageBytes = kValuesAt + kValueBytes;
constexpr int kBarriersAt = kStages * kStageBytes;

static_assert(kSharedBytes == kBarriersAt + RingBarriers<kStages>::kBytes,
              "host and device disagree on shared memory");
static_assert(kThreads == 32 * (kConsumers + kProducers), "a warp a role");
static_assert(kStepTiles % 2 == 0, "16-bit types take two tiles an instruction");
static_assert(kProducerRows <= 16, "a lane a row, and one beside them for A's part");
static_assert(kHandOver || kBulk, "copies by threads have no barrier of their own to wait for");
static_assert(kStageBytes % 16 == 0 && kRowStride % 128 == 16, "copies are aligned, no conflicts");
static_assert(kStageBytes < 1 << 20, "a barrier counts fewer bytes");

using Turns = Turn<kStages>;
using Barriers = RingBarriers<kStages>;

struct Ring {
  char* stages;
  Barriers barriers;
  __device__ __forceinline__ explicit Ring(char* memory)
      : stages(memory), barriers(memory + kBarriersAt) {}
  __device__ __forceinline__ char* at(const Turns& turn) const {
    return stages + turn.stage * kStageBytes;
  }
};

// A window, or some tiles of it, times columns of the slab.
struct Item {
  int window, first, stop, slot;  // tiles first to stop; slot of a partial sum or -1
  int piece, end_piece;           // of the slab
  int value;                      // first packed value
};

// A block's items in order. Four come with one load, a field per lane, and four more are in flight:
// short windows do not wait for their items.
struct Items {
  const int* later_at;  // address of the lane's next field
  int left, at;         // items left, and place of the next one among the four of `now`
  int now, later;

  __device__ __forceinline__ Items(const Params& p, int begin, int end)
      : later_at(p.items + i64(begin) * 8 + threadIdx.x % 32), left(end - begin), at(0) {
    now = load(0);
    later = load(4);
  }
  __device__ __forceinline__ int load(int ahead) {
    const int field = int(threadIdx.x) % 32 / 8 + ahead < left ? __ldg(later_at) : 0;
    later_at += 32;
    return field;
  }
  __device__ __forceinline__ bool done() const { return left <= 0; }
  __device__ __forceinline__ Item get() const {
    const auto field = [&](int i) { return __shfl_sync(kWarp, now, at * 8 + i); };
    return {field(0), field(1), field(2), field(3), field(4), field(5), field(6)};
  }
  __device__ __forceinline__ void next() {
    --left;
    if (++at < 4) return;
    at = 0;
    now = later;
    later = load(4);
  }
};

// Columns of B from the item's first one on; none: all warps skip the item. Slabs may be narrower
// than those that items were made for: pieces past the slab are left to the next one.
__device__ __forceinline__ int columns_inside(const Params& p, const Item& item) {
  const int first = slab_column(p) + item.piece * kPieceCols;
  return min(p.n - first, (min(item.end_piece, p.slab_pieces) - item.piece) * kPieceCols);
}

// ---- producers

// A's part of a step: bits or operands, and packed values.
struct TilePart {
  const char* bits;
  const char* values;
  u32 bit_bytes, value_bytes;

  __device__ __forceinline__ TilePart(const Params& p, int tile, int tiles, int value, int count)
      : bits(reinterpret_cast<const char*>(p.bitmaps + i64(tile) * kStack)),
        values(reinterpret_cast<const char*>(p.values)),
        bit_bytes(tiles * kStack * 16),
        value_bytes(0) {
    if constexpr (kDense) {
      bit_bytes = 0;
      values += i64(tile) * kDenseBytes;
      value_bytes = tiles * kDenseBytes;
    } else if constexpr (kWeighted) {
      constexpr int kEach = 16 / kSize;
      const int aligned = value / kEach * kEach;
      values += i64(aligned) * kSize;
      if (count > 0) value_bytes = (value + count - aligned + kEach - 1) / kEach * 16;
    }
  }
  __device__ __forceinline__ u32 bytes() const { return bit_bytes + value_bytes; }
};

// 16-byte pieces by the lanes of a warp, synchronously: the baseline of bulk copies.
__device__ __forceinline__ void copy_by_threads(char* to, const char* from, u32 bytes, int lane) {
  for (u32 at = lane * 16; at < bytes; at += 32 * 16) {
    *reinterpret_cast<uint4*>(to + at) = ptx::load_nc(reinterpret_cast<const uint4*>(from + at));
  }
}

// Wait until the stage may be filled again. Without the hand-over: until its last copies arrived.
__device__ __forceinline__ void wait_for_room(const Ring& ring, const Turns& turn) {
  if constexpr (kHandOver) {
    ring.barriers.wait_empty(turn);
  } else {
    wg::barrier_wait(ring.barriers.full + turn.stage, turn.parity ^ 1);
  }
}

// Some steps of an item, with the inputs of their copies; the loads that fill it are in flight.
struct Batch {
  int tile, stop;  // tiles of the item that are left, from the batch's first one on
  int piece;       // of the slab, the item's first
  u32 bytes;       // of a row of B; 0: there are no more items
  int id;          // lane s * kProducerRows + r: row of B, or -1
  int value;       // lane s: first packed value of step s, and behind the last
};

// Goes through a block's items in batches, ahead of the copies: an id used in the step that loads
// it adds a load's latency to every step.
struct Scout {
  Items items;
  Item item = {};
  int tile, columns, me, lane;

  __device__ __forceinline__ Scout(const Params& p, int first, int end, int me, int lane)
      : items(p, first, end), tile(0), columns(0), me(me), lane(lane) {
    enter(p);
  }
  // The next item that has a column of B.
  __device__ __forceinline__ void enter(const Params& p) {
    columns = 0;
    for (; !items.done(); items.next()) {
      item = items.get();
      columns = columns_inside(p, item);
      tile = item.first;
      if (columns > 0 && tile < item.stop) return;
    }
    columns = 0;
  }
  __device__ __forceinline__ Batch next(const Params& p) {
    Batch batch = {tile, item.stop, item.piece, 0, -1, 0};
    if (columns <= 0) return batch;
    batch.bytes = (columns * kSize + 15) / 16 * 16;
    const int step = lane / kProducerRows, row = me + lane % kProducerRows * kProducers;
    const int of_step = tile + step * kStepTiles;
    if (step < kBatchSteps && row < min(item.stop - of_step, kStepTiles) * 8) {
      batch.id = __ldg(p.columns + i64(of_step) * 8 + row);
    }
    if (kWeighted && !kDense && me == kProducers - 1 && lane <= kBatchSteps) {
      batch.value = __ldg(p.pair_values + min(item.stop, tile + lane * kStepTiles) / 2);
    }
    tile += kBatchTiles;
    if (tile >= item.stop) {
      items.next();
      enter(p);
    }
    return batch;
  }
};

// Producer number `me` copies rows me, me + kProducers, ... of each step; the last one also A's
// part.
__device__ __forceinline__ void produce(const Params& p, const Ring& ring, int first, int end,
                                        int me, int lane) {
  const E::Storage* slab = p.b + blockIdx.z * p.b_batch_stride + slab_column(p);
  const u32 row_bytes = p.b_row_bytes;
  const bool has_a = me == kProducers - 1;
  Turns turn;
  Scout scout(p, first, end, me, lane);
  Batch next = scout.next(p), later = scout.next(p);
#pragma unroll 1
  while (next.bytes != 0) {
    const Batch batch = next;
    next = later;
    later = scout.next(p);
    const char* b = reinterpret_cast<const char*>(slab) + batch.piece * kPieceBytes;
    const u32 bytes = batch.bytes;
    const int steps = min((batch.stop - batch.tile + kStepTiles - 1) / kStepTiles, kBatchSteps);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int tile = batch.tile + step * kStepTiles;
      const int value = __shfl_sync(kWarp, batch.value, step);
      const int count = __shfl_sync(kWarp, batch.value, step + 1) - value;
      const TilePart part(p, tile, min(batch.stop - tile, kStepTiles), value, count);
      const int first_lane = step * kProducerRows;
      char* stage = ring.at(turn);
      u64* full = ring.barriers.full + turn.stage;
      wait_for_room(ring, turn);
      if constexpr (kBulk) {
        // Consumers have read the old data, and TMA writes: the barrier alone does not order the
        // two. Each lane waits and fences itself, because each issues copies.
        wg::fence_shared();
        const int row = lane - first_lane;
        if (row >= 0 && row < kProducerRows) {
          wg::barrier_expect(full, batch.id >= 0 ? bytes : 0);
          if (batch.id >= 0) {
            wg::copy_bytes(stage + (me + row * kProducers) * kRowStride + batch.piece * kPieceBytes,
                           b + u64(u32(batch.id)) * row_bytes, bytes, full);
          }
        }
        if (has_a && lane == (first_lane + kProducerRows) % 32) {
          wg::barrier_expect(full, part.bytes());
          if (part.bit_bytes != 0) wg::copy_bytes(stage + kBitsAt, part.bits, part.bit_bytes, full);
          if (part.value_bytes != 0) {
            wg::copy_bytes(stage + kValuesAt, part.values, part.value_bytes, full);
          }
        }
      } else {
#pragma unroll 1
        for (int r = 0; r < kProducerRows; ++r) {
          const int from = __shfl_sync(kWarp, batch.id, first_lane + r);
          if (from < 0) continue;
          copy_by_threads(stage + (me + r * kProducers) * kRowStride + batch.piece * kPieceBytes,
                          b + u64(u32(from)) * row_bytes, bytes, lane);
        }
        if (has_a) {
          copy_by_threads(stage + kBitsAt, part.bits, part.bit_bytes, lane);
          copy_by_threads(stage + kValuesAt, part.values, part.value_bytes, lane);
        }
        wg::barrier_arrive(full);
      }
      turn.next();
    }
  }
  if constexpr (!kHandOver) {  // nobody else waits for the last copies, and the block must not end
    for (int stage = 0; stage < kStages; ++stage, turn.next()) wait_for_room(ring, turn);
  }
}

// ---- consumers

struct Lane {
  int warp, lane, g, t;
  __device__ __forceinline__ Lane()
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4) {}
  __device__ __forceinline__ int piece(int j) const { return warp + j * kConsumers; }
};

// A lane's sums of a piece: part of the window, instruction j, then rows g and g + 8, chunks t and
// t + 4.
struct Sums {
  float of[kStack][kSpan][4];
};
constexpr int kSums = kStack * kSpan * 4;

// Operands of a step's instructions: one per tile, or one for two tiles; of each part of a window.
constexpr int kOperands = kIsF32 ? kStepTiles : kStepTiles / 2;
constexpr int kOperandTiles = kStepTiles / kOperands;
struct Operands {
  uint4 of[kOperands][kStack];

  // Bits and packed values; tiles past the item's last are zeros. Returns the number of values.
  __device__ __forceinline__ int decode(const char* stage, const Lane& me, int tiles, int value) {
    using Value = typename WordOf<kSize>::Type;
    const Value* values = reinterpret_cast<const Value*>(stage + kValuesAt);
    values += value % (16 / kSize);  // the copy began at a multiple of 16 bytes
    BMatElements<E, kWeighted> tile[kStepTiles][kStack];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kStepTiles * kStack; ++i) {
      const uint4 bits = i < tiles * kStack
                             ? *reinterpret_cast<const uint4*>(stage + kBitsAt + i * 16)
                             : make_uint4(0, 0, 0, 0);
      const Value* mine = values + count;
      count +=
          tile[i / kStack][i % kStack].decode(bits, me.lane, [&](int n) { return u32(mine[n]); });
    }
#pragma unroll
    for (int i = 0; i < kOperands * kStack; ++i) {
      const int s = i % kStack;
      if constexpr (kIsF32) {
        of[i / kStack][s] = tf32_operand(tile[i / kStack][s]);
      } else {
        of[i / kStack][s] = operand_16(tile[i / kStack * 2][s], tile[i / kStack * 2 + 1][s]);
      }
    }
    return count;
  }
  // Operand i, from the stage.
  __device__ __forceinline__ void load(const char* stage, const Lane& me, int i) {
    const uint4* from = reinterpret_cast<const uint4*>(stage + kValuesAt) + me.lane;
#pragma unroll
    for (int s = 0; s < kStack; ++s) of[i][s] = from[(i * kStack + s) * 32];
  }
};

// sums += operands of a step times their rows of B, which begin at `rows` in the lane's chunk.
__device__ __forceinline__ void multiply(const char* rows, const uint4 (&a)[kStack], Sums& sums) {
  const auto row = [&](int r) { return *reinterpret_cast<const uint4*>(rows + r * kRowStride); };
  if constexpr (kIsF32) {
    const uint4 low = row(0), high = row(4);
    const u32 top[4] = {low.x, low.y, low.z, low.w}, bottom[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int s = 0; s < kStack; ++s) multiply_tf32(a[s], top[j], bottom[j], sums.of[s][j]);
    }
  } else {
    BRow<4> first[2], second[2];
    *reinterpret_cast<uint4*>(first[0].word) = row(0);
    *reinterpret_cast<uint4*>(first[1].word) = row(4);
    *reinterpret_cast<uint4*>(second[0].word) = row(8);
    *reinterpret_cast<uint4*>(second[1].word) = row(12);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint2 b0 = pair_rows(first, q), b1 = pair_rows(second, q);
#pragma unroll
      for (int s = 0; s < kStack; ++s) {
        multiply_16<Mma<E>::kBfloat>(a[s], b0.x, b1.x, sums.of[s][2 * q]);
        multiply_16<Mma<E>::kBfloat>(a[s], b0.y, b1.y, sums.of[s][2 * q + 1]);
      }
    }
  }
}

// Without a later launch: a piece of a window's part of C without the stored zeros of tiles.
__device__ __noinline__ void exact(const Params& p, int window, int part, int first_column) {
  const int begin = __ldg(p.window_tile_ptr + window), end = __ldg(p.window_tile_ptr + window + 1);
  ExactStrip<E> strip(p.b + blockIdx.z * p.b_batch_stride + first_column, p.b_row_bytes,
                      min(p.n - first_column, kPieceCols));
  strip.add<1>(PartTiles{p, part}, begin, end);  // more would take registers from the product
  const int first = window * kWindowRows + part * 16 + strip.g;
  const int rows[2] = {row_of(p, first), row_of(p, first + 8)};
  store_sums(p, strip.t, rows, first_column, strip.sum[0]);
}

// Store a piece of a window's part, or recompute it if its sums are not finite.
__device__ __forceinline__ void store_part(const Params& p, const Lane& me, int window, int part,
                                           const int (&rows)[2], int piece,
                                           const float (&sums)[kSpan][4]) {
  FiniteCheck<4> check;
#pragma unroll
  for (int i = 0; i < 4 * kSpan; ++i) check.add(sums[i / 4][i % 4], i);
  const int first_column = slab_column(p) + piece * kPieceCols;
  if (!__any_sync(kWarp, check.failed())) {
    store_sums(p, me.t, rows, first_column, sums);
  } else if (p.redo == nullptr) {
    exact(p, window, part, first_column);
  } else if (me.lane == 0) {
    atomicOr(unit_flags(p) + unit_of(p, window, part, piece), 1 << piece % kUnitPieces);
  }
}

// Add a piece to its window's others; true in the one warp whose sums are then the whole window's.
__device__ __forceinline__ bool join(const Params& p, const Lane& me, int slot, int piece,
                                     Sums& sums) {
  const auto add = [](Sums& mine, const Sums& other) {
    float* to = &mine.of[0][0][0];
    const float* from = &other.of[0][0][0];
#pragma unroll
    for (int i = 0; i < kSums; ++i) to[i] += from[i];
  };
  // Pieces of columns are separate layers: each has its counters and its slots.
  const i64 layer = (i64(blockIdx.z) * gridDim.y + blockIdx.y) * p.slab_pieces + piece;
  return climb<32>(tree_of(p, layer, 32 * sizeof(Sums)), slot, me.lane, sums, add);
}

__device__ __forceinline__ void consume(const Params& p, const Ring& ring, int first, int end) {
  const Lane me;
  const int chunk = (me.g % 2 * 4 + me.g / 2) * 16 + me.t * kRowStride;
  Turns turn;
#pragma unroll 1
  for (Items items(p, first, end); !items.done(); items.next()) {
    const Item item = items.get();
    const int columns = columns_inside(p, item);
    if (columns <= 0) continue;
    // Pieces that have a column: the same for all lanes.
    const int end_piece = item.piece + (columns + kPieceCols - 1) / kPieceCols;
    bool has[kPieces], any = false;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      has[j] = me.piece(j) >= item.piece && me.piece(j) < end_piece;
      any |= has[j];
    }
    // Looked up now, used after the last tile.
    int rows[kStack][2];
#pragma unroll
    for (int s = 0; s < kStack; ++s) {
      rows[s][0] = row_of(p, item.window * kWindowRows + s * 16 + me.g);
      rows[s][1] = row_of(p, item.window * kWindowRows + s * 16 + me.g + 8);
    }
    Sums sums[kPieces] = {};
    int value = item.value;
#pragma unroll 1
    for (int tile = item.first; tile < item.stop; tile += kStepTiles) {
      if constexpr (kHandOver) ring.barriers.wait_full(turn);
      __syncwarp();  // MMAs need converged lanes
      if (any) {
        const char* stage = ring.at(turn);
        Operands a;
        const int tiles = min(item.stop - tile, kStepTiles);
        if constexpr (!kDense) value += a.decode(stage, me, tiles, value);
#pragma unroll
        for (int i = 0; i < kOperands; ++i) {
          if (kStepTiles > 2 && i * kOperandTiles >= tiles) continue;
          if constexpr (kDense) a.load(stage, me, i);
#pragma unroll
          for (int j = 0; j < kPieces; ++j) {
            if (!has[j]) continue;
            const char* rows_of_b = stage + chunk + me.piece(j) * kPieceBytes;
            multiply(rows_of_b + i * kOperandTiles * 8 * kRowStride, a.of[i], sums[j]);
          }
        }
      }
      // All consumers wait and arrive in every step, so that none runs ahead of a phase.
      if constexpr (kHandOver) wg::barrier_arrive(ring.barriers.empty + turn.stage);
      turn.next();
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (!has[j]) continue;
      if (item.slot >= 0 && !join(p, me, item.slot, me.piece(j), sums[j])) continue;
#pragma unroll
      for (int s = 0; s < kStack; ++s) {
        store_part(p, me, item.window, s, rows[s], me.piece(j), sums[j].of[s]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    spmm_bmat(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char s_ring[];
  const Ring ring(s_ring);
  // Rows that are never copied are multiplied by zeros: they must not be NaN.
  for (int at = threadIdx.x * 16; at < kBarriersAt; at += kThreads * 16) {
    *reinterpret_cast<uint4*>(s_ring + at) = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    ring.barriers.init(kFullArrivals, kEmptyArrivals);
    wg::barrier_init_done();
  }
  wg::fence_shared();  // TMA writes where threads wrote
  __syncthreads();
  ptx::wait_previous();
  const int first = __ldg(p.first_items + blockIdx.x), end = __ldg(p.first_items + blockIdx.x + 1);
  const int warp = threadIdx.x / 32;
  if (warp >= kConsumers) {
    produce(p, ring, first, end, warp - kConsumers, threadIdx.x % 32);
  } else {
    consume(p, ring, first, end);
  }
}
