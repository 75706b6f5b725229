"""Launches of ``spmm_brp``: A's tiles as slots, and entries outside tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.formats.values import round_tf32
from sparsetile.jit import LoadedKernel
from sparsetile.kernels.brp import SPMM_BRP, brp_config, choose_brp_slabs
from sparsetile.kernels.rstile import Slabs
from sparsetile.systems.base import Tensors
from sparsetile.systems.shared.hybrid_runner import HybridRunner

__all__ = ["BRPRunner"]


class BRPRunner(HybridRunner):
    """Packed ``slots`` and ``rest``: values in groups and outside; both empty for a pattern."""

    packed_names = ("slots", "rest")

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._fixed = int(meta["fixed"])

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        if values is None:
            none = torch.empty(0, dtype=dtype, device=tensors["slot_ids"].device)
            return {"slots": none, "rest": none}
        values = values.to(dtype)
        slots = values[tensors["slot_entries"]]
        return {
            "slots": round_tf32(slots) if dtype is torch.float32 else slots,
            "rest": values[tensors["rest_entries"]],
        }

    def load(
        self, dtype: torch.dtype, out_dtype: torch.dtype, slabs: Slabs, weighted: bool, device: int
    ) -> LoadedKernel:
        config = brp_config(dtype, slabs, weighted, self._fixed, out_dtype=out_dtype)
        return SPMM_BRP.load(config, device)

    def choose_slabs(self, dtype: torch.dtype, n: int) -> Slabs:
        return choose_brp_slabs(dtype, n)

    def weights(self, tensors: Tensors, packed: Tensors) -> dict[str, Any]:
        names = ("slot_ids", "window_rest", "rest_rows", "rest_columns")
        return {
            **{name: tensors[name].data_ptr() for name in names},
            "slot_values": packed["slots"].data_ptr(),
            "rest_values": packed["rest"].data_ptr(),
        }
