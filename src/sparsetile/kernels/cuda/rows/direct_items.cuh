// Items of CSR arrays as callers have them. A short row is an item of its own: its row pointers.
// Long rows are listed in pieces by the blocks that meet them, and taken from the list by others:
//
//   grid.x   | row blocks: a row for each group of kLanes lanes | wide blocks: a piece for each
//   warp |
//
//   items[i]  = {row, begin, end, slot}      a row of more than `wide_length` entries, or a piece
//   of
//                                            at most `segment` of it; slot -1: a whole row
//   nodes, parent_of_slot                    the trees that join pieces (segment.cuh)
//   counts    = two words of 64 bits and one of 32, all 0 before and after the launch:
//                {places taken of items, slots, nodes; row blocks that have listed, pieces that
//                they listed; wide blocks that have read that}
//
// Row blocks of the first slab and batch list their long rows before they begin. Wide blocks, which
// are last in the grid, wait until all of them have: thread blocks start in the order of their
// numbers, so those that are waited for are running or done. Only the GPU knows how many pieces
// there are: wide blocks stride over them. One word says both that all have listed and how many
// pieces there are, and only blocks that list anything fence: each step of this chain that goes to
// L2 takes about 0.7 us, which small matrices have nothing to hide.
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

constexpr int kFanIn = 16;  // children of a node: see balance/tree.py
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

// The lanes of a group: write the tree over slots [slot, slot + leaves).
template <int kLanes, typename P>
__device__ __forceinline__ void write_tree(const P& p, int lane, int slot, int node, int leaves) {
  for (int count = leaves; count > 1;) {
    const int above = (count + kFanIn - 1) / kFanIn;
    for (int i = lane; i < count; i += kLanes) p.parent_of_slot[slot + i] = node + i / kFanIn;
    for (int g = lane; g < above; g += kLanes) {
      const int children = count - g * kFanIn < kFanIn ? count - g * kFanIn : kFanIn;
      p.nodes[node + g] =
          make_int4(slot + g * kFanIn, children, above == 1 ? -1 : slot + count + g, 0);
    }
    slot += count, node += above, count = above;
  }
}

// The lanes of a group: list a row.
template <int kLanes, typename P>
__device__ __noinline__ void list_row(const P& p, int lane, int row, int begin, int length) {
  const int pieces = (length + p.segment - 1) / p.segment;
  const int2 size = pieces > 1 ? tree_size(pieces) : make_int2(0, 0);
  u64 place = 0;
  if (lane == 0) {
    const u64 wanted = (u64(pieces) << kBits | u64(size.x)) << kBits | u64(size.y);
    place = atomicAdd(reinterpret_cast<u64*>(p.counts), wanted);
  }
  place = __shfl_sync(group_mask<kLanes>(), place, 0, kLanes);
  constexpr u64 kMask = (u64(1) << kBits) - 1;
  const int node = static_cast<int>(place & kMask);
  const int slot = static_cast<int>(place >> kBits & kMask);
  const i64 item = static_cast<i64>(place >> 2 * kBits);
  const bool fits = item + pieces <= p.most_items && slot + size.x <= p.slot_count &&
                    node + size.y <= p.node_count;
  for (int i = lane; i < pieces && item + i < p.most_items; i += kLanes) {
    const int first = begin + static_cast<int>(i64(length) * i / pieces);
    const int last = begin + static_cast<int>(i64(length) * (i + 1) / pieces);
    p.items[item + i] =
        fits ? make_int4(row, first, last, pieces > 1 ? slot + i : -1) : make_int4(-1, 0, 0, -1);
  }
  if (pieces > 1 && fits) write_tree<kLanes>(p, lane, slot, node, pieces);
  __threadfence();  // what is listed is read by those who read its number
  __syncwarp(group_mask<kLanes>());
  if (lane == 0) atomicAdd(reinterpret_cast<u64*>(p.counts) + 1, u64(pieces));
}

// Report row pointers that are wrong; each row looks at its own.
template <typename P>
__device__ __forceinline__ void check_pointers(const P& p, int row) {
  const i64 begin = load_pointer(p, row), end = load_pointer(p, i64(row) + 1);
  if (row == 0 && begin != 0) report(p, kBadPointer, 0, begin, 0);
  if (end < begin) report(p, kBadPointer, i64(row) + 1, end, begin);
  if (row == p.rows - 1 && end != p.entries) report(p, kBadPointer, p.rows, end, p.entries);
}

// The item of a group of a row block.
template <int kLanes, int kThreads, typename P>
__device__ __forceinline__ int4 row_of_group(const P& p) {
  const int row = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  int2 entries = make_int2(0, 0);
  if (row < p.rows) entries = entries_of(p, row);
  const int length = entries.y - entries.x;
  const bool is_long = length > p.wide_length;
  if (blockIdx.y == 0 && blockIdx.z == 0) {
    const int lane = threadIdx.x % kLanes;
    if (lane == 0 && row < p.rows) check_pointers(p, row);
    if (is_long) list_row<kLanes>(p, lane, row, entries.x, length);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<u64*>(p.counts) + 1, u64(1) << 32);
  }
  if (row >= p.rows || is_long) return make_int4(-1, 0, 0, -1);
  return make_int4(row, entries.x, entries.y, -1);
}

// Wait until all long rows are listed; returns the number of pieces. The last block to know it
// leaves the counters as they were.
template <int kThreads, typename P>
__device__ __forceinline__ int listed_pieces(const P& p, int row_blocks) {
  __shared__ int pieces;
  if (threadIdx.x == 0) {
    const volatile u64* word = reinterpret_cast<const u64*>(p.counts) + 1;
    u64 listed = *word;
    for (; static_cast<int>(listed >> 32) < row_blocks; listed = *word) __nanosleep(100);
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

// use(work, item) for this thread's items: those of its warp in a wide block, one of its group
// else.
template <int kLanes, int kThreads, typename P, typename Use>
__device__ __forceinline__ void for_each_item(const P& p, const Use& use) {
  constexpr int kWarps = kThreads / 32;
  const int row_blocks = static_cast<int>(gridDim.x) - p.wide_blocks;
  const int block = static_cast<int>(blockIdx.x) - row_blocks;
  const bool wide = block >= 0;
  GroupWork work;
  work.index = work.end = 0;
  work.shared = work.bundled = false, work.wide = wide;
  work.first = wide ? static_cast<int>(threadIdx.x) % 32 / kLanes * kLanes : 0;
  work.stride = wide ? 32 : kLanes;
  int4 item = make_int4(-1, 0, 0, -1);
  int at = 0, end = 1;
  if (wide) {
    at = block * kWarps + threadIdx.x / 32, end = listed_pieces<kThreads>(p, row_blocks);
  } else {
    item = row_of_group<kLanes, kThreads>(p);
  }
  for (; at < end; at += p.wide_blocks * kWarps) {
    use(work, wide ? __ldcg(p.items + at) : item);
    if (!wide) break;
  }
}

}  // namespace direct
