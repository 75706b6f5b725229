// Y = activation(alpha . X . A^T + bias) for any number of tokens (rows of X) and A in BCSR blocks,
// through mma.sync and cp.async: every GPU from sm_80 on.
//
// A thread block owns the kUnit rows of a block row, for kTokens tokens. It walks the row's blocks
// in stages of 128 bytes of k: one block of 64 in 16 bits, two of 32, four of 16; half a block of
// 64 in 32 bits. A stage holds the blocks' part of A and the same columns of X.
//
//              k: 128 bytes                     k: 128 bytes
//   A    | block | block | ..  kUnit rows    X  | columns | columns | ..  kTokens rows
//
// Tokens are the M side of mma.sync, rows of A its N side: both are stored along k, and a lane's
// sums are neighbours in a row of Y. Each 16-byte chunk c of row r lies at c ^ (r mod 8), so that
// ldmatrix (eight rows of one chunk) and cp.async (eight chunks of one row) have no bank conflicts.
// A fragment of either type is the same 16 bytes a row; only the instruction differs.
//
// kStages - 1 stages are in flight. A thread always copies the same chunk of its rows, so it needs
// one column index per stage, which it loads a stage ahead.
//
// Items: block rows with the most blocks first (`work`), blockIdx.x; slabs of tokens are
// blockIdx.y, so that thread blocks that run together share a slab of X and all of A in L2.
//
// kPaired: gate and up of a SwiGLU. An item is two block rows, one after the other in `work`, each
// with its own sums; Y = silu(gate) * up has half of A's rows.
//
// Biases are loaded before the products and used after. Y passes through shared memory: a warp
// then stores whole rows of kUnit elements.
//
// No split over thread blocks, no atomics, sums in the order of blocks: the same bits each time.
// Cells of kept blocks are multiplied, zeros too.
//
// Shared memory: dynamic, kStages stages of (kUnit + kTokens) * 128 bytes, used again for
// kTokens rows of Y; then the biases of kParts * kUnit rows, float32.
//
// Assumes: A, X and the rows of X at multiples of 16 bytes; columns of A a multiple of 16 bytes;
// A rounded to TF32 if float32; cells past the end of A are zeros; blocks of A under
// 2^31 / kUnit^2 * 16 bytes apart in 64-bit addresses; slabs under 65,536.
#include "epilogue/epilogue.cuh"
#include "mma/mma.cuh"
#include "ptx/matrices.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;

constexpr int kItem = sizeof(E::Storage);
constexpr int kThreads = 32 * kWarps;
constexpr int kRowBytes = 128;  // of a stage
constexpr int kChunks = kRowBytes / 16;
constexpr int kBlockRowBytes = kUnit * kItem;
constexpr int kSpanBytes = kBlockRowBytes < kRowBytes ? kBlockRowBytes : kRowBytes;
constexpr int kSpanChunks = kSpanBytes / 16;
constexpr int kTogether = kRowBytes / kSpanBytes;     // blocks in a stage
constexpr int kPieces = kBlockRowBytes / kSpanBytes;  // stages of a block
constexpr int kCopyRows = kThreads / kChunks;         // rows that all threads copy at once
constexpr int kWeightBytes = kUnit * kRowBytes;
constexpr int kStageBytes = kWeightBytes + kTokens * kRowBytes;
constexpr int kParts = kPaired ? 2 : 1;
// Warps across the rows of A, and along the tokens; a warp's rows and tokens, in tiles of 8 and 16.
constexpr int kAlong = kWarps / kAcross;
constexpr int kRowTiles = kUnit / kAcross / 8, kTokenTiles = kTokens / kAlong / 16;
constexpr int kStoreItem = sizeof(Out::Storage);
constexpr int kStoreRow = kUnit * kStoreItem + 16;  // bytes: rows 16 apart modulo 32 words

// Declared in kernels/linear_blocks.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");
static_assert(kRowBytes % kSpanBytes == 0 && kBlockRowBytes % kSpanBytes == 0,
              "whole blocks in a stage, or whole stages in a block");
static_assert(kRowTiles % 2 == 0 && kUnit == kRowTiles * 8 * kAcross, "ldmatrix loads two tiles");
static_assert(kTokens == kTokenTiles * 16 * kAlong && kTokens % kCopyRows == 0, "whole tiles");
static_assert(kStages >= 2 && kTokens * kStoreRow <= kStages * kStageBytes, "Y fits the ring");
static_assert(kThreads >= kParts * kUnit, "a thread for each bias");

// A block row's part of the item.
struct Half {
  int first_block, blocks;
};

__device__ __forceinline__ int stages_of(const Half& half) {
  return kPieces > 1 ? half.blocks * kPieces : (half.blocks + kTogether - 1) / kTogether;
}

// What a thread copies: chunk threadIdx.x mod 8 of every kCopyRows-th row.
struct Copier {
  Half half[kParts];
  int gate_stages, stages;  // of the first half, of all
  int column;               // block column of the thread's part of the next stage; -1: none
  int block;                // and its block

  // Where the thread's part of stage `step` is in A, loaded without waiting for it.
  __device__ __forceinline__ void look_up(const Params& p, int step) {
    const bool up = kPaired && step >= gate_stages;
    const Half mine = half[up ? kParts - 1 : 0];
    const int at = up ? step - gate_stages : step;
    const int chunk = threadIdx.x % kChunks;
    const int place = kPieces > 1 ? at / kPieces : at * kTogether + chunk / kSpanChunks;
    const bool here = step < stages && place < mine.blocks;
    block = here ? mine.first_block + place : -1;
    column = here ? __ldg(p.block_col_idx + block) : 0;
  }

  // Copies stage `step`, the one looked up, to its place.
  __device__ __forceinline__ void copy(const Params& p, char* stage, int step,
                                       int first_token) const {
    const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks;
    const int at = kPaired && step >= gate_stages ? step - gate_stages : step;
    const int within = chunk % kSpanChunks * 16 + (kPieces > 1 ? at % kPieces * kSpanBytes : 0);
    const int place = row * kRowBytes + (chunk ^ (row % 8)) * 16;
    const bool here = block >= 0;
    const char* a = reinterpret_cast<const char*>(p.blocks);
    const char* from = a + (static_cast<i64>(here ? block : 0) * kUnit + row) * kBlockRowBytes;
#pragma unroll
    for (int r = 0; r < kUnit; r += kCopyRows) {
      if (kUnit % kCopyRows != 0 && row >= kUnit - r) break;
      ptx::copy_async<false>(stage + r * kRowBytes + place,
                             here ? from + r * kBlockRowBytes + within : a, here);
    }
    const i64 k = static_cast<i64>(column) * kBlockRowBytes + within;  // in bytes
    const bool inside = here && k < static_cast<i64>(p.cols) * kItem;
    const char* x = reinterpret_cast<const char*>(p.b);
    const i64 step_bytes = p.x_stride * (kItem * kCopyRows);
    const char* token = x + (first_token + row) * p.x_stride * kItem + k;
#pragma unroll
    for (int r = 0; r < kTokens; r += kCopyRows) {
      const bool exists = inside && first_token + row + r < p.n;
      ptx::copy_async<false>(stage + kWeightBytes + r * kRowBytes + place, exists ? token : x,
                             exists);
      token += step_bytes;
    }
  }
};

// A warp's sums: tokens 16 i + g (+ 8), rows 8 j + 2 t (+ 1).
using Sums = float[kTokenTiles][kRowTiles][4];

__device__ __forceinline__ void multiply(const uint4& x, u32 w0, u32 w1, float (&sum)[4]) {
  if constexpr (kItem == 4) {
    mma_tf32(x, w0, w1, sum);
  } else {
    multiply_16<Mma<E>::kBfloat>(x, w0, w1, sum);
  }
}

// X is rounded here, A was before.
__device__ __forceinline__ uint4 rounded(const u32 (&word)[4]) {
  if constexpr (kItem == 4) {
    return make_uint4(round_tf32(word[0]), round_tf32(word[1]), round_tf32(word[2]),
                      round_tf32(word[3]));
  } else {
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// Adds the products of a stage. `x_at` and `w_at`: the lane's first addresses for ldmatrix.
__device__ __forceinline__ void multiply_stage(const char* stage, int x_at, int w_at, Sums& sum) {
#pragma unroll
  for (int k = 0; k < kChunks / 2; ++k) {
    u32 w[kRowTiles / 2][4];
#pragma unroll
    for (int j = 0; j < kRowTiles / 2; ++j) {
      ptx::load_matrix(stage + (w_at ^ (k * 32)) + j * 16 * kRowBytes, w[j]);
    }
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      u32 word[4];
      ptx::load_matrix(stage + (x_at ^ (k * 32)) + i * 16 * kRowBytes, word);
      const uint4 x = rounded(word);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        multiply(x, w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1], sum[i][j]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    linear_blocks(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char s_dynamic[];
  float* s_bias = reinterpret_cast<float*>(s_dynamic + kStages * kStageBytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_token = blockIdx.y * kTokens;
  Copier copier;
  int block_row = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int4 item = __ldg(p.work + blockIdx.x * kParts + part);
    block_row = item.x;
    copier.half[part] = {item.y, item.z};
  }
  copier.gate_stages = stages_of(copier.half[0]);
  copier.stages = copier.gate_stages + (kPaired ? stages_of(copier.half[kParts - 1]) : 0);
  const int first_row = block_row * kUnit;
  u32 bias = 0;
  if (p.row_bias != nullptr && threadIdx.x < kParts * kUnit) {
    const int row = first_row + threadIdx.x % kUnit;
    if (row < p.rows) load_row_bias(p, row + threadIdx.x / kUnit * p.rows, bias);
  }
  copier.look_up(p, 0);
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < copier.stages) copier.copy(p, s_dynamic + step * kStageBytes, step, first_token);
    ptx::copy_commit();
    copier.look_up(p, step + 1);
  }
  // Matrices of X: rows 0 and 8 of the first chunk, then of the second; of A: both chunks of rows
  // 0, then of rows 8.
  const int x_row = warp / kAcross * kTokenTiles * 16 + lane % 16, x_chunk = lane / 16;
  const int w_row = warp % kAcross * kRowTiles * 8 + lane % 8 + lane / 16 * 8;
  const int w_chunk = lane / 8 % 2;
  const int x_at = kWeightBytes + x_row * kRowBytes + (x_chunk ^ (x_row % 8)) * 16;
  const int w_at = w_row * kRowBytes + (w_chunk ^ (w_row % 8)) * 16;
  float sum[kParts][kTokenTiles][kRowTiles][4] = {};
  int read = 0, write = (kStages - 1) * kStageBytes;  // places in the ring
  int step = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int end = part + 1 < kParts ? copier.gate_stages : copier.stages;
    for (; step < end; ++step) {
      ptx::copy_wait<kStages - 2>();
      __syncthreads();  // the stage is complete, and all have read the one before
      const int next = step + kStages - 1;
      if (next < copier.stages) copier.copy(p, s_dynamic + write, next, first_token);
      ptx::copy_commit();
      copier.look_up(p, next + 1);
      multiply_stage(s_dynamic + read, x_at, w_at, sum[part]);
      read = read + kStageBytes < kStages * kStageBytes ? read + kStageBytes : 0;
      write = write + kStageBytes < kStages * kStageBytes ? write + kStageBytes : 0;
    }
  }
  if (threadIdx.x < kParts * kUnit) s_bias[threadIdx.x] = row_bias_value(p, bias);
  __syncthreads();  // the ring is free
  const float alpha = float(p.alpha);
  const bool relu = p.relu, silu_after = p.silu;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    const int row = (warp % kAcross * kRowTiles + j) * 8 + 2 * t;
    const float biases[2] = {s_bias[row], s_bias[row + 1]};
    float up_biases[2] = {};
    if constexpr (kPaired)
      up_biases[0] = s_bias[kUnit + row], up_biases[1] = s_bias[kUnit + row + 1];
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = (warp / kAcross * kTokenTiles + i) * 16 + half * 8 + g;
        Packed<Out, 2> pair;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float y = fmaf(sum[0][i][j][half * 2 + e], alpha, biases[e]);
          if constexpr (kPaired) {
            y = silu(y) * fmaf(sum[kParts - 1][i][j][half * 2 + e], alpha, up_biases[e]);
          } else {
            if (relu) y = y < 0.0f ? 0.0f : y;
            if (silu_after) y = silu(y);
          }
          pair.element[e] = Out::narrow(y);
        }
        auto* to = s_dynamic + token * kStoreRow + row * kStoreItem;
        *reinterpret_cast<typename Packed<Out, 2>::Word*>(to) = pair.word;
      }
    }
  }
  __syncthreads();
  constexpr int kEach = 16 / kStoreItem, kAccesses = kUnit / kEach;  // of a row of Y
  const bool whole = p.rows % kEach == 0 && p.c_stride % kEach == 0;
  for (int at = threadIdx.x; at < kTokens * kAccesses; at += kThreads) {
    const int token = at / kAccesses, place = at % kAccesses * kEach;
    if (first_token + token >= p.n || first_row + place >= p.rows) continue;
    const char* from = s_dynamic + token * kStoreRow + place * kStoreItem;
    Out::Storage* c = p.c + (first_token + token) * p.c_stride + first_row + place;
    if (whole) {
      ptx::store_cs(reinterpret_cast<uint4*>(c), *reinterpret_cast<const uint4*>(from));
    } else {
      for (int e = 0; e < min(kEach, p.rows - first_row - place); ++e) {
        c[e] = reinterpret_cast<const Out::Storage*>(from)[e];
      }
    }
  }
}
