// The work of a group of lanes in a sampled product: dot(G[row], B[column]) for the entries of a
// row or of a piece of one. Included by sddmm_csr.cu, which draws it, and sddmm_direct.cu, after
// element types, constants and parameters.
#pragma once

#include "rows/direct.cuh"
#include "rows/segment.cuh"

constexpr int kGroups = 32 / kLanes;
constexpr int kStep = kLanes * kVec;
constexpr int kSlab = kTimes * kStep;

static_assert(kThreads % 32 == 0 && 32 % kLanes == 0, "groups must not straddle warps");
static_assert(kLanes % kUnroll == 0, "a chunk is a whole number of batches");

// A lane's part of G's row in one slab, and which of its vectors are inside.
struct Left {
  Packed<E, kVec> part[kTimes];
  bool inside[kTimes];

  // `g` and `offset` point at the lane's first column of the slab.
  __device__ __forceinline__ void load(const E::Storage* g, int offset, int n) {
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
      inside[q] = offset + q * kStep < n;
      part[q] = load_vector<E, kVec>(g + (inside[q] ? offset + q * kStep : 0));
    }
  }
};

// dot[u] += this slab's part of entry u's product.
__device__ __forceinline__ void multiply(const Params& p, const Left& left, const E::Storage* b,
                                         const u32 (&column)[kUnroll], int offset,
                                         Acc (&dot)[kUnroll]) {
  Packed<E, kVec> right[kUnroll][kTimes];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const E::Storage* row = b + static_cast<u64>(column[u]) * p.b_row_stride + offset;
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
      // Past the last column: the row's first ones again, not used.
      right[u][q] = load_vector<E, kVec>(left.inside[q] ? row + q * kStep : row - offset);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int q = 0; q < kTimes; ++q) {
      if (!left.inside[q]) continue;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        dot[u] += widen(left.part[q], v) * widen(right[u][q], v);
      }
    }
  }
}

// Add kUnroll sums over the group's lanes; lane l gets sum l % kUnroll.
__device__ __forceinline__ Acc add_lanes(int lane, Acc (&dot)[kUnroll]) {
  int held = kUnroll;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    if (held > 1) {
      held /= 2;
#pragma unroll
      for (int i = 0; i < kUnroll / 2; ++i) {
        if (i >= held) continue;
        // Even lanes (at this step) keep the even sums, odd ones the odd; each sends the other.
        const bool odd = lane & step;
        const Acc mine = odd ? dot[2 * i + 1] : dot[2 * i];
        const Acc other = odd ? dot[2 * i] : dot[2 * i + 1];
        dot[i] = mine + __shfl_xor_sync(kWarp, other, step);
      }
    } else {
      dot[0] += __shfl_xor_sync(kWarp, dot[0], step);
    }
  }
  return dot[0];
}

// Column of an entry; of one that B does not have 0, and `bad`.
template <typename P>
__device__ __forceinline__ u32 sampled_column(const P& p, int entry, bool& bad) {
  if constexpr (kDirect) {
    int column = direct::load_column(p, entry);
    E::Storage value = {};
    bad = static_cast<u32>(column) >= static_cast<u32>(p.cols);
    direct::check_column<E>(p, entry, true, column, value);
    return static_cast<u32>(column);
  } else {
    bad = false;
    return static_cast<u32>(__ldg(p.columns + entry));
  }
}

// A group's part of an item {row, begin, end}.
template <typename P>
__device__ __forceinline__ void sampled_item(const P& p, const GroupWork& work, int4 item,
                                             int lane) {
  const E::Storage* g = p.g + blockIdx.z * p.g_batch_stride + item.x * p.g_row_stride;
  const E::Storage* b = p.b + blockIdx.z * p.b_batch_stride;
  Acc* out = p.out + blockIdx.z * p.out_batch_stride;
  const int length = item.z - item.y;

  // Lanes past the end of a chunk repeat a column that is read anyway.
  bool next_bad = false;
  const auto column_of = [&](int begin) {
    const int at = begin + (begin + lane < length ? lane : 0);
    return at < length ? sampled_column(p, item.y + at, next_bad) : 0u;
  };
  u32 next = column_of(work.first);
  Left left;
  left.load(g, lane * kVec, p.n);
  for (int begin = work.first;; begin += work.stride) {
    const int here = length - begin;  // entries of this chunk, may exceed kLanes or be <= 0
    const int most = kGroups == 1 ? here : __reduce_max_sync(kWarp, here);
    if (most <= 0) break;
    const u32 own = next;
    const bool bad = next_bad;
    next = column_of(begin + work.stride);
    Acc result = Acc(0);
#pragma unroll 1
    for (int j = 0; j < kLanes && j < most; j += kUnroll) {
      u32 column[kUnroll];
      Acc dot[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        column[u] = __shfl_sync(kWarp, own, j + u, kLanes);
        dot[u] = Acc(0);
      }
      multiply(p, left, b, column, lane * kVec, dot);
      if (p.n > kSlab) {
        for (int offset = kSlab + lane * kVec; offset - lane * kVec < p.n; offset += kSlab) {
          Left further;
          further.load(g, offset, p.n);
          multiply(p, further, b, column, offset, dot);
        }
      }
      const Acc sum = add_lanes(lane, dot);
      if (lane / kUnroll == j / kUnroll) result = sum;
    }
    const Acc nan = ptx::infinity<Acc>() - ptx::infinity<Acc>();
    if (lane < here) out[item.y + begin + lane] = kDirect && bad ? nan : result;
  }
}
