// round_tf32 of mma.cuh, one word a thread; transpose and narrow_pair of wgmma.cuh, four words a
// lane.
#include "mma/mma.cuh"
#include "mma/wgmma.cuh"

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void registers(const __grid_constant__ Params p) {
  const int at = blockIdx.x * 32 + threadIdx.x;
  p.rounded[at] = round_tf32(p.given[at]);
  u32 word[4];
  for (int i = 0; i < 4; ++i) word[i] = 4 * at + i;
  transpose(word, threadIdx.x % 4);
  for (int i = 0; i < 4; ++i) p.transposed[4 * at + i] = word[i];
  p.pairs[at] = narrow_pair<OUTPUT>(float(at), -float(at));
}
