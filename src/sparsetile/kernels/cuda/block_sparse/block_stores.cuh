// From spmm_bcsr.cu's sums in registers to C: epilogue, then a store by TMA or by threads.
#pragma once

#include "block_sparse/bcsr.cuh"
#include "epilogue/epilogue.cuh"
#include "mma/exact.cuh"

// Eight neighbouring columns of one row of C.
__device__ __forceinline__ void store_eight(Out::Storage* c, const u32 (&word)[4]) {
  ptx::store_cs(reinterpret_cast<uint4*>(c), make_uint4(word[0], word[1], word[2], word[3]));
}

// A thread's sums: rows `position` and 8 further on, sum[4 j + 2 half + e] in column 8 j + 2 q + e.

// Row of the first of a thread's sums in a block row.
__device__ __forceinline__ int position_in(int block_row) {
  const int thread = threadIdx.x - kFirstConsumer;
  return block_row * kBlock + thread / 32 % 4 * 16 + thread % 32 / 4;
}

// Biases of a thread's two rows, `from` rows further on. They are loaded before the item's products
// and used after: loaded after, an item of few blocks waited as long as it multiplied (gate_proj at
// 90 %, 8192 tokens: 245 us plain, 297 with a bias). No code may come between the two loads: even a
// skipped read of `order` made the second wait for the first (282 us).
__device__ __forceinline__ void load_thread_bias(const Params& p, int position, int from,
                                                 u32 (&bias)[2]) {
  bias[0] = bias[1] = 0;
  if (p.row_bias == nullptr) return;
  int row[2] = {min(position, p.rows - 1), min(position + 8, p.rows - 1)};  // past the end: unused
  if (p.order != nullptr) row[0] = __ldg(p.order + row[0]), row[1] = __ldg(p.order + row[1]);
  load_row_biases(p, from + row[0], from + row[1], bias);
}

// The epilogue if C is not read. Its branches are taken once for all sums: a branch for each of the
// 64 took longer than the product (gate_proj at 90 %: 239 us plain, 667 with a bias).
__device__ __forceinline__ void scale_and_add(const Params& p, int position, int first_column,
                                              const u32 (&bias_bits)[2], float (&sum)[64]) {
  float scale[2] = {float(p.alpha), float(p.alpha)};
  if (p.mean) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(p, position + 8 * half);
      if (row >= 0) scale[half] = row_terms<Acc>(p, row).scale;
    }
  }
  if (p.row_bias != nullptr) {
    const float row_bias[2] = {row_bias_value(p, bias_bits[0]), row_bias_value(p, bias_bits[1])};
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = fmaf(sum[i], scale[i / 2 % 2], row_bias[i / 2 % 2]);
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] *= scale[i / 2 % 2];
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int column = first_column + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      const float bias = column < p.n ? __ldg(p.bias + column) : 0.0f;
      sum[i / 2 * 4 + i % 2] += bias;
      sum[i / 2 * 4 + 2 + i % 2] += bias;
    }
  }
  if (p.relu) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = sum[i] < 0.0f ? 0.0f : sum[i];
  }
  if (p.silu) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = silu(sum[i]);
  }
}

// SwiGLU: silu of the gate's sums times those of up, each with its bias first.
__device__ __forceinline__ void join_halves(const Params& p, const u32 (&gate_bits)[2],
                                            const u32 (&up_bits)[2], const float (&up)[64],
                                            float (&sum)[64]) {
  const float alpha = float(p.alpha);
  const float gate_bias[2] = {row_bias_value(p, gate_bits[0]), row_bias_value(p, gate_bits[1])};
  const float up_bias[2] = {row_bias_value(p, up_bits[0]), row_bias_value(p, up_bits[1])};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const float gate = fmaf(sum[i], alpha, gate_bias[i / 2 % 2]);
    sum[i] = silu(gate) * fmaf(up[i], alpha, up_bias[i / 2 % 2]);
  }
}

// The same plus beta times the old C, which is rare.
__device__ __forceinline__ void add_to_c(const Params& p, int position, int first_column,
                                         float (&sum)[64]) {
  const bool transposed = p.store >= kTransposed;
  const i64 row_step = transposed ? 1 : p.c_stride, step = transposed ? p.c_stride : 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(p, position + 8 * half);
    const RowTerms<Acc> terms = row < 0 ? RowTerms<Acc>{} : row_terms<Acc>(p, row);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int column = first_column + j * 8 + threadIdx.x % 4 * 2, at = j * 4 + half * 2;
      float pair[2] = {sum[at], sum[at + 1]};
      apply_epilogue<Out>(p, terms, column, row < 0 ? 0 : p.n - column,
                          p.c + row * row_step + column * step, step, pair);
      sum[at] = pair[0], sum[at + 1] = pair[1];
    }
  }
}

// By TMA: a warp's 16 rows as two boxes of 64 columns.
template <typename O>
__device__ __forceinline__ void store_bulk(const Params& p, char* stored, int first_position,
                                           int first_column, const float (&sum)[64]) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) wg::store_wait_read();  // the item before
  __syncwarp();
  // Lane l has row l mod 16 of chunks l / 16, l / 16 + 2, ..; chunks are in the 128-byte swizzle.
  const u32 address =
      wg::shared_address(stored) + lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {  // of chunks
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = narrow_pair<O>(sum[pair * 8 + i * 2], sum[pair * 8 + i * 2 + 1]);
    }
    wg::store_matrices((address ^ (pair % 4 * 32)) + pair / 4 * kStoreBoxBytes, word);
  }
  wg::fence_shared();
  __syncwarp();
  if (lane == 0 && first_position < p.rows) {
    const u64 policy = wg::leave_first();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = first_column + j * 64;
      if (column < p.n) {
        wg::store_box(&p.stored, column, first_position, stored + j * kStoreBoxBytes, policy);
      }
    }
    wg::store_commit();
  }
}

// By TMA, transposed: a warpgroup's 64 rows and 128 columns as one box of 128 rows. A warp has 16
// neighbouring rows of C in each of them, the four warps 64: 128 bytes.
template <typename O>
__device__ __forceinline__ void store_transposed(const Params& p, char* stored, int block_row,
                                                 int first_column, const float (&sum)[64]) {
  const int thread = threadIdx.x % 128, lane = thread % 32, barrier = threadIdx.x / 128 + 1;
  if (thread == 0) wg::store_wait_read();  // the item before
  wg::group_sync(barrier);
  // Lane l has column l mod 8 + l / 16 * 8 of each sixteen, and chunk l / 8 mod 2 of its warp's.
  const int column = lane % 8 + lane / 16 * 8, chunk = thread / 32 * 2 + lane / 8 % 2;
  const u32 address = wg::shared_address(stored) + column * 128 + (chunk ^ (lane % 8)) * 16;
#pragma unroll
  for (int sixteen = 0; sixteen < 8; ++sixteen) {  // columns
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = narrow_pair<O>(sum[sixteen * 8 + i * 2], sum[sixteen * 8 + i * 2 + 1]);
    }
    wg::store_matrices_transposed(address + sixteen * 16 * 128, word);
  }
  wg::fence_shared();
  wg::group_sync(barrier);
  if (thread == 0 && first_column < p.n) {
    wg::store_box(&p.stored, block_row * kBlock, first_column, stored, wg::leave_first());
    wg::store_commit();
  }
}

// By threads.
template <typename O>
__device__ __forceinline__ void store_rows(const Params& p, int position, int first_column,
                                           const float (&sum)[64]) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(p, position + 8 * half);
    Out::Storage* c = p.c + i64(row) * p.c_stride;
#pragma unroll
    for (int group = 0; group < 4; ++group) {  // of four times eight columns
      if constexpr (sizeof(typename O::Storage) == 2) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (group * 4 + i) * 4 + half * 2;
          word[i] = narrow_pair<O>(sum[at], sum[at + 1]);
        }
        transpose(word, q);
        const int column = first_column + (group * 4 + q) * 8;
        if (row >= 0 && column < p.n) store_eight(c + column, word);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (group * 4 + i) * 4 + half * 2;
          const int column = first_column + (group * 4 + i) * 8 + q * 2;
          if (row >= 0 && column < p.n) {
            __stcs(reinterpret_cast<float2*>(c + column), make_float2(sum[at], sum[at + 1]));
          }
        }
      }
    }
  }
}

// By threads, transposed: float32, whose eight rows of a column are 32 neighbouring bytes.
__device__ __forceinline__ void store_columns(const Params& p, int position, int first_column,
                                              const float (&sum)[64]) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(p, position + 8 * half);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int column = first_column + i / 2 * 8 + q * 2 + i % 2;
      if (row >= 0 && column < p.n) {
        __stcs(p.c + column * p.c_stride + row, sum[i / 2 * 4 + half * 2 + i % 2]);
      }
    }
  }
}

// From sums to stored values.
__device__ __forceinline__ void finish_sums(const Params& p, int block_row, int first_column,
                                            const u32 (&bias_bits)[2], float (&sum)[64]) {
  const int position = position_in(block_row);
  if (p.spoilt != nullptr) {
    FiniteCheck<> check;
#pragma unroll
    for (int i = 0; i < 64; ++i) check.add(sum[i]);
    if (check.failed()) *p.spoilt = 1;
  }
  if (p.epilogue) {
    // Also true for minus zero: a comparison of doubles would take as long as the rest.
    if (__double_as_longlong(p.beta) << 1 == 0) {
      scale_and_add(p, position, first_column, bias_bits, sum);
    } else {
      add_to_c(p, position, first_column, sum);
    }
  }
}

// Finished sums of a warpgroup to C; `stored` is the shared memory for those of all warpgroups.
__device__ __forceinline__ void store_sums(const Params& p, char* stored, int block_row,
                                           int first_column, const float (&sum)[64]) {
  const int warp = (threadIdx.x - kFirstConsumer) / 32;
  const int first_position = block_row * kBlock + warp % 4 * 16, position = position_in(block_row);
  if constexpr (sizeof(Out::Storage) == 2) {
    if (p.store == kTransposed) {
      store_transposed<Out>(p, stored + warp / 4 * 4 * kWarpStoreBytes, block_row, first_column,
                            sum);
      return;
    }
    if (p.store == kByEngine) {
      store_bulk<Out>(p, stored + warp * kWarpStoreBytes, first_position, first_column, sum);
      return;
    }
  } else if (p.store == kTransposedByThreads) {
    store_columns(p, position, first_column, sum);
    return;
  }
  store_rows<Out>(p, position, first_column, sum);
}
