// Runs of short rows of CSR arrays as callers have them: a warp takes `run` rows that follow one
// another. Their entries are one stretch of A, so rows of B that several rows of C need are in
// flight at once, and a warp waits for row pointers and columns once a run, not once a row:
//
//   row pointers  | 0 3 4 4 9 |              lane l has those of row l of the run
//   entries         a a a b d d d d d        chunks of 32: lane l has column and value of entry l
//   rows of B       0 1 2 3 4 5 6 7 | 8      kUnroll at a time; a row of C ends anywhere among them
//
// Every lane has kVec columns of B. A row's entries are added in their order. Long rows are listed
// (direct_items.cuh), and a run is several stretches then. Row pointers that do not ascend give
// rows that nobody stores or wrong ones; no entry beyond A's is read.
#pragma once

#include "rows/direct_items.cuh"
#include "rows/row_items.cuh"

namespace rows {

static_assert(!kRuns || (kLanes == 32 && kParts == 1 && !kExtremum), "a run is sums of a warp");

// Where a warp is in a stretch of rows: the row that the next entry belongs to.
struct RunCursor {
  int place;  // in the run
  int stop;   // the first place after the stretch
  int end;    // of the row's entries
};

// Store the rows that have ended before entry `at`.
__device__ __forceinline__ void finish_rows(const Params& p, RunCursor& cursor, int first_row,
                                            int own_end, int at, int column, Accumulator<1>& acc) {
#pragma unroll 1
  while (cursor.place < cursor.stop && cursor.end <= at) {
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
      const int at = column + q * kStep;
      if (at < p.n)
        store_columns<Out, kVec>(c_row(p, first_row + cursor.place) + at, kVec, acc.sum[0][q]);
    }
    acc.clear(-1);
    ++cursor.place;
    cursor.end = __shfl_sync(kWarp, own_end, cursor.place);
  }
}

// direct::check_column without its call, for which a warp that is gathering has no registers.
__device__ __forceinline__ void check_column_inline(const Params& p, int entry, bool here,
                                                    int& column, V::Storage& value) {
  if (static_cast<u32>(column) < static_cast<u32>(p.cols)) return;
  u64* faults = p.faults;
  if (here && faults != nullptr && atomicCAS(faults, u64(0), direct::kBadColumn) == 0) {
    faults[1] = entry;
    faults[2] = direct::raw_column(p, entry);
    faults[3] = p.cols;
  }
  column = 0;
  value = V::narrow(ptx::infinity<Acc>() - ptx::infinity<Acc>());
}

// The rows of a stretch. `own_end`: where the entries of the lane's row of the run end.
__device__ __forceinline__ void stretch_of_rows(const Params& p, RunCursor cursor, int first_row,
                                                int begin, int end, int own_end, int lane,
                                                const Place& place) {
  Accumulator<1> acc;
  acc.clear(-1);
  int next_column = 0;
  V::Storage next_value = {};
  const auto look_ahead = [&](int at) {
    if (at < end) {
      next_column = load_column(p, at);
      next_value = load_value(p, at);
    }
  };
  look_ahead(begin + lane);
  finish_rows(p, cursor, first_row, own_end, begin, place.column, acc);
#pragma unroll 1
  for (int chunk = begin; chunk < end; chunk += 32) {
    int column = next_column;
    V::Storage value = next_value;
    check_column_inline(p, chunk + lane, chunk + lane < end, column, value);
    look_ahead(chunk + 32 + lane);
    const int left = end - chunk < 32 ? end - chunk : 32;
#pragma unroll 1
    for (int first = 0; first < left; first += kUnroll) {
      Packed<E, kVec> row[kUnroll][kTimes];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const u32 k = __shfl_sync(kWarp, column, first + u);
        if (first + u < left) load_row(p, place.b, k, row[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const Acc weight = V::widen(__shfl_sync(kWarp, value, first + u));
        if (first + u >= left) break;
        add_row<true>(true, weight, row[u], acc.sum[0]);
        const int next = chunk + first + u + 1;
        if (next >= cursor.end) {
          finish_rows(p, cursor, first_row, own_end, next, place.column, acc);
        }
      }
    }
  }
}

// The run of this warp, in a row block.
__device__ __forceinline__ void run_of_rows(const Params& p, int block, int slab, int lane) {
  const i64 first = (i64(block) * (kThreads / 32) + threadIdx.x / 32) * p.run;
  const bool here = lane < p.run && first + lane < p.rows;
  const int first_row = static_cast<int>(first);
  int2 own = make_int2(0, 0);
  if (here) own = direct::entries_of(p, first_row + lane);
  const u32 long_rows = __ballot_sync(kWarp, own.y - own.x > p.wide_length);
  const int rows = __popc(__ballot_sync(kWarp, here));
  const Place at = place(p, slab, lane);
#pragma unroll 1
  for (int from = 0; from < rows; ++from) {
    if (long_rows >> from & 1) continue;
    const u32 next_long = long_rows >> from;
    const int stop = next_long != 0 ? from + __ffs(next_long) - 1 : rows;
    const int begin = __shfl_sync(kWarp, own.x, from), end = __shfl_sync(kWarp, own.y, stop - 1);
    const RunCursor cursor = {from, stop, __shfl_sync(kWarp, own.y, from)};
    stretch_of_rows(p, cursor, first_row, begin, end, own.y, lane, at);
    from = stop;
  }
}

}  // namespace rows
