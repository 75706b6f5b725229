// Row order by merging: similar rows become pairs, similar pairs fours (reorder/merging.py, which
// has the same steps as tensor operations and gives the same order).
//
// A group has kBlock MinHash values, a lane each: the least hash of its columns for as many hash
// functions. Stages, one launch each; between them the host sorts keys and adds up counts:
//
//     rows         rows with entries: `rows`; the others: the end of `order`; first row of each
//                  range of kRange entries
//     signatures   values of each row: a warp hashes a range; rows that are in several ranges take
//                  the least of all by atomics
//   of each level:
//     keys         sort keys of pairs of values                        -> sorted: `sorted`
//     round        neighbours among the groups without a partner, in each sort and in the order so
//                  far, are candidates of each other: the most similar one of each goes to `best`.
//                  Two that prefer each other are partners, which the next launch finds
//     sides        the others side by side among kSide positions of the first sort, if they have
//                  anything in common; counts: 1 for the first part of a pair, 2^32 without a
//                  partner                                             -> running sums: `sums`
//     rest         groups without a partner: `rest`. They are paired in their order
//     unite        values of the groups made, and their keys; after the last level counts: 1 for a
//                  whole group, 2^32 times its rows for a smaller one -> `sums`
//   then:
//     order        rows of the groups, whole groups first
//
//     a sort:  |  block of 32 positions  |  next block  |     . has a partner
//              | a . b . . c . . . . . d |  . . e . f   |     a-b, b-c, c-d, d-e are candidates
//
// Neighbours are looked for in a block and its successor: no search is long, whatever the matrix.
// Atomics keep the least or the greatest of numbers: the same result in every run.
//
// Assumes: fewer than 2^31 keys. Threads: kThreads, any grid; stages with a warp for a range, a
// block or kBlock groups have 32 threads for each, `sides` a thread block for kSide positions.
// Shared memory: the groups of each warp's block; in `sides` those of kSide positions and two bits
// for each.
#include "pack/search.cuh"

// Declared in kernels/merge_rows.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kRows, kSignatures, kKeys, kRound, kSides, kRest, kUnite, kOrder };

constexpr int kBlock = 32, kSide = 1024, kRange = 256, kWarps = kThreads / 32;
constexpr int kNone = 0x7fffffff;  // value of no column: above all
constexpr int kKeyBits = 29;       // of a key below the number of its sort, one of eight
constexpr int kLoads = 8;          // groups whose values a warp loads at once

static_assert(kThreads % 32 == 0 && kBlock == 32, "a lane for each position, and for each value");
static_assert(kSide == 32 * 32 && kSide % kThreads == 0, "a lane for each word of bits");

struct Counts {
  int low, high;
};
__device__ __forceinline__ Counts counts_of(i64 packed) {
  return {static_cast<int>(packed), static_cast<int>(packed >> 32)};
}
__device__ __forceinline__ i64 packed_counts(i64 low, i64 high) { return high << 32 | low; }

__device__ __forceinline__ u32 mixed(u32 x) {  // the finaliser of MurmurHash3: one to one
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

__device__ __forceinline__ void find_rows(const Params& p, i64 i) {
  if (i < p.height) {
    const int before = p.used_rows[i];
    if (p.indptr[i] < p.indptr[i + 1]) {
      p.rows[before - 1] = static_cast<int>(i);
    } else {
      p.order[p.used + i - before] = i;
    }
  }
  const i64 begin = i * kRange;
  if (begin >= p.entries) return;
  const int row = row_of(p.indptr, p.height, begin), place = p.used_rows[row] - 1;
  p.range_rows[i] = place;
  if (p.indptr[row] == begin) return;
  for (int k = 0; k < kBlock; ++k) p.values[i64(place) * kBlock + k] = kNone;
}

// One range: each entry's column is mixed once, and each lane hashes it by its own function.
__device__ __forceinline__ void hash_range(const Params& p, i64 range, int lane) {
  const i64 begin = range * kRange;
  const int limit = static_cast<int>(min(i64(kRange), p.entries - begin));
  const u32 factor = mixed(2 * lane + 1) | 1, term = mixed(2 * lane + 2);
  int first = p.range_rows[range], end_of_lane = 0, row = kBlock, end = 0;
  bool shared = p.indptr[p.rows[first]] < begin;  // with the range before
  first -= kBlock;
  // The next row of the list; ends are loaded for as many as there are lanes.
  const auto next_row = [&] {
    if (row == kBlock) {
      first += kBlock;
      row = 0;
      const i64 ahead = first + lane < p.used ? p.indptr[p.rows[first + lane] + 1] - begin : 0;
      end_of_lane = static_cast<int>(min(ahead, i64(kRange + 1)));
    }
    end = __shfl_sync(kWarp, end_of_lane, row++);
  };
  next_row();
  u32 least = ~0u;
  for (int chunk = 0; chunk < limit; chunk += 32) {
    const u32 x = chunk + lane < limit ? mixed(p.columns[begin + chunk + lane]) : 0;
    const int stop = min(limit, chunk + 32);
    for (int at = chunk; at < stop;) {
      const int to = min(end, stop);
#pragma unroll 4
      for (; at < to; ++at) least = min(least, factor * __shfl_sync(kWarp, x, at - chunk) + term);
      if (at < end && at < limit) continue;
      int* const value = p.values + (i64(first) + row - 1) * kBlock + lane;
      if (shared || end > limit) {
        atomicMin(value, static_cast<int>(least >> 1));
      } else {
        *value = static_cast<int>(least >> 1);
      }
      shared = false;
      least = ~0u;
      if (at < limit) next_row();
    }
  }
}

// A group's key in a sort: as many bits of the first value, mixed, as tell the level's groups
// apart; the rest are the second's. Signed numbers ascend by sort.
__device__ __forceinline__ int key_of(const Params& p, int sort, u32 first, u32 second) {
  const u32 high = first * 0x9e3779b1u >> (32 - p.key_bits) << (kKeyBits - p.key_bits);
  const u32 low = second * 0x85ebca6bu >> (p.key_bits + 32 - kKeyBits);
  return static_cast<int>((u32(sort) << kKeyBits | high | low) ^ 0x80000000u);
}
__device__ __forceinline__ int first_value(const Params& p, int sort, int level) {
  return 2 * (sort + level * p.sorts) % kBlock;
}

__device__ __forceinline__ void write_keys(const Params& p, i64 group) {
  for (int sort = 0; sort < p.sorts; ++sort) {
    const int* const value = p.values + group * kBlock + first_value(p, sort, p.level);
    p.keys[i64(sort) * p.groups + group] = key_of(p, sort, value[0], value[1]);
  }
}

// Group of a round that prefers `group` and is preferred by it; -1 without one.
__device__ __forceinline__ int agreed(const Params& p, int turn, int group) {
  const u64* const best = p.best + i64(turn) * p.groups;
  const u64 wanted = best[group];
  const int other = static_cast<int>(static_cast<u32>(wanted));
  return wanted != 0 && static_cast<u32>(best[other]) == u32(group) ? other : -1;
}

// Partner of a group after `turn` rounds. `mate` lacks those of the last one.
__device__ __forceinline__ int partner(const Params& p, int turn, int group) {
  if (turn == 0) return -1;
  const int known = turn == 1 ? -1 : p.mate[group];
  return known >= 0 ? known : agreed(p, turn - 1, group);
}

// Group at a position of an order: the order so far, or a sort.
__device__ __forceinline__ int group_at(const Params& p, int order, i64 position) {
  if (order == 0) return static_cast<int>(position);
  const i64 before = i64(order - 1) * p.groups;
  return static_cast<int>(p.sorted[before + position] - before);
}

// Lane i gets how many values groups i and i + 1 of a list have in common, for `count` groups.
__device__ __forceinline__ int similarity(const Params& p, const int* list, int count, int lane) {
  int found = 0, before = kNone;
  for (int base = 0; base < count; base += kLoads) {
    int value[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      value[u] = base + u < count ? p.values[i64(list[base + u]) * kBlock + lane] : kNone;
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int common = __popc(__ballot_sync(kWarp, value[u] == before && before != kNone));
      if (lane == base + u - 1) found = common;
      before = value[u];
    }
  }
  return found;
}

// Candidates of one block of an order.
__device__ __forceinline__ void compare(const Params& p, int order, i64 block, int lane,
                                        int* s_list) {
  const int turn = p.turn;
  const i64 position = block * kBlock + lane, ahead = position + kBlock;
  int group = -1, next = -1;
  bool free = false, next_free = false;
  if (position < p.groups) {
    group = group_at(p, order, position);
    const int mate = partner(p, turn, group);
    free = mate < 0;
    if (order == 0 && turn > 0) p.mate[group] = mate;  // the others find the same before and after
  }
  if (ahead < p.groups && (turn > 0 || lane == 0)) {
    next = group_at(p, order, ahead);
    next_free = partner(p, turn, next) < 0;
  }
  const u32 here = __ballot_sync(kWarp, free), there = __ballot_sync(kWarp, next_free);
  const int own = __popc(here), total = own + (there != 0);
  if (own == 0 || total < 2) return;
  const u32 below = (1u << lane) - 1;
  if (free) s_list[__popc(here & below)] = group;
  if (next_free && (there & below) == 0) s_list[own] = next;
  __syncwarp();
  const u32 common = similarity(p, s_list, total, lane);
  // The most similar wins, then one that the numbers of both decide, so that both agree.
  u64 rank = 0;
  u32 a = 0, b = 0;
  if (common > 0) {
    a = s_list[lane];
    b = s_list[lane + 1];
    rank = u64(common << 16 | ((min(a, b) * 40503u + max(a, b)) & 0xffff)) << 32;
  }
  const u64 left = __shfl_sync(kWarp, rank == 0 ? 0 : rank | a, max(lane - 1, 0));
  const u64 best = max(rank == 0 ? 0 : rank | b, lane == 0 ? 0 : left);
  u64* const to = p.best + i64(turn) * p.groups;
  if (lane < own && best != 0) atomicMax(to + s_list[lane], best);
  if (lane == own - 1 && total > own && rank != 0) atomicMax(to + b, rank | a);
  __syncwarp();  // the list is written again
}

// Consecutive bits set below bit `at` of words.
__device__ __forceinline__ int run_below(const u32* words, int at) {
  int found = 0;
  for (int word = at / 32; word >= 0; --word) {
    const int bits = word == at / 32 ? at % 32 : 32;
    const u32 zeros = bits == 32 ? ~words[word] : ~words[word] & (1u << bits) - 1;
    if (zeros != 0) return found + bits - (32 - __clz(zeros));
    found += bits;
  }
  return found;
}

// Groups that are left among kSide positions of the first sort, by a thread block: in each run of
// them in which neighbours are similar at all, the first and the second, the third and the fourth,
// and so on.
__device__ __forceinline__ void pair_sides(const Params& p, i64 side, int lane) {
  __shared__ u32 s_free[kSide / 32], s_similar[kSide / 32];
  __shared__ int s_list[kSide];
  constexpr int kTurns = kSide / kThreads;
  const int warp = threadIdx.x / 32;
  int group[kTurns], mate[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const i64 position = side * kSide + turn * kThreads + threadIdx.x;
    group[turn] = position < p.groups ? group_at(p, 1, position) : -1;
    mate[turn] = position < p.groups ? partner(p, p.turn, group[turn]) : 0;
    const u32 free = __ballot_sync(kWarp, mate[turn] < 0);
    if (lane == 0) s_free[turn * kWarps + warp] = free;
  }
  __syncthreads();
  const int count_of_word = __popc(s_free[lane]);
  const int count = __reduce_add_sync(kWarp, count_of_word);
  int place[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int word = turn * kWarps + warp;
    place[turn] = __reduce_add_sync(kWarp, lane < word ? count_of_word : 0) +
                  __popc(s_free[word] & (1u << lane) - 1);
    if (mate[turn] < 0) s_list[place[turn]] = group[turn];
  }
  __syncthreads();
  for (int first = warp * 32; first < count; first += kThreads) {
    const int common = similarity(p, s_list + first, min(33, count - first), lane);
    const u32 similar = __ballot_sync(kWarp, common > 0);
    if (lane == 0) s_similar[first / 32] = similar;
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (mate[turn] < 0) {
      const int at = place[turn];
      const bool second = run_below(s_similar, at) % 2 == 1;
      if (second || s_similar[at / 32] >> at % 32 & 1)
        mate[turn] = s_list[second ? at - 1 : at + 1];
    }
    if (group[turn] >= 0) {
      p.mate[group[turn]] = mate[turn];
      p.counts[group[turn]] = packed_counts(mate[turn] > group[turn], mate[turn] < 0);
    }
  }
  __syncthreads();  // shared memory is written again
}

// The groups that kBlock groups are the first parts of.
__device__ __forceinline__ void unite(const Params& p, i64 block, int lane) {
  const i64 mine = block * kBlock + lane;
  const int made = (p.groups + 1) / 2;
  int mate = -1, place = -1, size = 1, mate_size = 0;
  if (mine < p.groups) {
    mate = p.mate[mine];
    const Counts before = counts_of(p.sums[mine]), all = counts_of(p.sums[p.groups - 1]);
    if (mate < 0) {
      const int number = before.high - 1;
      if (number % 2 == 0) {
        mate = number + 1 < all.high ? p.rest[number + 1] : -1;
        place = mate < 0 ? made - 1 : before.low + number / 2;
      }
    } else if (mate > mine) {  // the one without a partner is the last
      place = before.low - 1 + min((before.high + 1) / 2, all.high / 2);
    }
    if (mine < made) {
      for (int turn = 0; turn < p.turn; ++turn) p.best[i64(turn) * made + mine] = 0;
    }
  }
  if (place >= 0) {
    if (p.level > 0) {
      const int4* const nodes = p.nodes + p.level_nodes[p.level - 1];
      size = nodes[mine].w;
      mate_size = mate < 0 ? 0 : nodes[mate].w;
    } else {
      mate_size = mate >= 0;
    }
    const int both = size + mate_size;
    p.nodes[p.level_nodes[p.level] + place] = make_int4(static_cast<int>(mine), mate, size, both);
    if (p.level + 1 == p.levels) {
      const bool whole = both == 1 << p.levels;
      p.counts[place] = packed_counts(whole, whole ? 0 : both);
    }
  }
  if (p.level + 1 == p.levels) return;
  for (u32 left = __ballot_sync(kWarp, place >= 0); left; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int other = __shfl_sync(kWarp, mate, from), to = __shfl_sync(kWarp, place, from);
    int value = p.values[(block * kBlock + from) * kBlock + lane];
    if (other >= 0) value = min(value, p.values[i64(other) * kBlock + lane]);
    p.united[i64(to) * kBlock + lane] = value;
    const int sort = lane % p.sorts, at = first_value(p, sort, p.level + 1);
    const int first = __shfl_sync(kWarp, value, at), second = __shfl_sync(kWarp, value, at + 1);
    if (lane < p.sorts) p.keys[i64(sort) * made + to] = key_of(p, sort, first, second);
  }
}

// A row of a group of the last level.
__device__ __forceinline__ void write_order(const Params& p, i64 i) {
  const int made = (p.groups + 1) / 2;
  int group = static_cast<int>(i >> p.levels), slot = static_cast<int>(i & ((1 << p.levels) - 1));
  int4 node = p.nodes[p.level_nodes[p.levels - 1] + group];
  if (slot >= node.w) return;
  const Counts before = counts_of(p.sums[group]), all = counts_of(p.sums[made - 1]);
  const bool whole = node.w == 1 << p.levels;
  const i64 wholes = whole ? before.low - 1 : all.low;
  const i64 to = (wholes << p.levels) + (whole ? 0 : before.high - node.w) + slot;
  for (int level = p.levels - 1;; --level) {
    const bool second = slot >= node.z;
    if (second) slot -= node.z;
    group = second ? node.y : node.x;
    if (level == 0) break;
    node = p.nodes[p.level_nodes[level - 1] + group];
  }
  p.order[to] = p.rows[group];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_rows(const __grid_constant__ Params p) {
  __shared__ int s_lists[kWarps][kBlock + 1];
  const int lane = threadIdx.x % 32;
  int* const s_list = s_lists[threadIdx.x / 32];
  const i64 step = i64(gridDim.x) * kThreads;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < p.work; i += step) {
    switch (p.stage) {
      case kRows:
        find_rows(p, i);
        break;
      case kSignatures:
        hash_range(p, i / 32, lane);
        break;
      case kKeys:
        write_keys(p, i);
        break;
      case kRound: {
        const i64 blocks = (i64(p.groups) + kBlock - 1) / kBlock;
        compare(p, static_cast<int>(i / 32 / blocks), i / 32 % blocks, lane, s_list);
        break;
      }
      case kSides:
        pair_sides(p, i / kThreads, lane);
        break;
      case kRest:
        if (p.mate[i] < 0) p.rest[counts_of(p.sums[i]).high - 1] = static_cast<int>(i);
        break;
      case kUnite:
        unite(p, i / 32, lane);
        break;
      case kOrder:
        write_order(p, i);
        break;
    }
  }
}
