// Work items of the CUDA-core kernels and the deterministic sum of rows that were cut.
//
// A unit is a row of A, or a bundle of rows that share columns (formats/bundles.py). An item
// is a unit, or a piece of a long one. A group of kLanes neighbouring lanes handles a short item;
// all groups of a warp handle a wide one, share its entries and add their sums by shuffles; all
// groups of a thread block handle a shared one, or a warp if a kernel does not support shared
// items. The item list has five sections: shared rows, wide bundles, wide rows, bundles, rows.
//
// The pieces of a cut unit are the leaves of a tree: each node's partial sum has a slot in the
// workspace; the last child to arrive at a parent adds all children in slot order, and climbs.
// Timing decides which child arrives last, but not the order of the additions: the result is
// bit-identical from run to run, with one launch and no atomics on data.
//
//   items[i]          = {row or bundle, begin, end, slot}      slot -1: a whole unit
//   parent_of_slot[s] = parent node p of slot s
//   nodes[p]          = {first child slot, children, own slot or -1 at the root, 0}
//   arrivals[p, slab] counts arrived children; the last one resets it to 0, so the buffer is all
//                     zero before and after each launch.
#pragma once

#include "ptx/element.cuh"

// The lanes of this thread's group, as a mask for the *_sync functions.
template <int kLanes>
__device__ __forceinline__ u32 group_mask() {
  if constexpr (kLanes == 32) {
    return 0xffffffffu;
  } else {
    const int first = (threadIdx.x & 31) / kLanes * kLanes;
    return ((1u << kLanes) - 1u) << first;
  }
}

// The item of this thread's group, and the group's part of its entries.
struct GroupWork {
  int index;     // the item
  int end;       // of the section's items
  int first;     // offset of the group's first chunk of kLanes entries in the item
  int stride;    // entries from one of the group's chunks to the next: kThreads, 32 or kLanes
  bool shared;   // the block's groups share one item
  bool wide;     // the warp's groups share one item
  bool bundled;  // items are bundles; all three are the same for the whole block
};

template <int kLanes, int kThreads, bool kShared = false>
__device__ __forceinline__ GroupWork group_work(int block, const int (&item_end)[5],
                                                const int (&block_end)[5]) {
  int section = 0;
#pragma unroll
  for (int s = 0; s < 4; ++s) section += block >= block_end[s];
  const int first_item = section == 0 ? 0 : item_end[section - 1];
  const int first_block = section == 0 ? 0 : block_end[section - 1];
  GroupWork work;
  work.shared = kShared && section == 0;
  work.wide = section < 3;
  work.bundled = (section & 1) != 0;
  const int lanes = work.shared ? kThreads : work.wide ? 32 : kLanes;  // that work on one item
  work.end = item_end[section];
  work.index = first_item + (block - first_block) * (kThreads / lanes) + threadIdx.x / lanes;
  work.first = work.wide ? threadIdx.x % lanes / kLanes * kLanes : 0;
  work.stride = lanes;
  return work;
}

// Arrive at a node; true in every lane of the group that completed it.
template <int kLanes>
__device__ __forceinline__ bool arrive_last(int* counter, int children, int lane) {
  __threadfence();  // this group's partial is visible before its arrival is
  __syncwarp(group_mask<kLanes>());
  int arrived = 0;
  if (lane == 0) arrived = atomicAdd(counter, 1);
  arrived = __shfl_sync(group_mask<kLanes>(), arrived, 0, kLanes);
  if (arrived != children - 1) return false;
  if (lane == 0) *counter = 0;
  __threadfence();  // the other children's partials are read after their arrivals
  return true;
}
