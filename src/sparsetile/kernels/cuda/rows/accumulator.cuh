// A lane's part of a row of C, or of a bundle's rows, in the CUDA-core kernel: sums, or extrema
// with the winning entries.
//
// Included by row_items.cuh after the kernel's constants: kTimes vectors of kVec elements,
// kExtremum, kArgs, and the type of sums, Acc.
#pragma once

#include "ptx/ptx.cuh"

namespace rows {

// The winning entries of an extremum; empty if not requested.
template <bool>
struct Winners {
  int arg[kTimes][kVec];
  __device__ __forceinline__ int winner(int q, int v) const { return arg[q][v]; }
  __device__ __forceinline__ void set_winner(int q, int v, int entry) { arg[q][v] = entry; }
};
template <>
struct Winners<false> {
  __device__ __forceinline__ int winner(int, int) const { return -1; }
  __device__ __forceinline__ void set_winner(int, int, int) {}
};

template <int R>
struct Accumulator : Winners<(kArgs > 0)> {
  Acc sum[R][kTimes][kVec];  // an extremum's sign is flipped for a minimum

  // `first`: the entry that wins if all are equally small; -1 for none.
  __device__ void clear(int first) {
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
#pragma unroll
        for (int r = 0; r < R; ++r) sum[r][q][v] = kExtremum ? -ptx::infinity<Acc>() : Acc(0);
        this->set_winner(q, v, first);
      }
    }
  }

  // The next entry in order: the first of equals stays. A NaN stays too, but `arg` is not its entry
  // yet (first_nan finds that later).
  __device__ void offer(int q, int v, Acc candidate, int entry) {
    this->set_winner(q, v, candidate > sum[0][q][v] ? entry : this->winner(q, v));
    sum[0][q][v] = ptx::max_nan(sum[0][q][v], candidate);
  }

  // Another part of the row, in any order: the first of equals wins, and the first NaN.
  template <typename Sum, typename Arg>
  __device__ __forceinline__ void join(const Sum& other_sum, const Arg& other_arg_of) {
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          Acc& held = sum[r][q][v];
          const Acc other = other_sum(r, q, v);
          if constexpr (!kExtremum) {
            held += other;
          } else if constexpr (!kArgs) {
            held = ptx::max_nan(held, other);
          } else {
            const int held_arg = this->winner(q, v), other_arg = other_arg_of(q, v);
            const bool nan = other != other, held_nan = held != held;
            const bool tie = (other == held || (nan && held_nan)) && other_arg < held_arg;
            if (other_arg >= 0 && (held_arg < 0 || other > held || (nan && !held_nan) || tie)) {
              held = other;
              this->set_winner(q, v, other_arg);
            }
          }
        }
      }
    }
  }
};

}  // namespace rows
