// windows.cuh: goes through an item's tiles and notes when each window is stored (the tile) and
// which are computed again. Windows whose bit of `bad` is set are not finite.
#include "windows/windows.cuh"

struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

extern "C" __global__ void windows(const __grid_constant__ Params p) {
  const int4 item = p.items[blockIdx.x];
  Windows windows(p.offsets, item);
  for (int tile = item.y;; ++tile) {
    const auto store = [&](int window) {
      p.stored[window] = tile;
      return !(p.bad >> window & 1);
    };
    if (tile == windows.stop) windows.close(p.offsets, tile, store);
    if (tile >= item.z) break;
  }
  if (item.w >= 0) p.stored[windows.window] = item.z;
  windows.repair([&](int window) { p.redone[window] += 1; });
}
