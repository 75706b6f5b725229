"""Small kernels of ``device/``, each around one header of the device tree: sources and launches."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor

from sparsetile.jit import KernelSource, ParamStruct, load
from sparsetile.jit.params import Field, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.bcsr import ELEMENTS
from sparsetile.kernels.params import EPILOGUE, POSITIONS, TREE

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
FP8 = torch.float8_e4m3fn
MMA_TYPES = (F32, F16, BF16)
NAMES = {**ELEMENTS, F64: "F64"}
DEVICE = Path(__file__).parent / "device"


def primitive(name: str, config: dict[str, ConfigValue], *fields: Field) -> KernelSource:
    return KernelSource.make(f"{name}.cu", name, config, ParamStruct.of(*fields)).in_folder(DEVICE)


def run(
    source: KernelSource, grid: tuple[int, int], threads: int, **values: Tensor | float
) -> None:
    """Launch on the current stream and wait; tensors stand for their addresses."""
    given = {n: v.data_ptr() if isinstance(v, Tensor) else v for n, v in values.items()}
    stream = torch.cuda.current_stream().cuda_stream
    load(source, 0, torch.cuda.current_device()).launch((*grid, 1), threads, stream, given)
    torch.cuda.synchronize()


def tile_product(dtype: torch.dtype, weighted: bool, stack: int, stored: bool) -> KernelSource:
    return primitive(
        "tile_product",
        {"ELEMENT": NAMES[dtype], "kWeighted": weighted, "kStack": stack, "kStored": stored},
        pointer("bitmaps", "const u64*"),
        pointer("values", "const E::Storage*"),
        pointer("b", "const E::Storage*", "[8, 8 kSpan]"),
        pointer("weights", "u32*", "[32, kStack, words]"),
        pointer("c", "float*", "[8 kStack, 8 kSpan]"),
        pointer("count", "int*"),
        i32("tile"),
        i32("begin"),
        i32("end"),
    )


def copy_ring(dtype: torch.dtype, columns: int, stages: int, whole: bool) -> KernelSource:
    return primitive(
        "copy_ring",
        {"ELEMENT": NAMES[dtype], "kCols": columns, "kStages": stages, "kWhole": whole},
        pointer("ids", "const int*"),
        pointer("b", "const E::Storage*"),
        pointer("out", "E::Storage*", "[tiles, 8, kCols]"),
        i32("b_row_bytes"),
        i32("tiles"),
        i32("n"),
    )


def barrier_ring(stages: int, bulk: bool) -> KernelSource:
    return primitive(
        "barrier_ring",
        {"kStages": stages, "kBulk": bulk},
        pointer("given", "const u32*", "[steps, 128]"),
        pointer("out", "u32*", "[2, steps, 128]"),
        i32("steps"),
    )


def tree(lanes: int, words: int) -> KernelSource:
    return primitive(
        "tree",
        {"kLanes": lanes, "kWords": words},
        pointer("leaves", "const u32*", "[layers, pieces, kLanes, kWords]"),
        pointer("out", "u32*", "[layers, kLanes, kWords]"),
        *TREE,
    )


def epilogue(out: torch.dtype, vector: int, count: int, row_bias: bool) -> KernelSource:
    # A plain store where rows have a bias, a streaming one elsewhere: both are tried.
    acc = "double" if out is F64 else "float"
    return primitive(
        "epilogue",
        {
            "OUTPUT": NAMES[out],
            "ACC": acc,
            "kVec": vector,
            "kCount": count,
            "kStream": not row_bias,
        },
        pointer("sums", "const Acc*", "[positions, n]"),
        pointer("c", "Out::Storage*"),
        *((pointer("row_bias", "const Acc*"),) if row_bias else ()),
        i64("c_row_stride"),
        i64("c_batch_stride"),
        *POSITIONS,
        *EPILOGUE,
        i32("n"),
    )


def exact(dtype: torch.dtype, chains: int, pieces: int = 1, batch: int = 2) -> KernelSource:
    return primitive(
        "exact",
        {"ELEMENT": NAMES[dtype], "kChains": chains, "kPieces": pieces, "kBatch": batch},
        pointer("cells", "const int*", "[tiles, 16, 8], not 0: an entry"),
        pointer("raw", "const u32*", "its bits"),
        pointer("columns", "const int*"),
        pointer("b", "const E::Storage*"),
        pointer("out", "float*", "[16, n]"),
        pointer("failed", "int*", "of each thread"),
        i64("b_row_bytes"),
        i32("tiles"),
        i32("n"),
    )


def windows() -> KernelSource:
    return primitive(
        "windows",
        {},
        pointer("items", "const int4*"),
        pointer("offsets", "const int*"),
        pointer("stored", "int*"),
        pointer("redone", "int*"),
        i64("bad"),
    )


def registers(out: torch.dtype) -> KernelSource:
    return primitive(
        "registers",
        {"OUTPUT": NAMES[out]},
        pointer("given", "const u32*"),
        pointer("rounded", "u32*"),
        pointer("transposed", "u32*"),
        pointer("pairs", "u32*"),
    )


def wgmma_shared(dtype: torch.dtype, k_major: bool) -> KernelSource:
    return primitive(
        "wgmma_shared",
        {"ELEMENT": NAMES[dtype], "kKMajor": k_major, "kRowBytes": 64 if dtype is FP8 else 128},
        pointer("a", "const E::Storage*"),
        pointer("b", "const E::Storage*"),
        pointer("c", "float*", "[64, 128]"),
    )


def wgmma_registers(dtype: torch.dtype, columns: int) -> KernelSource:
    return primitive(
        "wgmma_registers",
        {"ELEMENT": NAMES[dtype], "kCols": columns},
        pointer("a", "const E::Storage*", "[64, kK]"),
        pointer("b", "const E::Storage*", "[kK, kCols]"),
        pointer("c", "float*", "[64, kCols]"),
    )


# What the tests run; every one is compiled where there is no GPU.
TILE_PRODUCTS = tuple(itertools.product(MMA_TYPES, (True, False), (1, 2), (True, False)))
COPY_RINGS = (
    *((F32, 32, stages, True) for stages in (1, 2, 4)),
    (F32, 128, 2, True), (F32, 64, 2, False), (F16, 64, 2, True), (BF16, 128, 3, False),
)  # fmt: skip
BARRIER_RINGS = tuple(itertools.product((1, 3, 4), (False, True)))
TREES = tuple(itertools.product((8, 32), (1, 2, 4, 12, 20)))
EPILOGUES = (
    *((out, vector, vector, False) for out in (F32, F16, BF16) for vector in (1, 2, 4, 8)),
    (F64, 1, 1, False), (F64, 2, 2, False), (F16, 2, 8, True), (F32, 4, 8, True),
)  # fmt: skip
EXACTS = tuple(itertools.product(MMA_TYPES, (1, 4)))
WGMMA_SHARED = (
    *itertools.product((F16, BF16), (True, False)), (F32, True), (FP8, True),
)  # fmt: skip
WGMMA_REGISTERS = tuple(itertools.product(MMA_TYPES, (128, 256)))

SOURCES = (
    *(tile_product(*case) for case in TILE_PRODUCTS),
    *(copy_ring(*case) for case in COPY_RINGS),
    *(barrier_ring(*case) for case in BARRIER_RINGS),
    *(tree(*case) for case in TREES),
    *(epilogue(*case) for case in EPILOGUES),
    *(exact(*case) for case in EXACTS),
    windows(),
    *(registers(out) for out in (F16, BF16)),
    *(wgmma_shared(*case) for case in WGMMA_SHARED),
    *(wgmma_registers(*case) for case in WGMMA_REGISTERS),
)
