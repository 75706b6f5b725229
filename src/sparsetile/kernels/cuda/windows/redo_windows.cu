// Recomputes non-finite sums of spmm_wcsr.cu and join_wcsr.cu, a window at a time (sm_90a). See
// redo.cuh.
//
// redo_wcsr.cu decodes a tile again for each 256 bytes of columns, and reads rows of B again for
// each sixteen rows. Here a block has a window and all columns of a slab. Its warps are teams that
// share the tiles. A warp has kOwn strips and 128 bytes of columns: 64 sums per lane. A step is
// kStep tiles of a team: each warp decodes one strip of one tile for all of them, one step ahead,
// and rows of B serve all of its strips. A long window takes as long as its tiles, however few
// columns were requested: kernels/wcsr.py decides when this pays.
//
// Grid: x = blocks that stride over the windows of a slab, as many as run at once; y = slabs of
// kCols columns, z = batch. Threads: kThreads. Shared memory: decoded tiles, and the teams' sums.
#include "windows/redo.cuh"
#include "windows/wcsr.cuh"

constexpr int kOwn = kIsF32 ? 4 : 2;
constexpr int kPieceCols = ExactStrip<E>::kCols, kPieces = kCols / kPieceCols;
constexpr int kMembers = kPieces * kWarps / kOwn;
constexpr int kTeams = kThreads / 32 / kMembers;
constexpr int kStep = kMembers / kWarps;
static_assert(kTeams * kMembers * 32 == kThreads, "whole teams");
static_assert(kStep * kWarps == kMembers, "a warp decodes a strip of a tile");
static_assert(kCols / 32 * kWarps == 32, "a window's flags are one word");

// Decoded tiles of one step and team.
struct Decoded {
  uint4 of[kMembers][32];  // strips of a tile side by side
  u32 special[kStep];      // a byte per strip: whether a number of A is not finite
};

// The first loads of a warp, a word per lane: ids of a step's rows of B, and bits and the first
// value of the strip that it decodes of the next step. Words of all lanes are one load. Steps may
// reach past the last tile by less than the margin that is stored after it.
struct Heads {
  static constexpr int kIds = kStep * 8;  // lanes; then four of bits, one of the value
  const int* from;
  int stride;  // words from step to step
  int word;

  __device__ __forceinline__ Heads(const Params& p, int member, int first) {
    const int lane = threadIdx.x % 32, strip = member % kWarps;
    int tile = first + member / kWarps, each = kWarps * 4;
    from = reinterpret_cast<const int*>(p.bitmaps) + strip * 4 + lane % 4;
    if (lane < kIds) from = p.columns + lane % 8, each = 8, tile = first + lane / 8;
    if (kWeighted && lane == kIds + 4) from = p.strip_value_ptr + strip, each = kWarps;
    from += i64(tile) * each;
    stride = kStep * each;
    word = __ldg(from);
  }
  // Once, after the first step's bits: afterwards they are a step ahead of the ids.
  __device__ __forceinline__ void next_bits() {
    if (threadIdx.x % 32 >= kIds) from += stride;
    word = __ldg(from);
  }
  __device__ __forceinline__ void next() {
    from += stride;
    word = __ldg(from);
  }
  __device__ __forceinline__ int2 ids(int i) const {
    const int at = i * 8 + staged(threadIdx.x % 4);
    return make_int2(__shfl_sync(kWarp, word, at), __shfl_sync(kWarp, word, at + 2));
  }
  __device__ __forceinline__ StripTiles::Bits bits() const {
    u32 bits[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) bits[i] = u32(__shfl_sync(kWarp, word, kIds + i));
    return {make_uint4(bits[0], bits[1], bits[2], bits[3]), kWeighted ? int(bits[4]) : 0};
  }
};
static_assert(Heads::kIds % 4 == 0 && Heads::kIds + 5 <= 32, "a word a lane");

struct Compute {
  const Params& p;
  Decoded (&s_decoded)[2][kTeams];
  float4* s_sums;

  // `asked`: bit 8s + c for 32 columns c of strip s.
  __device__ __forceinline__ void operator()(int window, u32 asked) const {
    const int warp = threadIdx.x / 32, team = warp / kMembers, member = warp % kMembers;
    const int column = member % kPieces * kPieceCols, first_strip = member / kPieces * kOwn;
    const int first = blockIdx.y * kCols + column;
    const int begin = __ldg(p.window_row_ptr + window), end = __ldg(p.window_row_ptr + window + 1);
    ExactStrip<E> strip[kOwn];
    u32 mine = 0;  // requests for the warp's strips
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      strip[s] =
          ExactStrip<E>(p.b + blockIdx.z * p.b_batch_stride + first, p.b_row_bytes, p.n - first);
      mine |= groups_of(asked, first_strip + s, column) << 8 * s;
    }
    if (first >= p.n) mine = 0;
    const int from = redo::share<kTeams>(begin, end, team);
    const int to = redo::share<kTeams>(begin, end, team + 1);
    if (mine != 0) {
      add<true>(strip, from, to, team, member, first_strip);
    } else {
      add<false>(strip, from, to, team, member, first_strip);
    }
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      redo::add_up<kTeams, kMembers>(strip[s], s_sums);
      const int groups = mine >> 8 * s & 0xff;
      if (team == 0 && groups) store_strip(p, strip[s], window, first_strip + s, first, groups);
    }
  }

 private:
  __device__ __forceinline__ static u32 groups_of(u32 asked, int strip, int column) {
    return asked >> (strip * 8 + column / 32) & ((1u << kPieceCols / 32) - 1);
  }

  // Adds tiles `begin` to `end`, together with the team. Not kWanted: only decodes for it.
  template <bool kWanted>
  __device__ __forceinline__ void add(ExactStrip<E> (&strip)[kOwn], int begin, int end, int team,
                                      int member, int first_strip) const {
    if (begin >= end) return;
    Heads heads(p, member, begin);
    const StripTiles source{p, member % kWarps};
    decode(source, heads.bits(), s_decoded[0][team], member);
    heads.next_bits();
    ptx::sync_some(team + 1, kMembers * 32);
    int now = 0;
#pragma unroll 1
    for (int tile = begin; tile < end; tile += kStep, now ^= 1) {
      BRow<4> row[kStep][1][2];
      if constexpr (kWanted) {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          strip[0].template load_rows<StripTiles>(heads.ids(i), row[i]);
        }
      }
      decode(source, heads.bits(), s_decoded[now ^ 1][team], member);
      heads.next();
      if constexpr (kWanted) {
        const Decoded& step = s_decoded[now][team];
        u32 special = 0;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          if (i > 0 && tile + i >= end) break;
          if (!multiply_finite(strip, step, i, first_strip, row[i])) special |= 1u << i;
        }
#pragma unroll 1
        for (; special != 0; special &= special - 1) {
          const int i = __ffs(special) - 1;
          multiply_special(strip, step, i, tile + i, first_strip);
        }
      }
      ptx::sync_some(team + 1, kMembers * 32);
    }
  }
  __device__ __forceinline__ static void decode(const StripTiles& source,
                                                const StripTiles::Bits& bits, Decoded& to,
                                                int member) {
    const int lane = threadIdx.x % 32;
    u32 of[4];
    source.elements(0, bits, lane, of);
    OperandCheck<E> check;
#pragma unroll
    for (int i = 0; i < 4; ++i) check.add(of[i], i);
    const bool special = __any_sync(kWarp, check.failed());
    to.of[member][lane] = make_uint4(of[0], of[1], of[2], of[3]);
    if (lane == 0) reinterpret_cast<unsigned char*>(to.special)[member] = special;
  }
  // Tile i of a step, unless a number of it or of its rows of B is not finite.
  __device__ __forceinline__ static bool multiply_finite(ExactStrip<E> (&strip)[kOwn],
                                                         const Decoded& step, int i,
                                                         int first_strip, BRow<4> (&row)[1][2]) {
    OperandCheck<E> check;
    ExactStrip<E>::round_rows(row, check);
    if (__any_sync(kWarp, check.failed()) || step.special[i] != 0) return false;
    const uint4* from = step.of[i * kWarps + first_strip] + threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      const uint4 a = from[s * 32];
      const u32 of[4] = {a.x, a.y, a.z, a.w};
      strip[s].multiply(of, row[0], strip[s].sum[0]);
    }
    return true;
  }
  // Such a tile. Rare, and registers are scarce: everything is loaded again.
  __device__ __forceinline__ void multiply_special(ExactStrip<E> (&strip)[kOwn],
                                                   const Decoded& step, int i, int tile,
                                                   int first_strip) const {
    const StripTiles source{p, 0};  // only ids
    const uint4* from = step.of[i * kWarps + first_strip];
    BRow<4> row[1][2];
    OperandCheck<E> check;
    strip[0].template load_rows<StripTiles>(source.columns(tile, strip[0].t), row);
    ExactStrip<E>::round_rows(row, check);
    u32 rest = 0;
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      const uint4 a = from[s * 32 + strip[0].lane];
      u32 of[4] = {a.x, a.y, a.z, a.w};
      rest |= strip[s].take_special(of, row);  // the first one removes all of B's
      strip[s].multiply(of, row[0], strip[s].sum[0]);
      __syncwarp();
    }
    const unsigned char* bits = reinterpret_cast<const unsigned char*>(p.bitmaps) +
                                (i64(tile) * kWarps + first_strip) * 16 + strip[0].g;
#pragma unroll 1
    for (; rest != 0; rest &= rest - 1) {
      const int k = __ffs(rest) - 1, id = source.column(tile, k);
      const u32* raw = &from[strip[0].g * 4 + k % 4].x + k / 4 * 2;
#pragma unroll
      for (int s = 0; s < kOwn; ++s) {
        const u32 of[2] = {raw[s * 128], raw[s * 128 + 1]};
        const bool entry[2] = {(__ldg(bits + s * 16) >> k & 1) != 0,
                               (__ldg(bits + s * 16 + 8) >> k & 1) != 0};
        strip[s].template add_column<StripTiles>(of, entry, id);
        __syncwarp();  // otherwise loads of all strips come first, and take registers
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    redo_windows(const __grid_constant__ Params p) {
  ptx::wait_previous();
  // The teams' sums reuse the memory of decoded tiles: add_up() waits for all first.
  __shared__ union {
    Decoded decoded[2][kTeams];
    float4 sums[redo::kSumWords<kTeams, kMembers, ExactStrip<E>>];
  } s;
  constexpr int kFlags = kWarps * kUnits;
  redo::each_asked<kThreads / 32, kFlags, kUnitCols / 32>(unit_flags(p), unit_count(p) / kFlags,
                                                          Compute{p, s.decoded, s.sums});
}
