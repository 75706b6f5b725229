// Work items of the CUDA-core kernels and the deterministic sum of rows that were cut.
//
// An item is a row, or a piece of a long row, handled by a group of kLanes neighbouring lanes.
// A cut row's pieces are the leaves of a tree: each node's partial sum has a slot in the
// workspace; the last child to arrive at a parent adds all children in slot order, and climbs.
// Which child arrives last depends on timing, the order of the additions does not: the result is
// bit-identical from run to run, with one launch and no atomics on data.
//
//   items[i]          = {row, begin, end, slot}      slot -1: a whole row
//   parent_of_slot[s] = parent node p of slot s
//   nodes[p]          = {first child slot, children, own slot or -1 at the root, entries in row}
//   arrivals[p, slab] counts arrived children; whoever completes it puts it back to 0, so the
//                     buffer is all zero before and after each launch.
#pragma once

#include "element.cuh"

struct SegmentTree {
  const int* parent_of_slot;
  const int4* nodes;
  int* arrivals;  // [batch][slab][node]
};

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

// Arrive at node `node`; true in every lane of the group that completed it.
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
