// Y = activation(alpha . X . A^T + bias) for few tokens (rows of X) and A in BCSR blocks: the work
// of a language model per new token. Bound by reading A's blocks once.
//
// A thread block owns kStrips strips of 16 rows of a block row, for all tokens. Its kWarps warps
// take the row's blocks in turn, kAhead of them at a time, so that nearly all of A that an SM reads
// is in flight at once. Their sums are then added in shared memory in the order of the warps.
// Nothing is split over thread blocks: no scratch memory, no atomics, the same bits each time.
//
//   block row   | block | block | block | block | block | ...        kUnit x kUnit, row-major
//   warp           0       1       2       0       1    ...          (kWarps 3)
//
// Rows of A are the M side of mma.sync m16n8k16 and tokens its N side, eight per tile. Lane 4g + t
// holds columns 8t to 8t + 7 of rows g and g + 8, one access of 16 bytes each, of 32 columns of the
// block, and the same columns of token g. The sum over k allows any numbering of k that both
// operands share: words 0 and 1 of an access are the first instruction's k = 2t and 2t + 8, words 2
// and 3 the second's. So nothing moves between lanes, and A does not pass through shared memory. X
// is read through L1: every thread block needs nearly all of it.
//
// kPaired: gate and up of a SwiGLU are stacked in A, pair_block_rows block rows apart, and
// Y = silu(gate) * up has half of A's rows. The first half of the warps takes the blocks of the
// gate's row, the second those of the same row of up; both sums are joined in shared memory.
//
// kEight: A is FP8 (e4m3), each block times a power of two, and is widened to the type of X in
// registers, which is exact: the shifted bits of an e4m3 number are a 16-bit number with a constant
// offset of the exponent. A lane's access is then 16 columns, 16t to 16t + 15, of a row of 64.
//
// Biases are loaded before the products and used after. Loaded after, they add a load's latency, a
// fifth of the time: 18944 x 3584 at 90 % took 6.3 us for a token, 8.0 with a bias.
//
// Shared memory: kWarps x 16 kStrips x 8 kTiles sums, float32, and a bias for each row.
//
// Zeros of blocks are multiplied too: if cells of blocks have no entry the host launches a repair
// of Y, which does nothing unless `spoilt` is set.
//
// Assumes: A, X and the rows of X at multiples of 16 bytes, columns of A a multiple of 8, tokens at
// most 8 kTiles, blocks under 2^31 / kUnit; cells past the end of A are zeros.
#include "epilogue/epilogue.cuh"
#include "mma/mma.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;

constexpr int kRows = 16 * kStrips;  // of a thread block
constexpr int kHalves = kUnit / 32;  // accesses along a row of a block, of four lanes together
constexpr int kTokens = 8 * kTiles;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroup = kPaired ? kWarps / 2 : kWarps;  // warps that share a block row
constexpr int kParts = kPaired ? 2 : 1;                // rows of A behind one of Y

// Declared in kernels/linear_few.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");
static_assert(sizeof(E::Storage) == 2 && kUnit % 32 == 0 && kUnit % kRows == 0,
              "16 bits, whole accesses, whole thread blocks in a block row");

static_assert(kThreads >= kParts * kRows, "a thread for each bias");
static_assert(!kEight || kUnit == 64, "four lanes have a row of FP8");

constexpr int kAccesses = kEight ? 1 : kHalves;  // of a lane along a row of a block

// A lane's part of one block: two rows of each strip, one token of each tile.
struct Piece {
  uint4 a[kStrips][kAccesses][2];
  uint4 x[kTiles][kHalves];
  u32 scale;  // kEight: twice the block's power of two, in the type of X
};

// First column of a lane's eight, within a block.
__device__ __forceinline__ int first_column(int t, int half) {
  return kEight ? 16 * t + 8 * half : 8 * t + 32 * half;
}

// Two to the power of `exponent`, times the factor that shifted bits of e4m3 lack: 2^120 in
// bfloat16, 2^8 in float16.
__device__ __forceinline__ u32 scale_of(int exponent) {
  u32 bits;
  if constexpr (Mma<E>::kBfloat) {
    bits = static_cast<u32>(127 + 120 + exponent) << 7;
  } else {
    const int biased = 15 + 8 + exponent;  // below 1 it is subnormal, below -9 nothing
    bits = biased > 0 ? static_cast<u32>(biased) << 10 : biased > -10 ? 1u << (9 + biased) : 0u;
  }
  return bits << 16 | bits;
}

// Two numbers of e4m3, each in the upper byte of 16 bits.
__device__ __forceinline__ u32 widen_pair(u32 pair, u32 scale) {
  constexpr int kShift = Mma<E>::kBfloat ? 4 : 1;
  return ptx::multiply_pairs<Mma<E>::kBfloat>((pair & 0x80008000u) | (pair & 0x7f007f00u) >> kShift,
                                              scale);
}

// Eight numbers of e4m3 in the type of X.
__device__ __forceinline__ uint4 widen(u32 first, u32 second, u32 scale) {
  return make_uint4(widen_pair((first & 0xffu) << 8 | (first & 0xff00u) << 16, scale),
                    widen_pair((first & 0xff0000u) >> 8 | (first & 0xff000000u), scale),
                    widen_pair((second & 0xffu) << 8 | (second & 0xff00u) << 16, scale),
                    widen_pair((second & 0xff0000u) >> 8 | (second & 0xff000000u), scale));
}

// A lane's eight columns of a row of A.
__device__ __forceinline__ uint4 eight_columns(const Piece& piece, int strip, int half, int lower) {
  if constexpr (kEight) {
    const uint4 row = piece.a[strip][0][lower];
    return half == 0 ? widen(row.x, row.y, piece.scale) : widen(row.z, row.w, piece.scale);
  } else {
    return piece.a[strip][half][lower];
  }
}

__device__ __forceinline__ void load_piece(const Params& p, int block, int first_row,
                                           Piece& piece) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kRowBytes = kUnit * (kEight ? 1 : 2);
  const char* a = reinterpret_cast<const char*>(p.blocks) +
                  (static_cast<i64>(block) * kUnit + first_row + g) * kRowBytes + 16 * t;
  if constexpr (kEight) piece.scale = scale_of(__ldg(p.exponents + block));
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int access = 0; access < kAccesses; ++access) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        // A is read once: it must not evict X from L1.
        piece.a[strip][access][lower] =
            ptx::load_once(a + (16 * strip + 8 * lower) * kRowBytes + 64 * access);
      }
    }
  }
  const int first_k = __ldg(p.block_col_idx + block) * kUnit;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int token = 8 * tile + g;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int k = first_k + first_column(t, half);
      piece.x[tile][half] = make_uint4(0, 0, 0, 0);
      if (token < p.n && k < p.cols) {
        piece.x[tile][half] = __ldg(reinterpret_cast<const uint4*>(p.b + token * p.x_stride + k));
      }
    }
  }
}

__device__ __forceinline__ void multiply_piece(const Piece& piece,
                                               float (&sum)[kStrips][kTiles][4]) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const uint4 upper = eight_columns(piece, strip, half, 0);
      const uint4 lower = eight_columns(piece, strip, half, 1);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 x = piece.x[tile][half];
        multiply_16<Mma<E>::kBfloat>(make_uint4(upper.x, lower.x, upper.y, lower.y), x.x, x.y,
                                     sum[strip][tile]);
        multiply_16<Mma<E>::kBfloat>(make_uint4(upper.z, lower.z, upper.w, lower.w), x.z, x.w,
                                     sum[strip][tile]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    linear_few(const __grid_constant__ Params p) {
  __shared__ float s_sum[kWarps][kTokens][kRows];
  __shared__ float s_bias[kParts * kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = blockIdx.x * kRows, first_row = first % kUnit;
  const int block_row = first / kUnit + warp / kGroup * p.pair_block_rows;
  const int end = __ldg(p.block_row_ptr + block_row + 1);
  u32 bias = 0;
  if (p.row_bias != nullptr && threadIdx.x < kParts * kRows) {
    const int row = row_of(p, first + threadIdx.x % kRows);
    if (row >= 0) load_row_bias(p, row + threadIdx.x / kRows * p.rows, bias);
  }
  float sum[kStrips][kTiles][4] = {};
  for (int at = __ldg(p.block_row_ptr + block_row) + warp % kGroup; at < end;
       at += kGroup * kAhead) {
    Piece piece[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (at + i * kGroup < end) load_piece(p, at + i * kGroup, first_row, piece[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (at + i * kGroup < end) multiply_piece(piece[i], sum);
    }
  }
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s_sum[warp][8 * tile + 2 * (lane % 4) + i % 2][16 * strip + lane / 4 + 8 * (i / 2)] =
            sum[strip][tile][i];
      }
    }
  }
  if (threadIdx.x < kParts * kRows) s_bias[threadIdx.x] = row_bias_value(p, bias);
  __syncthreads();
  bool finite = true;
  for (int i = threadIdx.x; i < kRows * kTokens; i += kThreads) {
    const int token = i / kRows, place = i % kRows, row = row_of(p, first + place);
    if (token >= p.n || row < 0) continue;
    float total[1] = {s_sum[0][token][place]};
#pragma unroll
    for (int w = 1; w < kGroup; ++w) total[0] += s_sum[w][token][place];
    finite = finite && total[0] - total[0] == 0.0f;
    Out::Storage* c = p.c + static_cast<i64>(token) * p.c_stride + row;
    if (p.epilogue) {
      const RowTerms<float> terms = {row_scale<float>(p, row), s_bias[place]};
      apply_epilogue<Out>(p, terms, token, 1, c, 1, total);
    }
    if constexpr (kPaired) {
      float up[1] = {s_sum[kGroup][token][place]};
#pragma unroll
      for (int w = kGroup + 1; w < kWarps; ++w) up[0] += s_sum[w][token][place];
      finite = finite && up[0] - up[0] == 0.0f;
      if (p.epilogue) {
        const RowTerms<float> terms = {row_scale<float>(p, row + p.rows), s_bias[kRows + place]};
        apply_epilogue<Out>(p, terms, token, 1, c, 1, up);
      }
      total[0] = silu(total[0]) * up[0];
    } else if (p.silu) {
      total[0] = silu(total[0]);
    }
    *c = Out::narrow(total[0]);
  }
  if (p.spoilt != nullptr && !finite) *p.spoilt = 1;
}
