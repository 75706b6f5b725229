// The epilogue of a row of C, the same for every kernel:
//
//   C[row, column] = relu(scale * sum + beta * C[row, column] + bias[column] + row_bias[row])
//
// with scale = alpha, divided by the row's entries for a mean. The kernel that owns a row does all
// of it. Fields: POSITIONS and EPILOGUE of kernels/params.py; ROW_BIAS if the struct has them.
#pragma once

#include "ptx/element.cuh"

// Row of C at a position of the plan's order; -1 past the last. `rows` counts the positions, so a
// kernel may own any part of C's rows.
template <typename Params>
__device__ __forceinline__ int row_of(const Params& p, int position) {
  if (position >= p.rows) return -1;
  return p.order == nullptr ? position : __ldg(p.order + position);
}

// First element of a row of C in this block's batch. Assumes rows under 2^32 elements apart: one
// 32-bit multiplication.
template <typename Params>
__device__ __forceinline__ auto c_row(const Params& p, int row) -> decltype(p.c) {
  return p.c + blockIdx.z * p.c_batch_stride +
         static_cast<u64>(static_cast<u32>(row)) * static_cast<u32>(p.c_row_stride);
}

// Whether the struct has a bias of rows.
template <typename Params>
__device__ constexpr auto has_row_bias(int) -> decltype(sizeof(&Params::row_bias) > 0) {
  return true;
}
template <typename Params>
__device__ constexpr bool has_row_bias(long) {
  return false;
}

// Load the biases of two rows as they are stored, without waiting for them: no code comes between
// the loads. row_bias_value makes numbers of them.
template <typename Params>
__device__ __forceinline__ void load_row_biases(const Params& p, i64 first, i64 second,
                                                u32 (&bits)[2]) {
  if (p.row_bias_type == 0) {
    ptx::load_unwaited(static_cast<const u32*>(p.row_bias) + first, bits[0]);
    ptx::load_unwaited(static_cast<const u32*>(p.row_bias) + second, bits[1]);
  } else {
    ptx::load_unwaited(static_cast<const u16*>(p.row_bias) + first, bits[0]);
    ptx::load_unwaited(static_cast<const u16*>(p.row_bias) + second, bits[1]);
  }
}

template <typename Params>
__device__ __forceinline__ void load_row_bias(const Params& p, i64 row, u32& bits) {
  if (p.row_bias_type == 0) {
    ptx::load_unwaited(static_cast<const u32*>(p.row_bias) + row, bits);
  } else {
    ptx::load_unwaited(static_cast<const u16*>(p.row_bias) + row, bits);
  }
}

template <typename Params>
__device__ __forceinline__ float row_bias_value(const Params& p, u32 bits) {
  if (p.row_bias_type == 0) return __uint_as_float(bits);
  return p.row_bias_type == 1 ? ptx::f16_to_f32(bits) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// Terms shared by all columns of a row.
template <typename Acc>
struct RowTerms {
  Acc scale;  // alpha, divided by the row's entries for a mean
  Acc bias;   // of the row
};

template <typename Acc, typename Params>
__device__ __forceinline__ Acc row_scale(const Params& p, int row) {
  Acc scale = Acc(p.alpha);
  if (p.mean) {
    const i64 entries = __ldg(p.indptr + row + 1) - __ldg(p.indptr + row);
    if (entries > 0) scale /= Acc(entries);
  }
  return scale;
}

template <typename Acc, typename Params>
__device__ __forceinline__ RowTerms<Acc> row_terms(const Params& p, int row) {
  RowTerms<Acc> terms = {row_scale<Acc>(p, row), Acc(0)};
  if constexpr (has_row_bias<Params>(0)) {
    if (p.row_bias != nullptr) {
      u32 bits;
      load_row_bias(p, row, bits);
      terms.bias = row_bias_value(p, bits);
    }
  }
  return terms;
}

template <typename Acc, int kCount>
__device__ __forceinline__ void scale_sums(const RowTerms<Acc>& terms, Acc (&sum)[kCount]) {
#pragma unroll
  for (int v = 0; v < kCount; ++v) sum[v] *= terms.scale;
}

// The rest of the formula for kCount neighbouring columns of a row, the first of them `column`,
// whose elements of C begin at `c` and lie `step` apart. Only the first `inside` columns exist.
template <typename Out, typename Params, typename Acc, int kCount>
__device__ __forceinline__ void add_terms(const Params& p, const RowTerms<Acc>& terms, int column,
                                          int inside, const typename Out::Storage* c, i64 step,
                                          Acc (&sum)[kCount]) {
  // Each branch is taken once for all columns.
  if (p.beta != 0.0) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (v < inside) sum[v] += Acc(p.beta) * Out::widen(c[v * step]);
    }
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (v < inside) sum[v] += __ldg(p.bias + column + v);
    }
  }
  if constexpr (has_row_bias<Params>(0)) {
    if (p.row_bias != nullptr) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) sum[v] += terms.bias;
    }
  }
  if (p.relu) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) sum[v] = sum[v] < Acc(0) ? Acc(0) : sum[v];
  }
}

// All of it. If p.epilogue is 0 the sums are C already, and callers may skip this.
template <typename Out, typename Params, typename Acc, int kCount>
__device__ __forceinline__ void apply_epilogue(const Params& p, const RowTerms<Acc>& terms,
                                               int column, int inside,
                                               const typename Out::Storage* c, i64 step,
                                               Acc (&sum)[kCount]) {
  scale_sums(terms, sum);
  add_terms<Out>(p, terms, column, inside, c, step, sum);
}

// Round kCount neighbouring columns of C and store the first `inside` of them: kVec columns, but at
// most 16 bytes, with one access. `inside` is a multiple of kVec. kStream: C is not read again here
// and should be evicted from L2 before B.
template <typename Out, int kVec, bool kStream = true, typename Acc, int kCount>
__device__ __forceinline__ void store_columns(typename Out::Storage* c, int inside,
                                              const Acc (&sum)[kCount]) {
  constexpr int kMost = 16 / sizeof(typename Out::Storage);
  constexpr int kPart = kVec < kMost ? kVec : kMost;
  static_assert(kCount % kPart == 0, "whole accesses");
#pragma unroll
  for (int v = 0; v < kCount; v += kPart) {
    if (v >= inside) continue;
    Packed<Out, kPart> packed;
#pragma unroll
    for (int e = 0; e < kPart; ++e) packed.element[e] = Out::narrow(sum[v + e]);
    auto* address = reinterpret_cast<typename Packed<Out, kPart>::Word*>(c + v);
    if constexpr (kStream) {
      ptx::store_cs(address, packed.word);
    } else {
      *address = packed.word;
    }
  }
}
