// Windows of BRP counted, and their groups packed (systems/brp/windows.py).
//
// A window is sixteen rows in the plan's order; formats/brp.py defines groups and
// formats/brp_windows.py the arrays. Entries are numbered here in the order of their rows'
// positions: number i is A's entry i if rows keep their order. Nothing is sorted. Rows are sorted
// already, so a search in each of the fifteen other rows of a window finds which of them have an
// entry's column, and how many entries come before it column by column. That needs no memory per
// window, however long, and the same work for each entry. Five stages, one launch each:
//
//     count     place, rank and mask of each entry; counts of each window
//     rows      rows in windows, and rows in none; this and later stages need the chosen windows
//     slices    slices of each column, in the order of columns    -> running sums: `slice_sums`
//     groups    entries in groups; which ones are outside          -> running sums: `rest_sums`
//     rest      entries outside groups
//
// Atomics add only whole numbers, whose order does not matter: the same result each time. One
// kernel with the stage as a parameter, so that only one is compiled and loaded.
//
// Assumes: fewer than 2^31 entries and rows; columns of a row ascend; `counts` is zero before
// `count`. Threads: kThreads, whole warps; any grid.
#include "pack/search.cuh"

// Declared in kernels/groups.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kCount, kRows, kSlices, kGroups, kRest };

constexpr int kHeight = 16, kTileColumns = 8;
constexpr int kNoWindow = 0x7fffffff;

__device__ __forceinline__ i64 row_at(const Params& p, int place) {
  return p.order ? p.order[place] : place;
}

// Number in A of the entry that is number i by positions.
__device__ __forceinline__ i64 entry_of(const Params& p, i64 i, int place) {
  return p.indptr[row_at(p, place)] + (i - p.starts[place]);
}

struct Met {
  int before;   // entries of the row in columns before
  bool column;  // whether it has the column
};

__device__ __forceinline__ Met look_for(const Params& p, int place, int column) {
  const i64 row = row_at(p, place), begin = p.indptr[row];
  const int length = static_cast<int>(p.indptr[row + 1] - begin);
  const int* columns = p.columns + begin;
  const int before = lower_bound(columns, 0, length, column);
  return {before, before < length && columns[before] == column};
}

__device__ __forceinline__ u32 below(int row) { return (1u << row) - 1; }

// Counts of a window, in the order of `counts`: two words that lanes add up, whose fields fit the
// sums of a warp. A column's slices are counted with its first entry.
struct Shares {
  u32 entries;  // 8 bits each: entries, new columns, columns, columns of eight rows
  u32 slices;   // 10 bits each: of two, four and eight entries
};
constexpr int kEntryCounts = 4, kSliceCounts = 3;

__device__ __forceinline__ Shares shares_of(int row, u32 mask, bool fresh) {
  const u32 before = mask & below(row);
  const bool first = before == 0, first_of_half = (before & (row < 8 ? 0xffu : 0xff00u)) == 0;
  const u32 size = first ? __popc(mask) : 0;
  return {1u | u32(fresh) << 8 | u32(first) << 16 | u32(first_of_half) << 24,
          size / 2 | size / 4 << 10 | size / 8 << 20};
}

// All lanes of a warp, each with the shares of one window or kNoWindow.
__device__ __forceinline__ void add_shares(const Params& p, int window, Shares mine) {
  const int lane = threadIdx.x % 32;
  for (int at = __reduce_min_sync(kWarp, window); at != kNoWindow;
       at = __reduce_min_sync(kWarp, window)) {
    const bool same = window == at;
    const u32 entries = __reduce_add_sync(kWarp, same ? mine.entries : 0u);
    const u32 slices = __reduce_add_sync(kWarp, same ? mine.slices : 0u);
    if (lane < kEntryCounts + kSliceCounts) {
      const int sum = lane < kEntryCounts ? entries >> 8 * lane & 255
                                          : slices >> 10 * (lane - kEntryCounts) & 1023;
      if (sum) atomicAdd(p.counts + i64(lane) * p.windows + at, sum);
    }
    if (same) window = kNoWindow;
  }
}

__device__ __forceinline__ void count(const Params& p, i64 i, bool inside) {
  int window = kNoWindow;
  Shares mine{};
  if (inside) {
    const int place = row_of(p.starts, p.rows, i), row = place % kHeight, first = place - row;
    const int column = p.columns[entry_of(p, i, place)];
    int rank = static_cast<int>(i - p.starts[place]);
    u32 mask = 1u << row;
    const int rows = min(kHeight, p.rows - first);
    for (int other = 0; other < rows; ++other) {
      if (other == row) continue;
      const Met met = look_for(p, first + other, column);
      rank += met.before;
      mask |= u32(met.column) << other;
    }
    rank += __popc(mask & below(row));
    // New: none of the next fifteen rows has the column, those of the next window among them.
    bool fresh = mask >> row == 1;
    const int end = min(p.rows - place, kHeight) + place;
    for (int later = first + kHeight; fresh && later < end; ++later) {
      fresh = !look_for(p, later, column).column;
    }
    p.place[i] = place;
    p.rank[i] = rank;
    p.mask[i] = static_cast<u16>(mask);
    window = place / kHeight;
    mine = shares_of(row, mask, fresh);
  }
  add_shares(p, window, mine);
}

__device__ __forceinline__ void write_row(const Params& p, int place) {
  const int window = place / kHeight, row = place % kHeight, kept = p.kept_sums[window];
  const i64 label = row_at(p, place);
  if (p.tiles[window]) {
    p.window_rows[i64(kept - 1) * kHeight + row] = static_cast<int>(label);
    if (row == 0) {
      p.row_window_offset[kept] = p.tile_sums[window];
      p.window_rest[kept] = p.outside_sums[window];
      if (kept == 1) p.row_window_offset[0] = p.window_rest[0] = 0;
    }
  } else {  // three lists one after the other: row, its first entry, its length
    i64* other = p.other_rows + i64(window - kept) * kHeight + row;
    other[0] = label;
    other[p.others] = p.indptr[label];
    other[2 * p.others] = p.indptr[label + 1] - p.indptr[label];
  }
}

// An entry in its window.
struct Cell {
  int place, window, row, rank;
  int size, number;  // entries of its column, and those of them before it
  i64 begin;         // entries of the windows before
};

__device__ __forceinline__ Cell cell_of(const Params& p, i64 i) {
  const int place = p.place[i], row = place % kHeight;
  const u32 mask = p.mask[i];
  return {place,
          place / kHeight,
          row,
          p.rank[i],
          __popc(mask),
          __popc(mask & below(row)),
          p.starts[place - row]};
}

__device__ __forceinline__ void write_slices(const Params& p, i64 i) {
  const Cell cell = cell_of(p, i);
  p.slices[cell.begin + cell.rank] = cell.number == 0 ? cell.size / p.fixed : 0;
}

// Slice of the window that holds a cell; -1 for one that fills none.
__device__ __forceinline__ int slice_of(const Params& p, const Cell& cell) {
  if (p.fixed == 1) return cell.rank;
  const int full = cell.size / p.fixed;
  if (cell.number >= full * p.fixed) return -1;
  const int before = cell.begin ? p.slice_sums[cell.begin - 1] : 0;
  const int end = p.slice_sums[cell.begin + cell.rank - cell.number];
  return end - full - before + cell.number / p.fixed;
}

__device__ __forceinline__ void write_slot(const Params& p, i64 i) {
  const Cell cell = cell_of(p, i);
  const int tiles = p.tiles[cell.window];
  bool outside = false;
  if (tiles) {
    const int slice = slice_of(p, cell);
    outside = slice < 0 || slice >= tiles * kTileColumns;
    if (!outside) {
      const i64 entry = entry_of(p, i, cell.place);
      const i64 column = i64(p.tile_sums[cell.window] - tiles) * kTileColumns + slice;
      const int number = cell.number % p.fixed;
      const i64 slot = column * p.fixed + number;
      p.slot_ids[slot] = static_cast<unsigned char>(cell.row * kTileColumns + slice % kTileColumns);
      p.slot_entries[slot] = static_cast<int>(entry);
      if (number == 0) p.tile_columns[column] = p.columns[entry];
    }
  }
  p.outside[i] = outside;
}

__device__ __forceinline__ void write_rest(const Params& p, i64 i) {
  if (!p.outside[i]) return;
  const int at = p.rest_sums[i] - 1, place = p.place[i];
  const i64 entry = entry_of(p, i, place);
  p.rest_rows[at] = static_cast<unsigned char>(place % kHeight);
  p.rest_columns[at] = p.columns[entry];
  p.rest_entries[at] = static_cast<int>(entry);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    pack_groups(const __grid_constant__ Params p) {
  const i64 step = i64(gridDim.x) * kThreads;
  for (i64 begin = i64(blockIdx.x) * kThreads; begin < p.work; begin += step) {
    const i64 i = begin + threadIdx.x;
    const bool inside = i < p.work;
    if (p.stage == kCount) {  // by all lanes
      count(p, i, inside);
      continue;
    }
    if (!inside) break;
    switch (p.stage) {
      case kRows:
        write_row(p, static_cast<int>(i));
        break;
      case kSlices:
        write_slices(p, i);
        break;
      case kGroups:
        write_slot(p, i);
        break;
      case kRest:
        write_rest(p, i);
        break;
    }
  }
}
