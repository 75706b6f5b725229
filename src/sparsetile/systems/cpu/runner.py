"""Calls of the numba kernels, matrix by matrix of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsetile.engines.runner import ExactRunner
from sparsetile.kernels.cpu.memory import HUGE_BYTES, empty_output
from sparsetile.launch.epilogue import apply_epilogue
from sparsetile.launch.interface import PLAIN, Bound, Epilogue, Tensors
from sparsetile.launch.kept import KeptLaunches

if TYPE_CHECKING:
    from sparsetile.kernels.cpu.api import Prepared

__all__ = ["CPURunner"]

_UNKNOWN: Any = object()


def _batches(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


def _widened(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return a tensor in the type of its products' sums, and that type."""
    wide = torch.float32 if tensor.dtype.itemsize == 2 else tensor.dtype
    return tensor.to(wide), wide


def _rows(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Row pointers int64, columns int32, chunk bounds int64."""
    return tensors["indptr"], tensors["columns"], tensors["bounds"]


class CPURunner(ExactRunner):
    """Imports LLVM, and numba if it has to compile, at the first product."""

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        from sparsetile.kernels.cpu import api

        indptr, columns, bounds = _rows(tensors)
        if out.dtype is not B.dtype:  # 16-bit input, float32 result: nothing is rounded between
            B = B.to(out.dtype)
            values = None if values is None else values.to(out.dtype)
        tail = epilogue.bias is not None or epilogue.relu
        beta = 0.0 if tail else epilogue.beta
        target = out
        if tail:  # the sum is rounded once, after the bias
            B, wide = _widened(B)
            target = torch.empty_like(out, dtype=wide)
        for b, c in zip(_batches(B), _batches(target), strict=True):
            api.spmm_sum(
                indptr, columns, values, b, c, epilogue.alpha, beta, bounds, mean=epilogue.mean
            )
        if tail:
            rest = Epilogue(beta=epilogue.beta, bias=epilogue.bias, relu=epilogue.relu)
            apply_epilogue(target, out, indptr, rest)

    def new_output(self, B: Tensor, dtype: torch.dtype) -> Tensor:
        if B.dim() != 2:
            return super().new_output(B, dtype)
        return empty_output(self.rows, B.shape[-1], dtype)

    def extremum(
        self, tensors: Tensors, values: Tensor | None, B: Tensor, out: Tensor, args: Tensor | None,
        maximum: bool,
    ) -> None:  # fmt: skip
        from sparsetile.kernels.cpu import api

        indptr, columns, bounds = _rows(tensors)
        if args is None:
            args = torch.empty(out.shape, dtype=self.place_dtype)
        for b, c, arg in zip(_batches(B), _batches(out), _batches(args), strict=True):
            api.spmm_extremum(indptr, columns, values, b, c, arg, maximum, bounds)

    @property
    def place_dtype(self) -> torch.dtype:
        return torch.int32

    def won(
        self, tensors: Tensors, values: Tensor | None, grad: Tensor, args: Tensor, order: Tensor,
        indptr: Tensor, out: Tensor,
    ) -> None:  # fmt: skip
        from sparsetile.kernels.cpu import api

        own, columns, bounds = _rows(tensors)
        for g, arg, c in zip(_batches(grad), _batches(args), _batches(out), strict=True):
            api.spmm_won(own, columns, values, g, arg, order, indptr, c, bounds)

    def sddmm(self, tensors: Tensors, G: Tensor, B: Tensor) -> Tensor:
        from sparsetile.kernels.cpu import api

        indptr, columns, bounds = _rows(tensors)
        (B, wide), (G, _) = _widened(B), _widened(G)
        total = torch.zeros(self.nnz, dtype=wide)
        for g, b in zip(_batches(G), _batches(B), strict=True):
            out = torch.empty(self.nnz, dtype=wide)
            api.sddmm(indptr, columns, g, b, out, bounds)
            total += out
        return total

    def repair(
        self, tensors: Tensors, values: Tensor | None, B: Tensor, out: Tensor,
        epilogue: Epilogue = PLAIN, only_if: Tensor | None = None,
    ) -> None:  # fmt: skip
        if (only_if is None or bool(only_if)) and not bool(torch.isfinite(out).all()):
            self.spmm(tensors, values, None, B, out, epilogue)

    def bind(self, tensors: Tensors, values: Tensor | None, packed: Tensors | None) -> Bound:
        return _BoundCPU(self, tensors, values)


class _BoundCPU:
    """A product bound to a variant's tensors, which are checked once."""

    def __init__(self, runner: CPURunner, tensors: Tensors, values: Tensor | None) -> None:
        from sparsetile.kernels.cpu import api

        self._runner, self._tensors, self._values = runner, tensors, values
        self._api = api
        self._read = (*_rows(tensors), values)
        # By shape and strides of B, the number of threads, and whether of means.
        self._prepared = KeptLaunches[tuple[Any, ...], "Prepared | None"]()

    def __call__(self, B: Tensor, out: Tensor | None = None) -> Tensor:
        return self._sum(B, out, False)

    def _sum(self, B: Tensor, out: Tensor | None, mean: bool) -> Tensor:
        rows, columns = self._runner.rows, B.shape[1]
        if out is None:
            if rows * columns * B.itemsize < HUGE_BYTES:
                out = B.new_empty(rows, columns)  # the quickest
            else:
                out = empty_output(rows, columns, B.dtype)
        key = (B.shape, B.stride(), torch.get_num_threads(), mean)
        found = self._prepared.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = self._prepared.keep(key, self._prepare(B, mean))
        if found is None:
            indptr, ids, bounds = _rows(self._tensors)
            self._api.add_products(indptr, ids, self._values, B, out, 1.0, 0.0, bounds, mean)
        else:
            found(B.data_ptr(), out, (B, *self._read))
        return out

    def _prepare(self, B: Tensor, mean: bool) -> Prepared | None:
        """Return the product of matrices like B, or None if operands have to be converted."""
        values = self._values
        unit = B.stride(1) == 1 or B.shape[1] == 1
        if not (B.numel() and self._runner.rows and unit and B.dtype.itemsize > 2):
            return None
        if values is not None and (
            values.dtype is not B.dtype or not values.is_contiguous() or values.is_neg()
        ):
            return None
        indptr, columns, bounds = _rows(self._tensors)
        return self._api.prepare_product(indptr, columns, values, B, bounds, mean=mean)

    def fused(self, B: Tensor, bias: Tensor | None, alpha: float, mean: bool, relu: bool) -> Tensor:
        """Return relu(alpha · A·B + bias), or of the mean of each row's entries."""
        if bias is not None:
            bias = bias.to(torch.float64 if B.dtype is torch.float64 else torch.float32)
        if alpha == 1.0 and B.dtype.itemsize > 2:  # of 16 bits the sum is rounded after the bias
            out = self._sum(B, None, mean)
            out = out if bias is None else out.add_(bias)
            return out.relu_() if relu else out
        out = self._runner.new_output(B, B.dtype)
        epilogue = Epilogue(alpha=alpha, mean=mean, bias=bias, relu=relu)
        self._runner.spmm(self._tensors, self._values, None, B, out, epilogue)
        return out
