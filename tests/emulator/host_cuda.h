// CUDA's words for a host compiler. The threads of a block take turns on one host thread: each runs
// until it waits at a barrier, so that every lane of a mask must take part in what is called
// *_sync, as on a GPU. Whose turn comes first is drawn anew each time: what lacks a barrier reads
// too early.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

using std::isfinite;
using std::max;
using std::min;

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
inline Index threadIdx, blockIdx, gridDim;

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
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long all = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(all >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  }
  return result;
}
inline float __expf(float x) { return std::exp(x); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline int atomicAdd(int* address, int value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline int atomicOr(int* address, int value) {
  return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);
}
inline unsigned long long atomicOr(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);
}

class Barrier;

struct Copy {  // one of those that a thread has begun
  void* to;
  const void* from;
  int bytes;   // that are read
  int filled;  // that are written; the rest of them are zeros
};
struct Thread {
  jmp_buf place;  // where it goes on
  std::unique_ptr<char[]> stack;
  const Barrier* at = nullptr;  // where it waits, and for the end of which round
  unsigned round = 0;
  bool ended = false;
  std::vector<Copy> begun;
  std::vector<std::vector<Copy>> under_way;
};
inline Thread* running;
inline jmp_buf scheduler;

// Another thread's turn. By jumps: swapcontext asks the kernel for signal masks each time.
[[gnu::noinline]] inline void give_way() {
  if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}
[[gnu::noinline]] inline void resume(Thread& thread) {
  running = &thread;
  if (!_setjmp(scheduler)) _longjmp(thread.place, 1);
}

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    if (++arrived_ == count_) {
      arrived_ = 0;
      ++round_;
    } else {
      running->at = this;
      running->round = round_;
    }
    give_way();  // the last one as well: others may come first
  }
  unsigned round() const { return round_; }

 private:
  int count_, arrived_ = 0;
  unsigned round_ = 0;
};

struct Warp {
  unsigned word[32][8];  // what each lane shows the others

  void wait(unsigned mask = ~0u) {
    if (mask == ~0u) return barrier_.wait();
    some_.try_emplace(mask, __builtin_popcount(mask)).first->second.wait();
  }

 private:
  Barrier barrier_{32};
  std::map<unsigned, Barrier> some_;  // of a part of the warp's lanes
};
inline std::vector<Warp*> warps;
inline Barrier* block_barrier;

inline Warp& this_warp() { return *warps[threadIdx.x / 32]; }
inline int this_lane() { return threadIdx.x % 32; }
inline void __syncwarp(unsigned mask = ~0u) { this_warp().wait(mask); }
inline void __syncthreads() { block_barrier->wait(); }

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

constexpr std::size_t kThreadStack = 256 << 10;

// Threads with their stacks, which blocks and launches take in turn: most of a short kernel's time
// would be spent on new ones. Each waits where the code of its next block begins.
inline std::vector<std::unique_ptr<Thread>> threads_kept;
inline void (*thread_code)();

inline void begin_thread() {
  for (;;) {
    give_way();
    thread_code();
    running->ended = true;
  }
}

inline void keep_threads(unsigned count) {
  while (threads_kept.size() < count) {
    threads_kept.emplace_back(new Thread);
    Thread& made = *threads_kept.back();
    made.stack.reset(new char[kThreadStack]);
    ucontext_t begin;
    getcontext(&begin);
    begin.uc_stack.ss_sp = made.stack.get();
    begin.uc_stack.ss_size = kThreadStack;
    begin.uc_link = nullptr;
    makecontext(&begin, begin_thread, 0);
    running = &made;
    if (!_setjmp(scheduler)) setcontext(&begin);
  }
}

// Let each thread of a block run from barrier to barrier until all have ended.
template <typename Kernel>
void run_block(unsigned threads, const Kernel& kernel, std::minstd_rand& draw) {
  static const Kernel* code;  // what a thread begins with takes no arguments
  code = &kernel;
  thread_code = [] { (*code)(); };
  keep_threads(threads);
  std::vector<unsigned> order(threads);
  for (unsigned t = 0; t < threads; ++t) {
    order[t] = t;
    Thread& each = *threads_kept[t];
    each.at = nullptr;
    each.ended = false;
    each.begun.clear();
    each.under_way.clear();
  }
  for (unsigned left = threads; left;) {
    bool any = false;
    std::shuffle(order.begin(), order.end(), draw);
    for (unsigned t : order) {
      Thread& each = *threads_kept[t];
      if (each.ended || (each.at && each.at->round() == each.round)) continue;
      any = true;
      each.at = nullptr;
      threadIdx = {t, 0, 0};
      resume(each);
      left -= each.ended;
    }
    if (!any) {
      std::fprintf(stderr, "emulator: %u threads wait where others never come\n", left);
      std::abort();
    }
  }
}

// Run a kernel over a grid, one block after the other.
template <typename Kernel>
void run_grid(Index grid, unsigned threads, const Kernel& kernel) {
  std::minstd_rand draw(threads);
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        for (unsigned w = 0; w < threads / 32; ++w) warps.push_back(new Warp);
        block_barrier = new Barrier(threads);
        run_block(threads, kernel, draw);
        for (Warp* warp : warps) delete warp;
        warps.clear();
        delete block_barrier;
      }
    }
  }
}
