// Condensed windows packed into tiles with bitmaps (formats/device_cells.py).
//
// Rows come in windows, a window's distinct columns in tiles, and each entry of A is a cell of a
// tile. Cells are numbered tile by tile; bit c % 64 of word c / 64 is set if cell c has an entry,
// and packed values are in the order of their cells. Six stages, one launch each; between them the
// host sorts keys and adds up counts:
//
//     keys      key of each entry: window * cols + column               -> sorted, with `entry`
//     heads     1 for the first of the entries with equal keys          -> running sums: `pair`
//     tiles     tiles of each window                                    -> sums: `window_ptr`
//     bits      cell of each sorted entry, its bit, and column ids
//     counts    set bits of each word                                   -> sums: `word_ptr`
//     entries   entry number behind each packed value
//
// Only bits are set by atomics, whose order does not matter: the same result in every run. One
// kernel with the stage as a parameter, so that only one is compiled and loaded.
//
// Assumes: fewer than 2^31 entries, rows and tiles; columns of a row are distinct, in any order;
// `words` is zero before `bits`. Threads: kThreads, any grid.
#include "pack/search.cuh"

// Declared in kernels/cells.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

enum Stage { kKeys, kHeads, kTiles, kBits, kCounts, kEntries };

__device__ __forceinline__ i64 key_at(const Params& p, i64 at) {
  return p.wide ? p.wide_keys[at] : p.keys[at];
}

// First sorted entry of a window, which is the number of entries in the windows before.
__device__ __forceinline__ i64 first_entry(const Params& p, int window) {
  const i64 row = i64(window) * p.height;
  return p.starts[row < p.rows ? row : p.rows];
}

// Pairs of window and column before a window.
__device__ __forceinline__ int first_pair(const Params& p, int window) {
  const i64 first = first_entry(p, window);
  return first < p.count ? p.pair[first] - 1 : p.pair[p.count - 1];
}

__device__ __forceinline__ void write_key(const Params& p, i64 i) {
  const int row = row_of(p.indptr, p.rows, i);
  const int place = p.positions ? static_cast<int>(p.positions[row]) : row;
  const i64 key = i64(place / p.height) * p.cols + p.columns[i];
  p.place[i] = place;
  if (p.wide) {
    p.wide_keys[i] = key;
  } else {
    p.keys[i] = static_cast<int>(key);
  }
}

__device__ __forceinline__ bool is_head(const Params& p, i64 i) {
  return i == 0 || key_at(p, i) != key_at(p, i - 1);
}

__device__ __forceinline__ void write_tiles(const Params& p, int window) {
  const int pairs = first_pair(p, window + 1) - first_pair(p, window);
  const int slots = p.pad * p.group;
  if (window == 0) p.window_ptr[0] = 0;
  p.window_ptr[window + 1] = (pairs + slots - 1) / slots * p.group;
}

__device__ __forceinline__ i64 cell_of(const Params& p, i64 tile, int row, int column) {
  if (!p.fragments) return (tile * p.height + row) * p.pad + column;
  // Sixteen rows by eight columns in the register layout of an MMA (formats/bmat.py).
  const i64 part = tile * (p.height / 16) + row / 16;
  const int word = row % 16 / 8 + 2 * (column / 4), lane = row % 8 * 4 + column % 4;
  return part * 128 + word * 32 + lane;
}

__device__ __forceinline__ void write_bit(const Params& p, i64 i) {
  const i64 key = key_at(p, i);
  const int window = static_cast<int>(key / p.cols), column = static_cast<int>(key % p.cols);
  const int number = p.pair[i] - 1 - first_pair(p, window);  // of the column in its window
  const i64 first_tile = p.window_ptr[window], tile = first_tile + number / p.pad;
  const int row = p.place[p.entry[i]] - window * p.height;
  const i64 cell = cell_of(p, tile, row, number % p.pad);
  p.cells[i] = cell;
  atomicOr(p.words + cell / 64, u64(1) << cell % 64);
  if (is_head(p, i)) p.tile_columns[first_tile * p.pad + number] = column;
  if (i + 1 == first_entry(p, window + 1)) {  // the window's last entry fills its last tile up
    const i64 end = i64(p.window_ptr[window + 1]) * p.pad;
    for (i64 slot = first_tile * p.pad + number + 1; slot < end; ++slot) {
      p.tile_columns[slot] = p.repeat ? column : -1;
    }
  }
}

__device__ __forceinline__ void write_count(const Params& p, i64 word) {
  if (word == 0) p.word_ptr[0] = 0;
  p.word_ptr[word + 1] = __popcll(p.words[word]);
}

__device__ __forceinline__ void write_entry(const Params& p, i64 i) {
  const i64 cell = p.cells[i], entry = p.entry[i];
  const u64 below = p.words[cell / 64] & ((u64(1) << cell % 64) - 1);
  p.entries[p.word_ptr[cell / 64] + __popcll(below)] = static_cast<int>(entry);
  if (p.places) p.places[entry] = cell;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    pack_cells(const __grid_constant__ Params p) {
  const i64 step = i64(gridDim.x) * kThreads;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < p.work; i += step) {
    switch (p.stage) {
      case kKeys:
        write_key(p, i);
        break;
      case kHeads:
        p.pair[i] = is_head(p, i);
        break;
      case kTiles:
        write_tiles(p, static_cast<int>(i));
        break;
      case kBits:
        write_bit(p, i);
        break;
      case kCounts:
        write_count(p, i);
        break;
      case kEntries:
        write_entry(p, i);
        break;
    }
  }
}
