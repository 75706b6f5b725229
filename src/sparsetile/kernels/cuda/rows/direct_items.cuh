// Items of CSR arrays as callers have them. A short row is an item of its own: its row pointers.
// Long rows are listed in pieces by the first blocks of the grid, and taken from the list by
// others:
//
//   grid.x     scan blocks | row blocks | wide blocks | row blocks
//              `scanned` rows a warp, a row for each group of kLanes lanes, a piece for each warp
//
//   items[i] = {row, begin, end, slot}       a row of more than `wide_length` entries, or a piece
//                                            of at most `segment` of it; slot -1: a whole row
//   nodes, parent_of_slot                    the trees that join pieces (segment.cuh)
//   counts    = two words of 64 bits and one of 32, all 0 before and after the launch:
//                {places taken of items, slots, nodes; warps that have listed, pieces that
//                they listed; wide blocks that have read that}
//
// Scan blocks read row pointers and nothing else, so all long rows are listed soon after the launch
// has begun. Wide blocks wait for that: thread blocks start in the order of their numbers, so those
// that are waited for are running or done. They stand behind about a wave of row blocks: as long
// rows end last, they should begin early, but not wait for their list. Only the GPU knows how many
// pieces there are: wide blocks stride over them. One word says both that all have listed and how
// many pieces there are, and only warps that list anything fence.
//
// Atomics give rows their places in the lists, which may differ from run to run; where a row is cut
// and the order in which its pieces are added do not.
//
// Assumes: room for every list of right row pointers (most_items, slot_count, node_count). Wrong
// ones are reported, and rows for which there is no room are not multiplied.
#pragma once

#include "rows/direct.cuh"
#include "rows/segment.cuh"

namespace direct {

constexpr int kFanIn = 16;   // children of a node: see balance/tree.py
constexpr int kScanned = 4;  // most rows that a lane looks at: see kernels/direct.py
// Bits of slots and of nodes in the word that counts all.
constexpr int kBits = 17;
// Numbers of 32 bits in `counts`, which those of segment.cuh follow.
constexpr int kCounters = 8;

// Slots and nodes of a tree with this many leaves.
__device__ __forceinline__ int2 tree_size(int leaves) {
  int2 size = make_int2(leaves, 0);
  for (int count = leaves; count > 1;) {
    count = (count + kFanIn - 1) / kFanIn;
    size.y += count;
    if (count > 1) size.x += count;
  }
  return size;
}

// `lanes` lanes: write the tree over slots [slot, slot + leaves).
template <typename P>
__device__ __forceinline__ void write_tree(const P& p, int lane, int lanes, int slot, int node,
                                           int leaves) {
  for (int count = leaves; count > 1;) {
    const int above = (count + kFanIn - 1) / kFanIn;
    for (int i = lane; i < count; i += lanes) p.parent_of_slot[slot + i] = node + i / kFanIn;
    for (int g = lane; g < above; g += lanes) {
      const int children = count - g * kFanIn < kFanIn ? count - g * kFanIn : kFanIn;
      p.nodes[node + g] =
          make_int4(slot + g * kFanIn, children, above == 1 ? -1 : slot + count + g, 0);
    }
    slot += count, node += above, count = above;
  }
}

// Piece i of a row's entries, cut evenly: length * i / pieces, without 64 bits. There are no more
// than some thousand pieces.
__device__ __forceinline__ int piece_begin(int begin, int length, int pieces, int i) {
  return begin + length / pieces * i + length % pieces * i / pieces;
}

// A warp: list the rows of lanes whose `length` is not 0. Returns the number of their pieces. All
// lanes take places and write items at once: one row after the other took 0.5 us each. Rows of very
// many pieces are written by the warp.
template <typename P>
__device__ __forceinline__ int list_rows(const P& p, int lane, int row, int begin, int length) {
  constexpr u32 kAll = 0xffffffffu;
  const int pieces = (length + p.segment - 1) / p.segment;
  const int2 size = pieces > 1 ? tree_size(pieces) : make_int2(0, 0);
  u64 place = 0;
  if (length > 0) {
    const u64 wanted = (u64(pieces) << kBits | u64(size.x)) << kBits | u64(size.y);
    place = atomicAdd(reinterpret_cast<u64*>(p.counts), wanted);
  }
  constexpr u64 kMask = (u64(1) << kBits) - 1;
  const int node = static_cast<int>(place & kMask);
  const int slot = static_cast<int>(place >> kBits & kMask);
  const i64 item = static_cast<i64>(place >> 2 * kBits);
  const bool fits = item + pieces <= p.most_items && slot + size.x <= p.slot_count &&
                    node + size.y <= p.node_count;
  const auto write_items = [&](int first, int step, int of, int number, int from, int entries,
                               i64 at, int own_slot, bool room) {
    for (int i = first; i < of && at + i < p.most_items; i += step) {
      p.items[at + i] =
          room ? make_int4(number, piece_begin(from, entries, of, i),
                           piece_begin(from, entries, of, i + 1), of > 1 ? own_slot + i : -1)
               : make_int4(-1, 0, 0, -1);
    }
  };
  const bool alone = pieces <= kFanIn;
  if (length > 0 && alone) {
    write_items(0, 1, pieces, row, begin, length, item, slot, fits);
    if (pieces > 1 && fits) write_tree(p, 0, 1, slot, node, pieces);
  }
  for (u32 left = __ballot_sync(kAll, !alone); left != 0; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int of = __shfl_sync(kAll, pieces, from), own_slot = __shfl_sync(kAll, slot, from);
    const bool room = __shfl_sync(kAll, static_cast<int>(fits), from) != 0;
    write_items(lane, 32, of, __shfl_sync(kAll, row, from), __shfl_sync(kAll, begin, from),
                __shfl_sync(kAll, length, from), __shfl_sync(kAll, item, from), own_slot, room);
    const int own_node = __shfl_sync(kAll, node, from);
    if (room) write_tree(p, lane, 32, own_slot, own_node, of);
  }
  return static_cast<int>(__reduce_add_sync(kAll, static_cast<unsigned>(pieces)));
}

// Report row pointers that are wrong; each row looks at its own.
template <typename P>
__device__ __forceinline__ void check_pointers(const P& p, int row) {
  const i64 begin = load_pointer(p, row), end = load_pointer(p, i64(row) + 1);
  if (row == 0 && begin != 0) report(p, kBadPointer, 0, begin, 0);
  if (end < begin) report(p, kBadPointer, i64(row) + 1, end, begin);
  if (row == p.rows - 1 && end != p.entries) report(p, kBadPointer, p.rows, end, p.entries);
}

// A warp of a scan block: check the row pointers of `scanned` rows, and list the long ones.
template <int kThreads, typename P>
__device__ __noinline__ void scan_rows(const P& p) {
  const int lane = threadIdx.x % 32;
  const i64 first = (i64(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * p.scanned + lane;
  int2 entries[kScanned];
#pragma unroll
  for (int i = 0; i < kScanned; ++i) {
    const i64 row = first + 32 * i;
    entries[i] = make_int2(0, 0);
    if (lane + 32 * i >= p.scanned || row >= p.rows) continue;
    entries[i] = entries_of(p, static_cast<int>(row));
    check_pointers(p, static_cast<int>(row));
  }
  int listed = 0;
#pragma unroll 1
  for (int i = 0; i < kScanned; ++i) {
    // By a rotation: an index that is not known would put the array into memory.
    const int begin = entries[0].x, length = entries[0].y - entries[0].x;
#pragma unroll
    for (int j = 1; j < kScanned; ++j) entries[j - 1] = entries[j];
    const int wide = length > p.wide_length ? length : 0;
    if (__any_sync(0xffffffffu, wide > 0)) {
      listed += list_rows(p, lane, static_cast<int>(first) + 32 * i, begin, wide);
    }
  }
  if (listed > 0) {
    __threadfence();  // what is listed is read by those who read its number
    __syncwarp();
  }
  if (lane == 0) {
    atomicAdd(reinterpret_cast<u64*>(p.counts) + 1, u64(1) << 32 | static_cast<u64>(listed));
  }
}

// The item of a group of a row block.
template <int kLanes, int kThreads, typename P>
__device__ __forceinline__ int4 row_of_group(const P& p, int block) {
  const int row = block * (kThreads / kLanes) + threadIdx.x / kLanes;
  int2 entries = make_int2(0, 0);
  if (row < p.rows) entries = entries_of(p, row);
  const bool is_long = entries.y - entries.x > p.wide_length;
  if (row >= p.rows || is_long) return make_int4(-1, 0, 0, -1);
  return make_int4(row, entries.x, entries.y, -1);
}

template <int kThreads, typename P>
__device__ __forceinline__ int scan_blocks(const P& p) {
  const int each = p.scanned * (kThreads / 32);
  return static_cast<int>((i64(p.rows) + each - 1) / each);
}

// Wait until all long rows are listed; returns the number of pieces. The last block to know it
// leaves the counters as they were.
template <int kThreads, typename P>
__device__ __forceinline__ int listed_pieces(const P& p, int scan_warps) {
  __shared__ int pieces;
  if (threadIdx.x == 0) {
    const volatile u64* word = reinterpret_cast<const u64*>(p.counts) + 1;
    u64 listed = *word;
    for (; static_cast<int>(listed >> 32) < scan_warps; listed = *word) __nanosleep(100);
    __threadfence();  // what they listed is read after their numbers
    const u64 counted = listed & 0xffffffff;
    pieces = counted < static_cast<u64>(p.most_items) ? static_cast<int>(counted) : p.most_items;
  }
  __syncthreads();
  // By the last warp: the first ones have work if any has.
  const int others = static_cast<int>(p.wide_blocks * gridDim.y * gridDim.z) - 1;
  if (threadIdx.x == kThreads - 1 && atomicAdd(p.counts + 4, 1) == others) {
    for (int i = 0; i < kCounters; ++i) p.counts[i] = 0;
  }
  return pieces;
}

// What a thread block does, and its number among those that do the same.
struct Role {
  int number;
  bool scans;
  bool wide;
};

template <int kThreads, typename P>
__device__ __forceinline__ Role role_of_block(const P& p) {
  const int scans = scan_blocks<kThreads>(p), block = static_cast<int>(blockIdx.x) - scans;
  const int row_blocks = static_cast<int>(gridDim.x) - scans - p.wide_blocks;
  const int wide_at = p.wide_at < row_blocks ? p.wide_at : row_blocks;
  if (block < wide_at) return {block, block < 0, false};
  const bool wide = block < wide_at + p.wide_blocks;
  return {block - (wide ? wide_at : p.wide_blocks), false, wide};
}

// use(work, item) for this thread's items: those of its warp in a wide block, one of its group
// else.
template <int kLanes, int kThreads, typename P, typename Use>
__device__ __forceinline__ void for_each_item(const P& p, const Role& role, const Use& use) {
  constexpr int kWarps = kThreads / 32;
  GroupWork work;
  work.index = work.end = 0;
  work.shared = work.bundled = false, work.wide = role.wide;
  work.first = role.wide ? static_cast<int>(threadIdx.x) % 32 / kLanes * kLanes : 0;
  work.stride = role.wide ? 32 : kLanes;
  int4 item = make_int4(-1, 0, 0, -1);
  int at = 0, end = 1;
  if (role.wide) {
    at = role.number * kWarps + threadIdx.x / 32;
    end = listed_pieces<kThreads>(p, scan_blocks<kThreads>(p) * kWarps);
  } else {
    item = row_of_group<kLanes, kThreads>(p, role.number);
  }
  for (; at < end; at += p.wide_blocks * kWarps) {
    use(work, role.wide ? __ldcg(p.items + at) : item);
    if (!role.wide) break;
  }
}

}  // namespace direct
