// B as WGMMA needs it in TF32: rounded, and K-major. to[n, k] = round(b[k, n]).
//
// Tensor Cores truncate a float32, and read TF32 from shared memory only along k, so spmm_bcsr.cu
// multiplies this copy. Rounding keeps infinities and NaN.
//
// A thread block has 64 x 64 elements, all tiles of k before the next of n. If b is contiguous
// along n the tile is transposed in shared memory: a thread has four neighbours on either side of
// it, eight threads 128 bytes. Rows of 65 words: four rows of eight threads use 32 banks, written
// and read. If b is contiguous along k (kKMajor) no transposition is needed.
//
// Assumes: kVector is 4 only if b has neighbours along that side and all of their groups of four
// begin at multiples of 16 bytes, otherwise any strides; `to` at a multiple of 16 bytes, its stride
// a multiple of 4, so that groups of four are written whole. Threads: kThreads.
#include "mma/mma.cuh"

constexpr int kTile = 64;
constexpr int kPitch = kTile + 1;
static_assert(kThreads == 256, "eight threads a row, 32 rows at a time");

// Declared in kernels/tf32_operand.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

// Four elements from (k, n) on, along k or n, rounded; zeros past the end.
__device__ __forceinline__ uint4 load_four(const Params& p, int k, int n) {
  const int inside = kKMajor ? (n < p.n ? p.k - k : 0) : (k < p.k ? p.n - n : 0);
  const float* b = p.b + k * p.k_stride + n * p.n_stride;
  u32 word[4] = {0, 0, 0, 0};
  if (kVector == 4 && inside >= 4) {
    const uint4 four = ptx::load_nc(reinterpret_cast<const uint4*>(b));
    word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
  } else {
    const i64 stride = kKMajor ? p.k_stride : p.n_stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < inside) word[i] = __float_as_uint(__ldg(b + i * stride));
    }
  }
  return make_uint4(round_tf32(word[0]), round_tf32(word[1]), round_tf32(word[2]),
                    round_tf32(word[3]));
}

__device__ __forceinline__ void store_four(const Params& p, int k, int n, uint4 four) {
  if (k < p.k && n < p.n) *reinterpret_cast<uint4*>(p.to + n * p.to_stride + k) = four;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    tf32_operand(const __grid_constant__ Params p) {
  const int k_tiles = (p.k + kTile - 1) / kTile;
  const int first_k = blockIdx.x % k_tiles * kTile, first_n = blockIdx.x / k_tiles * kTile;
  const int row = threadIdx.x / 8, four = threadIdx.x % 8 * 4;  // of a quarter of the tile
  if constexpr (kKMajor) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int n = first_n + row + quarter / 2 * 32, k = first_k + four + quarter % 2 * 32;
      store_four(p, k, n, load_four(p, k, n));
    }
  } else {
    __shared__ u32 s_tile[kTile * kPitch];  // by k, then n
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int k = row + quarter / 2 * 32, n = four + quarter % 2 * 32;
      const uint4 found = load_four(p, first_k + k, first_n + n);
      u32* to = s_tile + k * kPitch + n;
      to[0] = found.x, to[1] = found.y, to[2] = found.z, to[3] = found.w;
    }
    __syncthreads();
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int n = row + quarter / 2 * 32, k = four + quarter % 2 * 32;
      const u32* from = s_tile + k * kPitch + n;
      store_four(p, first_k + k, first_n + n,
                 make_uint4(from[0], from[kPitch], from[2 * kPitch], from[3 * kPitch]));
    }
  }
}
