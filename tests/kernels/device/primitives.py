"""Small kernels, each around one header of the device tree: how they are made and launched.

Folders here are those of the device tree.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsetile.core.device import capability
from sparsetile.jit import KernelSource, ParamStruct, load
from sparsetile.jit.params import Field
from sparsetile.jit.source import ConfigValue

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
FP8 = torch.float8_e4m3fn
MMA_TYPES = (F32, F16, BF16)
NAMES = {F32: "F32", F16: "F16", BF16: "BF16", F64: "F64", FP8: "E4M3"}  # traits of device code

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
HOPPER = torch.cuda.is_available() and capability(0) == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="no sm_90 GPU here")


def primitive(
    folder: Path, name: str, config: dict[str, ConfigValue], *fields: Field
) -> KernelSource:
    """Return the source of a kernel of ``folder``."""
    return KernelSource.make(f"{name}.cu", name, config, ParamStruct.of(*fields)).in_folder(folder)


def run(
    source: KernelSource, grid: tuple[int, int], threads: int, **values: Tensor | float
) -> None:
    """Launch on the current stream and wait; tensors stand for their addresses."""
    given = {n: v.data_ptr() if isinstance(v, Tensor) else v for n, v in values.items()}
    stream = torch.cuda.current_stream().cuda_stream
    load(source, 0, torch.cuda.current_device()).launch((*grid, 1), threads, stream, given)
    torch.cuda.synchronize()


def whole(*shape: int, most: int = 4, seed: int = 0) -> Tensor:
    """Whole numbers from -most to most, as float64."""
    maker = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randint(-most, most + 1, shape, generator=maker).double()


def cuda(array: Tensor | np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(array).to("cuda", dtype)
