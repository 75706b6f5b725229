// Y = X . A^T + bias for up to kTokens tokens (rows of X) and A of single kept weights, entry by
// entry on CUDA cores: for a new token of a pruned language model. Bound by reading A once, and
// with more tokens by reading X from shared memory.
//
// An entry is a value and the number of columns since the one before, 1 to 16, in four bits: 1.25
// times the bytes of the values alone. Where 16 or more columns lie between two kept weights,
// entries of value 0 are put between. A thread block has 32 rows of about equal length, one for
// each lane, and kParts warps: warp s has the s-th part of the entries of each row, and knows the
// column before its first one (formats/entry_streams.py).
//
//   step of a warp   | 32 lanes x 8 values | 32 lanes x 8 gaps |     512 + 128 bytes
//
// So all lanes read neighbouring bytes whatever the rows' lengths, and each keeps a place of its
// own in X, which lies in shared memory: for a token as float32, for more as the 16 bits that it
// has, the tokens of a column side by side. Random columns are in random banks: of 32 lanes 3.4 on
// average wait for the same one. The eight columns of a step are sums of bytes of one word,
// computed together.
//
// kAhead steps are in flight in registers, the first ones before X is copied. A lane's sum is in
// the order of its columns, even and odd entries apart (up to four tokens); warps' sums are then
// added in shared memory in the order of the warps: the same bits each time.
//
// A dropped weight is a zero that is multiplied in the dense product. That matters if X is not
// finite: a result is NaN if its row drops a column of an Inf or NaN. No entry stands for a column
// twice: those that fill a row's last step up lie behind its last kept weight. So a block that
// meets such columns in X counts them, in X and in each row.
//
// Shared memory: a count for each token, 32 bytes; X [p.cols + p.zeros][kTokens], afterwards the
// sums [kTokens][kParts][32], float32.
//
// Assumes: p.zeros at least 8 for each step of a warp and 16.
#include "epilogue/epilogue.cuh"
#include "mma/mma.cuh"

using E = ELEMENT;

constexpr int kThreads = 32 * kParts;
constexpr int kStepBytes = 32 * 16 + 32 * 4;
constexpr int kXAt = 32;
constexpr bool kWide = kTokens == 1;  // X is float32
constexpr int kWords = kWide ? 1 : kTokens / 2;
constexpr int kColumnBytes = 4 * kWords;
constexpr bool kBrain = Mma<E>::kBfloat;
// Of two numbers of X: their exponents, and the lowest bits of these.
constexpr u32 kExponents = kBrain ? 0x7f807f80u : 0x7c007c00u;
constexpr u32 kLowestBits = kBrain ? 0x00800080u : 0x04000400u;
constexpr int kSums = kTokens <= 4 ? 2 : 1;  // of a token; registers are scarce

// Declared in kernels/linear_entries.py.
struct Params {
  PARAMS_FIELDS
};

static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");
static_assert(sizeof(E::Storage) == 2 && 4 * kTokens <= kXAt, "16 bits; a count for each token");

// Eight entries of a lane.
struct Step {
  uint4 values;
  u32 gaps;
};

// All tokens of a column of X.
struct Column {
  u32 word[kWords];
};

__device__ __forceinline__ Step load_step(const char* at, int lane) {
  return {ptx::load_once(at + 16 * lane), __ldg(reinterpret_cast<const u32*>(at + 512 + 4 * lane))};
}

__device__ __forceinline__ Column read_column(const char* s_x, u32 column) {
  using Word = typename WordOf<kColumnBytes>::Type;
  Column found;
  *reinterpret_cast<Word*>(found.word) =
      *reinterpret_cast<const Word*>(s_x + column * kColumnBytes);
  return found;
}

__device__ __forceinline__ float lower(u32 word) { return E::widen(static_cast<u16>(word)); }
__device__ __forceinline__ float upper(u32 word) { return E::widen(static_cast<u16>(word >> 16)); }

__device__ __forceinline__ float token_of(const Column& x, int token) {
  if constexpr (kWide) return __uint_as_float(x.word[0]);
  return token % 2 ? upper(x.word[token / 2]) : lower(x.word[token / 2]);
}

// kCareful: X is not finite.
template <bool kCareful>
__device__ __forceinline__ void add_entry(float value, const Column& x, float (&sum)[kTokens],
                                          int (&met)[kTokens]) {
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    const float number = token_of(x, token);
    if constexpr (kCareful) met[token] += !(number - number == 0.0f);
    sum[token] += value * number;
  }
}

// `column` is the first one that the step may have.
template <bool kCareful>
__device__ __forceinline__ void multiply_step(const Step& step, const char* s_x, u32& column,
                                              float (&sum)[kSums][kTokens], int (&met)[kTokens]) {
  const u32 words[4] = {step.values.x, step.values.y, step.values.z, step.values.w};
  // Gaps up to each entry: byte i of `odd` of the entries to 2i + 1, of `even` to 2i.
  const u32 second = step.gaps >> 4 & 0x0f0f0f0fu;
  const u32 odd = ((step.gaps & 0x0f0f0f0fu) + second) * 0x01010101u, even = odd - second;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 first = column + __byte_perm(even, 0, 0x4440 + i) + 2 * i;
    const u32 next = column + __byte_perm(odd, 0, 0x4440 + i) + 2 * i + 1;
    add_entry<kCareful>(lower(words[i]), read_column(s_x, first), sum[0], met);
    add_entry<kCareful>(upper(words[i]), read_column(s_x, next), sum[kSums - 1], met);
  }
  column += (odd >> 24) + 8;
}

// A warp's steps, the first kAhead of them loaded.
template <bool kCareful>
__device__ __forceinline__ void multiply_steps(const char* at, int steps, int lane, const char* s_x,
                                               u32 column, Step (&ahead)[kAhead],
                                               float (&sum)[kSums][kTokens], int (&met)[kTokens]) {
  int step = 0;
  for (; step + kAhead <= steps; step += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const Step now = ahead[i];
      const int later = step + i + kAhead;
      if (later < steps) ahead[i] = load_step(at + later * kStepBytes, lane);
      multiply_step<kCareful>(now, s_x, column, sum, met);
    }
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (step + i < steps) multiply_step<kCareful>(ahead[i], s_x, column, sum, met);
  }
}

// Columns k and k + 1 of X, a word for each token.
template <bool kPaired>
__device__ __forceinline__ void load_pair(const Params& p, int k, u32 (&pair)[kTokens]) {
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    pair[token] = 0;
    if (token >= p.n) continue;
    const E::Storage* from = p.b + token * p.x_stride + k;
    if constexpr (kPaired) {
      pair[token] = __ldg(reinterpret_cast<const u32*>(from));
    } else {
      pair[token] = __ldg(from);
      if (k + 1 < p.cols) pair[token] |= static_cast<u32>(__ldg(from + 1)) << 16;
    }
  }
}

// X to shared memory, two neighbouring columns of all tokens at a time: words of columns would
// otherwise be stored by halves. Returns bits that are 0 if all of this thread's part is finite.
template <bool kPaired>
__device__ __forceinline__ u32 stage_input(const Params& p, char* s_x) {
  constexpr int kTogether = kTokens <= 2 ? 4 : 2;  // loads that are under way
  using Word = typename WordOf<kColumnBytes>::Type;
  u32 carried = 0;
#pragma unroll kTogether
  for (int k = 2 * threadIdx.x; k < p.cols; k += 2 * kThreads) {
    u32 pair[kTokens];
    load_pair<kPaired>(p, k, pair);
    // An exponent of ones carries into the sign.
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      carried |= (pair[token] & kExponents) + kLowestBits;
    }
    Column column[2];
    if constexpr (kWide) {
      column[0].word[0] = __float_as_uint(lower(pair[0]));
      column[1].word[0] = __float_as_uint(upper(pair[0]));
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        column[0].word[i] = __byte_perm(pair[2 * i], pair[2 * i + 1], 0x5410);
        column[1].word[i] = __byte_perm(pair[2 * i], pair[2 * i + 1], 0x7632);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<Word*>(s_x + (k + i) * kColumnBytes) =
          *reinterpret_cast<const Word*>(column[i].word);
    }
  }
  return carried & 0x80008000u;
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_entries(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char s_memory[];
  int* s_counts = reinterpret_cast<int*>(s_memory);
  char* s_x = s_memory + kXAt;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = __ldg(p.offsets + blockIdx.x);
  const int steps = (__ldg(p.offsets + blockIdx.x + 1) - first) / kParts;
  const char* at = p.stream + static_cast<i64>(first + warp * steps) * kStepBytes;
  Step ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < steps) ahead[i] = load_step(at + i * kStepBytes, lane);
  }
  const u32 column = __ldg(p.starts + (blockIdx.x * kParts + warp) * 32 + lane) + 1;
  const int row = __ldg(p.row_ids + blockIdx.x * 32 + lane);

  // Only the weight is read before: it belongs to the layer, which waits whenever it is rewritten.
  ptx::wait_previous();
  if (p.let_next) ptx::let_next_start();
  if (threadIdx.x < kTokens) s_counts[threadIdx.x] = 0;
  const u32 any = p.paired ? stage_input<true>(p, s_x) : stage_input<false>(p, s_x);
  // An odd last column has a zero beside it already.
  for (int k = (p.cols + 1 & ~1) + threadIdx.x; k < p.cols + p.zeros; k += kThreads) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      reinterpret_cast<u32*>(s_x + k * kColumnBytes)[i] = 0;
    }
  }
  const bool careful = __syncthreads_or(any != 0) != 0;
  float sum[kSums][kTokens] = {};
  int met[kTokens] = {};
  if (!careful) {
    multiply_steps<false>(at, steps, lane, s_x, column, ahead, sum, met);
  } else {
    for (int k = threadIdx.x; k < p.cols; k += kThreads) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const float x = token_of(read_column(s_x, k), token);
        if (!(x - x == 0.0f)) atomicAdd(s_counts + token, 1);
      }
    }
    multiply_steps<true>(at, steps, lane, s_x, column, ahead, sum, met);
  }

  // All of X is read: its place is that of the sums.
  __syncthreads();
  float* s_sums = reinterpret_cast<float*>(s_x);
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    float total = sum[0][token];
    if constexpr (kSums == 2) total += sum[1][token];
    s_sums[(token * kParts + warp) * 32 + lane] = total;
  }
  __syncthreads();
  for (int token = warp; token < p.n; token += kParts) {
    if (row < 0) continue;
    float total = s_sums[token * kParts * 32 + lane];
#pragma unroll
    for (int part = 1; part < kParts; ++part) total += s_sums[(token * kParts + part) * 32 + lane];
    if (p.row_bias != nullptr) {
      u32 bias;
      load_row_bias(p, row, bias);
      total += row_bias_value(p, bias);
    }
    p.c[token * p.c_stride + row] = E::narrow(total);
  }
  if (!careful) return;

  // Columns of X that are not finite and that a row drops.
  __syncthreads();
  int* s_met = reinterpret_cast<int*>(s_x);
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    s_met[(token * kParts + warp) * 32 + lane] = met[token];
  }
  __syncthreads();
  for (int token = warp; token < p.n; token += kParts) {
    int found = 0;
    for (int part = 0; part < kParts; ++part) found += s_met[(token * kParts + part) * 32 + lane];
    if (row >= 0 && found < s_counts[token]) {
      p.c[token * p.c_stride + row] = E::narrow(__uint_as_float(0x7fc00000u));
    }
  }
}
