// tree.cuh: each block is a piece of one split unit; whoever completes the root writes the result.
// The join is not commutative, so that the result tells the order of the children.
#include "rows/tree.cuh"

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

struct Partial {
  u32 word[kWords];
};

extern "C" __global__ void tree(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % kLanes, slot = blockIdx.x;
  const i64 layer = blockIdx.y;
  if (threadIdx.x >= kLanes) return;
  Partial mine;
  for (int w = 0; w < kWords; ++w) {
    mine.word[w] = p.leaves[((layer * gridDim.x + slot) * kLanes + lane) * kWords + w];
  }
  const auto join = [](Partial& held, const Partial& other) {
    for (int w = 0; w < kWords; ++w) held.word[w] = held.word[w] * 31 + other.word[w];
  };
  const Tree of = tree_of(p, layer, kLanes * sizeof(Partial));
  if (!climb<kLanes>(of, slot, lane, mine, join)) return;
  for (int w = 0; w < kWords; ++w) p.out[(layer * kLanes + lane) * kWords + w] = mine.word[w];
}
