// The MMA instructions of mma.cuh by what the manual says of their operands. Included in place of
// the device's functions of these names.
inline u32 round_tf32(u32 bits) {
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
  return (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}

// c += 16 x kDepth of A times kDepth x 8 of B; number(word, part) is one of kEach numbers of a
// word.
template <int kDepth, int kEach, typename Number>
void multiply_emulated(const uint4& a, u32 b0, u32 b1, float (&c)[4], const Number& number) {
  Warp& warp = this_warp();
  const int lane = this_lane(), g = lane / 4, t = lane % 4;
  const u32 shown[6] = {a.x, a.y, a.z, a.w, b0, b1};
  for (int i = 0; i < 6; ++i) warp.word[lane][i] = shown[i];
  warp.wait();
  float result[4];
  for (int e = 0; e < 4; ++e) {
    const int m = g + e / 2 * 8, n = 2 * t + e % 2;
    double sum = c[e];
    for (int k = 0; k < kDepth; ++k) {
      const int from = k % (4 * kEach) / kEach, upper = k / (4 * kEach), half = k % kEach;
      sum += static_cast<double>(number(warp.word[m % 8 * 4 + from][m / 8 + 2 * upper], half)) *
             static_cast<double>(number(warp.word[n * 4 + from][4 + upper], half));
    }
    result[e] = static_cast<float>(sum);
  }
  warp.wait();
  for (int e = 0; e < 4; ++e) c[e] = result[e];
}

template <bool kBrain>
float half_of(u32 word, int half) {
  const u16 bits = word >> 16 * half;
  return kBrain ? ptx::bf16_to_f32(bits) : ptx::f16_to_f32(bits);
}
template <bool kBrain>
void multiply_16(const uint4& a, u32 b0, u32 b1, float (&c)[4]) {
  multiply_emulated<16, 2>(a, b0, b1, c, half_of<kBrain>);
}
template <bool kBrain>
void mma_16_bit(const uint2& a, u32 b, float (&c)[4]) {
  multiply_emulated<8, 2>({a.x, a.y, 0, 0}, b, 0, c, half_of<kBrain>);
}
inline void mma_tf32(const uint4& a, u32 b0, u32 b1, float (&c)[4]) {
  multiply_emulated<8, 1>(a, b0, b1, c, [](u32 word, int) { return __uint_as_float(word); });
}
