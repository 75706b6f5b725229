// CUDA's words for a host compiler. The threads of a block take turns on one host thread: each runs
// until it waits at a barrier, so that every lane of a mask must take part in what is called
// *_sync, as on a GPU. Whose turn it is host_threads.h says, a library of its own: containers here
// would take longer to compile than most kernels, and to link the C++ library half as long.
#pragma once

// What is used of <cmath>, <cstdlib>, <cstring> and <algorithm>: even precompiled, those headers
// would be a sixth of a kernel's compilation.
extern "C" {
void abort() noexcept;
void* memcpy(void*, const void*, unsigned long) noexcept;
float fmaf(float, float, float) noexcept;
float fabsf(float) noexcept;
double sqrt(double) noexcept;
}
namespace std {
using ::abort;
using ::memcpy;
}  // namespace std
inline float sqrt(float x) { return __builtin_sqrtf(x); }
template <typename T>
bool isfinite(T x) {
  return __builtin_isfinite(x);
}
template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <typename T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other
#define __CUDA_ARCH__ 900

struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline int2 make_int2(int a, int b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
inline int4 make_int4(int a, int b, int c, int d) { return {a, b, c, d}; }

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}
template <typename T>
void __stcg(T* address, T value) {
  *address = value;
}

template <typename To, typename From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
inline unsigned __float_as_uint(float value) { return bits_of<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long all = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(all >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  }
  return result;
}
inline void __nanosleep(unsigned) { std::abort(); }  // blocks run one after the other
inline float __expf(float x) { return __builtin_expf(x); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline int atomicAdd(int* address, int value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
template <typename Number>
inline Number atomicMax(Number* address, Number value) {
  const Number found = *address;  // threads take turns
  *address = max(found, value);
  return found;
}
inline int atomicMin(int* address, int value) {
  const int found = *address;  // threads take turns
  *address = min(found, value);
  return found;
}
template <typename Number>
inline Number atomicCAS(Number* address, Number expected, Number value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline int atomicOr(int* address, int value) {
  return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);
}
inline unsigned long long atomicOr(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);
}

struct Warp {
  unsigned word[32][8];  // what each lane shows the others

  void wait(unsigned mask = ~0u);
};
extern Warp warps[32];
inline Warp& this_warp() { return warps[threadIdx.x / 32]; }
inline int this_lane() { return threadIdx.x % 32; }
inline void __syncwarp(unsigned mask = ~0u) { this_warp().wait(mask); }
void __syncthreads();
inline int __syncthreads_or(int value) {
  static int any;  // blocks run one after the other
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= value != 0;
  __syncthreads();
  return any;
}
void sync_some_warps(int barrier, int threads);  // of the block, by a barrier's number

// Asynchronous copies of the thread whose turn it is: of ``filled`` bytes ``bytes`` are read, the
// rest of them are zeros.
void begin_copy(void* to, const void* from, int bytes, int filled);
void commit_copies();
void wait_for_copies(int pending);

// Run a kernel over a grid, one block after the other.
void run_grid(Index grid, unsigned threads, void (*kernel)());

// All lanes show up to two words; then each reads what it wants of them.
template <typename T, typename Read>
auto exchange(unsigned mask, T shown, const Read& read) {
  static_assert(sizeof(T) <= 8, "a lane shows two words");
  Warp& warp = this_warp();
  std::memcpy(warp.word[this_lane()], &shown, sizeof(T));
  warp.wait(mask);
  const auto result = read(warp);
  warp.wait(mask);
  return result;
}
template <typename T>
T shown_by(const Warp& warp, int lane) {
  T value;
  std::memcpy(&value, warp.word[lane], sizeof(T));
  return value;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int lane = this_lane() / width * width + (from % width + width) % width;
  return exchange(mask, value, [&](Warp& w) { return shown_by<T>(w, lane); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  const int lane = this_lane() ^ step;
  return exchange(mask, value, [&](Warp& w) { return shown_by<T>(w, lane); });
}
template <typename Fold>
unsigned fold(unsigned value, const Fold& join) {
  return exchange(~0u, value, [&](Warp& w) {
    unsigned result = w.word[0][0];
    for (int lane = 1; lane < 32; ++lane) result = join(result, w.word[lane][0]);
    return result;
  });
}
inline bool __any_sync(unsigned, bool value) {
  return fold(value, [](unsigned a, unsigned b) { return a | b; });
}
inline bool __all_sync(unsigned, bool value) {
  return fold(value, [](unsigned a, unsigned b) { return a & b; });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return fold(value ? 1u << this_lane() : 0u, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return fold(value, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return fold(value, [](unsigned a, unsigned b) { return a + b; });
}
inline int __reduce_max_sync(unsigned, int value) {
  return fold(value, [](unsigned a, unsigned b) { return unsigned(max(int(a), int(b))); });
}
inline int __reduce_min_sync(unsigned, int value) {
  return fold(value, [](unsigned a, unsigned b) { return unsigned(min(int(a), int(b))); });
}
