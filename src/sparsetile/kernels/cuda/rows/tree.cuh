// The deterministic sum of units of work that were cut: pieces are leaves of a tree, and the last
// child to arrive at a node adds all of them in slot order. See segment.cuh for the arrays.
//
// A partial result is any trivially copyable struct of a lane. Slots hold it word by word, lanes
// side by side, so that a group's accesses are contiguous for any struct:
//
//   slot:  | word 0: lane 0, lane 1, ... | word 1: lane 0, lane 1, ... | ...
#pragma once

#include "rows/segment.cuh"

struct Tree {
  const int* parent_of_slot;
  const int4* nodes;
  int* arrivals;   // of this slab and batch, one counter a node
  char* partials;  // of this slab and batch, kLanes * kSlotBytes a slot
};

// The tree of one layer (batch and slab) of a launch; fields: TREE of kernels/params.py.
template <typename Params>
__device__ __forceinline__ Tree tree_of(const Params& p, i64 layer, int slot_bytes) {
  return {p.parent_of_slot, p.nodes, p.arrivals + layer * p.node_count,
          p.partials + layer * p.slot_count * slot_bytes};
}

template <typename Partial>
union TreeWords {
  static constexpr int kBytes = sizeof(Partial) % 16 == 0 ? 16 : sizeof(Partial) % 8 == 0 ? 8 : 4;
  using Word = typename WordOf<kBytes>::Type;
  static constexpr int kWords = sizeof(Partial) / kBytes;
  Partial partial;
  Word word[kWords];
  __device__ TreeWords() {}
};

// Climb from `slot`; true in the one group whose `mine` is then the whole unit's result.
// join(mine, other) adds a later child to the earlier ones. kSlotBytes: of a lane in a slot, where
// partial results of several kinds share them.
template <int kLanes, typename Partial, typename Join, int kSlotBytes = sizeof(Partial)>
__device__ __forceinline__ bool climb(const Tree& tree, int slot, int lane, Partial& mine,
                                      const Join& join) {
  using Words = TreeWords<Partial>;
  using Word = typename Words::Word;
  static_assert(sizeof(Partial) % 4 == 0, "partials are moved in words of at least four bytes");
  static_assert(kSlotBytes >= sizeof(Partial) && kSlotBytes % Words::kBytes == 0, "slots fit");
  // Children whose loads are in flight at once, to hide latency; registers are scarce.
  constexpr int kAhead = sizeof(Partial) <= 32 ? 4 : sizeof(Partial) <= 64 ? 2 : 1;
  const auto place = [&](int s) {
    return reinterpret_cast<Word*>(tree.partials + i64(s) * kLanes * kSlotBytes) + lane;
  };
  while (true) {
    Words words;
    words.partial = mine;
#pragma unroll
    for (int w = 0; w < Words::kWords; ++w) __stcg(place(slot) + w * kLanes, words.word[w]);
    const int node = __ldg(tree.parent_of_slot + slot);
    const int4 info = __ldg(tree.nodes + node);
    if (!arrive_last<kLanes>(tree.arrivals + node, info.y, lane)) return false;
#pragma unroll 1
    for (int first = 0; first < info.y; first += kAhead) {
      Words child[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        // Past the last child the last is read again: one wait for all, for any number.
        const int number = min(first + a, info.y - 1);
#pragma unroll
        for (int w = 0; w < Words::kWords; ++w) {
          child[a].word[w] = __ldcg(place(info.x + number) + w * kLanes);
        }
      }
      if (first == 0) mine = child[0].partial;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (first + a > 0 && first + a < info.y) join(mine, child[a].partial);
      }
    }
    if (info.z < 0) return true;
    slot = info.z;
  }
}
