// Kept weights of a layer and the bits of their places -> the streams of linear_entries.cu, or,
// with kCount, only the lengths of the rows. What a stream is stands in formats/entry_streams.py.
//
// One warp for each row. A lane reads the bits of 32 columns and finds with the warp how many kept
// weights and entries come before its own, so that all lanes write their entries at once. Entries
// are collected in shared memory; eight of them are 16 bytes of values and 4 of gaps in the stream.
//
// Shared memory: values [p.capacity], 16 bits; gaps [p.capacity], 8 bits.
//
// Assumes: p.capacity a multiple of 16, and at least the entries of any row and 8.
#include "ptx/ptx.cuh"

constexpr int kGap = 16;  // most columns from one entry to the next
constexpr int kStepBytes = 32 * 16 + 32 * 4;

// Declared in kernels/masked_rows.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

// Bits of columns 32 `word` to 32 `word` + 31 of a row; 0 past its last one.
__device__ __forceinline__ u32 load_bits(const Params& p, const unsigned char* row, int word) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int byte = 4 * word + i;
    if (byte < p.row_bytes) found |= static_cast<u32>(__ldg(row + byte)) << 8 * i;
  }
  const int left = p.cols - 32 * word;
  return left >= 32 ? found : left <= 0 ? 0 : found & ((1u << left) - 1);
}

// The sum of the values of this lane and those before it.
__device__ __forceinline__ int sum_upto(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_sync(kWarp, value, lane - step);
    if (lane >= step) value += other;
  }
  return value;
}

// Four gaps less one, a byte each, as two bytes.
__device__ __forceinline__ u32 pack_gaps(u32 four) {
  const u32 pairs = (four | four >> 4) & 0x00ff00ffu;
  return (pairs | pairs >> 8) & 0xffffu;
}

extern "C" __global__ void __launch_bounds__(32) pack_entries(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char s_memory[];
  u16* s_values = reinterpret_cast<u16*>(s_memory);
  unsigned char* s_gaps = reinterpret_cast<unsigned char*>(s_values + p.capacity);
  const int position = blockIdx.x, lane = threadIdx.x;
  const int row = kCount ? position : __ldg(p.row_ids + position);
  const int length = kCount || row < 0 ? 0 : __ldg(p.lengths + row);
  const int strip = position / 32, place_in_strip = position % 32;
  const int first = kCount ? 0 : __ldg(p.offsets + strip);
  const int steps = kCount ? 0 : (__ldg(p.offsets + strip + 1) - first) / p.parts;
  const int each = 8 * steps;  // entries of a part
  int* starts = p.starts + strip * p.parts * 32 + place_in_strip;
  const i64 kept_first = kCount || row < 0 ? 0 : __ldg(p.kept_begin + row);

  const int words = row < 0 ? 0 : (p.cols + 31) / 32;
  const unsigned char* bits = p.bits + static_cast<i64>(row) * p.row_bytes;
  int last = -1, entries = 0, kept = 0;
  for (int base = 0; base < words; base += 32) {
    const u32 word = load_bits(p, bits, base + lane);
    const int column = 32 * (base + lane), mine_kept = __popc(word);
    const u32 filled = __ballot_sync(kWarp, word != 0), below = filled & ptx::lanes_below();
    const int own_last = column + 31 - __clz(word);
    const int near = __shfl_sync(kWarp, own_last, below ? 31 - __clz(below) : 0);
    const int before = below ? near : last;
    int mine = 0, previous = before;
    for (u32 rest = word; rest != 0; rest &= rest - 1) {
      const int next = column + __ffs(rest) - 1;
      mine += 1 + (next - previous - 1) / kGap;
      previous = next;
    }
    const int upto = sum_upto(mine, lane), kept_upto = sum_upto(mine_kept, lane);
    if constexpr (!kCount) {
      int place = entries + upto - mine;
      const u16* from = p.weight + kept_first + kept + kept_upto - mine_kept;
      int part = (place + each - 1) / max(each, 1), begin = part * each;
      previous = before;
      for (u32 rest = word; rest != 0; rest &= rest - 1) {
        const int next = column + __ffs(rest) - 1;
        while (true) {
          const bool far = next - previous > kGap;
          if (place == begin) {
            starts[part * 32] = previous;
            begin += each;
            ++part;
          }
          const int gap = far ? kGap : next - previous;
          s_values[place] = far ? 0 : __ldg(from++);
          s_gaps[place] = gap - 1;
          previous += gap;
          ++place;
          if (!far) break;
        }
      }
    }
    entries += __shfl_sync(kWarp, upto, 31);
    kept += __shfl_sync(kWarp, kept_upto, 31);
    if (filled) last = __shfl_sync(kWarp, own_last, 31 - __clz(filled));
  }
  if constexpr (kCount) {
    if (lane == 0) {
      p.lengths[row] = entries;
      p.kept_counts[row] = kept;
    }
    return;
  }

  // The last step is filled up; parts of no entries begin behind the last column.
  if (lane < 8) {
    s_values[length + lane] = 0;
    s_gaps[length + lane] = 0;
  }
  if (lane < p.parts && lane * each >= length) starts[lane * 32] = p.cols - 1;
  __syncwarp();
  for (int slot = lane; slot < p.parts * steps; slot += 32) {
    uint4 values = make_uint4(0, 0, 0, 0);
    u32 gaps = 0;
    if (8 * slot < length) {
      values = *reinterpret_cast<const uint4*>(s_values + 8 * slot);
      const uint2 eight = *reinterpret_cast<const uint2*>(s_gaps + 8 * slot);
      gaps = pack_gaps(eight.x) | pack_gaps(eight.y) << 16;
    }
    char* to = p.stream + static_cast<i64>(first + slot) * kStepBytes;
    *reinterpret_cast<uint4*>(to + 16 * place_in_strip) = values;
    *reinterpret_cast<u32*>(to + 512 + 4 * place_in_strip) = gaps;
  }
}
