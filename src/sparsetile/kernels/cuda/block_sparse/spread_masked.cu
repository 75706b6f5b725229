// Kept weights of 16 bits and the bits of their places -> the dense weight, zeros elsewhere.
//
// One warp for each row. Each lane has eight columns at a time: the byte of their bits, and, from
// the number of bits before it, the place of its first kept weight. Bound by writing.
#include "ptx/ptx.cuh"

// Declared in kernels/masked_rows.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    spread_masked(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const unsigned char* bits = p.bits + static_cast<i64>(row) * p.row_bytes;
  const u16* from = p.weight + __ldg(p.kept_begin + row);
  u16* to = p.dense + static_cast<i64>(row) * p.cols;
  const bool whole = p.cols % 8 == 0;
  for (int base = 0; base < p.row_bytes; base += 32) {
    const int byte = base + lane, column = 8 * byte, inside = min(p.cols - column, 8);
    u32 mine = byte < p.row_bytes ? __ldg(bits + byte) : 0;
    if (inside < 8) mine &= (1u << max(inside, 0)) - 1;
    int upto = __popc(mine);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_sync(kWarp, upto, lane - step);
      if (lane >= step) upto += other;
    }
    int next = upto - __popc(mine);  // counted up: population counts are slow
    u32 found[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      found[i] = 0;
      if (mine >> i & 1) found[i] = __ldg(from + next++);
    }
    if (whole && inside == 8) {
      *reinterpret_cast<uint4*>(to + column) =
          make_uint4(found[0] | found[1] << 16, found[2] | found[3] << 16,
                     found[4] | found[5] << 16, found[6] | found[7] << 16);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < inside) to[column + i] = found[i];
      }
    }
    from += __shfl_sync(kWarp, upto, 31);
  }
}
