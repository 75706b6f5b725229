// A step of a warp: sixteen rows of A by sixteen columns of 16-bit types (m16n8k16), or by eight of
// float32 (m16n8k8 in TF32). Tiles have eight columns. Included after the element types.
#pragma once

#include "mma/mma.cuh"

constexpr int kSize = sizeof(E::Storage);
constexpr bool kHalf = kSize == 2;
constexpr int kDepth = kHalf ? 2 : 1;  // tiles of a step
constexpr int kStepRows = 8 * kDepth;  // rows of B behind its columns

static_assert(kSize == 2 || kSize == 4, "types that have such instructions");
