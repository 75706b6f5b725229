// Y = X . A^T + bias for up to kTokens tokens (rows of X) and A as kept weights of 16 bits and the
// bits of their places, as a layer stores them: nothing is kept beside. Bound by the loads of
// single values, which do not become fewer with sparsity: slower than linear_entries.cu.
//
// A warp takes a row at a time, 1024 columns at once: each lane four times eight columns, whose
// bits are a byte. The numbers of bits before are summed over the warp for all four together, a
// byte for each: without a lane's own bits they are at most 248. A dropped weight is a zero that is
// multiplied: results are those of the dense product also if X is not finite.
//
// Shared memory: X [kTokens][p.padded], 16 bits, zeros past the last column.
//
// Assumes: p.padded a multiple of 1024, at least the columns.
#include "epilogue/epilogue.cuh"

using E = ELEMENT;

constexpr int kThreads = 32 * kWarps;
constexpr int kTogether = 4;  // bytes of bits of a lane
// Of an SM: four tokens have more sums.
constexpr int kMinBlocks = kTokens <= 2 ? 4 : 3;

// Declared in kernels/masked_rows.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");
static_assert(sizeof(E::Storage) == 2, "weights of 16 bits");

__device__ __forceinline__ float lower(u32 word) { return E::widen(static_cast<u16>(word)); }
__device__ __forceinline__ float upper(u32 word) { return E::widen(static_cast<u16>(word >> 16)); }

// Bits of the lane's columns: byte i is of columns 8 (`base` + 32 i + lane) on.
__device__ __forceinline__ u32 load_bits(const Params& p, const unsigned char* row, int base,
                                         int lane) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const int byte = base + 32 * i + lane;
    if (byte < p.row_bytes) found |= static_cast<u32>(__ldg(row + byte)) << 8 * i;
  }
  return found;
}

// Numbers of bits of each byte.
__device__ __forceinline__ u32 count_bits(u32 word) {
  word -= word >> 1 & 0x55555555u;
  word = (word & 0x33333333u) + (word >> 2 & 0x33333333u);
  return word + (word >> 4) & 0x0f0f0f0fu;
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_masked(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char s_memory[];
  u16* s_x = reinterpret_cast<u16*>(s_memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::wait_previous();
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    for (int k = threadIdx.x; k < p.padded; k += kThreads) {
      const bool inside = token < p.n && k < p.cols;
      s_x[token * p.padded + k] = inside ? __ldg(p.b + token * p.x_stride + k) : 0;
    }
  }
  __syncthreads();

  for (int row = blockIdx.x * kWarps + warp; row < p.rows; row += gridDim.x * kWarps) {
    const unsigned char* bits = p.bits + static_cast<i64>(row) * p.row_bytes;
    const u16* from = p.weight + __ldg(p.kept_begin + row);
    float sum[kTokens] = {};
    u32 later = load_bits(p, bits, 0, lane);
    for (int base = 0; base < p.row_bytes; base += 32 * kTogether) {
      u32 mine = later;
      later = load_bits(p, bits, base + 32 * kTogether, lane);
      if (8 * (base + 32 * kTogether) > p.cols) {  // bits past the last column
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int inside = max(min(p.cols - 8 * (base + 32 * i + lane), 8), 0);
          mine &= ~(0xffu << 8 * i) | (1u << inside) - 1 << 8 * i;
        }
      }
      const u32 own = count_bits(mine);
      u32 before = __shfl_sync(kWarp, own, lane - 1);
      if (lane == 0) before = 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_sync(kWarp, before, lane - step);
        if (lane >= step) before += other;
      }
      const u32 last_before = __shfl_sync(kWarp, before, 31), last = __shfl_sync(kWarp, own, 31);
      u32 value[8 * kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        int next = before >> 8 * i & 0xff;  // counted up: population counts are slow
        const u32 byte = mine >> 8 * i & 0xff;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          value[8 * i + c] = 0;
          if (byte >> c & 1) value[8 * i + c] = __ldg(from + next++);
        }
        from += (last_before >> 8 * i & 0xff) + (last >> 8 * i & 0xff);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int column = 8 * (base + 32 * i + lane);
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          const uint4 x = *reinterpret_cast<const uint4*>(s_x + token * p.padded + column);
          const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sum[token] += lower(value[8 * i + 2 * c]) * lower(words[c]);
            sum[token] += lower(value[8 * i + 2 * c + 1]) * upper(words[c]);
          }
        }
      }
    }
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        sum[token] += __shfl_xor_sync(kWarp, sum[token], step);
      }
      if (lane != 0 || token >= p.n) continue;
      float total = sum[token];
      if (p.row_bias != nullptr) {
        u32 bias;
        load_row_bias(p, row, bias);
        total += row_bias_value(p, bias);
      }
      p.c[token * p.c_stride + row] = E::narrow(total);
    }
  }
}
