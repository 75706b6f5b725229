"""Launches of ``spmm_rstile``: A's tiles as fragments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.tiles.hybrid_runner import HybridRunner
from sparsetile.formats.fragments import fragment_elements, fragment_places
from sparsetile.formats.values import round_tf32
from sparsetile.jit import LoadedKernel
from sparsetile.kernels.rstile import SPMM_RSTILE, Slabs, choose_slabs, rstile_config
from sparsetile.launch.interface import Tensors

__all__ = ["RSHRunner"]


class RSHRunner(HybridRunner):
    """Packed ``fragments``: A's tiles as MMA operands; ones for a pattern."""

    packed_names = ("fragments",)

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        cells, entries = tensors["cells"], tensors["entries"]
        size = fragment_elements(self._tiles, dtype.itemsize)
        fragments = torch.zeros(size, dtype=dtype, device=cells.device)
        places = fragment_places(cells, dtype.itemsize)
        if values is None:
            fragments[places] = 1.0
        else:
            picked = values.to(dtype)[entries]
            fragments[places] = round_tf32(picked) if dtype is torch.float32 else picked
        return {"fragments": fragments}

    def load(
        self, dtype: torch.dtype, out_dtype: torch.dtype, slabs: Slabs, weighted: bool, device: int
    ) -> LoadedKernel:
        config = rstile_config(dtype, slabs, weighted, out_dtype=out_dtype)
        return SPMM_RSTILE.load(config, device)

    def choose_slabs(self, dtype: torch.dtype, n: int) -> Slabs:
        return choose_slabs(dtype, n)

    def weights(self, tensors: Tensors, packed: Tensors) -> dict[str, Any]:
        return {
            "bitmaps": tensors["bitmaps"].data_ptr(),
            "fragments": packed["fragments"].data_ptr(),
        }
