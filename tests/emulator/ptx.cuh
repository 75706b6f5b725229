// ptx.cuh for a host compiler: the same names. Asynchronous copies are made where a thread waits
// for them, and what is under way until then is not there.
#pragma once

using i32 = int;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

constexpr u32 kWarp = 0xffffffffu;

namespace ptx {

// By hand: not every host compiler has the type.
inline float f16_to_f32(u16 bits) {
  const u32 sign = static_cast<u32>(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return __uint_as_float(sign | (rest << 13) + (112u << 23));
  return __uint_as_float(sign | __float_as_uint(__builtin_ldexpf(static_cast<float>(rest), -24)));
}
inline u16 f32_to_f16(float value) {
  const u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return sign | 0x7e00;
  if (rest >= 0x477ff000u) return sign | 0x7c00;  // 65520 and more
  if (rest >= 0x38800000u) return sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
  return sign | static_cast<u32>(__builtin_nearbyintf(__builtin_ldexpf(__uint_as_float(rest), 24)));
}
inline float bf16_to_f32(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
inline u16 f32_to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void wait_previous() {}
inline void let_next_start() {}
inline void sync_some(int barrier, int threads) { sync_some_warps(barrier, threads); }
inline int lane_now() { return this_lane(); }
inline u32 lanes_below() { return (1u << this_lane()) - 1; }

template <typename T>
T infinity() {
  return static_cast<T>(__builtin_huge_valf());
}
template <typename T>
T max_nan(T a, T b) {
  return b > a || b != b ? b : a;
}
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <int kCount, typename T>
void fma_if(bool here, T weight, const T (&x)[kCount], T (&sum)[kCount]) {
  for (int v = 0; here && v < kCount; ++v) sum[v] = fused(weight, x[v], sum[v]);
}
template <int kCount, typename T>
void add_if(bool here, const T (&x)[kCount], T (&sum)[kCount]) {
  for (int v = 0; here && v < kCount; ++v) sum[v] += x[v];
}
template <typename T>
T load_nc(const T* address) {
  if (reinterpret_cast<u64>(address) % sizeof(T) != 0) std::abort();  // as a GPU would
  return *address;
}
template <bool kBrain>
u32 multiply_pairs(u32 a, u32 b) {
  u32 product = 0;
  for (int half = 0; half < 2; ++half) {
    const u16 x = a >> 16 * half, y = b >> 16 * half;
    const u16 made = kBrain ? f32_to_bf16(bf16_to_f32(x) * bf16_to_f32(y))
                            : f32_to_f16(f16_to_f32(x) * f16_to_f32(y));
    product |= static_cast<u32>(made) << 16 * half;
  }
  return product;
}
inline uint4 load_once(const void* address) { return *static_cast<const uint4*>(address); }
inline void load_unwaited(const u32* from, u32& to) { to = *from; }
inline void load_unwaited(const u16* from, u32& to) { to = *from; }
template <typename T>
void store_cs(T* address, T value) {
  *address = value;
}

template <int kCount>
void add_global(float* address, const float (&sum)[kCount]) {
  if (reinterpret_cast<u64>(address) % sizeof(sum) != 0) std::abort();  // as a GPU would
  for (int v = 0; v < kCount; ++v) {
    auto* word = reinterpret_cast<u32*>(address + v);
    u32 bits = __atomic_load_n(word, __ATOMIC_SEQ_CST), added;
    do {
      added = __float_as_uint(__uint_as_float(bits) + sum[v]);
    } while (!__atomic_compare_exchange_n(word, &bits, added, false, __ATOMIC_SEQ_CST,
                                          __ATOMIC_SEQ_CST));
  }
}

template <bool kCached>
void copy_async(void* shared, const void* global, bool inside) {
  begin_copy(shared, global, inside ? 16 : 0, 16);
}
template <int kBytes>
void copy_async_small(void* shared, const void* global) {
  begin_copy(shared, global, kBytes, kBytes);
}
inline void copy_commit() { commit_copies(); }
template <int kPending>
void copy_wait() {
  wait_for_copies(kPending);
}

inline void load_matrix(const void* row, u32 (&word)[4]) {
  Warp& warp = this_warp();
  const int lane = this_lane(), g = lane / 4, t = lane % 4;
  const u64 address = reinterpret_cast<u64>(row);
  if (address % 16 != 0) std::abort();  // as a GPU would
  warp.word[lane][0] = static_cast<u32>(address);
  warp.word[lane][1] = static_cast<u32>(address >> 32);
  warp.wait();
  for (int i = 0; i < 4; ++i) {
    const u32* from = warp.word[8 * i + g];
    const u64 place = static_cast<u64>(from[1]) << 32 | from[0];
    word[i] = reinterpret_cast<const u32*>(place)[t];
  }
  warp.wait();
}

inline void load_matrix_transposed(const void* row, u32 (&word)[4]) {
  Warp& warp = this_warp();
  const int lane = this_lane(), g = lane / 4, t = lane % 4;
  const u64 address = reinterpret_cast<u64>(row);
  warp.word[lane][0] = static_cast<u32>(address);
  warp.word[lane][1] = static_cast<u32>(address >> 32);
  warp.wait();
  for (int i = 0; i < 4; ++i) {
    u32 pair = 0;
    for (int k = 0; k < 2; ++k) {
      const u32* from = warp.word[8 * i + 2 * t + k];
      const u64 place = static_cast<u64>(from[1]) << 32 | from[0];
      pair |= static_cast<u32>(reinterpret_cast<const u16*>(place)[g]) << 16 * k;
    }
    word[i] = pair;
  }
  warp.wait();
}

}  // namespace ptx
