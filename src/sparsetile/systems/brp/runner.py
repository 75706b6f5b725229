"""Launches of ``spmm_brp``: A's tiles as slots, and entries outside tiles.

With atomics (kernels/cuda/windows/window_adds.cuh) rows of C in windows have no owner: the work
before and after their sums is done here, on the launch's stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.tiles.hybrid_runner import HybridRunner, Launch
from sparsetile.formats.values import round_tf32
from sparsetile.jit import LoadedKernel
from sparsetile.kernels.brp import SPMM_BRP, brp_config, choose_brp_slabs
from sparsetile.kernels.rstile import Slabs
from sparsetile.launch.geometry import Geometry
from sparsetile.launch.interface import PLAIN, Epilogue, Prepared, Tensors

__all__ = ["BRPRunner"]


class BRPRunner(HybridRunner):
    """Packed ``slots`` and ``rest``: values in groups and outside; both empty for a pattern."""

    packed_names = ("slots", "rest")

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._fixed = int(meta["fixed"])
        self._atomic = bool(meta.get("atomic", False))  # missing in older plan files
        self._direct = bool(meta.get("direct", False))  # likewise

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
        config = brp_config(
            dtype, slabs, weighted, self._fixed, out_dtype=out_dtype, atomic=self._atomic,
            direct=self._direct and dtype is torch.float32,
        )  # fmt: skip
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

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        if not self._atomic or out.dtype is torch.float32:
            super().spmm(tensors, values, packed, B, out, epilogue)
            return
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        if epilogue.beta != 0.0:
            wide.copy_(out)
        super().spmm(tensors, values, packed, B, wide, epilogue)
        out.copy_(wide)

    def _multiply(
        self, launch: Launch, shape: Geometry, batches: int, tensors: Tensors,
        values: Tensor | None, packed: Tensors, out: Tensor, epilogue: Epilogue,
    ) -> None:  # fmt: skip
        if self._atomic:
            self._begin(tensors["order"], out, epilogue)
        super()._multiply(launch, shape, batches, tensors, values, packed, out, epilogue)
        if self._atomic and epilogue.relu:
            out.relu_()  # a second time for rows outside of windows, with no effect

    def _begin(self, order: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """Write beta * C + bias, to which windows add. Other rows are unchanged; their kernel reads
        them if beta is not 0."""
        if epilogue.beta == 0.0 and epilogue.bias is None:
            out.zero_()
            return
        rows = order.long()
        if epilogue.beta != 0.0:
            begun = out.index_select(-2, rows).mul_(epilogue.beta)
        else:  # C may be uninitialised and contain NaN
            begun = out.new_zeros((*out.shape[:-2], rows.numel(), out.shape[-1]))
        if epilogue.bias is not None:
            begun += epilogue.bias
        out.index_copy_(-2, rows, begun)

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:  # fmt: skip
        """Return the launch of the base class; None with atomics, which need C zeroed first."""
        if self._atomic:
            return None
        return super().prepare_launches(tensors, values, packed, B, epilogue)
