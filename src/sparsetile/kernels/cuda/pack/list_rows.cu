// Rows of A counted and listed for a schedule (formats/device_rows.py).
//
// Units are bundles of rows (`bundles` of them, unit u being the range bundle_ptr[u] to
// bundle_ptr[u + 1] of a list), then rows: `rows` names them, or they are 0, 1, 2, ... Stages, one
// launch each; `chunks` are units in groups of kThreads:
//
//     count      facts of the units' lengths and, if `distinct` has the distinct columns of windows
//                of kWindow rows, of the windows: added up in `tally`
//     classes    units of each class in each chunk                     -> running sums: `sums`
//     arrange    units by class, in their order: `arranged`; those to be cut are listed in `cut`
//     levels     of each unit to be cut: pieces, and nodes of their tree by level  -> running sums
//     pieces     items of pieces, and the tree that adds them up (balance/tree.py): a thread a slot
//     items      items of whole units; the short ones sorted by length inside windows of kThreads
//     heads      column of each thread's first entry, in whole thread blocks of `block` threads
//
// Atomics add whole numbers or keep the greatest: the same result in every run. One kernel with the
// stage as a parameter, so that only one is compiled and loaded.
//
// Assumes: fewer than 2^31 units and entries; `tally` is zero before `count`. Threads: kThreads,
// whole warps; any grid. In `heads`, `levels` and `pieces` a thread has an element, in `count` a
// unit; in the others a block has a chunk or a window of the list.
#include "pack/row_windows.cuh"

// Declared in kernels/row_lists.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kCount, kClasses, kArrange, kLevels, kPieces, kItems, kHeads };
enum Class { kCutBundle, kCutRow, kShareBlock, kWideBundle, kWideRow, kBundle, kRow, kClassCount };

// Children of a node, levels of a tree, cut rows whose pieces are listed side by side: FAN_IN in
// balance/tree.py, TREE_LEVELS in kernels/row_lists.py, INTERLEAVED in balance/segments.py.
// Elements of a bundle's list that a kernel loads at once: LIST_STEP in formats/bundles.py.
constexpr int kFanIn = 16, kTreeLevels = 8, kInterleaved = 16, kListStep = 4;
constexpr int kWarps = kThreads / 32;
constexpr int kLimits = sizeof(Params::limits) / sizeof(int);
constexpr int kSections = sizeof(Params::sections) / sizeof(int);
// Numbers of the tally, in the order of its list.
constexpr int kMaxima = 2 + kLimits, kSums = 1 + 2 * kLimits + 3;
// Of units that are longer than a limit, if they are cut there: lists behind those numbers.
enum CutNumber { kPieceCount, kNodeCount, kBundlePieces, kLongestPiece, kCutNumbers };

struct Unit {
  i64 label, begin, length;
  bool bundled;
};

__device__ __forceinline__ i64 row_at(const Params& p, i64 place) {
  return p.rows ? p.rows[place] : place;
}

__device__ __forceinline__ Unit unit_at(const Params& p, i64 i) {
  const bool bundled = i < p.bundles;
  const i64 label = bundled ? i : row_at(p, i - p.bundles);
  const i64* const ptr = bundled ? p.bundle_ptr : p.indptr;
  const i64 begin = ptr[label];
  return {label, begin, ptr[label + 1] - begin, bundled};
}

// A share of a unit's length, rounded up; lists of bundles are cut at multiples of kListStep.
__device__ __forceinline__ i64 grains_up(i64 length, i64 parts, bool bundled) {
  const i64 grain = bundled ? kListStep : 1;
  return (length / grain + parts - 1) / parts * grain;
}

// Nodes of a level that add up that many slots.
__device__ __forceinline__ int parents_of(int slots) { return (slots + kFanIn - 1) / kFanIn; }

// Nodes of the tree over that many pieces.
__device__ __forceinline__ int nodes_over(int pieces) {
  int nodes = 0;
  do {
    pieces = parents_of(pieces);
    nodes += pieces;
  } while (pieces > 1);
  return nodes;
}

template <typename Join>
__device__ __forceinline__ i64 over_lanes(i64 value, int first, const Join& join) {
  for (int step = first; step; step /= 2) {
    value = join(value, __shfl_xor_sync(kWarp, value, step));
  }
  return value;
}
__device__ __forceinline__ i64 sum_of_lanes(i64 value, int first = 16) {
  return over_lanes(value, first, [](i64 a, i64 b) { return a + b; });
}
__device__ __forceinline__ i64 greatest_of_lanes(i64 value) {
  return over_lanes(value, 16, [](i64 a, i64 b) { return a < b ? b : a; });
}

// What cutting a warp's units at a limit makes, added up in shared memory: in registers it would
// take half of a thread's. Units are cut at powers of two.
__device__ __forceinline__ void count_cut(const Params& p, const Unit& unit, int each, bool longer,
                                          int (&cut)[kCutNumbers][kLimits]) {
  const u32 limit = p.limits[each];
  if (limit & (limit - 1) || !__any_sync(kWarp, longer)) return;
  int pieces = 0, nodes = 0, longest = 0;
  if (longer) {
    pieces = static_cast<int>((unit.length + limit - 1) >> (31 - __clz(limit)));
    nodes = nodes_over(pieces);
    longest = static_cast<int>(grains_up(unit.length, pieces, unit.bundled));
  }
  const int of_bundles = __reduce_add_sync(kWarp, unit.bundled ? pieces : 0);
  pieces = __reduce_add_sync(kWarp, pieces);
  nodes = __reduce_add_sync(kWarp, nodes);
  longest = __reduce_max_sync(kWarp, longest);
  if (threadIdx.x % 32) return;
  atomicAdd(&cut[kPieceCount][each], pieces);
  atomicAdd(&cut[kNodeCount][each], nodes);
  atomicAdd(&cut[kBundlePieces][each], of_bundles);
  atomicMax(&cut[kLongestPiece][each], longest);
}

__device__ __forceinline__ void count_units(const Params& p) {
  __shared__ i64 found[kWarps][kMaxima + kSums];
  __shared__ int cut[kCutNumbers][kLimits];
  for (int i = threadIdx.x; i < kCutNumbers * kLimits; i += kThreads)
    cut[i / kLimits][i % kLimits] = 0;
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Longest, end, longest up to each limit; total, units over each limit, their total, and of
  // windows that share columns: how many, their entries, their distinct columns.
  i64 greatest[kMaxima] = {}, sum[kSums] = {};
  const i64 step = i64(gridDim.x) * kThreads;
  for (i64 base = i64(blockIdx.x) * kThreads; base < p.work; base += step) {
    const i64 i = base + threadIdx.x;
    const Unit unit = i < p.work ? unit_at(p, i) : Unit{};
    greatest[0] = max(greatest[0], unit.length);
    greatest[1] = max(greatest[1], unit.begin + unit.length);
    sum[0] += unit.length;
#pragma unroll
    for (int each = 0; each < kLimits; ++each) {
      const bool longer = unit.length > p.limits[each];
      if (!longer) greatest[2 + each] = max(greatest[2 + each], unit.length);
      sum[1 + each] += longer;
      sum[1 + kLimits + each] += longer ? unit.length : 0;
      count_cut(p, unit, each, longer, cut);
    }
    if (!p.distinct) continue;
    const i64 entries = sum_of_lanes(unit.length, kWindow / 2);
    const bool first = lane % kWindow == 0 && i < p.work;
    const i64 columns = first ? p.distinct[i / kWindow] : 0;
    if (shares_columns(entries, columns, p.min_sharing)) {
      sum[kSums - 3] += 1;
      sum[kSums - 2] += entries;
      sum[kSums - 1] += columns;
    }
  }
  __syncwarp();
#pragma unroll
  for (int each = 0; each < kMaxima; ++each) {
    const i64 all = greatest_of_lanes(greatest[each]);
    if (lane == 0) found[warp][each] = all;
  }
#pragma unroll
  for (int each = 0; each < kSums; ++each) {
    const i64 all = sum_of_lanes(sum[each]);
    if (lane == 0) found[warp][kMaxima + each] = all;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kCutNumbers * kLimits; i += kThreads) {
    const int all = cut[i / kLimits][i % kLimits];
    i64* const to = p.tally + kMaxima + kSums + i;
    if (i / kLimits == kLongestPiece) {
      atomicMax(to, i64(all));
    } else if (all) {
      atomicAdd(reinterpret_cast<u64*>(to), static_cast<u64>(all));
    }
  }
  const int number = threadIdx.x;
  if (number >= kMaxima + kSums) return;
  i64 all = found[0][number];
  for (int other = 1; other < kWarps; ++other) {
    all = number < kMaxima ? max(all, found[other][number]) : all + found[other][number];
  }
  if (number < kMaxima) {
    atomicMax(p.tally + number, all);
  } else {
    atomicAdd(reinterpret_cast<u64*>(p.tally + number), static_cast<u64>(all));
  }
}

__device__ __forceinline__ int class_of(const Params& p, const Unit& unit) {
  if (unit.length > p.max_length) return unit.bundled ? kCutBundle : kCutRow;
  if (!unit.bundled && unit.length > p.shared_length) return kShareBlock;
  if (unit.length > p.wide_length) return unit.bundled ? kWideBundle : kWideRow;
  return unit.bundled ? kBundle : kRow;
}

// A chunk's units by class, all threads of the block: `below` units of the thread's own class come
// before it. Returns the number of units of class threadIdx.x.
__device__ __forceinline__ int count_classes(int mine, int& below) {
  __shared__ int in_warp[kWarps][kClassCount];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();  // the chunk before has been read
  below = 0;
#pragma unroll
  for (int each = 0; each < kClassCount; ++each) {
    const u32 same = __ballot_sync(kWarp, mine == each);
    if (lane == 0) in_warp[warp][each] = __popc(same);
    if (mine == each) below = __popc(same & ptx::lanes_below());
  }
  __syncthreads();
  int all = 0;
  for (int other = 0; other < kWarps; ++other) {
    if (mine >= 0 && other < warp) below += in_warp[other][mine];
    if (threadIdx.x < kClassCount) all += in_warp[other][threadIdx.x];
  }
  return all;
}

__device__ __forceinline__ void classify(const Params& p, i64 chunk, i64 chunks) {
  const i64 i = chunk * kThreads + threadIdx.x;
  int below;
  const int all = count_classes(i < p.units ? class_of(p, unit_at(p, i)) : -1, below);
  if (threadIdx.x < kClassCount) p.sums[threadIdx.x * chunks + chunk] = all;
}

__device__ __forceinline__ void arrange(const Params& p, i64 chunk, i64 chunks) {
  const i64 i = chunk * kThreads + threadIdx.x;
  const Unit unit = i < p.units ? unit_at(p, i) : Unit{};
  const int mine = i < p.units ? class_of(p, unit) : -1;
  int below;
  count_classes(mine, below);
  if (mine < 0) return;
  const i64 before = mine * chunks + chunk;
  const i64 to = (before ? p.sums[before - 1] : 0) + below;
  p.arranged[to] = static_cast<int>(i);
  if (mine <= kCutRow) {
    p.cut[to] = make_int4(static_cast<int>(unit.label), static_cast<int>(unit.begin),
                          static_cast<int>(unit.length), unit.bundled);
  }
}

// Element i of a list's running sums: the sum before it.
__device__ __forceinline__ int sum_before(const int* sums, i64 i) { return i ? sums[i - 1] : 0; }

// Slots of each level of a unit's tree, and its nodes there: kTreeLevels lists of slots, then as
// many of nodes, with an element for each unit to be cut.
__device__ __forceinline__ void count_levels(const Params& p, i64 u) {
  int slots = (p.cut[u].z + p.max_length - 1) / p.max_length;
  for (int level = 0; level < kTreeLevels; ++level) {
    const int nodes = parents_of(slots);
    p.levels[level * p.cut_units + u] = slots;
    p.levels[(kTreeLevels + level) * p.cut_units + u] = nodes;
    slots = nodes > 1 ? nodes : 0;
  }
}

// Place of a piece among those of its section's units, which begin and end there: those of
// kInterleaved neighbouring units are listed by their number, then by unit.
__device__ __forceinline__ int place_of_piece(const Params& p, i64 unit, int number, i64 begins,
                                              i64 ends) {
  const i64 first = unit - (unit - begins) % kInterleaved;
  const i64 end = min(first + kInterleaved, ends);
  int place = sum_before(p.level_sums, first);
  for (i64 u = first; u < end; ++u) {
    const int pieces = p.levels[u];
    place += min(pieces, number) + (u < unit && pieces > number);
  }
  return place;
}

__device__ __forceinline__ void write_piece(const Params& p, int slot) {
  // Slots are numbered level by level, row by row, like the running sums.
  const i64 nodes_begin = kTreeLevels * p.cut_units;
  i64 at = 0, high = nodes_begin;
  while (at < high) {
    const i64 middle = at + (high - at) / 2;
    if (p.level_sums[middle] <= slot) {
      at = middle + 1;
    } else {
      high = middle;
    }
  }
  const int number = slot - sum_before(p.level_sums, at);
  const i64 slots = p.levels[at], nodes = p.levels[nodes_begin + at];
  const i64 group = number * nodes / slots, first = (group * slots + nodes - 1) / nodes;
  const i64 node = p.level_sums[nodes_begin + at - 1] - p.level_sums[nodes_begin - 1] + group;
  p.parent_of_slot[slot] = static_cast<int>(node);
  if (number == first) {
    const i64 end = ((group + 1) * slots + nodes - 1) / nodes;
    const i64 own = nodes > 1 ? p.level_sums[at + p.cut_units - 1] + group : -1;
    p.nodes[node] = make_int4(slot, static_cast<int>(end - first), static_cast<int>(own), 0);
  }
  if (at >= p.cut_units) return;
  const int4 unit = p.cut[at];
  const i64 bundles = p.counts[kCutBundle], grain = unit.w ? kListStep : 1;
  const i64 grains = unit.z / grain;
  const int begin = unit.y + static_cast<int>(grains * number / slots * grain);
  const int end = unit.y + static_cast<int>(grains * (number + 1) / slots * grain);
  int place = 0;  // of the section, then in it
  if (unit.w) {
    place = p.pieces[0] + p.counts[kShareBlock] + place_of_piece(p, at, number, 0, bundles);
  } else {
    if (!p.pieces[0]) place = p.counts[kShareBlock] + p.pieces[1] + p.counts[kWideBundle];
    place += place_of_piece(p, at, number, bundles, p.cut_units) - p.pieces[1];
  }
  p.items[place] = make_int4(unit.x, begin, end, slot);
}

__device__ __forceinline__ int windows_of(int units) { return (units + kThreads - 1) / kThreads; }

// One window of the list of whole units: of the classes with a warp or more together, of bundles,
// or of rows.
__device__ __forceinline__ void write_items(const Params& p, i64 number) {
  __shared__ int lengths[kThreads];
  const int wide = p.counts[kShareBlock] + p.counts[kWideBundle] + p.counts[kWideRow];
  const int sizes[3] = {wide, p.counts[kBundle], p.counts[kRow]};
  int begin = static_cast<int>(p.cut_units), size = 0;  // of the part in `arranged`
  int window = static_cast<int>(number), part = 0;
  for (; part < 3; ++part) {
    size = sizes[part];
    if (window < windows_of(size)) break;
    window -= windows_of(size);
    begin += size;
  }
  const int place = window * kThreads + threadIdx.x;
  const bool inside = place < size;
  const Unit unit = inside ? unit_at(p, p.arranged[begin + place]) : Unit{};
  int to = begin + place;
  if (part > 0) {  // longest first; those of equal length stay in their order
    __syncthreads();
    lengths[threadIdx.x] = inside ? static_cast<int>(unit.length) : -1;
    __syncthreads();
    int rank = 0;
    for (int other = 0; other < kThreads; ++other) {
      const int length = lengths[other];
      rank += length > unit.length || (length == unit.length && other < threadIdx.x);
    }
    to = begin + window * kThreads + rank;
  }
  if (!inside) return;
  // Pieces of cut units come before the whole units of their section.
  const int whole = to - static_cast<int>(p.cut_units);
  to = whole + p.pieces[0];
  if (whole >= p.counts[kShareBlock]) to += p.pieces[1];
  if (whole >= p.counts[kShareBlock] + p.counts[kWideBundle]) to += p.pieces[2];
  const i64 end = unit.begin + unit.length;
  p.items[to] = make_int4(static_cast<int>(unit.label), static_cast<int>(unit.begin),
                          static_cast<int>(end), -1);
}

__device__ __forceinline__ void write_head(const Params& p, i64 thread) {
  int item = 0;
  i64 at = thread;
  for (int section = 0; section < kSections; ++section) {
    const i64 lanes = section == 0 ? p.block : section < 3 ? 32 : p.lanes;
    const i64 threads = (p.sections[section] * lanes + p.block - 1) / p.block * p.block;
    if (at < threads) {
      int column = 0;
      const i64 number = at / lanes;
      if (number < p.sections[section]) {
        const int4 found = p.items[item + number];
        const i64 entry = found.y + at % lanes;
        if (entry < found.z) column = p.columns[entry];
      }
      p.heads[thread] = column;
      return;
    }
    at -= threads;
    item += p.sections[section];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) list_rows(const __grid_constant__ Params p) {
  const i64 step = i64(gridDim.x) * kThreads, chunks = (p.units + kThreads - 1) / kThreads;
  if (p.stage == kCount) return count_units(p);
  // All threads of a block iterate equally often: they meet at barriers.
  for (i64 base = i64(blockIdx.x) * kThreads; base < p.work; base += step) {
    const i64 i = base + threadIdx.x, block = base / kThreads;
    switch (p.stage) {
      case kClasses:
        classify(p, block, chunks);
        break;
      case kArrange:
        arrange(p, block, chunks);
        break;
      case kLevels:
        if (i < p.work) count_levels(p, i);
        break;
      case kPieces:
        if (i < p.work) write_piece(p, static_cast<int>(i));
        break;
      case kItems:
        write_items(p, block);
        break;
      case kHeads:
        if (i < p.work) write_head(p, i);
        break;
    }
  }
}
