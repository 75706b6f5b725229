// C = epilogue(A . B) for A in BCSR blocks of 64 x 64 on WGMMA, AsyncSparse's product (sm_90a).
//
// C is split into items: 64 rows (a block row of A) times kCols columns. Persistent thread blocks
// stride over the items. One warp copies each block of the row and its 64 rows of B, both by TMA,
// into a ring of kStages. kConsumers warpgroups multiply, 128 columns each:
//
//   producer    wait empty[s] -> block (8 KB), 64 x kCols of B (128 bytes a row and box) -> full[s]
//   consumers   wait full[s]  -> four WGMMAs of k = 16, sums in registers       -> empty[s]
//
// The producer goes from item to item without a stop, so that blocks of the next ones are in the
// ring while the consumers store C: the only exposed latency per item is its first WGMMA. An item's
// block row, blocks and columns are loaded one item ahead.
//
// B is read in place, row-major, or with kKMajor as the transpose of a row-major matrix, as in a
// linear layer: WGMMA reads 16-bit operands from shared memory along either side. The first product
// of an item overwrites its sums instead of adding to zeros. A stage is released when the products
// after its own have been started, so Tensor Cores are never idle.
//
// Order of items: block rows longest first, for `together` slabs of kCols columns at a time, slab
// by slab: blocks that run together share their columns of B, and blocks of A, in L2.
//
// Thread blocks take every gridDim.x-th item, or, if `queue` is given, the next item of all. With a
// fixed stride, thread blocks with longer block rows fall behind, more with each slab, and L2 has
// to hold the rows of B of all of them. (3584 x 18944 at 90 %, 65,536 columns: in a model of an L2
// with 40 MB, B is read 2.9 times with a stride and once with the queue.) Sums do not depend on
// which block takes an item.
//
//   copying warp   takes the item after the next two from queue[0], one atomic ahead of its use
//                  -> s_taken[slot] -> taken.full[slot]
//   consumers      wait taken.full[slot] -> read -> taken.empty[slot]
//
// An index past the last item ends both. The last block to end resets the queue to 0.
//
// C of 16 bits in the given row order goes through shared memory, 4 KB per warp, and is stored by
// TMA, so that its warp can go on with the next item; transposed, for a linear layer, 16 KB per
// warpgroup at a time. Otherwise threads store it, 16 bytes at a time; float32 8 bytes, transposed
// 4, with eight lanes on neighbours.
//
// FP8 (e4m3): rows of 64 bytes, only K-major B. Tensor Cores keep some 14 bits of a sum of such
// products, so theirs run over 128 of k, two blocks, and are added up in float32.
//
// TF32: A was rounded when it was packed, B is a rounded copy, K-major (tf32_operand.cu). A block
// takes two stages of 32 columns, 128 bytes a row, so the ring is that of 16 bits. C is float32 and
// does not go through shared memory.
//
// kPaired: gate and up of a SwiGLU are stacked in A, and C = silu(gate) * up has half of A's rows.
// An item is a block row of the gate and the same one of up: `work` lists both, one after the
// other, and their blocks pass through the ring in that order. The consumers keep both sums, 128
// registers, and join them before they store: neither half of A . B is ever written.
//
// kStep is the last enabled step of the paper's ladder, each with all before it: 0 CUDA cores, 1
// WGMMA, 2 TMA, 3 a warp that copies and the ring, 5 sums that are not zeroed first, 6 persistent
// thread blocks (only the grid changes), 7 blocks of A shared by two. Below 3 all threads fill and
// multiply one stage in turn.
//
// Step 7 (CLUSTERED): two thread blocks are a cluster, with neighbouring slabs of the same block
// rows, so both go through the same blocks of A in the same order. Each copies half of A's block,
// 32 rows, to both, and its own rows of B:
//
//   producer r   wait empty[s] of r -> expect a whole stage at full[s] of r
//                -> rows 32 r.. of the block to both, B to r
//   consumers    wait full[s] of their own -> multiply -> arrive at empty[s] of both
//
// empty[s] of r has arrivals of both blocks' consumers, since producer r writes into both. The
// other one's half may land, and count at full[s] of r, before producer r has announced its bytes:
// that phase cannot end without producer r, and none is early by a whole turn, because the other
// producer waited for consumers of r, who waited for the phase before. Likewise no consumer arrives
// twice in a phase of empty[s] of the other: its next full[s] needs that one's producer to have
// passed it. Both begin when all barriers are initialised, and end together, because an exited
// block has no barriers. If slabs are odd the last block has columns past n: zeros, never stored.
//
// Shared memory: dynamic, kStages stages of 8 KB + kCols * 128 bytes, kCols * 128 bytes of C, the
// barriers, and indices from the queue. No atomics on data; sums in block order. With 128 columns
// two blocks share an SM.
//
// Zeros of blocks are multiplied too: if B is not finite the host launches a repair of C from A's
// entries, which does nothing unless `spoilt` is set.
//
// Assumes: address and row stride of B and C multiples of 16 bytes, and rows of C (columns if
// transposed) padded to a multiple of 8 elements, which is written (host copies otherwise; threads
// that store a transposed C need none of that); tensor maps made for this A and B, never read if A
// has no block, and for this C if TMA stores it; rows of C under 2^31, blocks of A under 2^25,
// items and two grids under 2^31; the queue at 0, and no other running launch that uses it.
#include "block_sparse/bcsr.cuh"
#include "block_sparse/block_steps.cuh"
#include "block_sparse/block_stores.cuh"
#include "pipeline/ring.cuh"

using RingTurn = Turn<kStages>;

// Indices of items in flight from the copying warp to the consumers.
constexpr bool kQueued = kStep == 6;
constexpr int kTaken = 4;
using TakenTurn = Turn<kTaken>;

struct Taken : RingBarriers<kTaken> {
  int* index;

  __device__ __forceinline__ explicit Taken(char* memory)
      : RingBarriers(memory), index(reinterpret_cast<int*>(memory + kBytes)) {}
};

struct Ring : RingBarriers<kStages> {
  char* stages;
  char* stored;  // C, by consumer and warp
  Taken taken;

  __device__ __forceinline__ explicit Ring(char* memory)
      : RingBarriers(memory + kStages * kStageBytes + kStoreBytes),
        stages(memory),
        stored(memory + kStages * kStageBytes),
        taken(memory + kStages * kStageBytes + kStoreBytes + kBytes) {}
};

__device__ __forceinline__ char* ring_memory() {
  extern __shared__ __align__(1024) char s_dynamic[];
  return s_dynamic;
}

// Facts of an item before it is begun.
struct Item {
  int block_row;
  int first_block;
  int blocks;
  int first_column;
};

// Items of a thread block are those of its cluster, the slab by its rank there. With kPaired an
// item has two halves, gate and up.
__device__ __forceinline__ int first_index() { return blockIdx.x / kCluster; }
__device__ __forceinline__ int index_in_turn(int last) { return last + gridDim.x / kCluster; }
__device__ __forceinline__ bool is_item(const Params& p, int index) {
  return index < p.block_rows * p.slabs;
}
__device__ __forceinline__ bool from_queue(const Params& p) {
  return kQueued && p.queue != nullptr;
}
__device__ __forceinline__ int cluster_rank() { return blockIdx.x % kCluster; }

// Past the last item: one without blocks. Does not wait for the load.
__device__ __forceinline__ Item item_at(const Params& p, int index, int half) {
  if (!is_item(p, index)) return {0, 0, 0, 0};
  const int first_slab = index / (p.block_rows * p.together) * p.together;
  const int rest = index - first_slab * p.block_rows, width = min(p.together, p.slabs - first_slab);
  int4 row;
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(row.x), "=r"(row.y), "=r"(row.z), "=r"(row.w)
               : "l"(p.work + rest / width * kHalves + half));
  const int slab = (first_slab + rest % width) * kCluster + cluster_rank();
  return {row.x, row.y, row.z, slab * kCols};
}

// Column of the item's block `from` + lane. Does not wait for the load either.
__device__ __forceinline__ int column_at(const Params& p, const Item& item, int from) {
  const int block = from + threadIdx.x % 32;
  int column = 0;
  if (block < item.blocks) {
    asm volatile("ld.global.nc.s32 %0, [%1];"
                 : "=r"(column)
                 : "l"(p.block_col_idx + item.first_block + block));
  }
  return column;
}

// Piece `piece` of block `block` and its rows of B; those of the block begin at `row`.
__device__ __forceinline__ void copy_stage(const Params& p, char* stage, u64* full, int block,
                                           int piece, int row, int first_column) {
  wg::barrier_expect(full, kStageBytes);
  if constexpr (kCluster == 1) {
    wg::copy_box(stage, &p.a, piece * kDepth, block * kBlock, full);
  } else {
    const int first = cluster_rank() * (kBlock / kCluster);
    wg::copy_box_to_all(stage + first * kRowBytes, &p.a, piece * kDepth, block * kBlock + first,
                        full, (1 << kCluster) - 1);
  }
  if constexpr (kKMajor) {
    wg::copy_box(stage + kBlockBytes, &p.b, row + piece * kDepth, first_column, full);
  } else {
#pragma unroll
    for (int j = 0; j < kBoxes; ++j) {
      wg::copy_box(stage + kBlockBytes + j * kBoxBytes, &p.b, first_column + j * 64, row, full);
    }
  }
}

// The copying warp's walk over its items, half by half; it passes each item to the consumers.
struct Producing {
  int index, half;  // current position
  int asked;        // lane 0: the last index from the queue
  TakenTurn turn;

  __device__ __forceinline__ void ask(const Params& p) {
    if (threadIdx.x == 0) asked = atomicAdd(p.queue, 1);
  }
  __device__ __forceinline__ explicit Producing(const Params& p)
      : index(first_index()), half(0), asked(0) {
    if (from_queue(p)) ask(p);
  }
  // Requests nothing after an index past the last item.
  __device__ __forceinline__ void next(const Params& p, const Taken& taken) {
    if (!is_item(p, index)) return;
    if (++half < kHalves) return;
    half = 0;
    if (!from_queue(p)) {
      index = index_in_turn(index);
      return;
    }
    index = gridDim.x + __shfl_sync(0xffffffffu, asked, 0);
    if (is_item(p, index)) ask(p);
    if (threadIdx.x == 0) {
      taken.wait_empty(turn);
      taken.index[turn.stage] = index;
      wg::barrier_arrive(taken.full + turn.stage);
    }
    turn.next();
  }
};

__device__ __forceinline__ void produce(const Params& p, const Ring& ring) {
  const int lane = threadIdx.x % 32;
  Producing way(p);
  Item item = item_at(p, way.index, way.half);
  bool more = is_item(p, way.index);
  way.next(p, ring.taken);
  Item next = item_at(p, way.index, way.half);
  bool more_next = is_item(p, way.index);
  int first_columns = column_at(p, item, 0);
  if (lane == 0 && item.blocks > 0) {
    wg::prefetch_map(&p.a);
    wg::prefetch_map(&p.b);
  }
  RingTurn turn;
  while (more) {
    way.next(p, ring.taken);
    const Item after = item_at(p, way.index, way.half);
    const bool more_after = is_item(p, way.index);
    int mine = first_columns;
    first_columns = column_at(p, next, 0);
    for (int from = 0; from < item.blocks; from += 32) {
      if (from > 0) mine = column_at(p, item, from);
      const int count = min(32, item.blocks - from);
      for (int i = 0; i < count; ++i) {
        const int row = __shfl_sync(0xffffffffu, mine, i) * kBlock;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          if (lane == 0) {
            ring.wait_empty(turn);
            copy_stage(p, ring.stages + turn.stage * kStageBytes, ring.full + turn.stage,
                       item.first_block + from + i, piece, row, item.first_column);
          }
          __syncwarp();
          turn.next();
        }
      }
    }
    item = next, next = after;
    more = more_next, more_next = more_after;
  }
  // Every block has its last index: no more requests.
  if (from_queue(p) && lane == 0 && atomicAdd(p.queue + 1, 1) == gridDim.x - 1) {
    p.queue[0] = 0;
    p.queue[1] = 0;
  }
}

__device__ __forceinline__ void clear(float (&sum)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
}

// Starts the products of a stage, whose B is this consumer's at `b`.
__device__ __forceinline__ void start_products(const char* stage, const char* b, bool add,
                                               float (&sum)[64]) {
  wg::fence();
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; ++k) {
    Wgmma128<E, kKMajor ? 0 : 1>::multiply(
        sum, wg::descriptor<kRowBytes>(stage + k * 32, 16, 8 * kRowBytes),
        kKMajor ? wg::descriptor<kRowBytes>(b + k * 32, 16, 8 * kRowBytes)
                : wg::descriptor(b + k * 2048, kBoxBytes, 1024),
        add || k > 0);
  }
  wg::commit();
}

// A warp is done with a stage: one lane arrives at each block of the cluster.
__device__ __forceinline__ void release(u64* empty) {
  const int lane = threadIdx.x % 32;
  if (lane < kCluster) {
    if constexpr (kCluster == 1) {
      wg::barrier_arrive(empty);
    } else {
      wg::barrier_arrive_at(empty, lane);
    }
  }
}

// The item's sums over `stages` stages; `turn` advances through the ring.
__device__ __forceinline__ void accumulate(const Ring& ring, int consumer, int stages,
                                           RingTurn& turn, float (&sum)[64]) {
  if (stages == 0 || !kElided) clear(sum);
  if (stages == 0) return;
  u64* previous = nullptr;
  for (int i = 0; i < stages; ++i) {
    ring.wait_full(turn);
    const char* stage = ring.stages + turn.stage * kStageBytes;
    start_products(stage, stage + kBlockBytes + consumer * 2 * kBoxBytes, i > 0 || !kElided, sum);
    wg::wait<1>();  // for the products before these
    if (i > 0) release(previous);
    previous = ring.empty + turn.stage;
    turn.next();
  }
  wg::wait<0>();
  wg::settle(sum);
  release(previous);
}

// The same for FP8: products of two blocks at a time.
__device__ __forceinline__ void accumulate_pairs(const Ring& ring, int consumer, int blocks,
                                                 RingTurn& turn, float (&sum)[64]) {
  const bool releases = threadIdx.x % 32 == 0;
  clear(sum);
  for (int i = 0; i < blocks; i += 2) {
    float part[64];
    u64* used[2] = {nullptr, nullptr};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (i + half >= blocks) break;
      ring.wait_full(turn);
      const char* stage = ring.stages + turn.stage * kStageBytes;
      start_products(stage, stage + kBlockBytes + consumer * 2 * kBoxBytes, half > 0, part);
      used[half] = ring.empty + turn.stage;
      turn.next();
    }
    wg::wait<0>();
    wg::settle(part);
    if (releases) {
      wg::barrier_arrive(used[0]);
      if (used[1] != nullptr) wg::barrier_arrive(used[1]);
    }
#pragma unroll
    for (int j = 0; j < 64; ++j) sum[j] += part[j];
  }
}

// The index of the item after `index`, from the copying warp.
__device__ __forceinline__ int index_after(const Params& p, const Taken& taken, int index,
                                           TakenTurn& turn) {
  if (!from_queue(p)) return index_in_turn(index);
  taken.wait_full(turn);
  const int found = taken.index[turn.stage];
  __syncwarp();
  if (threadIdx.x % 32 == 0) wg::barrier_arrive(taken.empty + turn.stage);
  turn.next();
  return found;
}

__device__ __forceinline__ void consume(const Params& p, const Ring& ring) {
  const int consumer = threadIdx.x / 128 - 1;
  int index = first_index();
  Item item = item_at(p, index, 0), up_item = {};
  if constexpr (kPaired) up_item = item_at(p, index, 1);
  RingTurn turn;
  TakenTurn taken_turn;
  while (is_item(p, index)) {
    index = index_after(p, ring.taken, index, taken_turn);
    const Item next = item_at(p, index, 0);
    const int position = position_in(item.block_row);
    const int first_column = item.first_column + consumer * 128;
    float sum[64];
    u32 bias[2];
    load_thread_bias(p, position, 0, bias);
    if constexpr (kPaired) {
      const Item next_up = item_at(p, index, 1);
      float up[64];
      u32 up_bias[2];
      load_thread_bias(p, position, p.rows, up_bias);
      accumulate(ring, consumer, item.blocks, turn, sum);
      accumulate(ring, consumer, up_item.blocks, turn, up);
      join_halves(p, bias, up_bias, up, sum);
      up_item = next_up;
    } else {
      if constexpr (sizeof(E::Storage) == 1) {
        accumulate_pairs(ring, consumer, item.blocks, turn, sum);
      } else {
        accumulate(ring, consumer, item.blocks * kPieces, turn, sum);
      }
      finish_sums(p, item.block_row, first_column, bias, sum);
    }
    store_sums(p, ring.stored, item.block_row, first_column, sum);
    item = next;
  }
  if (p.store != kByThreads) wg::store_wait_read();  // shared memory lives as long as its threads
}

// ---- steps 0 to 2: in turns

template <typename Element>
__device__ __forceinline__ void take_turns(const Params& p, const Ring& ring) {
  const int consumer = threadIdx.x / 128;
  const Item item = item_at(p, first_index(), 0);
  char* stage = ring.stages;
  const char* b = stage + kBlockBytes + consumer * 2 * kBoxBytes;
  float sum[64];
  clear(sum);
  u32 bias[2];
  load_thread_bias(p, position_in(item.block_row), 0, bias);
  for (int i = 0; i < item.blocks; ++i) {
    const int block = item.first_block + i, row = __ldg(p.block_col_idx + block) * kBlock;
    if constexpr (kEngine) {
      if (threadIdx.x == 0) copy_stage(p, stage, ring.full, block, 0, row, item.first_column);
      wg::barrier_wait(ring.full, i % 2);
    } else {
      copy_by_threads<kThreads>(stage, p.a, 0, block * kBlock);
#pragma unroll
      for (int j = 0; j < kBoxes; ++j) {
        copy_by_threads<kThreads>(stage + kBlockBytes + j * kBoxBytes, p.b,
                                  item.first_column + j * 64, row);
      }
      wg::fence_shared();  // WGMMA reads through the async proxy
      __syncthreads();
    }
    if constexpr (kTensorCores) {
      start_products(stage, b, true, sum);
      wg::wait<0>();
      wg::settle(sum);
    } else {
      multiply_by_cores<Element>(stage, b, sum);
    }
    __syncthreads();
  }
  const int first_column = item.first_column + consumer * 128;
  finish_sums(p, item.block_row, first_column, bias, sum);
  store_sums(p, ring.stored, item.block_row, first_column, sum);
  if (p.store != kByThreads) wg::store_wait_read();
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(kThreads, kBlocksPerSM)
    spmm_bcsr(const __grid_constant__ Params p) {
  const Ring ring(ring_memory());
  if (threadIdx.x == 0) {
    ring.init(1, kCluster * kConsumers * 4);
    if constexpr (kQueued) ring.taken.init(1, kConsumers * 4);
    wg::barrier_init_done();
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    wg::cluster_sync();
  }
  if constexpr (!kSpecialised) {
    take_turns<E>(p, ring);
  } else if (threadIdx.x < 128) {
    wg::fewer_registers<40>();
    if (threadIdx.x < 32) produce(p, ring);
  } else {
    // Registers released by the copying warpgroup: 168 * 384 and 128 * 256 in all.
    wg::more_registers<kConsumers == 2 ? 232 : 216>();
    consume(p, ring);
  }
  if constexpr (kCluster > 1) wg::cluster_sync();
}
