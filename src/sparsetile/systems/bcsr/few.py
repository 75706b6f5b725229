"""Launches of ``linear_few``: a linear layer of kept blocks for up to 16 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import capability, machine
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import (
    PreparedLaunch,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.kernels.linear_few import (
    FEW_COLUMNS,
    FEW_TOKENS,
    FEW_TYPES,
    FEW_UNITS,
    LINEAR_FEW,
    FewTile,
    choose_few_tile,
    few_config,
)
from sparsetile.launch.epilogue import epilogue_params, row_bias_params
from sparsetile.launch.geometry import aligned
from sparsetile.launch.interface import Epilogue

__all__ = ["FewTokens"]

_AMPERE = (8, 0)
# Parameters that change from call to call.
_OPERANDS = ("b", "c")


class FewTokens:
    """The kernel for one weight's size; its tile depends on the tokens."""

    def __init__(self, rows: int, cols: int, blocks: int, unit: int, paired: bool = False) -> None:
        # A pair, gate and up, makes half of the rows.
        self.rows, self.cols = rows // 2 if paired else rows, cols
        self._paired = paired
        self._blocks, self._unit = blocks, unit
        self._kernels: dict[tuple[Any, ...], tuple[LoadedKernel, FewTile]] = {}

    def reasons(self, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Return why this kernel does not support the weight; empty if it does."""
        found = []
        if dtype not in FEW_TYPES:
            found.append(f"takes 16 bits, not {str(dtype).removeprefix('torch.')}")
        if self._unit not in FEW_UNITS:
            found.append(f"takes blocks of {FEW_UNITS}, not {self._unit}")
        if self.cols % FEW_COLUMNS:
            found.append(f"takes inputs of a multiple of {FEW_COLUMNS} features, not {self.cols}")
        if device.type != "cuda" or capability(device) < _AMPERE:
            found.append("needs a GPU of sm_80 or newer")
        return found

    @staticmethod
    def takes(X: Tensor) -> bool:
        """Whether X [..., tokens, K] is read in place."""
        return 0 < X.shape[-2] <= FEW_TOKENS and X.stride(-1) == 1 and aligned(X)

    def _load(
        self, dtype: torch.dtype, out_dtype: torch.dtype, tokens: int, device: int, eight: bool,
    ) -> tuple[LoadedKernel, FewTile]:  # fmt: skip
        processors = machine(torch.device("cuda", device)).processors
        tile = choose_few_tile(
            tokens, self.rows, self._blocks, self._unit, processors, self._paired
        )
        key = (dtype, out_dtype, tile, device, eight)
        if key not in self._kernels:
            kernel = LINEAR_FEW.load(few_config(dtype, tile, out_dtype, eight), device)
            self._kernels[key] = (kernel, tile)
        return self._kernels[key]

    def _params(
        self, lists: tuple[Tensor, Tensor], order: Tensor | None, blocks: Tensor, X: Tensor,
        c_stride: int, epilogue: Epilogue, silu: bool, spoilt: Tensor | None,
        exponents: Tensor | None,
    ) -> dict[str, int | float]:  # fmt: skip
        shared = epilogue_params(epilogue)
        return {
            "b": 0, "c": 0, "blocks": blocks.data_ptr(),
            "exponents": 0 if exponents is None else exponents.data_ptr(),
            "block_row_ptr": lists[0].data_ptr(), "block_col_idx": lists[1].data_ptr(),
            **row_bias_params(epilogue),
            "spoilt": 0 if spoilt is None else spoilt.data_ptr(), "x_stride": X.stride(0),
            "c_stride": c_stride,
            "order": 0 if order is None or not order.numel() else order.data_ptr(),
            "rows": self.rows, "indptr": 0, **shared, "epilogue": bool(shared["epilogue"]) or silu,
            "silu": silu, "pair_block_rows": self.rows // self._unit if self._paired else 0,
            "n": X.shape[0], "cols": self.cols,
        }  # fmt: skip

    def run(
        self, lists: tuple[Tensor, Tensor], blocks: Tensor, X: Tensor, Y: Tensor,
        epilogue: Epilogue, *, order: Tensor | None = None, silu: bool = False,
        spoilt: Tensor | None = None, exponents: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Multiply X [tokens, K] into Y [tokens, M], whose rows are contiguous.

        ``lists`` are block_row_ptr and block_col_idx. ``exponents`` [blocks], of int8, come with
        blocks of FP8, which are scaled by two to this power: at most 7.
        """
        if not self.rows:
            return
        device = X.device.index
        kernel, tile = self._load(X.dtype, Y.dtype, X.shape[0], device, exponents is not None)
        params = self._params(
            lists, order, blocks, X, Y.stride(0), epilogue, silu, spoilt, exponents
        )
        params |= {"b": X.data_ptr(), "c": Y.data_ptr()}
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            kernel.launch(tile.grid(self.rows), tile.threads, stream, params)

    def prepare(
        self, lists: tuple[Tensor, Tensor], blocks: Tensor, X: Tensor, epilogue: Epilogue,
        silu: bool, exponents: Tensor | None = None, order: Tensor | None = None,
        also: tuple[str, ...] = (),
    ) -> PreparedLaunch:  # fmt: skip
        """Return the launch for inputs like X and contiguous results, ready for addresses of X, Y
        and what ``also`` names."""
        eight = exponents is not None
        kernel, tile = self._load(X.dtype, X.dtype, X.shape[0], X.device.index, eight)
        params = self._params(lists, order, blocks, X, self.rows, epilogue, silu, None, exponents)
        return kernel.prepare(tile.grid(self.rows), tile.threads, params, (*_OPERANDS, *also))
