// Rows of B, float32, as rows of float16 times a power of two each, for spmm_half.cu.
//
//   copy[k, :] = round(b[k, :] * 2^(14 - e))      2^e <= the largest element of row k
//   scales[k]  = 2^(e - 14)
//
// float16 has the eleven significant bits of TF32, so an element's error is TF32's unless it is
// subnormal there, that is below 2^-28 of the row's largest one. A scale of 0, with zeros in the
// copy, marks four kinds of rows: with a smaller element that is not 0; with a largest element over
// 2^40 or under 2^-40 (times a value of A it might overflow float32); with Inf or NaN; and all rows
// if `unfit` is set because a bundle's values are of such sizes. Zeros, because an entry of A that
// is added from B itself has weight 0 for the copy, which must not meet an Inf.
//
// kLanes lanes have a row, in vectors of kVector elements, so that a warp has several short rows: a
// row is a dependent load, reduction and store, and several rows per warp hide that latency (one
// row per warp: 17 us for 36,692 rows of 64). A row of up to kHeld vectors per lane is read once, a
// longer one three times: for its largest element, its smallest, and to be written.
//
// Assumes: `copy` with rows of `pitch` elements, a multiple of 8; b with unit column stride,
// aligned to kVector elements like n. Elements between n and pitch are not written. Threads:
// kThreads.
#include "ptx/element.cuh"

// Declared in kernels/half.py.
using E = F16;
using V = F32;
using Out = F32;
using Acc = float;
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

using Vector = Packed<F32, kVector>;

constexpr int kBias = 127, kTop = 14, kMost = 40;  // exponents: float32's offset, the copy's, A's
constexpr float kSmallest = 6.103515625e-5f;       // not subnormal in float16

// Largest magnitude, as its bits, which have the order of the numbers; Inf and NaN are larger.
__device__ __forceinline__ u32 largest(const Vector& x, u32 most) {
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    const u32 bits = __float_as_uint(x.element[v]) & 0x7fffffffu;
    if (bits > most) most = bits;
  }
  return most;
}

// Whether an element would be a subnormal of float16.
__device__ __forceinline__ bool too_small(const Vector& x, float factor) {
  bool found = false;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    const float scaled = fabsf(x.element[v] * factor);
    found = found || (scaled < kSmallest && x.element[v] != 0.0f);
  }
  return found;
}

__device__ __forceinline__ void store(u16* to, const Vector& x, float factor, bool wide) {
  Packed<F16, kVector> made;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    made.element[v] = wide ? u16(0) : F16::narrow(x.element[v] * factor);
  }
  *reinterpret_cast<typename Packed<F16, kVector>::Word*>(to) = made.word;
}

// The factor of a row, and its inverse; 0 if the copy cannot hold it.
struct Factor {
  float up;
  float back;
};
__device__ __forceinline__ Factor factor_of(u32 most, bool unfit) {
  const int e = static_cast<int>(most >> 23) - kBias;
  if (most == 0 && !unfit) return {1.0f, 1.0f};
  if (unfit || e > kMost || e < -kMost) return {0.0f, 0.0f};
  return {__uint_as_float(static_cast<u32>(kBias + kTop - e) << 23),
          __uint_as_float(static_cast<u32>(kBias - kTop + e) << 23)};
}

// Over the kLanes lanes of a row.
__device__ __forceinline__ u32 largest_of_row(u32 most) {
  if constexpr (kLanes == 32) return __reduce_max_sync(0xffffffffu, most);
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) {
    most = max(most, __shfl_xor_sync(0xffffffffu, most, other));
  }
  return most;
}

__device__ __forceinline__ bool any_of_row(bool found) {
  const u32 warp = __ballot_sync(0xffffffffu, found);
  if constexpr (kLanes == 32) return warp != 0;
  const int first = threadIdx.x % 32 / kLanes * kLanes;
  return (warp >> first & ((1u << (kLanes % 32)) - 1)) != 0;
}

extern "C" __global__ void __launch_bounds__(kThreads) half_rows(const __grid_constant__ Params p) {
  ptx::wait_previous();
  ptx::let_next_start();
  const int row = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  // All lanes of a warp take part in its reductions: those past the last row write nothing.
  const int n = row < p.k ? p.n : 0;
  const float* b = reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.b) +
                                                  i64(row) * p.wide_row_bytes);
  u16* to = p.copy + i64(row) * p.pitch;
  const bool unfit = p.unfit != nullptr && __ldg(p.unfit) != 0;
  constexpr int kStep = kLanes * kVector;
  Factor factor;
  bool small = false;
  if (p.n <= kHeld * kStep) {
    Vector held[kHeld];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = i * kStep + lane * kVector;
      if (at < n) {
        held[i] = load_vector<F32, kVector>(b + at);
        most = largest(held[i], most);
      }
    }
    factor = factor_of(largest_of_row(most), unfit);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (i * kStep + lane * kVector < n) small = small || too_small(held[i], factor.up);
    }
    if (any_of_row(small)) factor.back = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = i * kStep + lane * kVector;
      if (at < n) store(to + at, held[i], factor.up, factor.back == 0.0f);
    }
  } else {
    u32 most = 0;
    for (int at = lane * kVector; at < n; at += kStep) {
      most = largest(load_vector<F32, kVector>(b + at), most);
    }
    factor = factor_of(largest_of_row(most), unfit);
    for (int at = lane * kVector; at < n; at += kStep) {
      small = small || too_small(load_vector<F32, kVector>(b + at), factor.up);
    }
    if (any_of_row(small)) factor.back = 0.0f;
    for (int at = lane * kVector; at < n; at += kStep) {
      store(to + at, load_vector<F32, kVector>(b + at), factor.up, factor.back == 0.0f);
    }
  }
  if (lane == 0 && row < p.k) p.scales[row] = factor.back;
}
