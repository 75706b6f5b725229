// Constants and parameters of spmm_bcsr.cu and its headers, and who stores C.
#pragma once

#include "mma/wgmma.cuh"

using E = ELEMENT;
using Out = OUTPUT;
using Acc = float;

constexpr int kBlock = 64;
constexpr bool kTensorCores = kStep >= 1, kEngine = kStep >= 2, kSpecialised = kStep >= 3,
               kElided = kStep >= 5;
#ifdef CLUSTERED
#define CLUSTER_DIMS __cluster_dims__(2, 1, 1)
constexpr int kCluster = 2;
#else
#define CLUSTER_DIMS
constexpr int kCluster = 1;
#endif
constexpr int kConsumers = kCols / 128;
constexpr int kHalves = kPaired ? 2 : 1;                // block rows of an item
constexpr int kFirstConsumer = kSpecialised ? 128 : 0;  // thread
constexpr int kBlocksPerSM = kConsumers == 1 || !kSpecialised ? 2 : 1;
constexpr int kPieces = sizeof(E::Storage) == 4 ? 2 : 1;  // stages that a block takes
constexpr int kDepth = kBlock / kPieces;                  // columns of A, rows of B, in a stage
constexpr int kRowBytes = kDepth * sizeof(E::Storage);    // of a block, and of a K-major B
constexpr int kBlockBytes = kBlock * kRowBytes;
constexpr int kBoxBytes = kBlock * kRowBytes;  // of B: 64 rows x 64 columns, or 64 columns x kDepth
constexpr int kBoxes = kCols / 64;
constexpr int kStageBytes = kBlockBytes + kBoxes * kBoxBytes;
constexpr int kStoreBoxBytes = 16 * 128;  // a warp's rows of C, 64 columns
constexpr int kWarpStoreBytes = 2 * kStoreBoxBytes;
constexpr int kStoreBytes = kPieces == 1 ? kConsumers * 4 * kWarpStoreBytes : 0;

// Declared in kernels/bcsr.py.
struct Params {
  PARAMS_FIELDS
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");
static_assert(kCols % 128 == 0 && (sizeof(E::Storage) == 2 || (kKMajor && kElided)),
              "a consumer takes 128 columns of 16 bits, or K-major of 8 or 32");
static_assert(kCluster == 1 || (kStep == 7 && sizeof(E::Storage) == 2),
              "the last step is for 16 bits");
static_assert(!kPaired || (kStep == 6 && kKMajor && sizeof(E::Storage) == 2),
              "gate and up are halves of a linear layer of 16 bits");
static_assert(kThreads == kFirstConsumer + kConsumers * 128 && (kSpecialised || kStages == 1),
              "one warpgroup copies, the others multiply");

// From kTransposed on columns of C are rows of memory; the last is only for float32.
enum Store { kByThreads, kByEngine, kTransposed, kTransposedByThreads };
