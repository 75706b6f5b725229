// The threads of host_cuda.h: whose turn it is, barriers, and copies that are under way. Whose turn
// comes first is drawn anew each time: what lacks a barrier reads too early.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "host_cuda.h"

Index threadIdx, blockIdx, gridDim;
Warp warps[32];

namespace {

class Barrier;

struct Copy {  // one of those that a thread has begun
  void* to;
  const void* from;
  int bytes, filled;
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
Thread* running;
jmp_buf scheduler;

// Another thread's turn. By jumps: swapcontext asks the kernel for signal masks each time.
[[gnu::noinline]] void give_way() {
  if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}
[[gnu::noinline]] void resume(Thread& thread) {
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

struct WarpBarriers {
  Barrier all{32};
  std::map<unsigned, Barrier> some;  // of a part of the warp's lanes
};
std::vector<WarpBarriers> warp_barriers;
Barrier* block_barrier;
std::map<int, Barrier> some_barriers;  // of a part of the block's warps

constexpr std::size_t kThreadStack = 256 << 10;

// Threads with their stacks, which blocks and launches take in turn: most of a short kernel's time
// would be spent on new ones. Each waits where the code of its next block begins.
std::vector<std::unique_ptr<Thread>> kept;
void (*code)();

void begin_thread() {
  for (;;) {
    give_way();
    code();
    running->ended = true;
  }
}

void keep_threads(unsigned count) {
  while (kept.size() < count) {
    kept.emplace_back(new Thread);
    Thread& made = *kept.back();
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
void run_block(unsigned threads, std::minstd_rand& draw) {
  std::vector<unsigned> order(threads);
  for (unsigned t = 0; t < threads; ++t) {
    order[t] = t;
    Thread& each = *kept[t];
    each.at = nullptr;
    each.ended = false;
    each.begun.clear();
    each.under_way.clear();
  }
  for (unsigned left = threads; left;) {
    bool any = false;
    std::shuffle(order.begin(), order.end(), draw);
    for (unsigned t : order) {
      Thread& each = *kept[t];
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

}  // namespace

void Warp::wait(unsigned mask) {
  WarpBarriers& mine = warp_barriers[this - warps];
  if (mask == ~0u) return mine.all.wait();
  mine.some.try_emplace(mask, __builtin_popcount(mask)).first->second.wait();
}

void __syncthreads() { block_barrier->wait(); }
void sync_some_warps(int barrier, int threads) {
  some_barriers.try_emplace(barrier, threads).first->second.wait();
}

void begin_copy(void* to, const void* from, int bytes, int filled) {
  running->begun.push_back({to, from, bytes, filled});
}
void commit_copies() {
  running->under_way.push_back(running->begun);
  running->begun.clear();
}
void wait_for_copies(int pending) {
  auto& under_way = running->under_way;
  while (static_cast<int>(under_way.size()) > pending) {
    for (const Copy& copy : under_way.front()) {
      std::memset(copy.to, 0, copy.filled);
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    under_way.erase(under_way.begin());
  }
}

void run_grid(Index grid, unsigned threads, void (*kernel)()) {
  std::minstd_rand draw(threads);
  gridDim = grid;
  code = kernel;
  keep_threads(threads);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        warp_barriers.assign(threads / 32, {});
        Barrier all(threads);
        block_barrier = &all;
        some_barriers.clear();
        run_block(threads, draw);
      }
    }
  }
}
